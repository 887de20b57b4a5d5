"""Try separate devices for prefill and decode (plan/ask_split.py) on the virtual clock.

The two groups are simulated apart: the first with answers of one token, the second with prompts of one token whose
contexts are longer by the mean prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ridgeline.plan.ask import Question
from ridgeline.plan.ask_split import Split
from ridgeline.sched.routing import least_loaded
from ridgeline.sim.ask import MOST_SIMULATED, Spread, Trial, drawn, judged
from ridgeline.sim.calibrated_cost import cost_of
from ridgeline.sim.cost import StepCost, Sums
from ridgeline.sim.settings import settings
from ridgeline.sim.simulator import simulate
from ridgeline.sim.workload import Workload, arrive, poisson

PROMPTS_AT_ONCE = 4  # of a prefill engine


def attempt_prefill(split: Split, question: Question, engines: int, spread: Spread) -> Trial:
    """Simulate the prompts of all users on so many prefill engines; the trial's TPOT is 0."""
    simulated = min(engines, MOST_SIMULATED)
    rate = question.requests_per_s * simulated / engines
    limit = min(4 * question.load.context, split.prefill.spec.max_position_embeddings)
    chosen = settings(split.prefill, max_model_len=limit, max_num_seqs=PROMPTS_AT_ONCE)
    requests = [r._replace(output_tokens=1) for r in drawn(question, spread, rate, limit)]
    found = simulate(
        Workload(arrive(requests, poisson(rate, spread.seed))), chosen, cost_of(split.prefill, split.sure),
        replicas=simulated, route=least_loaded, seed=spread.seed,
    )  # fmt: skip
    load = question.requests_per_s * split.sure.tpot * split.prompt_s / engines
    more_s = split.sending_s + split.sure.own_s(split.prompt_s)
    return judged(found.book.answered(), question, engines, load, found.report.mean_batch, more_s)


def attempt_decode(split: Split, question: Question, engines: int, spread: Spread) -> Trial:
    """Simulate the answers of all users on so many decode engines; the trial's TTFT is the wait for one of them."""
    simulated = min(engines, MOST_SIMULATED)
    rate = question.requests_per_s * simulated / engines
    limit = min(4 * question.load.context, split.decode.spec.max_position_embeddings)
    chosen = settings(split.decode, max_model_len=limit, max_num_seqs=split.batch)
    requests = [r._replace(prompt_tokens=1) for r in drawn(question, spread, rate, limit)]
    found = simulate(
        Workload(arrive(requests, poisson(rate, spread.seed))), chosen,
        ShiftedCost(cost_of(split.decode, split.sure), question.prompt), replicas=simulated, route=least_loaded,
        seed=spread.seed,
    )  # fmt: skip
    answer_s = max(question.output - 1, 1) * split.tpot_s * split.sure.tpot
    load = question.requests_per_s * answer_s / split.batch / engines
    return judged(found.book.answered(), question, engines, load, found.report.mean_batch)


@dataclass(frozen=True, slots=True)
class ShiftedCost:
    """The cost of steps whose contexts are longer by `shift` tokens, which were computed elsewhere."""

    cost: StepCost
    shift: int

    def of(self, tokens: int, context: int) -> tuple[int, ...]:
        return self.cost.of(tokens, context + self.shift)

    def seconds(self, tokens: int, rows: int, sums: Sums) -> Any:
        return self.cost.seconds(tokens, rows, sums)
