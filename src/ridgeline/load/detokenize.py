"""Convert token ids to text, one id at a time.

`TokenText` gives what each id adds: characters, or bytes of a UTF-8 sequence that may span several ids. `Detokenizer`
joins them and holds back only an unfinished character. So each id costs the same however long the text is, and the
joined pieces equal the decoded text, because `Tokenizer.decode` uses this same loop.

The supported decoders are those of the `tokenizers` library (ByteLevel; Replace, ByteFallback, Fuse and Strip in the
Llama order; Metaspace; none). There is one difference. In a run of byte-fallback tokens that is partly invalid UTF-8,
`tokenizers` replaces the whole run by U+FFFD, valid characters included, which would change text that has already been
sent. Here, as in SentencePiece's own decoder, each byte that cannot be part of a character becomes one U+FFFD, and the
valid characters stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from ridgeline.errors import TokenizerError
from ridgeline.load.growth import MAX_GROWTH, growth

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_REPLACEMENT = "\ufffd"


@dataclass
class _Rules:
    """A decoder of `tokenizers`, reduced to its effect on one token, which depends on whether the token is
    the first.
    """

    substitutions: list[tuple[str, str]] = field(default_factory=list)
    byte_level: bool = False
    byte_fallback: bool = False
    separator: str = ""  # before every token but the first
    continuing: str = ""  # at the start of a token that continues a word, in place of the separator (WordPiece)
    cleanup: bool = False  # whether spaces before marks and English endings are removed within a token
    drop_first: str = ""  # removed from the first token (Metaspace's added space)
    strip: str = ""  # removed from the start of the text, at most `strip_count` times
    strip_count: int = 0


class TokenText:
    """The text that each id of a vocabulary adds. All Detokenizers of a tokenizer share it.

    size: the largest id plus one. longest: characters of the longest entry. Computing them copies the vocabulary, which
    takes tens of milliseconds.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Read the decoder of `backend`. Raises TokenizerError if its text cannot be streamed exactly."""
        self.rules = _rules(backend)
        self._backend = backend
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self.longest = max(map(len, vocabulary), default=0)
        self._pieces: dict[int, str | bytes | None] = {}

    def piece(self, token_id: int) -> str | bytes | None:
        """Return the characters or bytes of `token_id`, or None for an id outside the vocabulary."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._piece(int(token_id)) if 0 <= token_id < self.size else None
            if piece is not None:  # clients can send any id; unknown ones must not fill the memory
                self._pieces[token_id] = piece
            return piece

    def first(self, piece: str | bytes) -> str | bytes:
        """Return the text of `piece` at the start of a text. The spaces of `piece` are not replaced yet."""
        if self.rules.drop_first and isinstance(piece, str):
            return piece.replace(self.rules.drop_first, "")
        return _clean(piece) if self.rules.cleanup and isinstance(piece, str) else piece

    def later(self, piece: str | bytes) -> str | bytes:
        """Return the text of `piece` after another token."""
        if isinstance(piece, bytes):
            return piece
        if self.rules.drop_first:
            return piece.replace(self.rules.drop_first, " ")
        start = self.rules.continuing
        text = piece[len(start) :] if start and piece.startswith(start) else self.rules.separator + piece
        return _clean(text) if self.rules.cleanup else text

    def characters(self, token_id: int) -> str:
        """Return what `token_id` adds after another token, if it is whole characters; else ""."""
        piece = self.piece(token_id)
        if piece is None:
            return ""
        text = self.later(piece)
        try:
            return text.decode("utf-8") if isinstance(text, bytes) else text
        except UnicodeDecodeError:
            return ""

    def _piece(self, token_id: int) -> str | bytes | None:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return None
        for old, new in self.rules.substitutions:
            token = token.replace(old, new)
        if self.rules.byte_level:
            return _byte_level(token)
        if self.rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token


class Detokenizer:
    """Converts a growing list of ids to text: `push` returns what each id completes, `flush` returns the rest."""

    def __init__(self, text: TokenText, skip: frozenset[int] = frozenset(), prompt: Sequence[int] = ()) -> None:
        """Start after `prompt`, whose text is not returned. Ids in `skip` add nothing.

        If the prompt does not end inside a character, decode(prompt + ids) is decode(prompt) followed by the pieces of
        `ids`.
        """
        self._text = text
        self._skip = skip
        self._pending = b""  # the first bytes of an unfinished character
        self._first = bool(text.rules.drop_first or text.rules.separator)
        self._strip_left = text.rules.strip_count
        self._per_byte = not text.rules.byte_level
        self._replay(prompt)

    def push(self, token_id: int) -> str:
        """Return the text that `token_id` completes; "" for a special, unknown or unfinished one."""
        piece = None if token_id in self._skip else self._text.piece(token_id)
        if piece is None:
            return ""
        piece = self._text.first(piece) if self._first else self._text.later(piece)
        self._first = False
        if isinstance(piece, bytes):
            new, self._pending = _decode(self._pending + piece, self._per_byte)
        else:
            new = self._unfinished() + piece
        return self._strip(new) if self._strip_left else new

    def peek(self, token_id: int) -> tuple[str, bytes]:
        """Return the text that `push` would return for `token_id`, and the bytes that it adds, without changing the
        state.

        A skipped special token adds nothing to the text, but its bytes are still those of its name.
        """
        text = copy(self).push(token_id)
        piece = self._text.piece(token_id)
        if piece is None:
            return text, b""
        piece = self._text.first(piece) if self._first else self._text.later(piece)
        data = piece if isinstance(piece, bytes) else piece.encode("utf-8")
        if token_id not in self._skip:
            strip = self._text.rules.strip.encode("utf-8")
            for _ in range(self._strip_left):
                data = data.removeprefix(strip)
        return text, data

    @property
    def settled(self) -> bool:
        """Return whether the next id alone decides its text: not at the start, and not inside a character."""
        return not (self._first or self._strip_left or self._pending)

    def flush(self) -> str:
        """Return U+FFFD for a character that was never completed, or "". Call this after the last id."""
        new = self._unfinished()
        return self._strip(new) if self._strip_left else new

    def _unfinished(self) -> str:
        pending, self._pending = self._pending, b""
        if not pending:
            return ""
        return _REPLACEMENT * (len(pending) if self._per_byte else 1)

    def _strip(self, new: str) -> str:
        strip = self._text.rules.strip
        while self._strip_left and new.startswith(strip):
            new = new[len(strip) :]
            self._strip_left -= 1
        if new:
            self._strip_left = 0
        return new

    def _replay(self, prompt: Sequence[int]) -> None:
        """Restore the state after `prompt`. Only its start and its last character matter, so the rest is skipped."""
        head = 0
        while head < len(prompt) and (self._first or self._strip_left):
            self.push(prompt[head])
            head += 1
        tail, size = len(prompt), 0
        while tail > head and size < _LONGEST_CHARACTER:
            tail -= 1
            piece = None if prompt[tail] in self._skip else self._text.piece(prompt[tail])
            size += _LONGEST_CHARACTER if isinstance(piece, str) else len(piece or b"")
        if tail > head:
            self._pending = b""
        for token_id in prompt[tail:]:
            self.push(token_id)


def _decode(data: bytes, per_byte: bool) -> tuple[str, bytes]:
    """Return the text of `data`, and the unfinished character at its end.

    An invalid sequence becomes one U+FFFD (Unicode's "maximal subpart" practice, which Rust's lossy decoding follows
    too) or, with `per_byte`, one for each of its bytes.
    """
    text = ""
    while True:
        try:
            return text + data.decode("utf-8"), b""
        except UnicodeDecodeError as error:
            text += data[: error.start].decode("utf-8")
            if error.end == len(data) and error.reason == "unexpected end of data":
                return text, data[error.start :]
            text += _REPLACEMENT * (error.end - error.start if per_byte else 1)
            data = data[error.end :]


def _clean(text: str) -> str:
    """Return the text of a token as the decoder WordPiece cleans it: each pair in its order."""
    for old, new in _CLEANUP:
        text = text.replace(old, new)
    return text


_CLEANUP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def _byte_table() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable ones are themselves, the others are U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(0x100 + index): byte for index, byte in enumerate(hidden)})
    return table


_BYTES = _byte_table()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:  # an added token, which is stored as plain text
        return token.encode("utf-8")


def _rules(backend: tokenizers.Tokenizer) -> _Rules:
    if backend.decoder is None:
        return _Rules(separator=" ")
    rules = _Rules()
    done: set[str] = set()
    for step in _flatten(json.loads(backend.decoder.__getstate__())):
        kind = str(step["type"])
        if not _apply(rules, step, kind, done):
            raise TokenizerError(
                f"the decoder step {kind} of tokenizer.json is not supported after {sorted(done) or 'nothing'}; "
                "supported: ByteLevel, Metaspace, WordPiece, or Replace, ByteFallback, Fuse, Strip in this order"
            )
        done.add(kind)
    if (most := growth(json.loads(backend.decoder.__getstate__()))) > MAX_GROWTH:
        raise TokenizerError(
            f"the decoder of tokenizer.json can expand one character to {most:.3g}; the limit is {MAX_GROWTH}: "
            "take another tokenizer (--tokenizer)"
        )
    return rules


def _flatten(state: dict[str, Any]) -> Iterable[dict[str, Any]]:
    if state["type"] != "Sequence":
        yield state
        return
    for step in state["decoders"]:
        yield from _flatten(step)


def _apply(rules: _Rules, step: dict[str, Any], kind: str, done: set[str]) -> bool:
    """Add one decoder step to `rules`. Returns False if it is unknown, or not supported after the steps in `done`."""
    if kind == "Fuse":
        return True
    if kind == "Strip":
        rules.strip, rules.strip_count = step["content"], step["start"]
        return "Fuse" in done and "Strip" not in done and step["stop"] == 0
    if done - {"Replace"}:
        return False
    if kind == "Replace":
        rules.substitutions.append((step["pattern"].get("String"), step["content"]))
        return "String" in step["pattern"]
    if kind == "ByteLevel":
        rules.byte_level = True
    elif kind == "ByteFallback":
        rules.byte_fallback = True
    elif kind == "WordPiece":
        rules.separator, rules.continuing, rules.cleanup = " ", step["prefix"], step["cleanup"]
    elif kind == "Metaspace" and step.get("prepend_scheme", "always") == "never":
        rules.substitutions.append((step["replacement"], " "))
    elif kind == "Metaspace":
        rules.drop_first = step["replacement"]
    else:
        return False
    return True
