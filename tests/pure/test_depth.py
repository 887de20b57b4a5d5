"""The rule that chooses depths, on a machine whose times and acceptance are known."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import pytest

from ridgeline.engine.depth import DepthRule
from ridgeline.spec.trees import depths

MOST, STEPS = 4, 1200
JITTER = 0.1  # largest share by which a step takes longer


class Machine(NamedTuple):
    """Seconds of a step: plain, for each draft more, for each round of a draft model, and for each sequence in one."""

    plain: float
    draft: float
    round: float = 0.0
    sequence: float = 0.0


def run(
    machine: Machine, batch: int, acceptance: Callable[[int, int], float], seed: int = 0, steps: int = STEPS,
    disturbed: range = range(0),
) -> tuple[float, list[int]]:  # fmt: skip
    """Return the speed with the rule over the speed without drafts, and how often each depth was chosen.

    acceptance: from the sequence and the step to the probability that a draft is accepted. disturbed: steps in which
    another program makes drafts take ten times as long. If there are any, the first draft takes half a step more, and
    the times of rounds count only if the step before had drafts too, as with a draft model that must run other rows.
    """
    rng, rule = random.Random(seed), DepthRule(MOST, rounds=machine.round > 0)
    seconds, tokens, chosen, had_drafts = 0.0, 0, [0] * (MOST + 1), False
    sequences = range(batch)
    for step in range(steps):
        rests = rule.is_resting
        if rests:
            rule.rest()
        depths = {} if rests else rule.depths(sequences, batch)
        rounds, drafts = max(depths.values(), default=0), sum(depths.values())
        slow = 10.0 if step in disturbed else 1.0
        own = (machine.plain + slow * drafts * machine.draft + (0.5 if drafts and disturbed else 0.0)) * (
            1 + JITTER * rng.random()
        )
        each = machine.round + len(depths) * machine.sequence
        drafting = slow * each * rounds * (1 + JITTER * rng.random())
        results = []
        for sequence in sequences:
            depth, accepted = depths.get(sequence, 0), 0
            chosen[depth] += 1
            while accepted < depth and rng.random() < acceptance(sequence, step):
                accepted += 1
            tokens += accepted + 1
            results.append((sequence, depth, range(accepted)))
        if not rests:
            rule.step(
                batch,
                drafts,
                rounds if had_drafts or not disturbed else 0,
                own,
                drafting,
                sum(len(path) + 1 for *_, path in results),
            )
        for result in results:
            if not rests:
                rule.verified(*result)
        seconds, had_drafts = seconds + own + drafting, bool(drafts)
    return tokens / seconds / (batch / (machine.plain * (1 + JITTER / 2))), chosen


def best(machine: Machine, batch: int, a: float) -> float:
    """Return the closed form: the best speed of one depth for all, over the speed without drafts."""
    return max(
        sum(a**j for j in range(k + 1)) * machine.plain
        / (machine.plain + k * (batch * machine.draft + machine.round))
        for k in range(MOST + 1)
    )  # fmt: skip


MACHINES = {
    "cheap": Machine(1, 0.05, 0.1), "even": Machine(1, 0.1, 0.2), "dear": Machine(1, 0.3, 0.3),
    "too dear": Machine(1, 0.5, 0.5), "looked up": Machine(1, 0.1),
}  # fmt: skip


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", MACHINES)
def test_the_speed_is_nearly_that_of_the_best_depth(name: str, batch: int) -> None:
    machine = MACHINES[name]._replace(draft=MACHINES[name].draft * min(batch, 8) / batch)
    for a in (0.0, 0.3, 0.6, 0.95):
        speeds = [
            run(machine, batch, lambda sequence, step, a=a: a, seed)[0] for seed in range(1 if batch == 16 else 3)
        ]  # type: ignore[misc]
        found = sum(speeds) / len(speeds)
        assert found > 0.9 * best(machine, batch, a), f"acceptance {a}"
        assert found > 0.97, f"acceptance {a}"  # never slower than without drafts, but for probes


PARENTS = (-1, 0, -1, 1, 0, 2, 1)  # a tree of seven nodes, by score: the first child has 0.6, the second one 0.25
SHARES = (0.6, 0.36, 0.25, 0.216, 0.15, 0.15, 0.09)


def tree_levels(nodes: int) -> int:
    return max(depths(PARENTS[:nodes])) + 1


def accepted_path(rng: random.Random, nodes: int) -> list[int]:
    """Return the accepted nodes of a tree that is cut to its first ones."""
    path: list[int] = []
    while True:
        at, drawn = path[-1] if path else -1, rng.random()
        below = [i for i, parent in enumerate(PARENTS[:nodes]) if parent == at]
        number = 0 if drawn < 0.6 else 1 if drawn < 0.85 else 2
        if number >= len(below):
            return path
        path.append(below[number])


@pytest.mark.parametrize(
    ("machine", "nodes"),
    [(Machine(1, 0.01, 0.05), 7), (Machine(1, 0.1, 0.05), 3), (Machine(1, 0.16, 0.0), 3), (Machine(1, 0.7, 0.4), 0)],
)
def test_the_number_of_nodes_is_nearly_the_best(machine: Machine, nodes: int) -> None:
    """Node j is worth its share of verifications, and a level more is one round of the head more."""
    speeds = [(1 + sum(SHARES[:k])) / (1 + k * machine.draft + tree_levels(k) * machine.round) for k in range(1, 8)]
    assert max(range(8), key=lambda k: [1.0, *speeds][k]) == nodes
    rng, rule = random.Random(0), DepthRule(7, rounds=machine.round > 0, levels=tree_levels)
    seconds, tokens = 0.0, 0
    for _ in range(STEPS):
        rests = rule.is_resting
        if rests:
            rule.rest()
        nodes = 0 if rests else rule.depths([0], 1).get(0, 0)
        levels = tree_levels(nodes) if nodes else 0
        own = (1 + machine.draft * nodes) * (1 + JITTER * rng.random())
        drafting = machine.round * levels * (1 + JITTER * rng.random())
        path = accepted_path(rng, nodes)
        if not rests:
            rule.step(1, nodes, levels, own, drafting, 1 + len(path))
            rule.verified(0, nodes, path)
        seconds, tokens = seconds + own + drafting, tokens + 1 + len(path)
    speed = tokens / seconds * (1 + JITTER / 2)
    assert speed > 0.9 * max(1.0, *speeds) and speed > 0.97


def test_a_change_of_the_text_changes_the_choice() -> None:
    machine, half = Machine(1, 0.1, 0.1), STEPS // 2
    better, _ = run(machine, 1, lambda sequence, step: 0.9 * (step >= half))
    worse, _ = run(machine, 1, lambda sequence, step: 0.9 * (step < half))
    both = (1 + best(machine, 1, 0.9)) / 2
    assert better > 0.8 * both
    assert worse > 0.9 * both


@pytest.mark.parametrize(("batch", "least"), [(1, 1.6), (4, 1.2)])
def test_a_disturbance_that_ends_is_forgotten(batch: int, least: float) -> None:
    """Probes of one draft do not measure the times of many, so times that were disturbed must not stay.

    Four drafts always would be 1.95 and 1.52 times as fast as none.
    """
    machine = Machine(1, 0.05, 0.1)
    speeds = [run(machine, batch, lambda *_: 0.9, seed, disturbed=range(60, 120))[0] for seed in range(3)]
    assert sum(speeds) / 3 > least


def test_times_of_few_sequences_are_not_taken_for_those_of_many() -> None:
    """A batch of 64 first drafts for four. Drafts for all of them are 0.8 times as fast as none."""
    speeds = [run(Machine(8, 0.075, 0.2, 0.045), 64, lambda *_: 0.9, seed, steps=300)[0] for seed in range(2)]
    assert sum(speeds) / 2 > 0.96


def test_times_that_were_disturbed_from_the_start_are_measured_again() -> None:
    speeds = [run(Machine(1, 0.05, 0.1), 1, lambda *_: 0.9, seed, disturbed=range(30))[0] for seed in range(3)]
    assert sum(speeds) / 3 > 1.3


def test_sequences_have_depths_of_their_own() -> None:
    """With half the sequences repetitive, drafting all of them would hardly pay."""
    speed, chosen = run(Machine(1, 0.05), 8, lambda sequence, step: 0.9 * (sequence % 2))
    assert speed > 1.3
    assert chosen[0] > 0.4 * sum(chosen) and chosen[MOST] > 0.25 * sum(chosen)


def test_a_disturbance_does_not_turn_drafts_off() -> None:
    rule = DepthRule(2, rounds=False)
    for step in range(60):
        depths = rule.depths([0], 1)
        slow = 50.0 if step % 20 == 19 else 1.0
        rule.step(1, depths.get(0, 0), 0, slow * (1 + 0.1 * depths.get(0, 0)), 0.0, 1 + depths.get(0, 0))
        if depths:
            rule.verified(0, depths[0], range(depths[0]))
    assert rule.depths([0], 1) == {0: 2}
    rule.end(0)
    assert not rule._own


def test_a_proposer_that_finds_nothing_is_seldom_asked() -> None:
    """Looking up takes time too: with nothing to propose, seven of eight steps rest, until something is found."""
    rule, asked = DepthRule(MOST, rounds=False), list[int]()
    for step in range(400):
        if rule.is_resting:
            rule.rest()
            continue
        wanted = rule.depths([0], 1).get(0, 0)
        drafts = wanted if step >= 200 else 0
        asked += [step] * bool(wanted)
        rule.step(1, drafts, 0, 1.0 + 0.1 * drafts, 0.0, 1 + drafts)
        rule.verified(0, drafts, range(drafts))
    assert len([step for step in asked if step < 200]) < 35
    assert len([step for step in asked if step >= 200]) > 180
