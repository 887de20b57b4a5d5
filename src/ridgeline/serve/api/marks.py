"""Marks in a stream of text, wherever the pieces are cut."""

from __future__ import annotations


class MarkScanner:
    """Looks for one mark. What may be its beginning is held back until that is known."""

    def __init__(self, mark: str) -> None:
        self._mark, self._held = mark, ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is certain to come before the mark, and, once it is found, the text after it."""
        text = self._held + text
        before, found, after = text.partition(self._mark)
        if found:
            self._held = ""
            return before, after
        size = next(
            (n for n in range(min(len(text), len(self._mark) - 1), 0, -1) if self._mark.startswith(text[-n:])), 0
        )
        self._held = text[len(text) - size :]
        return text[: len(text) - size], None

    def flush(self) -> str:
        """What was held back; call it at the end of the text."""
        held, self._held = self._held, ""
        return held
