"""Choose how many drafts each sequence verifies in a step: as many as give tokens faster, or none.

A decode step of B sequences takes `plain(B)` seconds, each draft that it verifies `draft(B)` more, and each round of
the draft model `round(B)`. All three are measured here, step by step. If a draft at depth j is accepted with
probability a_j after those before it, then k drafts for each sequence give

    tokens(k) = B (1 + a_1 + a_1 a_2 + ... + a_1 ... a_k)  in  plain + k B draft + k round  seconds,

so the drafts that count most often are taken, one after the other, as long as the tokens a second rise. Taking none is
one of the choices. The acceptance of a sequence is a mean of its own and that of all sequences.

Nodes of a tree are numbered by their scores, the best first, and a step takes the first k of them. With s_j the share
of verifications in which node j is on the accepted path, k nodes give B (1 + s_1 + ... + s_k) tokens, and take as many
rounds of the head as the tree has levels.

If no draft pays, one sequence verifies one draft now and then, more and more rarely while that is rejected. So the
choice follows when the text changes. If such drafts are accepted, and drafts would pay with the least times so far,
these are trusted again: probes do not measure times well. Otherwise the times are measured again, more and more rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log2
from operator import mul

from ridgeline.sched.stats import DraftSpeed

FIRST_SAMPLES = 3  # the first steps of a kind also record kernels; the least of their times counts
FIRST_SEQUENCES = 4  # have drafts while their times are not known
WIDER = 2  # with so many times as many sequences that have drafts, the times are measured again
WEIGHT = 0.2  # of the newest time in a moving average
RISE = 2.0  # one time raises an average as if it were at most so many times larger: new recordings take longer
SMALL = 0.04  # of a plain step: smaller times of drafts are not told apart
OUTLIER = 3.0  # a time that is so many times the average is taken for a disturbance
PATIENCE = 8  # unless so many came one after the other
MEMORY = 0.98  # weight of all earlier verifications after one more
HOPED = 0.8  # acceptance before the first verification
LIKELY = 0.5  # with this acceptance of first drafts, it is worth while to measure what drafts cost
AGAIN = 1  # accepted probes before the least times are trusted; twice as many before each next time
PATIENT = 8  # accepted probes before the times are measured again; twice as many before each next time
DOUBTFUL = 0.6  # if drafts are slower than so many times plain decode, disturbed times are not the reason
OWN_VERIFICATIONS = 6.0  # from so many on, a sequence's own acceptance counts more than that of all
RECHECK = 24  # without drafts, the choice is made again after so many steps
MISSES, MISSED = 4, 8  # after so many choices in a row for which nothing was proposed, one is made every MISSED steps
PROBE_STEPS, RAREST_PROBE = 24, 96  # steps without drafts between two probes
PLAIN_STEPS = 64  # with drafts, a step without them after so many, so that its time stays known
GAIN = 1.02  # drafts must be so much faster than none: times are not exact
START = 1.1  # the same for the first drafts after a step without: a draft model then runs all tokens that it missed


def in_turn(count: int) -> int:
    """Return the rounds of the draft model for a chain of `count` drafts."""
    return count


def factors(
    plain: float, draft: float, each: float, batch: int, shares: Seq[float], rounds: Callable[[int], int] = in_turn
) -> list[float]:
    """Return the expected speed over plain decode for 1, 2, ... drafts of each sequence of a batch.

    plain, draft, each: seconds of a step, of a draft more, and of a round of the draft model. shares: probabilities
    that draft j is accepted, and all before it on its path. rounds: from a number of drafts to the rounds that they
    take.
    """
    tokens = accumulate(shares, initial=1.0)
    next(tokens)
    return [gained * plain / (plain + k * batch * draft + rounds(k) * each) for k, gained in enumerate(tokens, 1)]


@dataclass(slots=True)
class Mean:
    """A moving average of times. value: None before FIRST_SAMPLES of them; then their least begins it.

    least: the smallest value so far.
    """

    value: float | None = None
    least: float | None = None
    first: list[float] = field(default_factory=list)

    def add(self, x: float, weight: float = WEIGHT, most: float = inf) -> None:
        """Add a time. It counts as at most RISE times the average, or `most` if that is more."""
        if self.value is None:
            self.first.append(x)
            if len(self.first) == FIRST_SAMPLES:
                self.value = self.least = min(self.first)
        else:
            self.value += weight * (min(x, max(RISE * self.value, most)) - self.value)
            self.least = min(self.value, self.value if self.least is None else self.least)


@dataclass(slots=True)
class Costs:
    """Seconds of the steps of one size of batch.

    plain: a step without drafts. draft: each draft more. round: each round of the draft model. since_plain: number of
    steps since the last one without drafts. odd: number of the last times that were taken for disturbances. width: most
    sequences that had drafts while these were measured; 0: none.
    """

    plain: Mean = field(default_factory=Mean)
    draft: Mean = field(default_factory=Mean)
    round: Mean = field(default_factory=Mean)
    since_plain: int = 0
    odd: int = 0
    width: int = 0

    def add(self, batch: int, drafts: int, rounds: int, seconds: float, drafting: float, width: int) -> None:
        """Record a step. drafting: seconds of its rounds of the draft model. width: sequences that had drafts."""
        if drafts and width > WIDER * self.width:
            self.width = width
            self.measure_again()
        plain, draft, is_first = self.plain.value, self.draft.value, not self.since_plain
        self.since_plain = self.since_plain + 1 if drafts else 0
        usual = None if plain is None or (drafts and draft is None) else plain + drafts * (draft or 0.0)
        if self._is_odd(seconds, usual):
            return
        if not drafts:
            self.plain.add(seconds)
        elif is_first and draft is not None:
            return  # its weights were in no cache
        elif plain is not None:  # few drafts say little about the time of one
            weight = WEIGHT * min(1.0, drafts / batch)
            self.draft.add(max(seconds - plain, 0.0) / drafts, weight, SMALL * plain)
        if rounds and not self._is_odd(drafting / rounds, self.round.value):
            self.round.add(drafting / rounds, most=SMALL * (plain or 0.0))

    def trust_least(self) -> None:
        """Take the least averages so far: another program may have disturbed the later times."""
        self.draft.value, self.round.value = self.draft.least, self.round.least

    def measure_again(self) -> None:
        """Forget what drafts cost: all times were disturbed, or are those of fewer sequences."""
        self.draft, self.round = Mean(), Mean()

    def _is_odd(self, seconds: float, usual: float | None) -> bool:
        """Return whether a time is a disturbance. usual: the expected time; None: it is not known."""
        is_odd = usual is not None and seconds > OUTLIER * usual and self.odd < PATIENCE
        self.odd = self.odd + 1 if is_odd else 0
        return is_odd


@dataclass(slots=True)
class Rates:
    """Counts drafts by depth, or nodes of trees by their number; the older ones have less weight.

    tried: drafts of a chain whose predecessors were accepted; all nodes of a tree. accepted: drafts that were accepted
    as well.
    """

    tried: list[float]
    accepted: list[float]

    @classmethod
    def of(cls, most: int) -> Rates:
        """Return counts for `most` drafts of a sequence."""
        return cls([0.0] * most, [0.0] * most)

    def add(self, tried: int, path: Collection[int]) -> None:
        """Count a verification of the first `tried` drafts. path: the accepted ones."""
        for j in range(tried):
            self.tried[j] = MEMORY * self.tried[j] + 1
            self.accepted[j] = MEMORY * self.accepted[j] + (j in path)

    def forget(self, first: int) -> None:
        """Lower the weight of what is known of drafts from `first` on, which were not tried."""
        for j in range(first, len(self.tried)):
            self.tried[j] *= MEMORY
            self.accepted[j] *= MEMORY

    def rate(self, index: int, usual: float) -> float:
        """Return the acceptance of a draft. usual: counts as one verification."""
        return (self.accepted[index] + usual) / (self.tried[index] + 1)


class DepthRule:
    """Chooses numbers of drafts from what it is told of every step. most: largest number. rounds: whether a draft model
    runs.

    levels: if drafts form trees, returns the levels of a tree of so many nodes; None: they are chains.
    speed: times of all steps so far, with the drafts and as they would have been without.
    """

    def __init__(self, most: int, *, rounds: bool, levels: Callable[[int], int] | None = None) -> None:
        self.speed = DraftSpeed(depths=[0] * (most + 1))
        self._most, self._has_rounds, self.is_tree = most, rounds, levels is not None
        self._rounds = levels or in_turn
        # The largest number of drafts for each number of rounds, which are the candidates of `_best`.
        self._stages = sorted({self._rounds(k): k for k in range(1, most + 1)}.values()) if rounds else [most]
        # Expected rates before the first verification: of each draft after those before it, or of each node.
        self._hoped = [HOPED ** (j + 1) if self.is_tree else HOPED for j in range(most)]
        self._costs: dict[int, Costs] = {}
        self._all = Rates.of(most)
        self._own: dict[int, Rates] = {}  # by sequence
        self._wait, self._off, self._probes = PROBE_STEPS, 0, 0  # steps between probes, steps since one, their number
        self._probing, self._pays = False, True
        self._is_on = False  # drafts were chosen last time
        self._width = 0  # sequences of the last step that were to have drafts
        self._asked, self._misses = False, 0  # drafts were chosen for the last step; steps in a row that had none
        self._again, self._until_again, self._patience = AGAIN, AGAIN, PATIENT
        self._rest, self._batch = 0, 0  # steps that run before the next choice, and their sequences
        self._expected = 0.0, 0.0  # tokens and seconds of the step that was chosen last; no tokens: they are not known

    @property
    def is_resting(self) -> bool:
        """Return whether the next step has no drafts, so that nothing need be chosen for it."""
        return self._rest > 0

    def rest(self) -> None:
        """Count a step that runs while `is_resting`, which takes as long as any step without drafts."""
        self._rest -= 1
        plain = self._costs_of(self._batch).plain.value or 0.0
        self.speed.seconds += plain
        self.speed.plain += plain
        self.speed.expected += plain
        self.speed.expected_plain += plain
        self.speed.depths[0] += self._batch

    def depths(self, sequences: Seq[int], batch: int) -> dict[int, int]:
        """Return the depth of each sequence of the next step; sequences with depth 0 are left out.

        sequences: ids that can have drafts. batch: number of sequences of the step, others included.
        """
        costs = self._costs_of(batch)
        self._probing, self._asked, self._batch, self._expected = False, False, batch, (0.0, 0.0)
        if not sequences or costs.plain.value is None or costs.since_plain >= PLAIN_STEPS:
            return {}
        if found := self._best(sequences, batch, costs):
            self._off, self._again, self._until_again, self._asked = 0, AGAIN, AGAIN, True
            self._width, self._is_on = len(found), True
            return found
        self._is_on = False
        self._off += RECHECK
        if self._off < self._wait:
            self._rest = RECHECK - 1
            return {}
        self._pays = self._could_pay(batch, costs)
        self._off, self._probing, self._probes, self._width = 0, True, self._probes + 1, 1
        return {sequences[self._probes % len(sequences)]: 1}

    def step(self, batch: int, drafts: int, rounds: int, seconds: float, drafting: float, tokens: int) -> None:
        """Record a step that only decoded: its sequences, drafts and rounds of the draft model; how long it took.

        rounds: 0 if their time says nothing about later ones. drafting: seconds of the rounds. tokens: number of tokens
        that the step gave.
        """
        self._measure(batch, drafts, seconds, drafting, tokens)
        self._costs_of(batch).add(batch, drafts, rounds, seconds, drafting, self._width)
        if self._asked:
            self._misses = 0 if drafts else self._misses + 1
            if self._misses >= MISSES:
                self._rest = MISSED - 1
        if self._probing and drafts:  # nothing was found to probe with otherwise
            self._wait = min(2 * self._wait, RAREST_PROBE)
        elif self._probing:
            self._off, self._rest = self._wait - RECHECK, RECHECK - 1

    def verified(self, sequence: int, run: int, path: Collection[int]) -> None:
        """Record how many drafts of a sequence were run in a step. path: indices of those that were accepted."""
        self.speed.depths[run] += 1
        if not run:
            return
        tried = run if self.is_tree else min(run, len(path) + 1)
        for rates in (self._all, self._own.setdefault(sequence, Rates.of(self._most))):
            rates.add(tried, path)
            if self.is_tree:  # nodes that were unlucky at first are tried again
                rates.forget(tried)
        if not (self._probing and path):
            return
        if self._all.rate(0, HOPED) > LIKELY:  # then only the times can be the reason
            self._until_again -= 1
            costs = self._costs_of(self._batch)
            factor = self._least_factor()
            if self._until_again <= 0 and factor > GAIN:
                self._again = self._until_again = 2 * self._again
                costs.trust_least()
            elif self._until_again <= -self._patience and factor > DOUBTFUL:
                self._patience, self._until_again = 2 * self._patience, self._again
                costs.measure_again()
        elif self._pays:
            self._wait = max(self._wait // 4, PROBE_STEPS)  # `step` has doubled it

    def end(self, sequence: int) -> None:
        """Forget a sequence that is over."""
        self._own.pop(sequence, None)

    def _measure(self, batch: int, drafts: int, seconds: float, drafting: float, tokens: int) -> None:
        """Add a step to `speed`, if the time without drafts is known. A step without drafts is its own measure."""
        plain, (expected, took) = self._costs_of(batch).plain.value, self._expected
        if plain is None or (drafts and not expected):
            return
        speed = self.speed
        speed.seconds += seconds + drafting
        speed.drafting += drafting
        speed.verifying += seconds if drafts else 0.0
        speed.plain += tokens * plain / batch if drafts else seconds
        speed.expected += took if drafts else plain
        speed.expected_plain += expected * plain / batch if drafts else plain

    def _best(self, sequences: Seq[int], batch: int, costs: Costs) -> dict[int, int]:
        """Return the depths with the most tokens a second; none if that is a step without drafts."""
        plain, draft, each = costs.plain.value or 0.0, costs.draft.value, costs.round.value
        usual = self._usual()
        if draft is None or (self._has_rounds and each is None):  # not measured yet
            first = sequences[: costs.width or FIRST_SEQUENCES]
            return dict.fromkeys(first, self._most) if usual[0] > LIKELY else {}
        chances = [(c, s, j) for s in sequences for j, c in enumerate(self._chances(s, usual))]
        chances.sort(key=lambda x: -x[0])  # of one sequence, in the order of its drafts
        least = GAIN if self._is_on else START
        speed, taken = least * batch / plain, list[tuple[float, int, int]]()
        self._expected = float(batch), plain
        for deepest in self._stages:
            tokens, seconds, count = float(batch), plain + self._rounds(deepest) * (each or 0.0), 0
            reached = [x for x in chances if x[2] < deepest]
            for chance, _, _ in reached:
                if chance * seconds < tokens * draft and tokens / seconds > batch / plain:
                    break  # this draft and all after it would lower the tokens a second
                tokens, seconds, count = tokens + chance, seconds + draft, count + 1
                if tokens / seconds > speed:
                    speed, taken, self._expected = tokens / seconds, reached[:count], (tokens, seconds)
        return {sequence: j + 1 for _, sequence, j in taken}

    def _chances(self, sequence: int, usual: Seq[float]) -> list[float]:
        """Return with which probability the drafts of a sequence are accepted, with all before them on their paths.

        usual: the rates of all sequences.
        """
        own = self._own.get(sequence)
        if own is None:
            return self._shares(usual)
        rates = (
            rate if not tried else (accepted / OWN_VERIFICATIONS + rate) / (tried / OWN_VERIFICATIONS + 1)
            for rate, tried, accepted in zip(usual, own.tried, own.accepted, strict=True)
        )
        return self._shares(rates)

    def _usual(self) -> list[float]:
        """Return the rates of all sequences."""
        return [self._all.rate(j, hoped) for j, hoped in enumerate(self._hoped)]

    def _shares(self, rates: Iterable[float]) -> list[float]:
        """Return the shares of verifications in which each draft is accepted.

        The rates of a tree are such shares already. They fall, because its nodes come in the order of their scores;
        where counts say otherwise, that is taken for chance.
        """
        return list(accumulate(rates, min if self.is_tree else mul))

    def _least_factor(self) -> float:
        """Return the speed over plain decode with the least times of drafts so far, and as often accepted as now."""
        costs = self._costs_of(self._batch)
        draft, each = costs.draft.least, costs.round.least or 0.0
        if costs.plain.value is None or draft is None:
            return 0.0
        shares = self._shares(self._usual())
        return max(factors(costs.plain.value, draft, each, self._batch, shares, self._rounds))

    def _could_pay(self, batch: int, costs: Costs) -> bool:
        """Return whether drafts would pay if all were accepted."""
        plain, draft, each = costs.plain.value, costs.draft.value, costs.round.value or 0.0
        if plain is None or draft is None:
            return True
        levels = self._rounds(self._most) if self.is_tree else self._most
        shares = [float(j < levels) for j in range(self._most)]
        return max(factors(plain, draft, each, batch, shares, self._rounds)) > GAIN

    def off_from(self) -> int | None:
        """Return the smallest batch of those measured from which on no draft pays; None if the largest one gains.

        Batches are known to a quarter of a power of two, and count with the acceptance of all sequences.
        """
        shares, found = self._shares(self._usual()), None
        for key, costs in sorted(self._costs.items(), reverse=True):
            plain, draft, each = costs.plain.value, costs.draft.value, costs.round.value
            if key < 0 or plain is None or draft is None or (self._has_rounds and each is None):
                continue
            batch = max(1, round(2 ** (key / 4)))
            if max(factors(plain, draft, each or 0.0, batch, shares, self._rounds)) > GAIN:
                break
            found = batch
        return found

    def _costs_of(self, batch: int) -> Costs:
        """Return the costs of batches of nearly this size."""
        return self._costs.setdefault(round(4 * log2(batch)) if batch else -1, Costs())
