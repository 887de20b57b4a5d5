"""A dialogue as the token ids that the model really saw, so that each turn finds the turns before it in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.load.tokenizer import Tokenizer


class Conversation:
    """Messages, and the ids that stand for them.

    An answer's text, tokenized again, need not give the ids that the model produced; then nothing from there on would
    be found in the prefix cache, and the model would read what it never said. So a turn is the ids of the history as
    they were, and after them what the template puts between the answer and the next one. Where the template rewrites
    the history (drops earlier reasoning, strips the answer's spaces), the whole dialogue is tokenized anew.
    """

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        self._tokenizer, self._system = tokenizer, system
        self.reset()

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.messages: list[dict[str, Any]] = system
        self._ids: list[int] = []  # all that the model saw and said
        self._text = ""  # the same, as the template wrote it

    def ask(self, content: str) -> list[int]:
        """Ids of the prompt for the next turn of the user. Raises as Tokenizer.encode_chat."""
        messages = [*self.messages, {"role": "user", "content": content}]
        text = self._tokenizer.render_chat(messages)
        ids = self._tokenizer.encode_chat(messages)
        rest = self._rest(text)
        # What follows the history is the end of the whole, tokenized.
        if rest and ids[-len(rest) :] == rest:
            ids = [*self._ids, *rest]
        self.messages, self._ids, self._text = messages, ids, text
        return ids

    def answered(self, ids: Sequence[int], text: str) -> None:
        """What the model answered: its ids, with the one that ended it if there was one, and the text of the rest."""
        self.messages.append({"role": "assistant", "content": text})
        if self._tokenizer.decode(ids) != text:  # cut at a stop string, say: the ids are of another text
            self._ids, self._text = [], ""
            return
        ended = bool(ids) and ids[-1] in self._tokenizer.special_ids
        self._ids = [*self._ids, *ids]
        self._text += text + (self._tokenizer.decode(ids[-1:], skip_special_tokens=False) if ended else "")

    def withdraw(self) -> None:
        """Take the last question back: it got no answer."""
        self.messages = self.messages[:-1]
        self._ids, self._text = [], ""  # the next turn is tokenized anew

    def _rest(self, text: str) -> list[int]:
        """Ids of what the template wrote after the history; none where it did not write that as it was."""
        if not self._text or not text.startswith(self._text):
            return []
        return self._tokenizer.encode(text[len(self._text) :], add_special_tokens=False)
