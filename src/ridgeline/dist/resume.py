"""Continue a stream on another replica: the answer is computed again, and what the client has is left out.

Answers depend on nothing but the request: the noise of sampling is a function of its keys and of positions. So the
second computation gives the same tokens and texts, and only chunks may be cut differently.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.spec.request import OutputChunk


class Sent:
    """Counts what a client has received of the answers to one prompt."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}  # by the answer's number
        self._characters: dict[int, int] = {}
        self._ended: set[int] = set()
        self._skip_tokens: dict[int, int] = {}
        self._skip_characters: dict[int, int] = {}

    @property
    def tokens(self) -> int:
        """Return the number of tokens that were sent."""
        return sum(self._tokens.values())

    def again(self) -> None:
        """Expect all chunks from the first one on again."""
        self._skip_tokens, self._skip_characters = dict(self._tokens), dict(self._characters)

    def rest(self, chunk: OutputChunk) -> OutputChunk | None:
        """Return the part of a chunk that was not sent before, and count it as sent; None if there is none."""
        index, tokens, characters = chunk.index, len(chunk.token_ids), len(chunk.text)
        old_tokens = min(tokens, self._skip_tokens.get(index, 0))
        old_characters = min(characters, self._skip_characters.get(index, 0))
        has_ended = index in self._ended
        if chunk.finish_reason is not None or chunk.error is not None:
            self._ended.add(index)
        is_new = tokens > old_tokens or characters > old_characters or (index in self._ended and not has_ended)
        if old_tokens:
            self._skip_tokens[index] -= old_tokens
        if old_characters:
            self._skip_characters[index] -= old_characters
        self._tokens[index] = self._tokens.get(index, 0) + tokens - old_tokens
        self._characters[index] = self._characters.get(index, 0) + characters - old_characters
        if not is_new and chunk.output is None:
            return None
        if not old_tokens and not old_characters:
            return chunk
        return replace(
            chunk, text=chunk.text[old_characters:], token_ids=chunk.token_ids[old_tokens:],
            logprobs=chunk.logprobs[old_tokens:],
        )  # fmt: skip
