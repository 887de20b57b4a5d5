"""List changes of a model that keep latency limits by predicted cost, the mildest ones first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from typing import Literal

from ridgeline.compress.prune.aims import parse_keep
from ridgeline.compress.prune.choose import uniform
from ridgeline.errors import RequestError
from ridgeline.plan.changes import change
from ridgeline.plan.expected import ROOF
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Figures, Load, Planner
from ridgeline.plan.slo import kept
from ridgeline.plan.units import seconds
from ridgeline.spec import ModelSpec

Command = Literal["prune", "convert"]
MOST_KINDS = 2  # kinds of changes in one candidate


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of change. command: the one that makes it. words: its changes of a model, the gentlest first, as that
    command takes them, with the share that each keeps of its part; those that a model cannot have are left out. stages:
    the stages of `ridgeline distill` for it.
    """

    name: str
    command: Command
    words: Callable[[ModelSpec], Mapping[str, float]]
    stages: str = "logits"


def _shares(word: str, *shares: float) -> Callable[[ModelSpec], Mapping[str, float]]:
    return lambda spec: {f"{word}={share}": share for share in shares}


def _fixed(shares: Mapping[str, float]) -> Callable[[ModelSpec], Mapping[str, float]]:
    return lambda spec: shares


def _kv_heads(spec: ModelSpec) -> dict[str, float]:
    full = min((own.num_kv_heads for own in spec.attentions(shared=False)), default=1)
    return {f"kv_heads={n}": n / full for n in range(full - 1, 0, -1) if full % n == 0}


def _layers(spec: ModelSpec) -> dict[str, float]:
    full = len(spec.layers)
    return {f"layers={n}": n / full for n in range(full - 1, full // 2 - 1, -max(1, full // 8)) if n}


# Every kind of change that is tried. Commands run in the order of this table.
KINDS: tuple[Kind, ...] = (
    Kind("layers", "prune", _layers),
    Kind("width", "prune", _shares("width", 0.875, 0.75, 0.625, 0.5)),
    Kind("heads", "prune", _shares("heads", 0.75, 0.5, 0.25)),
    Kind("mlp", "prune", _shares("mlp", 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)),
    Kind("kv_heads", "convert", _kv_heads, "layers,logits"),
    Kind("cla", "convert", _fixed({"cla=2": 1 / 2, "cla=4": 1 / 4}), "layers,logits"),
    Kind(
        "window", "convert", _fixed({"window=256:1": 1 / 2, "window=64:1": 1 / 2, "window=64:3": 1 / 4}),
        "layers,logits",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Candidate:
    """A changed model. words: its changes, by the name of their kind. spec: the shape that it will have.

    harm: the sum of the squared logarithms of the shares that its changes keep, so that two mild changes count less
    than a strong one.
    """

    words: Mapping[str, str]
    spec: ModelSpec = field(repr=False)
    figures: Figures
    harm: float

    def __str__(self) -> str:
        return ",".join(self.words.values())

    @property
    def commands(self) -> list[tuple[Command, str]]:
        """Return the commands that make it, each with its words. Everything that is pruned is pruned at once."""
        own = [kind for kind in KINDS if kind.name in self.words]
        cuts = [self.words[kind.name] for kind in own if kind.command == "prune"]
        found: list[tuple[Command, str]] = [("prune", ",".join(cuts))] if cuts else []
        return found + [("convert", self.words[kind.name]) for kind in own if kind.command == "convert"]

    @property
    def stages(self) -> str:
        """Return the stages of its repair: logits alone where any of its changes wants that."""
        wanted = {kind.stages for kind in KINDS if kind.name in self.words}
        return wanted.pop() if len(wanted) == 1 else "logits"


def find_candidates(
    deployment: Deployment, load: Load, slo: Slo, on_tried: Callable[[int, int], None] = lambda *_: None
) -> list[Candidate]:
    """Return the candidates that keep the limits, in the order in which they are worth a try.

    A candidate has up to MOST_KINDS kinds of changes. Among candidates with equal kinds, only the mildest one is
    returned; one that still keeps the limits with less of a change is left out. The first candidate is the mildest.
    Each next one shares the fewest kinds with those before it, so that a few differ much.

    on_tried: called with the number of combinations whose cost is known, and of all.

    Raises RequestError if the model keeps the limits as it is, and if no candidate keeps them.
    """
    before = Planner(deployment).figures(load)
    if kept(slo, before, ROOF):
        raise RequestError(
            f"the model keeps {said(slo)} as it is: {said_of(slo, before)} predicted; there is nothing to make "
            "cheaper, so lower the limit"
        )
    tried = list(_tried(deployment, load, on_tried))
    if not tried:
        raise RequestError("no change that is known suits this model; `ridgeline prune` and `convert` say why")
    keeping = [one for one in tried if kept(slo, one.figures, ROOF)]
    if not keeping:
        near = min(tried, key=lambda one: _miss(slo, one.figures))
        raise RequestError(
            f"no candidate keeps {said(slo)}: the closest, {near}, has {said_of(slo, near.figures)} predicted, and the "
            f"model {said_of(slo, before)}; raise the limit, or name other hardware"
        )
    whole = [one for one in keeping if not any(_is_gentler(other, one, deployment.spec) for other in keeping)]
    ranked = sorted(whole, key=lambda one: (one.harm, -one.spec.num_params(), str(one)))
    best: dict[frozenset[str], Candidate] = {}
    for one in ranked:
        best.setdefault(frozenset(one.words), one)
    return _unlike(list(best.values()))


def _unlike(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Return candidates in an order in which each shares the fewest kinds with those before it; ranks decide ties."""
    left, found, used = list(ranked), list[Candidate](), Counter[str]()
    while left:
        one = min(left, key=lambda c: (sum(used[name] for name in c.words), ranked.index(c)))
        left.remove(one)
        found.append(one)
        used.update([*one.words])
    return found


def _tried(deployment: Deployment, load: Load, on_tried: Callable[[int, int], None]) -> Iterator[Candidate]:
    """Yield every combination of changes that the model can have, with its predicted cost."""
    able = {kind.name: [w for w in kind.words(deployment.spec) if _changed(deployment, [(kind, w)])] for kind in KINDS}
    kinds = [kind for kind in KINDS if able[kind.name]]
    sets = [some for n in range(1, MOST_KINDS + 1) for some in combinations(kinds, n)]
    every = [(some, words) for some in sets for words in product(*(able[kind.name] for kind in some))]
    for done, (some, words) in enumerate(every):
        on_tried(done, len(every))
        after = _changed(deployment, list(zip(some, words, strict=True)))
        if after is not None and load.context <= after.spec.max_position_embeddings:
            by_name = {kind.name: word for kind, word in zip(some, words, strict=True)}
            harm = sum(math.log(kind.words(deployment.spec)[by_name[kind.name]]) ** 2 for kind in some)
            yield Candidate(by_name, after.spec, Planner(after).figures(load), harm)


def _changed(deployment: Deployment, changes: Sequence[tuple[Kind, str]]) -> Deployment | None:
    """Return the deployment of a changed model; None if the model cannot have these changes."""
    found = deployment
    try:
        for kind, word in changes:
            if kind.command == "convert":
                found = change(found, word).deployment
            else:
                aims = parse_keep(word)
                count = aims.size("layers", len(found.spec.layers), "the model's layers")
                found = replace(found, spec=uniform(found.spec, aims, range(count)))
    except RequestError:
        return None
    return None if found.spec == deployment.spec else found


def _is_gentler(one: Candidate, other: Candidate, spec: ModelSpec) -> bool:
    """Return whether a candidate has some of the changes of another one, none of them stronger, and is not the same."""
    if one.words == other.words or not set(one.words) <= set(other.words):
        return False
    orders = {kind.name: list(kind.words(spec)) for kind in KINDS if kind.name in one.words}
    return all(order.index(one.words[name]) <= order.index(other.words[name]) for name, order in orders.items())


def _miss(slo: Slo, figures: Figures) -> float:
    return max(value_of(figures, name) / limit for name, limit in slo.limits.items())


def value_of(figures: Figures, name: str) -> float:
    """Return the figure that a limit is for, in seconds."""
    ttft, tpot = figures.served_ttft_s, figures.served_tpot_s
    return {"ttft": ttft, "tpot": tpot, "e2e": ttft + (figures.load.output - 1) * tpot}[name]


def said(slo: Slo) -> str:
    """Return limits in words: `tpot=30 ms`."""
    return ", ".join(f"{name}={seconds(limit)}" for name, limit in slo.limits.items())


def said_of(slo: Slo, figures: Figures) -> str:
    """Return the figures that limits are for, in words."""
    return ", ".join(f"{name} {seconds(value_of(figures, name))}" for name in slo.limits)
