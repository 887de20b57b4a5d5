"""Find offers for a question: simulate the cheapest layouts, and one with separate devices for prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ridgeline.errors import RequestError
from ridgeline.plan.ask import Budget, Layout, Question
from ridgeline.plan.ask_split import Split, split_of
from ridgeline.plan.expected import LEVELS, sureness
from ridgeline.sim.ask import Spread, Trial, attempt, fewest, longest
from ridgeline.sim.ask_split import attempt_decode, attempt_prefill

EXACT, LOSSY = 3, 1  # layouts that are simulated: with unchanged outputs, and with narrower types
SPLITS = 1  # of the cheapest layouts with unchanged outputs


@dataclass(frozen=True, slots=True)
class Offer:
    """A way to serve all users, as it was simulated.

    replicas: engines; of a split, those of both kinds together. trial: its simulation, at the times that are kept with
    the confidence that was asked for. prefill, decode: engines of each kind; 0 without a split. cost: dollars per hour,
    or devices if there is no price.
    """

    layout: Layout
    replicas: int
    trial: Trial
    cost: float
    max_model_len: int
    split: Split | None = None
    prefill: int = 0
    decode: int = 0

    @property
    def devices(self) -> int:
        return self.replicas * self.layout.devices

    @property
    def dollars_per_hour(self) -> float | None:
        return self.cost if self.layout.price else None

    def dollars_per_million(self, question: Question) -> float | None:
        """Return the dollars per million tokens of answers; None without a price."""
        if self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour / (question.output_tokens_per_s * 3600) * 1e6


@dataclass(frozen=True, slots=True)
class Answered:
    """Offers for a question.

    answer: the cheapest offer with unchanged outputs that keeps the limits within the budget; None if there is none.
    others: all other offers, those that keep the limits first. failure: the answer with one replica fewer; None if it
    has only one. bands: the answer's simulations at the percentiles of its times, by the names of LEVELS; empty where
    these are not known.
    """

    answer: Offer | None
    others: tuple[Offer, ...]
    failure: Trial | None
    bands: Mapping[str, Trial] = field(default_factory=dict)


def num_offers(found: Sequence[Layout]) -> int:
    """Return the most offers that `offers` makes."""
    return min(len(found), EXACT + LOSSY) + SPLITS + 1


def offers(
    found: Sequence[Layout], question: Question, budget: Budget, spread: Spread, on_done: Callable[[], None]
) -> Answered:
    """Simulate the cheapest layouts. found: as plan/ask.py returns them, the cheapest first. on_done: called after each
    offer. Raises RequestError if no layout keeps the limits at any number of replicas.
    """
    if not found:
        raise RequestError(
            f"no layout gives {question.tokens_per_s:g} tokens/s with a TTFT of {question.ttft_s:g} s at any number of "
            "devices; allow a longer --ttft, fewer --tokens-per-second, or name another --hardware"
        )
    made: list[Offer] = []
    for offer in _made(found, question, budget, spread):
        made.append(offer)
        on_done()
    good = sorted((o for o in made if o.trial.kept and not o.layout.changed), key=_rank)
    answer = good[0] if good else None
    others = sorted((o for o in made if o is not answer), key=lambda o: (not o.trial.kept, _rank(o)))
    if answer is None:
        return Answered(None, tuple(others), None)
    return Answered(answer, tuple(others), _failure(answer, question, spread), _bands(answer, question, spread))


def _rank(offer: Offer) -> tuple[float, int]:
    return offer.cost, offer.devices


def _made(found: Sequence[Layout], question: Question, budget: Budget, spread: Spread) -> Iterator[Offer]:
    """Yield offers as they are simulated."""
    exact = [one for one in found if not one.changed]
    lossy = [one for one in found if one.changed]
    for layout in _affordable(exact, question, budget)[:EXACT] + _affordable(lossy, question, budget)[:LOSSY]:
        most = max(budget.most_replicas(layout), 1)
        least = min(layout.least_replicas(question), most)
        trial = fewest(most, least, partial(attempt, layout, question, spread=spread))
        assert trial is not None
        yield Offer(layout, trial.replicas, trial, layout.cost(trial.replicas), longest(layout, question))
    for layout in [one for one in exact if _may_split(one)][:SPLITS]:
        if (split := split_of(layout, question)) is not None:
            yield from _split_offer(layout, split, question, budget, spread)


def _may_split(layout: Layout) -> bool:
    """Return whether separate devices are tried: not with drafts, and not on CPUs, which such links do not join."""
    return layout.deployment.speculation is None and layout.deployment.hardware.kind != "cpu"


def _affordable(found: Sequence[Layout], question: Question, budget: Budget) -> list[Layout]:
    """Return the layouts that the budget may pay for; the one that misses it least if there is none."""
    inside = [one for one in found if budget.most_replicas(one) >= one.least_replicas(question)]
    possible = [one for one in found if budget.most_replicas(one) >= 1]
    by_share = sorted(possible, key=lambda one: -budget.most_replicas(one) / one.least_replicas(question))
    return inside or by_share[:1]


def _split_offer(layout: Layout, split: Split, question: Question, budget: Budget, spread: Spread) -> Iterator[Offer]:
    most, (prompts, answers) = budget.most_replicas(layout), split.least(question)
    if prompts + answers > most:
        return
    first = fewest(most - answers, prompts, partial(attempt_prefill, split, question, spread=spread))
    second = first and fewest(most - first.replicas, answers, partial(attempt_decode, split, question, spread=spread))
    if first is None or second is None:
        return
    trial = _joined(first, second)
    yield Offer(
        layout, trial.replicas, trial, split.cost(trial.replicas), longest(layout, question), split, first.replicas,
        second.replicas,
    )  # fmt: skip


def _joined(first: Trial, second: Trial) -> Trial:
    """Return the trial of a split from those of its prefill and of its decode engines."""
    return replace(
        second, replicas=first.replicas + second.replicas, ttft_p50_s=first.ttft_p50_s, ttft_p99_s=first.ttft_p99_s,
        kept=first.kept and second.kept, share=first.share * second.share, load=max(first.load, second.load),
    )  # fmt: skip


def _bands(offer: Offer, question: Question, spread: Spread) -> dict[str, Trial]:
    """Return the trials of an offer at the percentiles of its machine's times."""
    layout, found = offer.layout, dict[str, Trial]()
    if layout.sure.is_roof:
        return found
    for name, probability in LEVELS.items():
        sure = sureness(layout.deployment.hardware, probability)
        if offer.split is None:
            found[name] = attempt(replace(layout, sure=sure), question, offer.replicas, spread)
        else:
            split = replace(offer.split, sure=sure)
            first = attempt_prefill(split, question, offer.prefill, spread)
            found[name] = _joined(first, attempt_decode(split, question, offer.decode, spread))
    return found


def _failure(offer: Offer, question: Question, spread: Spread) -> Trial | None:
    """Return the trial of an answer with one engine fewer: of a split, with one decode engine fewer."""
    if offer.split is not None:
        return attempt_decode(offer.split, question, offer.decode - 1, spread) if offer.decode > 1 else None
    return attempt(offer.layout, question, offer.replicas - 1, spread) if offer.replicas > 1 else None


def users_within(layout: Layout, question: Question, budget: Budget, share: float) -> int:
    """Return about how many users a budget serves with a layout, at a share of its even load."""
    served = budget.most_replicas(layout) * layout.requests_per_s * share / question.requests_per_s
    return int(question.users * served)
