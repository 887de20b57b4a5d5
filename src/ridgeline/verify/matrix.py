"""The exactness matrix as data: all values of each axis around a default case, then combinations of axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ridgeline.spec.sight import BEYOND

PROMPT = 40  # tokens of an ordinary prompt
SHARED = 16  # least tokens that prompts share in a case with prefix hits and preemption, in whole pages
OVER = 6  # tokens of a prompt after its first page or chunk
CROSSING = 4  # in a case of preemption, an answer reaches a new page after so many tokens
LONGER = 16  # in a case of preemption, every second prompt is longer by so many tokens, if the context allows
NUM_COMBINATIONS, NUM_QUICK_COMBINATIONS = 8, 3
MANY = 3  # sequences of one page each, one of which is preempted for the others
MOST_HEADS = 4  # of a Medusa model with random weights
LEAST_COMBINED = 3  # settings of a combination that differ from the default

Preempt = Literal["recompute", "swap"]
# Proposes the tokens that are known to follow; looks them up in earlier text; is the model itself, as a draft model; or
# is a head with random weights (heads.py).
DraftSource = Literal["known", "ngram", "model", "medusa", "eagle", "eagle3"]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to serve requests.

    chunk: tokens of a step; None: enough for all prompts. page: tokens of a page. others: number of other requests at
    the same time. prefix: whether the prefix of a prompt is in the cache. preempt: how sequences are preempted, with
    few pages; None: enough pages. drafts: tokens that are proposed at every step. wrong: share of wrong drafts.
    source: the proposer. tree: most drafts after a draft; 1: they are chains. n: answers to each prompt. prompt: tokens
    of a prompt; None: the usual length. text: prompts are real text. apart: answers to one prompt share no page.
    number: index in the matrix, which seeds the arrivals. impossible: why the case cannot be run with this model.
    """

    axis: str = "default"
    value: str = "whole prompt, cold, alone, n 1, pages of 16, 1 step in flight"
    chunk: int | None = None
    page: int = 16
    steps_in_flight: int = 1
    others: int = 0
    prefix: Literal["cold", "hit"] = "cold"
    preempt: Preempt | None = None
    drafts: int = 0
    wrong: float = 0.0
    source: DraftSource = "known"
    tree: int = 1
    n: int = 1
    prompt: int | None = None
    text: bool = False
    apart: bool = False
    number: int = 0
    impossible: str = ""

    @property
    def heads(self) -> int:
        """Return the number of heads of a Medusa model; more of them propose more tokens, and take more memory."""
        return min(self.drafts, MOST_HEADS)


@dataclass(frozen=True, slots=True)
class Scale:
    """Limits of the cases of one model.

    longest: most tokens of a prompt and its answer. new_tokens: tokens of every answer. windows: the windows of the
    model's layers, in tokens, ascending. text: there is a tokenizer. quick: use few values of each axis. states: some
    layers are recurrent. only_states: all are, so a sequence needs no more pages at its end than at its beginning.
    block: tokens of a block of a diffusion model, BEYOND if it sees whole sequences; None: the model is autoregressive.
    canvas: tokens of the canvas of a diffusion model that has one; 0: it has none.
    ranks: the number of parts that the model is cut into.
    """

    longest: int
    new_tokens: int
    windows: tuple[int, ...] = ()
    text: bool = False
    quick: bool = False
    states: bool = False
    only_states: bool = False
    block: int | None = None
    ranks: int = 1
    canvas: int = 0

    @property
    def is_whole(self) -> bool:
        """Return whether the model sees whole sequences."""
        return self.block is not None and self.block >= BEYOND

    @property
    def positions(self) -> int:
        """Return the positions that an answer takes: the last canvas is computed whole."""
        return _pages(self.new_tokens, self.canvas or 1)

    @property
    def room(self) -> int:
        """Return the largest number of tokens of a prompt."""
        return self.longest - self.positions

    @property
    def together(self) -> int:
        """Return the tokens that a pass computes together: 1 for an autoregressive model."""
        return self.canvas or self.block or 1


@dataclass(frozen=True, slots=True)
class Value:
    """A value of an axis. change: fields that differ from the default case. quick: it is part of a quick run."""

    label: str
    change: Mapping[str, Any]
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt lengths of a case, in tokens. prompts: requests take them in turn. shared: the common prefix."""

    prompts: tuple[int, ...]
    shared: int


DEFAULT = Case()
DRAFTED: Mapping[DraftSource, str] = {
    "known": "", "ngram": " looked up", "model": " of a draft model", "medusa": " of a Medusa head",
    "eagle": " of an EAGLE-1 head", "eagle3": " of an EAGLE-3 head",
}  # fmt: skip
# The default value of each axis is missing here: the default case has it.
AXES: dict[str, tuple[Value, ...]] = {
    "chunks": (
        Value("of 1", {"chunk": 1}),
        Value("of 7", {"chunk": 7}, quick=True),
        Value("of 16", {"chunk": 16}),
        Value("of 1000", {"chunk": 1000}),
    ),
    "prefix": (Value("hit", {"prefix": "hit"}, quick=True),),
    "batch": (
        Value("1 other", {"others": 1}),
        Value("7 others", {"others": 7}, quick=True),
        Value("40 others", {"others": 40}),
    ),
    "preempted": (
        Value("recompute", {"preempt": "recompute", "others": 7}, quick=True),
        Value("swap", {"preempt": "swap", "others": 7}, quick=True),
        # A step is in flight whose tokens are lost, or come late.
        Value("recompute, 2 in flight", {"preempt": "recompute", "others": 7, "steps_in_flight": 2}),
        Value("swap, 2 in flight", {"preempt": "swap", "others": 7, "steps_in_flight": 2}),
    ),
    "drafts": (
        Value("4, all right", {"drafts": 4}),
        Value("4, half of them wrong", {"drafts": 4, "wrong": 0.5}, quick=True),
        Value("4, looked up", {"drafts": 4, "source": "ngram"}),
        Value("4, of a draft model", {"drafts": 4, "source": "model"}),
        Value("4, of a Medusa head", {"drafts": 4, "source": "medusa"}),
        Value("4, of an EAGLE-1 head", {"drafts": 4, "source": "eagle"}),
        Value("4, of an EAGLE-3 head", {"drafts": 4, "source": "eagle3"}),
        Value("12, trees of a Medusa head", {"drafts": 12, "tree": 3, "source": "medusa"}),
        Value("12, trees of an EAGLE-1 head", {"drafts": 12, "tree": 3, "source": "eagle"}),
    ),
    "forks": (Value("n 4", {"n": 4}, quick=True),),
    "pages": (Value("of 1", {"page": 1}, quick=True), Value("of 64", {"page": 64})),
    "in flight": (Value("2 steps", {"steps_in_flight": 2}, quick=True),),
}


SEVERAL = "a step of a diffusion model predicts several tokens already"


def _never(reason: str) -> tuple[Value, ...]:
    """Return the only value of an axis that a kind of model does not have."""
    return (Value("-", {"impossible": reason}, quick=True),)


# Of models that see whole sequences: every pass computes all tokens of a sequence, on pages of its own.
WHOLE_AXES: dict[str, tuple[Value, ...]] = {
    "chunks": _never("a step computes a whole sequence"),
    "prefix": _never("no row of a whole sequence is ever final"),
    "batch": AXES["batch"],
    "preempted": _never("a sequence takes all of its pages with its first pass"),
    "drafts": _never(SEVERAL),
    "forks": (Value("n 4", {"n": 4, "apart": True}, quick=True),),
    "pages": AXES["pages"],
    "in flight": _never(SEVERAL),
}


def cases(scale: Scale, seed: int) -> list[Case]:
    """Return the matrix for one model. Equal scales and seeds give equal cases."""
    found = [_default(scale), *_around_default(scale), *_combinations(scale, seed)]
    return [_checked(replace(case, number=i), scale) for i, case in enumerate(found)]


def lengths(case: Case, scale: Scale) -> Lengths:
    """Return the lengths of a case's prompts and of their common prefix."""
    if case.preempt:
        return _crowding(case, scale)
    longest = case.prompt or min(PROMPT, scale.room)
    for size in (case.page, 0 if case.others else case.chunk or 0):
        if case.prompt is None and longest < size + OVER <= scale.room:
            longest = size + OVER  # more than one page or chunk
    shared = max(longest - 4, 0) // case.page * case.page if case.prefix == "hit" else 0
    # One request of each kind has the full length; the others are shorter, down to one token after the prefix.
    rest = min(longest - shared, PROMPT)
    return Lengths((longest,) * 4 + tuple(shared + 1 + (rest - 1) * i // 8 for i in range(8)), shared)


def _crowding(case: Case, scale: Scale) -> Lengths:
    """Return the lengths for a case of preemption: a short and a long prompt, in turn.

    When the answer to the short one reaches a new page, or its second canvas, no page is left. The long one has just
    begun a page then: if all its pages were full, a wrong order of pages would not change what it computes next.
    """
    page, before = case.page, scale.canvas or min(CROSSING, scale.new_tokens - 1)
    shared = _pages(SHARED, page) if case.prefix == "hit" else 0
    short = _pages(shared + 4 + before, page) - before
    most = scale.room
    if case.chunk:  # the long prompt must be computed by then, beside the short one's answer
        most = min(most, shared + (case.chunk - 1) * before)
    long = min(_pages(short + LONGER, page), max(most - 2, 0) // page * page) + 2
    return Lengths((short, long if long > shared + 2 else short), shared)


def _pages(tokens: int, page: int) -> int:
    """Return `tokens`, rounded up to whole pages."""
    return -(-tokens // page) * page


def _around_default(scale: Scale) -> Iterator[Case]:
    axes = _axes(scale)
    for axis, values in (*axes.items(), ("window", _window_values(scale)), ("prompt", _text_values(scale))):
        for value in values:
            if value.quick or not scale.quick:
                yield replace(_default(scale), axis=axis, value=value.label, **value.change)


def _default(scale: Scale) -> Case:
    """Return the case around which values are chosen. Pages of a diffusion model hold whole blocks."""
    if scale.block is None or scale.is_whole:
        return DEFAULT
    page = _pages(DEFAULT.page, scale.block)
    return replace(DEFAULT, page=page, value=f"whole prompt, cold, alone, n 1, pages of {page}")


def _axes(scale: Scale) -> Mapping[str, Sequence[Value]]:
    """Return the axes of a kind of model. A diffusion model has no drafts, and one step in flight."""
    if scale.block is None:
        return AXES
    if scale.is_whole:
        return WHOLE_AXES
    if scale.canvas:
        return _canvas_axes(scale.canvas)
    size = scale.block
    chunks = dict.fromkeys((size, 2 * size - 1, 3 * size, 1000 + size))
    pages = dict.fromkeys((size, _pages(24, size), _pages(64, size)))
    none = _never(SEVERAL)
    return {
        "chunks": tuple(Value(f"of {n}", {"chunk": n}, quick=n == 2 * size - 1) for n in chunks),
        "prefix": AXES["prefix"],
        "batch": AXES["batch"],
        "preempted": tuple(v for v in AXES["preempted"] if "steps_in_flight" not in v.change),
        "drafts": none,
        "forks": AXES["forks"],
        "pages": tuple(Value(f"of {n}", {"page": n}, quick=n == size) for n in pages),
        "in flight": none,
    }


def _canvas_axes(size: int) -> Mapping[str, Sequence[Value]]:
    """Return the axes of a model with a canvas: a step computes at least a whole one, and pages are as in AR models."""
    chunks = dict.fromkeys((size, 2 * size - 1, 3 * size, 1000 + size))
    return {
        **AXES,
        "chunks": tuple(Value(f"of {n}", {"chunk": n}, quick=n == 2 * size - 1) for n in chunks),
        "preempted": tuple(v for v in AXES["preempted"] if "steps_in_flight" not in v.change),
        "drafts": _never(SEVERAL),
        "in flight": _never(SEVERAL),
    }


def _text_values(scale: Scale) -> Sequence[Value]:
    return (Value("real text", {"text": True}, quick=True),) if scale.text else ()


def _window_values(scale: Scale) -> Sequence[Value]:
    """Return prompts shorter than each window, so that the answer crosses it, of equal length, and longer."""
    if not scale.windows:
        return (Value("-", {"impossible": "no layer has a window"}, quick=True),)
    found = []
    for window in scale.windows:
        inside = max(1, window - max(1, scale.new_tokens // 2))
        beyond = max(window + 1, min(2 * window, scale.room))
        for prompt, quick in ((inside, False), (window, False), (beyond, True)):
            sign = "<" if prompt < window else "=" if prompt == window else ">"
            found.append(Value(f"prompt {prompt} {sign} {window}", {"prompt": prompt}, quick))
    return found


def _combinations(scale: Scale, seed: int) -> Iterator[Case]:
    """Yield cases with random values of about half of the axes, without those that cannot be combined."""
    rng = np.random.default_rng([seed, 1])
    axes = (*_axes(scale).values(), _window_values(scale))
    wanted = NUM_QUICK_COMBINATIONS if scale.quick else NUM_COMBINATIONS
    for _ in range(1000):
        drawn = [values[int(rng.integers(len(values)))] for values in axes if rng.integers(2)]
        case = replace(_default(scale), axis="combined")
        for value in drawn:
            case = replace(case, **value.change)
        if case.n > 1:  # they are many sequences already
            case = replace(case, others=min(case.others, 1))
        if len(drawn) >= LEAST_COMBINED and _goes_together(case, scale) and not _checked(case, scale).impossible:
            yield replace(case, value=_describe(case, scale))
            wanted -= 1
        if not wanted:
            return


def _goes_together(case: Case, scale: Scale) -> bool:
    """Return whether every setting of a combination takes effect.

    In steps of one token only one sequence runs at a time, and in steps of few blocks only one request, so there are no
    other requests and no preemption. A case of preemption chooses its own prompt lengths; if a page is longer than a
    window and prompts begin with whole pages, it may not run short of pages. Drafts need the token before them, and
    more than one token in a step. With drafts it is not known where the others are when an answer reaches a new page,
    and an answer may be over before another prompt is computed in chunks. Sequences of one page each run short of pages
    only if several begin in one step.
    """
    several = case.others or case.n > 1
    in_chunks = case.chunk is not None and case.chunk < max(lengths(case, scale).prompts)
    if case.drafts and (case.chunk == 1 or case.steps_in_flight > 1 or case.preempt or (case.others and in_chunks)):
        return False
    if (scale.is_whole or scale.canvas) and case.impossible:
        return False
    if scale.canvas and case.chunk and case.preempt:  # when the second canvas begins depends on the chunks
        return False
    if case.chunk is not None and case.chunk < (case.n + 1) * scale.together:
        return not (case.others or case.preempt)
    if not case.preempt:
        return True
    together = not case.chunk or case.chunk >= MANY * max(lengths(case, scale).prompts)
    if scale.only_states and (case.n > 1 or not together):
        return False
    wide = scale.windows and case.page > scale.windows[0] and case.prefix == "hit"
    return bool(several and not case.prompt and not wide)


def _describe(case: Case, scale: Scale) -> str:
    """Return the settings of a combination that differ from the default."""
    prompt = max(lengths(case, scale).prompts)
    parts = [
        f"chunks {case.chunk}" if case.chunk else "",
        "hit" if case.prefix == "hit" else "",
        f"{case.others} other{'s' if case.others > 1 else ''}" if case.others else "",
        case.preempt or "",
        f"{case.drafts} drafts{' in trees' if case.tree > 1 else ''}{DRAFTED[case.source]}" if case.drafts else "",
        f"n {case.n}" if case.n > 1 else "",
        f"pages {case.page}" if case.page != DEFAULT.page else "",
        f"{case.steps_in_flight} in flight" if case.steps_in_flight > 1 else "",
        f"prompt {prompt}",
    ]
    return ", ".join(filter(None, parts))


def _checked(case: Case, scale: Scale) -> Case:
    """Return the case, with the reason why it is impossible: prompts that do not fit, or share no whole page."""
    found = lengths(case, scale)
    reason = case.impossible
    if not reason and max(found.prompts) > scale.room:
        reason = f"prompts of {max(found.prompts)} tokens: this run goes to {scale.room}"
    elif not reason and case.prefix == "hit" and not found.shared:
        reason = f"a prompt with a page of {case.page} tokens: this run goes to {scale.room}"
    elif not reason and scale.ranks > 1 and case.source not in ("known", "ngram"):
        reason = "a model that is cut takes no draft model or head"
    elif not reason and case.source == "model" and scale.states:
        reason = "a draft model, here the model itself, has no recurrent layers"
    return replace(case, impossible=reason)
