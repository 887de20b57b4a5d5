"""Find a marker such as </think> in a stream of text, even if it is split over several pieces."""

from __future__ import annotations


class MarkScanner:
    """Searches for one marker. Text that may be the beginning of the marker is held back."""

    def __init__(self, mark: str) -> None:
        self._mark, self._held = mark, ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Add text. Return the text before the marker, and the text after it once the marker is found, else None."""
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
        """Return the text that was held back. Call this at the end of the text."""
        held, self._held = self._held, ""
        return held
