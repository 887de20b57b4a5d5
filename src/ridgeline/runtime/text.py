"""Text out of tokens: detokenised as they come, up to a stop string, for every answer of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ridgeline.load.detokenize import Detokenizer
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.batch import GenerationRequest
from ridgeline.runtime.stop import StopStrings
from ridgeline.spec.request import SamplingParams


class TextStreams:
    """Text of every answer, piece by piece, up to a stop string."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        requests: Sequence[GenerationRequest],
        on_text: Callable[[int, int, str], None] | None,
    ) -> None:
        self._on_text = on_text
        self._keep_ends = [r.params.include_stop_str_in_output for r in requests]
        self._streams: list[list[_Stream]] = [[] for _ in requests]
        if tokenizer is not None:
            for streams, r in zip(self._streams, requests, strict=True):
                for _ in range(r.params.n):
                    detokenizer = tokenizer.detokenizer(r.params.skip_special_tokens, r.prompt_token_ids)
                    streams.append(_Stream(detokenizer, r.params))

    def push(self, request: int, choice: int, token: int, ended: bool) -> str | None:
        """Take a token of an answer; return the stop string that it completed, if any.

        ended: the token is an end of sequence or a stop, and no part of the text unless that was asked for.
        """
        if not self._streams[request] or (ended and not self._keep_ends[request]):
            return None
        piece, stop = self._streams[request][choice].push(token)
        self._emit(request, choice, piece)
        return stop

    def finish(self, request: int) -> None:
        """All answers to a request are complete: what was held back comes out."""
        for choice, stream in enumerate(self._streams[request]):
            self._emit(request, choice, stream.flush())

    def text(self, request: int, choice: int) -> str:
        streams = self._streams[request]
        return "".join(streams[choice].pieces) if streams else ""

    def _emit(self, request: int, choice: int, piece: str) -> None:
        if piece:
            self._streams[request][choice].pieces.append(piece)
            if self._on_text:
                self._on_text(request, choice, piece)


class _Stream:
    """Text of one answer."""

    def __init__(self, detokenizer: Detokenizer, params: SamplingParams) -> None:
        self.pieces: list[str] = []
        self._detokenizer = detokenizer
        self._stops = StopStrings(params.stop, params.include_stop_str_in_output)
        self._unarmed = params.min_tokens  # tokens that cannot end the answer yet

    def push(self, token: int) -> tuple[str, str | None]:
        armed = self._unarmed == 0
        self._unarmed -= not armed
        return self._stops.push(self._detokenizer.push(token), armed)

    def flush(self) -> str:
        # A character that never ended is no part of a stop string.
        piece, _ = self._stops.push(self._detokenizer.flush(), armed=False)
        return piece + self._stops.flush()
