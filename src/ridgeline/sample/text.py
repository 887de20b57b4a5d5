"""Turn the tokens of an answer into text as they are generated, up to a stop string."""

from __future__ import annotations

from ridgeline.load.detokenize import Detokenizer
from ridgeline.sample.stop import StopStrings
from ridgeline.spec.request import Params, SamplingParams


class AnswerText:
    """The text of one answer, piece by piece; no piece ends inside a character."""

    def __init__(self, detokenizer: Detokenizer, params: Params) -> None:
        self._detokenizer = detokenizer
        stops: tuple[str, ...] = ()
        self._keep_end, self._unarmed = False, 0  # beam search has no stop strings
        if isinstance(params, SamplingParams):
            stops, self._keep_end = params.stop, params.include_stop_str_in_output
            self._unarmed = params.min_tokens  # tokens that cannot end the answer yet
        self._stops = StopStrings(stops, self._keep_end)

    def push(self, token: int, ended: bool) -> tuple[str, str | None]:
        """Take a token; return the text that is no part of a stop string, and the stop string that it completed.

        ended: whether the token ended the answer; its text is then left out unless include_stop_str_in_output.
        """
        if ended and not self._keep_end:
            return "", None
        armed = self._unarmed == 0
        self._unarmed -= not armed
        return self._stops.push(self._detokenizer.push(token), armed)

    def flush(self) -> str:
        """Return the text that was held back; call it when the answer is complete."""
        # An incomplete character cannot end a stop string.
        piece, _ = self._stops.push(self._detokenizer.flush(), armed=False)
        return piece + self._stops.flush()
