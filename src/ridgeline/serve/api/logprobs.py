"""Format log probabilities as OpenAI's two endpoints do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ridgeline.serve.api.token_texts import Piece, TokenPosition, named
from ridgeline.spec.request import TokenLogprobs

LEAST = -9999.0  # stands for -infinity, which JSON does not have; vLLM uses the same number


def of_chat(position: TokenPosition, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Return the logprobs of a chat's choice. position: where the first token begins; it advances past the last one."""

    def one(piece: Piece, logprob: float) -> dict[str, Any]:
        return {"token": piece.text, "logprob": max(logprob, LEAST), "bytes": list(piece.bytes)}

    content = []
    for e in entries:
        top = [one(position.peek(token), logprob) for token, logprob in e.top]
        content.append({**one(position.push(e.token_id), e.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def of_completion(
    position: TokenPosition, entries: Iterable[TokenLogprobs | None], first: int, over: bool
) -> dict[str, Any]:
    """Return the logprobs of a completion's choice.

    position: as in `of_chat`. first: the token id of an entry that is None, which is a prompt's first token.
    over: True if no entry follows.
    """
    tokens, offsets, values, tops = [], [], [], []
    known = list(entries)
    for number, entry in enumerate(known, 1):
        token = first if entry is None else entry.token_id
        others = () if entry is None else [(t, v, position.peek(t).text) for t, v in entry.top if t != token]
        offsets.append(position.offset)
        tokens.append(position.push(token, last=over and number == len(known)).text)
        values.append(None if entry is None else max(entry.logprob, LEAST))
        tops.append(None if entry is None else _by_text([(token, entry.logprob, tokens[-1]), *others]))
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def plain(entries: Iterable[TokenLogprobs | None]) -> list[Any]:
    """Return the log probabilities of a prompt by token id, in the format of vLLM's prompt_logprobs."""
    return [
        None if e is None else {str(t): {"logprob": max(v, LEAST)} for t, v in ((e.token_id, e.logprob), *e.top)}
        for e in entries
    ]


def _by_text(candidates: Iterable[tuple[int, float, str]]) -> dict[str, float]:
    """Return log probabilities of tokens by text, best first. If several tokens have the same text, all but the first
    are named by their ids.
    """
    found: dict[str, float] = {}
    for token, logprob, text in candidates:
        found[named(token) if text in found else text] = max(logprob, LEAST)
    return dict(sorted(found.items(), key=lambda item: -item[1]))
