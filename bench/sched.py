"""Measure the time of the scheduler: python bench/sched.py

Prints the time of schedule and commit, per running sequence and step, with 256 sequences in decode. It does not grow
with the context, because page tables travel as differences. The gate: every sequence ran in every step, and the page
tables agree after.
"""

from __future__ import annotations

import gc

from common import emit, seconds

from ridgeline.sched import Result, Scheduler, Sequence, Work
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.state import ALL

NUM_SEQS = 256
STEPS = 64  # four pages of 16 tokens, so that the mean contains every cost of a page
ROUNDS = 5
KV = StateGroup("kv", 16, ALL, 1)
GROUPS = {
    "one group": (KV,),
    "three groups": (KV, StateGroup("window", 16, 1023, 1), StateGroup("state", 256, 1, 1, snapshot=True)),
}
TARGET_US = {"one group": 15.0, "three groups": 35.0}


def prepare(groups: tuple[StateGroup, ...], context: int) -> Scheduler:
    """Return 256 sequences with `context` computed tokens of distinct prompts."""
    pages = NUM_SEQS * ((context + STEPS * ROUNDS) // 16 + 3)
    scheduler = Scheduler(groups, [pages] * len(groups), max_batch_tokens=1 << 24, max_seqs=NUM_SEQS)
    for i in range(NUM_SEQS):
        scheduler.add(Sequence(i, [i, *range(context - 1)], STEPS * ROUNDS + 8))
    while not all(w.sample for w in run(scheduler, 1)):
        pass
    return scheduler


def run(scheduler: Scheduler, steps: int) -> list[Work]:
    works: list[Work] = []
    for _ in range(steps):
        plan = scheduler.schedule()
        assert plan
        works = list(plan.works)
        scheduler.commit(plan, [Result((7,)) if w.sample else Result() for w in works])
    return works


def main() -> None:
    for name, groups in GROUPS.items():
        for context in (100, 1_000, 10_000):
            scheduler = prepare(groups, context)
            gc.collect()
            ran = []
            times = [seconds(lambda: ran.append(len(run(scheduler, STEPS)))) for _ in range(ROUNDS)]  # noqa: B023
            scheduler.check()
            per_seq = [1e6 * t / STEPS / NUM_SEQS for t in times]
            emit(
                f"sched: {name}, context {context}",
                ran == [NUM_SEQS] * ROUNDS,
                us_per_seq_step=round(min(per_seq), 2),
                worst=round(max(per_seq), 2),
                target=TARGET_US[name],
            )


if __name__ == "__main__":
    main()
