"""Separate reasoning from content: <think> ... </think>, as Qwen 3, DeepSeek-R1 and others write it."""

from __future__ import annotations

from ridgeline.serve.api.marks import MarkScanner

OPEN, CLOSE = "<think>", "</think>"
PARSERS = ("think",)


def suggested(template: str | None) -> str | None:
    """Return the name of the parser for a model with this chat template, or None."""
    return "think" if template is not None and CLOSE in template else None


class ThinkParser:
    """Splits one answer into reasoning and content. inside: True if the prompt ends with <think>, as some templates
    write it.
    """

    def __init__(self, inside: bool) -> None:
        self._inside = inside
        self._begun = inside  # after the first content, <think> is text
        self._scanner = MarkScanner(CLOSE if inside else OPEN)
        self._trim = inside  # drop line ends after a marker
        self._spaces = ""  # white space at the start, which is dropped if <think> follows

    def push(self, text: str) -> tuple[str, str]:
        """Add text; return the complete parts as (reasoning, content)."""
        if self._begun and not self._inside:
            return "", self._trimmed(text)
        before, after = self._scanner.push(text)
        if self._inside:
            reasoning = self._trimmed(before)
            if after is None:
                return reasoning, ""
            self._inside, self._trim = False, True
            return reasoning, self._trimmed(after)
        if after is not None and not before.strip():
            self._spaces = ""
            self._inside = self._begun = self._trim = True
            self._scanner = MarkScanner(CLOSE)
            return self.push(after)
        if before.strip() or after is not None:
            self._begun, before, self._spaces = True, self._spaces + before, ""
            return "", before + (self._scanner.flush() if after is None else OPEN + after)
        self._spaces += before
        return "", ""

    def flush(self) -> tuple[str, str]:
        """Return the text that was held back, as (reasoning, content). Call this at the end of the answer."""
        held = self._scanner.flush()
        return (held, "") if self._inside else ("", self._spaces + held)

    def _trimmed(self, text: str) -> str:
        if self._trim:
            text = text.lstrip("\n")
            self._trim = not text
        return text
