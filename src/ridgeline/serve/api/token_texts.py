"""The text and the bytes of single tokens, each as it stands in its place in a text.

A SentencePiece decoder removes the space before the first word, and a character may span several tokens, so the text of
a token depends on what stands before it. The texts of an answer's tokens joined are the answer's text: a token that
ends inside a character has the text "", and the token that completes the character has the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.load.detokenize import Detokenizer
from ridgeline.load.tokenizer import Tokenizer


class Piece(NamedTuple):
    """What one token adds. text: its name where the token is no part of the text. added: characters of the text."""

    text: str
    bytes: Sequence[int]
    added: int


class TokenTexts:
    """The pieces of one tokenizer's tokens for one request, each decoded once.

    tokenizer: None where the model has none. skip_special_tokens: whether special tokens are no part of the text.
    as_ids: name tokens "token_id:N" instead of by their text, as vLLM's return_tokens_as_token_ids.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, skip_special_tokens: bool = True, as_ids: bool = False) -> None:
        self._tokenizer, self._skip, self._as_ids = tokenizer, skip_special_tokens, as_ids
        self._settled: dict[int, Piece] = {}  # those whose piece depends on the token alone

    def after(self, prompt: Sequence[int]) -> TokenPlace:
        """The place behind `prompt`; the start of a text for an empty one."""
        stream = None if self._tokenizer is None else self._tokenizer.detokenizer(self._skip, prompt)
        return TokenPlace(self, stream)

    def all_of(self, ids: Sequence[int]) -> list[str]:
        """The texts of all tokens of a text."""
        place = self.after(())
        return [place.push(token, last=number == len(ids)).text for number, token in enumerate(ids, 1)]

    def piece(self, token: int, stream: Detokenizer | None) -> Piece:
        """What a token adds where `stream` stands."""
        if self._tokenizer is None or stream is None:
            return Piece(named(token), (), 0)
        if not stream.settled:
            return self._made(token, stream, self._tokenizer)
        if (found := self._settled.get(token)) is None:
            found = self._settled[token] = self._made(token, stream, self._tokenizer)
        return found

    def longer(self, piece: Piece, rest: str) -> Piece:
        """The same piece with more text after it."""
        return Piece(piece.text if self._as_ids else piece.text + rest, piece.bytes, piece.added + len(rest))

    def _made(self, token: int, stream: Detokenizer, tokenizer: Tokenizer) -> Piece:
        text, data = stream.peek(token)
        added = len(text)
        if self._skip and token in tokenizer.special_ids:
            text = tokenizer.token_name(token)
        return Piece(named(token) if self._as_ids else text, tuple(data), added)


class TokenPlace:
    """A place in a text that moves on token by token. offset: characters of the text so far."""

    def __init__(self, texts: TokenTexts, stream: Detokenizer | None) -> None:
        self._texts, self._stream = texts, stream
        self.offset = 0

    def peek(self, token: int) -> Piece:
        """What a token would add here."""
        return self._texts.piece(token, self._stream)

    def push(self, token: int, *, last: bool = False) -> Piece:
        """What a token adds here; the place is behind it then.

        last: nothing follows, so the token has the text of a character that it leaves unfinished too.
        """
        piece = self.peek(token)
        if self._stream is not None:
            self._stream.push(token)
            if last and (rest := self._stream.flush()):
                piece = self._texts.longer(piece, rest)
        self.offset += piece.added
        return piece


def named(token: int) -> str:
    """A token by its id, in vLLM's words."""
    return f"token_id:{token}"
