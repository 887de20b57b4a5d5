"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ridgeline.serve.service import Service
from ridgeline.spec.request import TokenLogprobs

LEAST = -9999.0  # JSON has no infinity; vLLM writes this


class TokenTexts:
    """What tokens are by themselves. An answer's candidates repeat, so each is decoded once."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, list[int]] = {}

    def text(self, token: int) -> str:
        """As text."""
        if (found := self._texts.get(token)) is None:
            found = self._texts[token] = self._service.token_text(token)
        return found

    def bytes(self, token: int) -> list[int]:
        """As bytes."""
        if (found := self._bytes.get(token)) is None:
            found = self._bytes[token] = self._service.token_bytes(token)
        return found

    def is_special(self, token: int) -> bool:
        """Is the token none of the text?"""
        return self._service.is_special(token)


def of_chat(texts: TokenTexts, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs of a chat choice."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": texts.text(token),
            "logprob": max(logprob, LEAST),
            "bytes": texts.bytes(token),
        }

    content = [{**one(e.token_id, e.logprob), "top_logprobs": [one(*pair) for pair in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def of_completion(
    texts: TokenTexts, entries: Iterable[TokenLogprobs | None], first: int, offset: int
) -> dict[str, Any]:
    """The logprobs of a completion's choice. first: the token of an entry that is None (a prompt's first token).
    offset: where the text of the first token begins.
    """
    tokens, offsets, values, tops = [], [], [], []
    for entry in entries:
        token = first if entry is None else entry.token_id
        text = texts.text(token)
        tokens.append(text)
        offsets.append(offset)
        offset += 0 if texts.is_special(token) else len(text)  # texts are without special tokens
        values.append(None if entry is None else max(entry.logprob, LEAST))
        tops.append(None if entry is None else _top(texts, entry))
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def plain(entries: Iterable[TokenLogprobs | None]) -> list[Any]:
    """Of a prompt, by token id, as vLLM's prompt_logprobs."""
    return [
        None if e is None else {str(t): {"logprob": max(v, LEAST)} for t, v in ((e.token_id, e.logprob), *e.top)}
        for e in entries
    ]


def _top(texts: TokenTexts, entry: TokenLogprobs) -> dict[str, float]:
    """By text: the likeliest tokens, and the one that was taken. Of several with one text, the likeliest counts."""
    found: dict[str, float] = {}
    for token, logprob in (*entry.top, (entry.token_id, entry.logprob)):
        found.setdefault(texts.text(token), max(logprob, LEAST))
    return found
