"""Read what is to be kept of a model: `--keep mlp=0.5,heads=0.75,layers=20,width=0.75`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from ridgeline.errors import RequestError
from ridgeline.spec import ModelSpec

Word = Literal["mlp", "heads", "kv_heads", "experts", "state", "width", "layers"]
WORDS: tuple[Word, ...] = get_args(Word)
# Words whose sizes are rounded; a share of all others must be a whole number of them.
ROUNDED: frozenset[Word] = frozenset(("mlp", "width"))
_UNITS: Mapping[str, float] = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
WHOLE = 1e-3  # largest distance of a share of units from a whole number, for shares with few digits
FORM = "--keep: write mlp=0.5,heads=0.75,layers=20, with a share such as 0.5 or a whole number to keep"


@dataclass(frozen=True, slots=True)
class Aims:
    """The parts to keep, by word: a share (float) from 0 to 1, or a number (int).

    multiple: sizes of MLPs and of the stream that follow from a share are multiples of it where the full size is one.
    """

    by_word: Mapping[Word, float | int] = field(default_factory=dict)
    multiple: int = 1

    def size(self, word: Word, full: int, where: str, step: int = 1) -> int:
        """Return how many of `full` units are kept; all of them if nothing was said.

        step: the number of units must be a multiple of it, because groups of equal size share something.

        Raises RequestError, with `where`, for a number that is not in 1..full or not a multiple, and for a share that
        is no whole number of units.
        """
        given = self.by_word.get(word)
        if given is None:
            return full
        if isinstance(given, int):
            if not 1 <= given <= full:
                raise RequestError(f"--keep {word}={given}: {where} has {full}; keep 1 to {full}, or write a share")
            if given % step:
                raise _indivisible(word, given, given, full, where, step)
            return given
        kept = given * full
        if word in ROUNDED:
            own = self.multiple if full % self.multiple == 0 else 1
            return max(own, round(kept / own) * own)
        size = round(kept)
        if abs(kept - size) > WHOLE or size < 1 or size % step:
            raise _indivisible(word, given, kept, full, where, step)
        return size


def _indivisible(word: Word, given: float, kept: float, full: int, where: str, step: int) -> RequestError:
    """Return the error for a number of units that groups do not allow, with the nearest ones that they do."""
    low = min(max(step, int(kept // step) * step), full)
    near = " or ".join(f"{n / full:.6g} ({n})" for n in dict.fromkeys((low, min(full, low + step))))
    groups = f" in {step} equal groups" if step > 1 else ""
    return RequestError(
        f"--keep {word}={given:g}: that is {kept:.4g} of the {full} of {where}{groups}, which do not divide so; write "
        f"{word}={near}"
    )


def parse_keep(text: str) -> Aims:
    """Return the aims that a text describes. Raises RequestError, which says how to write them."""
    found: dict[Word, float | int] = {}
    for part in text.split(","):
        name, sign, value = (x.strip() for x in part.partition("="))
        if name not in WORDS:
            raise RequestError(f"--keep {part.strip()!r}: {name!r} cannot be pruned; use {', '.join(WORDS)}")
        word: Word = name
        if not sign or not value:
            raise RequestError(f"{FORM}, not {part.strip()!r}")
        if word in found:
            raise RequestError(f"--keep names {word} twice; leave one out")
        found[word] = _number(word, value)
    return Aims(found)


def _number(word: Word, value: str) -> float | int:
    try:
        number = float(value) if not value.isdecimal() else int(value)
    except ValueError:
        raise RequestError(f"{FORM}, not {word}={value}") from None
    if isinstance(number, int):
        if number < 1 or (number == 1 and word in ROUNDED):
            more = f"; write {word}=1.0 to keep all of it" if number else f"; leave {word} out to keep all of it"
            raise RequestError(f"--keep {word}={value} would leave {number}{more}")
        return number
    if not 0 < number <= 1:
        raise RequestError(f"--keep {word}={value}: a share must be above 0 and at most 1; write a share such as 0.5")
    return number


def parse_params(text: str) -> int:
    """Return a number of parameters: 2B, 850M, 1.5e6. Raises RequestError for anything else."""
    return parse_amount("--params", text, "parameters", "2B, 850M or 120000")


def parse_amount(flag: str, text: str, what: str, example: str) -> int:
    """Return a number such as 2B or 1.5e6. Raises RequestError, with the flag and an example, for anything else."""
    body, factor = text.strip().lower(), 1.0
    if body and body[-1] in _UNITS:
        body, factor = body[:-1], _UNITS[body[-1]]
    try:
        found = round(float(body) * factor)
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise RequestError(f"{flag} {text:.40}: write a number of {what} such as {example}")
    return found


def check_words(aims: Aims, spec: ModelSpec) -> None:
    """Raise RequestError for words that contradict each other on this model."""
    both = {"heads", "kv_heads"} <= set(aims.by_word)
    if both and all(m.query_group == 1 for m in spec.attentions(shared=True)):
        raise RequestError(
            "--keep heads and kv_heads are the same in this model, in which each query head has its own keys and "
            "values: give one of them"
        )
