"""Define requests to OpenAI's two endpoints, and the content of their events. Names are those of vLLM's bench."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.errors import RequestError

# Short and frequent: with the space before it each is one token of most vocabularies, and two to four of a small one.
WORDS = (
    "the of and to in is that it was for on are as with his they at be this have from or one had by word but not what "
    "all were we when your can said there use an each which she do how their if will up other about out many then them "
    "these so some her would make like him into time has look two more"
).split()


@dataclass(frozen=True, slots=True)
class Backend:
    """An endpoint.

    path: its path. prompt: returns the fields of a prompt from token ids. has_text: whether a choice has text.
    """

    path: str
    prompt: Callable[[Sequence[int]], Mapping[str, Any]]
    has_text: Callable[[Mapping[str, Any]], bool]


def text_of(ids: Sequence[int]) -> str:
    """Return a word for each id, so that shared prefixes stay shared.

    A server's usage says how many tokens they are.
    """
    return " ".join(WORDS[i % len(WORDS)] for i in ids)


def _delta_has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls"))


def _has_text(choice: Mapping[str, Any]) -> bool:
    return bool(choice.get("text"))


BACKENDS = {
    "openai": Backend("/v1/completions", lambda ids: {"prompt": list(ids)}, _has_text),
    "openai-text": Backend("/v1/completions", lambda ids: {"prompt": text_of(ids)}, _has_text),
    "openai-chat": Backend(
        "/v1/chat/completions", lambda ids: {"messages": [{"role": "user", "content": text_of(ids)}]}, _delta_has_text
    ),
}


def backend_of(name: str) -> Backend:
    """Return a backend by its name. Raises RequestError for an unknown name."""
    if name not in BACKENDS:
        raise RequestError(f"--backend {name!r} is not known; choose one of {', '.join(BACKENDS)}")
    return BACKENDS[name]
