"""Log probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ridgeline.serve.api.token_texts import Piece, TokenPlace, named
from ridgeline.spec.request import TokenLogprobs

LEAST = -9999.0  # JSON has no infinity; vLLM writes this


def of_chat(place: TokenPlace, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The logprobs of a chat choice. place: where the first token stands; it is behind the last one afterwards."""

    def one(piece: Piece, logprob: float) -> dict[str, Any]:
        return {"token": piece.text, "logprob": max(logprob, LEAST), "bytes": list(piece.bytes)}

    content = []
    for e in entries:
        top = [one(place.peek(token), logprob) for token, logprob in e.top]
        content.append({**one(place.push(e.token_id), e.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


def of_completion(place: TokenPlace, entries: Iterable[TokenLogprobs | None], first: int, over: bool) -> dict[str, Any]:
    """The logprobs of a completion's choice. place: as in `of_chat`. first: the token of an entry that is None (a
    prompt's first token). over: nothing follows the last entry.
    """
    tokens, offsets, values, tops = [], [], [], []
    known = list(entries)
    for number, entry in enumerate(known, 1):
        token = first if entry is None else entry.token_id
        others = () if entry is None else [(t, v, place.peek(t).text) for t, v in entry.top if t != token]
        offsets.append(place.offset)
        tokens.append(place.push(token, last=over and number == len(known)).text)
        values.append(None if entry is None else max(entry.logprob, LEAST))
        tops.append(None if entry is None else _by_text([(token, entry.logprob, tokens[-1]), *others]))
    return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def plain(entries: Iterable[TokenLogprobs | None]) -> list[Any]:
    """Of a prompt, by token id, as vLLM's prompt_logprobs."""
    return [
        None if e is None else {str(t): {"logprob": max(v, LEAST)} for t, v in ((e.token_id, e.logprob), *e.top)}
        for e in entries
    ]


def _by_text(candidates: Iterable[tuple[int, float, str]]) -> dict[str, float]:
    """Log probabilities of tokens by text, best first. Of several tokens with one text the first one given keeps it;
    the others are named by their ids, so that none is lost.
    """
    found: dict[str, float] = {}
    for token, logprob, text in candidates:
        found[named(token) if text in found else text] = max(logprob, LEAST)
    return dict(sorted(found.items(), key=lambda item: -item[1]))
