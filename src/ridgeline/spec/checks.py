"""Check the fields of a request. Each check raises RequestError, which names the field, the value and the limit."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.errors import RequestError


def check_flag(name: str, value: object) -> None:
    """Check that the value is True or False."""
    if type(value) is not bool:
        raise RequestError(f"{name} is {value!r}; it must be true or false")


def ids_of(name: str, value: object) -> tuple[int, ...]:
    """Return a list of token ids as a tuple."""
    if not isinstance(value, list | tuple):
        raise RequestError(f"{name} is {value!r}; it must be a list of token ids")
    for token in value:
        check_whole(name, token, 0)
    return tuple(value)


def texts_of(name: str, value: object) -> tuple[str, ...]:
    """Return one text, or a list of texts, as a tuple."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise RequestError(f"{name} is {value!r:.100}; it must be a text or a list of texts, none of them empty")
    return tuple(texts)


def check_sizes(name: str, words: Sequence[str] | Sequence[tuple[int, ...]], most: int, total: int, unit: str) -> None:
    """Check the number of words and their total length. unit: name of the parts of a word, for the message."""
    if len(words) > most:
        raise RequestError(f"{name} has {len(words)} entries; the limit is {most}")
    if (found := sum(map(len, words))) > total:
        raise RequestError(f"{name} has {found} {unit} in all; the limit is {total}")


def pairs_of(name: str, value: Any) -> tuple[tuple[Any, Any], ...]:
    """Return a mapping, or a list of its pairs, as pairs in order of token id."""
    items = list(value.items()) if isinstance(value, Mapping) else value
    pairs = isinstance(items, list | tuple) and all(isinstance(i, list | tuple) and len(i) == 2 for i in items)
    if not pairs or not all(type(token) is int for token, _ in items):
        raise RequestError(f"{name} is {value!r:.100}; it must map token ids, whole numbers at least 0, to numbers")
    found = dict(items)
    return tuple(sorted(found.items()))


def check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    """Check that the value is a whole number from `low` to `high`; None: no upper limit."""
    ok = type(value) is int and value >= low and (high is None or value <= high)
    if not ok:
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise RequestError(f"{name} is {value!r}; it must be a whole number {limit}")


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> None:
    """Check that the value is a finite number from `low` to `high`. open_low: `low` itself is not allowed."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not ok or value > high or value < low or (open_low and value == low):
        more = "greater than" if open_low else "at least"
        upper = f" and at most {high:g}" if math.isfinite(high) else ""
        raise RequestError(f"{name} is {value!r}; it must be a number {more} {low:g}{upper}")
