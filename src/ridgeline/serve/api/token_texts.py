"""Return the text and bytes of single tokens, given the tokens before them.

A SentencePiece decoder removes the space before the first word, and a character may span several tokens, so the text of
a token depends on the tokens before it. The joined texts of an answer's tokens are the answer's text: a token that ends
inside a character has the text "", and the token that completes the character has the whole character.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ridgeline.load.detokenize import Detokenizer
from ridgeline.load.tokenizer import Tokenizer


class Piece(NamedTuple):
    """The text and bytes that one token adds.

    text: the token's name if the token is not part of the text. added: number of characters added to the text.
    """

    text: str
    bytes: Sequence[int]
    added: int


class TokenTexts:
    """Decodes the tokens of one request, each once.

    tokenizer: None if the model has none. skip_special_tokens: leave special tokens out of the text. as_ids: name
    tokens "token_id:N" instead of by their text, as vLLM's return_tokens_as_token_ids.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool = True, as_ids: bool = False) -> None:
        self._tokenizer, self._skip, self._as_ids = tokenizer, skip_special_tokens, as_ids
        self._settled: dict[int, Piece] = {}  # pieces that depend on the token alone

    def after(self, prompt: Sequence[int]) -> TokenPosition:
        """Return the position after `prompt`. An empty prompt gives the start of a text."""
        stream = None if self._tokenizer is None else self._tokenizer.detokenizer(self._skip, prompt)
        return TokenPosition(self, stream)

    def all_of(self, ids: Sequence[int]) -> list[str]:
        """Return the texts of all tokens of a text."""
        position = self.after(())
        return [position.push(token, last=number == len(ids)).text for number, token in enumerate(ids, 1)]

    def pieces_of(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return each token with its text, or with its bytes where it has no text of its own, as llama.cpp does."""
        position = self.after(())
        found = [(token, position.push(token)) for token in ids]
        return [{"id": token, "piece": piece.text or list(piece.bytes)} for token, piece in found]

    def piece(self, token: int, stream: Detokenizer | None) -> Piece:
        """Return what a token adds at the position of `stream`."""
        if self._tokenizer is None or stream is None:
            return Piece(named(token), (), 0)
        if not stream.settled:
            return self._made(token, stream, self._tokenizer)
        if (found := self._settled.get(token)) is None:
            found = self._settled[token] = self._made(token, stream, self._tokenizer)
        return found

    def longer(self, piece: Piece, rest: str) -> Piece:
        """Return the piece with more text after it."""
        return Piece(piece.text if self._as_ids else piece.text + rest, piece.bytes, piece.added + len(rest))

    def _made(self, token: int, stream: Detokenizer, tokenizer: Tokenizer) -> Piece:
        text, data = stream.peek(token)
        added = len(text)
        if self._skip and token in tokenizer.special_ids:
            text = tokenizer.token_name(token)
        return Piece(named(token) if self._as_ids else text, tuple(data), added)


class TokenPosition:
    """A position in a text that advances token by token. offset: number of characters so far."""

    def __init__(self, texts: TokenTexts, stream: Detokenizer | None) -> None:
        self._texts, self._stream = texts, stream
        self.offset = 0

    def peek(self, token: int) -> Piece:
        """Return what a token would add here, without advancing."""
        return self._texts.piece(token, self._stream)

    def push(self, token: int, *, last: bool = False) -> Piece:
        """Return what a token adds here, and advance past it.

        last: no token follows, so the text of an incomplete character is added too.
        """
        piece = self.peek(token)
        if self._stream is not None:
            self._stream.push(token)
            if last and (rest := self._stream.flush()):
                piece = self._texts.longer(piece, rest)
        self.offset += piece.added
        return piece


def named(token: int) -> str:
    """Return vLLM's name of a token by its id."""
    return f"token_id:{token}"
