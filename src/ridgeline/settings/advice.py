"""What the cost model says of an engine's settings on a machine that was calibrated: each with its reason.

max_num_batched_tokens   the shortest chunk that reads prompts nearly as fast as any
max_num_seqs             the smallest batch that gives as many tokens a second as any, at short contexts, where batches
                         pay most: more of them would only wait longer
threads                  why as many as there are
drafts                   for each batch size, the number of drafts with the most tokens a second
preemption               what it takes to compute a token again, and to copy a byte out or in
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ridgeline.cost.calibration import this_machine
from ridgeline.cost.operations import Slice
from ridgeline.cost.precision import cpu_precision
from ridgeline.plan.planner import Deployment, Planner, Speculation
from ridgeline.plan.units import seconds
from ridgeline.settings.preempt import PreemptCost
from ridgeline.spec import ModelSpec

CHUNKS = (64, 128, 256, 512, 1024, 2048)  # tokens
BATCHES = (16, 32, 64, 128, 256)
NEARLY, ALMOST_ALL = 0.95, 0.99  # of the best: of chunks, whose length others wait for; of batches
CONTEXT, SHORT = 1024, 128  # tokens of a sequence, where the model has as many
COPIES = 2  # of pages on their way out, or in
ACCEPTANCE, DRAFT_COST, DEPTHS, DRAFT_BATCHES = 0.7, 0.05, (1, 2, 3, 4, 6, 8), (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings where memory allows them; drafts: their number by batch size, 0 where they do not pay. preempt: what
    making room costs. reasons: a line for each, by its name.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    drafts: Mapping[int, int]
    preempt: PreemptCost
    reasons: Mapping[str, str]


def machine_advice(spec: ModelSpec, weights: str, state: str, threads: int | None = None) -> Advice | None:
    """Of this machine, if it was calibrated with so many threads (None: with those that it has)."""
    machine, _ = this_machine()
    if machine.rates is None or threads not in (None, machine.rates.threads):
        return None
    return advise(Deployment(spec, machine, cpu_precision(weights, state, machine)))


def advise(deployment: Deployment) -> Advice | None:
    """None where the machine was not calibrated: roofs say nothing of overheads, which these settings are about."""
    rates = deployment.hardware.rates
    if rates is None:
        return None
    planner = Planner(deployment)
    chunk, why_chunk = _chunk(planner)
    seqs, why_seqs = _seqs(planner, chunk)
    drafts = {batch: _drafts(planner, batch) for batch in DRAFT_BATCHES}
    said = ", ".join(f"{n or 'none'} at {batch}" for batch, n in drafts.items())
    read = {int(n): curve.values[-1] / 1e9 for n, curve in rates.read.items()}
    rising = ", ".join(f"{n} {'reads' if n == 1 else 'read'} {gb:.0f} GB/s" for n, gb in sorted(read.items()))
    preempt, why_preempt = _preempt(planner.with_chunk(chunk))
    return Advice(
        seqs, chunk, drafts, preempt,
        {
            "max_num_seqs": why_seqs,
            "max_num_batched_tokens": why_chunk,
            "threads": f"one on each physical core: {rising}, and products take a core each",
            "num_speculative_tokens": f"drafts that pay, by batch size, if {ACCEPTANCE:.0%} are accepted and one costs "
            f"{DRAFT_COST:.0%} of a step: {said}",
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
        f"reads prompts at {rates[chosen]:,.0f} tokens/s, {rates[chosen] / best:.0%} of the best; other sequences wait "
        f"{step} for such a chunk"
    )


def _seqs(planner: Planner, chunk: int) -> tuple[int, str]:
    context = min(SHORT, _context(planner.deployment.spec))
    rates = {n: n / planner.decode(n, context).seconds for n in BATCHES if n <= chunk}
    rates = rates or {chunk: chunk / planner.decode(chunk, context).seconds}
    best = max(rates.values())
    chosen = min(n for n, rate in rates.items() if rate >= ALMOST_ALL * best)
    return chosen, (
        f"together they are given {rates[chosen]:,.0f} tokens/s, {rates[chosen] / best:.0%} of the most; a step takes "
        f"{seconds(chosen / rates[chosen])} at {context:,} tokens"
    )


def _preempt(planner: Planner) -> tuple[PreemptCost, str]:
    """One way pages are copied twice: gathered, and put in their places on the other side."""
    rates, context = planner.deployment.hardware.rates, _context(planner.deployment.spec)
    assert rates is not None
    found = PreemptCost(planner.ttft_s(context) / context, COPIES / rates.copy[str(rates.threads)].values[-1])
    return found, (
        f"of the longest sequence: a token is computed again in {seconds(found.seconds_per_token)}, pages go out at "
        f"{1 / found.seconds_per_byte / 1e9:.1f} GB/s and come back as fast"
    )


def _drafts(planner: Planner, batch: int) -> int:
    """The number of drafts with the least time for a token, 0 for none."""
    context = _context(planner.deployment.spec)
    best, found = planner.decode(batch, context).seconds, 0
    for depth in DEPTHS:
        speculation = Speculation(ACCEPTANCE, depth, DRAFT_COST)
        taken = Planner(replace(planner.deployment, speculation=speculation)).token_s(batch, context)
        if taken < best:
            best, found = taken, depth
    return found
