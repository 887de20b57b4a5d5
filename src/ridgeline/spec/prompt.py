"""Define how a prompt is read: special tokens, truncation, sharing of prefixes. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from ridgeline.errors import RequestError

T = TypeVar("T")
Side = Literal["left", "right"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How a prompt is read. Raises RequestError, which names the value, for a bad value.

    add_special_tokens: whether the tokens that the model expects around a text, such as BOS, are added to it; they are
    never added to token ids. truncate_prompt_tokens: keep at most this many tokens, special ones included; -1 keeps all
    that leave room for the answer; None refuses a prompt that is too long. truncation_side: "left" drops tokens from
    the start of the prompt, "right" from its end. cache_salt: only prompts with the same salt
    share the prefix cache.
    """

    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Side = "left"
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if type(self.add_special_tokens) is not bool:
            raise RequestError(f"add_special_tokens is {self.add_special_tokens!r:.100}; it must be true or false")
        count = self.truncate_prompt_tokens
        if count is not None and (type(count) is not int or (count < 1 and count != -1)):
            raise RequestError(
                f"truncate_prompt_tokens is {count!r:.100}; it must be a whole number at least 1, or -1 for as many "
                "tokens as leave room for the answer"
            )
        if self.truncation_side not in ("left", "right"):
            raise RequestError(f"truncation_side is {self.truncation_side!r:.100}; it must be left or right")
        if not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt is {self.cache_salt!r}; it must be a text")
        try:
            self.cache_salt.encode("utf-8")
        except UnicodeEncodeError as error:
            wrong = self.cache_salt[error.start]
            raise RequestError(f"cache_salt has the lone surrogate {wrong!r}; send valid Unicode") from None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> PromptOptions:
        """Return the options in a prompt that is an object; a field that is None there has its default."""
        return cls(**{name: value for name in OPTION_KEYS if (value := given.get(name)) is not None})

    def kept(self, room: int) -> int | None:
        """Return how many tokens of a prompt to keep; None: all. room: tokens of the context without the answer.

        Raises RequestError if the context has no room for both.
        """
        count = self.truncate_prompt_tokens
        if count is not None and room < 1:
            raise RequestError("max_tokens leaves no room for a prompt in the context; lower it")
        if count is not None and count > room:
            raise RequestError(
                f"truncate_prompt_tokens is {count}, but only {room} tokens leave room for the answer in the context; "
                f"lower it to {room}, or max_tokens"
            )
        return room if count == -1 else count


OPTION_KEYS = tuple(field.name for field in fields(PromptOptions))


def truncated(tokens: Sequence[T], kept: int | None, side: Side) -> Sequence[T]:
    """Return at most `kept` of the tokens: the last ones if the left side is cut, the first ones if the right is."""
    if kept is None or len(tokens) <= kept:
        return tokens
    return tokens[len(tokens) - kept :] if side == "left" else tokens[:kept]
