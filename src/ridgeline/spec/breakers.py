"""Hold the token sequences at which a repetition ends: DRY's sequence breakers, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.spec.checks import ids_of

MAX_BREAKER_TOKENS = 1 << 15  # token ids in all breakers of a request


@dataclass(frozen=True, slots=True)
class TokenBreaker:
    """One of `heads`, followed by all of `tail`. Tokenizers join characters, so many tokens may begin one breaker."""

    heads: frozenset[int]
    tail: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.heads, set | frozenset) or not self.heads:
            raise RequestError(f"a TokenBreaker has the heads {self.heads!r:.100}; they must be a set of token ids")
        ids_of("the heads of a TokenBreaker", list(self.heads))
        object.__setattr__(self, "heads", frozenset(self.heads))
        object.__setattr__(self, "tail", ids_of("the tail of a TokenBreaker", self.tail))

    def __len__(self) -> int:
        """Return the number of token ids in it."""
        return len(self.heads) + len(self.tail)


def breakers_of(name: str, value: Any) -> tuple[TokenBreaker, ...]:
    """Return a list of breakers as a tuple. Raises RequestError if they hold too many token ids."""
    if not isinstance(value, list | tuple) or not all(isinstance(one, TokenBreaker) for one in value):
        raise RequestError(f"{name} is {value!r:.100}; it must be a list of TokenBreaker")
    check_total(name, sum(map(len, value)))
    return tuple(value)


def check_total(name: str, count: int) -> None:
    """Raise RequestError if `count` token ids are more than breakers may hold."""
    if count > MAX_BREAKER_TOKENS:
        raise RequestError(
            f"{name} matches more than {MAX_BREAKER_TOKENS} tokens of the vocabulary, which is the limit: "
            "give fewer or longer texts"
        )


def largest(breakers: Sequence[TokenBreaker]) -> list[int]:
    """Return the largest token id of each breaker."""
    return [max((*one.tail, max(one.heads))) for one in breakers]
