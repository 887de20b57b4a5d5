"""Keep a dialogue as the token ids that the model saw, so that each turn reuses the earlier ones from the
prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.load.tokenizer import Tokenizer


class Conversation:
    """The messages of a dialogue and their token ids.

    Tokenizing an answer's text again may give other ids than the model produced. The prefix cache would then miss from
    there on, and the model would read tokens that it never wrote. So the prompt of a turn is the ids of the history,
    followed by what the template puts after the answer. If the template rewrites the history (it drops earlier
    reasoning or strips spaces), the whole dialogue is tokenized again.
    """

    def __init__(self, tokenizer: Tokenizer, system: str | None = None) -> None:
        self._tokenizer, self._system = tokenizer, system
        self.reset()

    def reset(self) -> None:
        """Remove all messages except the system message."""
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        self.messages: list[dict[str, Any]] = system
        self._ids: list[int] = []  # all ids that the model read and wrote
        self._text = ""  # their text, as the template wrote it

    def ask(self, content: str) -> list[int]:
        """Return the ids of the prompt for the user's next turn. Raises as Tokenizer.encode_chat does."""
        messages = [*self.messages, {"role": "user", "content": content}]
        text = self._tokenizer.render_chat(messages)
        ids = self._tokenizer.encode_chat(messages)
        rest = self._rest(text)
        # The ids after the history are taken from the end of the whole tokenized text.
        if rest and ids[-len(rest) :] == rest:
            ids = [*self._ids, *rest]
        self.messages, self._ids, self._text = messages, ids, text
        return ids

    def answered(self, ids: Sequence[int], text: str) -> None:
        """Record the model's answer: its ids, with the one that ended it if there was one, and its text."""
        self.messages.append({"role": "assistant", "content": text})
        if self._tokenizer.decode(ids) != text:  # for example cut at a stop string, so the ids have a different text
            self._ids, self._text = [], ""
            return
        ended = bool(ids) and ids[-1] in self._tokenizer.special_ids
        self._ids = [*self._ids, *ids]
        self._text += text + (self._tokenizer.decode(ids[-1:], skip_special_tokens=False) if ended else "")

    def withdraw(self) -> None:
        """Remove the last question, which got no answer."""
        self.messages = self.messages[:-1]
        self._ids, self._text = [], ""  # the next turn is tokenized as a whole

    def _rest(self, text: str) -> list[int]:
        """Return the ids of the text that the template wrote after the history; none if the template changed the
        history.
        """
        if not self._text or not text.startswith(self._text):
            return []
        return self._tokenizer.encode(text[len(self._text) :], add_special_tokens=False)
