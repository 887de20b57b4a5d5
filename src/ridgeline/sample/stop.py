"""Find stop strings in a stream of text pieces, wherever the pieces are cut.

The algorithm of Knuth, Morris and Pratt (1977) tracks how much of each stop string the text ends with. Every character
costs the same, and the text that may still become a stop string is known.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for `stops` in one answer, piece by piece.

    The first match to end counts; if several end together, the longest. include: whether the text that is returned
    ends with the match instead of before it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends with
        self._held = ""  # text that may be the start of a match
        self._include = include
        self._over = False

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Take the next piece; return the text that cannot become a match, and the stop string that `text` completed.

        armed: whether a match may end in this piece; a match that ends later may begin here even if not. After a match
        all further text is dropped.
        """
        if self._over:
            return "", None
        for end, character in enumerate(text, 1):
            match = self._advance(character)
            if match is not None and armed:
                self._over = True
                whole = self._held + text[:end]
                return whole if self._include else whole[: len(whole) - len(match)], match
        whole = self._held + text
        cut = len(whole) - max(self._matched, default=0)
        self._held = whole[cut:]
        return whole[:cut], None

    def flush(self) -> str:
        """Return the text that was held back; call it after the last piece."""
        held, self._held = self._held, ""
        return "" if self._over else held

    def _advance(self, character: str) -> str | None:
        """Take one character; return the longest stop string that it completes."""
        found: str | None = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                matched = borders[-1]
                if found is None or len(stop) > len(found):
                    found = stop
            self._matched[i] = matched
        return found


def _borders(stop: str) -> list[int]:
    """Return for each prefix of `stop` the length of its longest proper prefix that it also ends with."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
