"""Choose settings on a calibrated machine with the cost model, each with its reason.

max_num_batched_tokens   the shortest chunk that computes prompts nearly as fast as the best one
max_num_seqs             the smallest batch with nearly the highest throughput at short contexts, where large batches
                         help most; a larger batch would only make each sequence wait longer
threads                  one per physical core; only the reason comes from the cost model
drafts                   for each batch size, the number of draft tokens with the highest throughput
preemption               recompute or swap, by the time to recompute a token and to copy a byte
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.cost.calibration import this_machine
from ridgeline.cost.operations import Slice
from ridgeline.cost.precision import cpu_precision
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.plan.speculation import ASSUMED, DRAFT_COST, Speculation
from ridgeline.plan.units import seconds
from ridgeline.settings.preempt import PreemptCost
from ridgeline.spec import ModelSpec

CHUNKS = (64, 128, 256, 512, 1024, 2048)  # tokens
BATCHES = (16, 32, 64, 128, 256)
NEARLY, ALMOST_ALL = 0.95, 0.99  # share of the best rate that a chunk and a batch must reach
CONTEXT, SHORT = 1024, 128  # tokens of a sequence, or the model's longest context if that is shorter
COPIES = 2  # times that a page is copied in one direction
DEPTHS, DRAFT_BATCHES = (1, 2, 3, 4, 6, 8), (1, 4, 16, 64)
ACCEPTANCE = ASSUMED["model"][0]  # no draft is known when this is asked


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings that are best if memory allows them.

    drafts: best number of draft tokens by batch size; 0 if drafts save no time. preempt: the cost of preemption.
    step_s: seconds of a decode step of one sequence. reasons: one line for each setting, by its name.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    drafts: Mapping[int, int]
    preempt: PreemptCost
    step_s: float
    reasons: Mapping[str, str]


def machine_advice(spec: ModelSpec, weights: str, state: str, threads: int | None = None) -> Advice | None:
    """Return advice for this machine if it was calibrated with `threads` threads; None otherwise.

    threads: None accepts any number of threads.
    """
    machine, _ = this_machine()
    if machine.rates is None or threads not in (None, machine.rates.threads):
        return None
    return advise(Deployment(spec, machine, cpu_precision(weights, state, machine)))


def advise(deployment: Deployment) -> Advice | None:
    """Return the best settings; None if the machine is not calibrated, because a roofline has no overheads."""
    rates = deployment.hardware.rates
    if rates is None:
        return None
    planner = Planner(deployment)
    chunk, why_chunk = _chunk(planner)
    seqs, why_seqs = _seqs(planner, chunk)
    drafts = {batch: _drafts(planner, batch) for batch in DRAFT_BATCHES}
    said = ", ".join(f"{n or 'none'} at batch {batch}" for batch, n in drafts.items())
    read = {int(n): curve.values[-1] / 1e9 for n, curve in rates.read.items()}
    rising = ", ".join(f"{gb:.0f} GB/s with {n} thread{'s' if n > 1 else ''}" for n, gb in sorted(read.items()))
    preempt, why_preempt = _preempt(planner.with_chunk(chunk))
    step_s = planner.decode(1, min(SHORT, _context(deployment.spec))).seconds
    return Advice(
        seqs, chunk, drafts, preempt, step_s,
        {
            "max_num_seqs": why_seqs,
            "max_num_batched_tokens": why_chunk,
            "threads": f"one per physical core, since matrix products keep a core busy; memory is read at {rising}",
            "num_speculative_tokens": f"the best number of drafts is {said}, if {ACCEPTANCE:.0%} are accepted and each "
            f"costs {DRAFT_COST:.0%} of a step, as with small drafts in arXiv:2211.17192; `ridgeline plan` computes it "
            "for a draft: speculate=MODEL",
            "preemption": why_preempt,
        },
    )  # fmt: skip


def _context(spec: ModelSpec) -> int:
    return min(CONTEXT, spec.max_position_embeddings)


def _chunk(planner: Planner) -> tuple[int, str]:
    context = _context(planner.deployment.spec)
    sizes = [n for n in CHUNKS if n <= context] or [context]
    rates = {n: context / planner.with_chunk(n).ttft_s(context) for n in sizes}
    best = max(rates.values())
    chosen = min(n for n, rate in rates.items() if rate >= NEARLY * best)
    step = seconds(planner.step([Slice(1, chosen, context, 0)]).seconds)
    return chosen, (
        f"prefill in such chunks computes {rates[chosen]:,.0f} tokens/s, {rates[chosen] / best:.0%} of the best rate; "
        f"other sequences wait {step} for a chunk"
    )


def _seqs(planner: Planner, chunk: int) -> tuple[int, str]:
    context = min(SHORT, _context(planner.deployment.spec))
    rates = {n: n / planner.decode(n, context).seconds for n in BATCHES if n <= chunk}
    rates = rates or {chunk: chunk / planner.decode(chunk, context).seconds}
    best = max(rates.values())
    chosen = min(n for n, rate in rates.items() if rate >= ALMOST_ALL * best)
    return chosen, (
        f"at this batch decode computes {rates[chosen]:,.0f} tokens/s, {rates[chosen] / best:.0%} of the best rate; a "
        f"step takes {seconds(chosen / rates[chosen])} at a context of {context:,} tokens"
    )


def _preempt(planner: Planner) -> tuple[PreemptCost, str]:
    """Return the cost of preemption. A swap copies pages twice: they are gathered, and then written to their slots."""
    rates, context = planner.deployment.hardware.rates, _context(planner.deployment.spec)
    assert rates is not None
    found = PreemptCost(planner.ttft_s(context) / context, COPIES / rates.copy[str(rates.threads)].values[-1])
    return found, (
        f"the faster way for the longest sequence: recomputing takes {seconds(found.seconds_per_token)} per token, and "
        f"pages are copied out and back at {1 / found.seconds_per_byte / 1e9:.1f} GB/s"
    )


def _drafts(planner: Planner, batch: int) -> int:
    """Return the number of draft tokens with the least time per token; 0 if none is faster."""
    context = _context(planner.deployment.spec)
    best, found = planner.decode(batch, context).seconds, 0
    for depth in DEPTHS:
        speculation = Speculation(ACCEPTANCE, depth, DRAFT_COST)
        taken = Planner(replace(planner.deployment, speculation=speculation)).token_s(batch, context)
        if taken < best:
            best, found = taken, depth
    return found
