"""Texts that end an answer, found in a stream of pieces wherever the pieces are cut.

Knuth, Morris and Pratt (1977): for each stop string, how much of it the text ends with. So every character costs the
same, however long the text and whatever it repeats, and it is known how much text may still become a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for `stops` in one answer, piece by piece.

    The match is the one whose last character comes first; of several that end there, the longest. Where the pieces are
    cut never matters. include: whether the text that comes out ends with the match or before it.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends with
        self._held = ""  # text that may be the start of a match
        self._include = include
        self._over = False

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Take the next piece; return the text that is certain to stand, and the stop string that `text` completed.

        armed: whether a match may end in this piece (one that ends in the next may begin here all the same). After a
        match nothing more comes out.
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
        """The text that was held back; call it after the last piece."""
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
    """For each prefix of `stop`: the length of its longest proper prefix that it also ends with."""
    borders = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = borders[length - 1]
        length += stop[i] == stop[length]
        borders[i] = length
    return borders
