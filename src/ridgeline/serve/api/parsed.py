"""Parse the only answer of a request into reasoning, content and tool calls: whole, or while it is generated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ridgeline.serve.api.answer import AnswerReader, Piece, Reading
from ridgeline.serve.api.completions import collect
from ridgeline.serve.api.tally import Tally
from ridgeline.serve.engine.client import Batch
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.service import Turn
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput


class Opening(Protocol):
    """A request for one answer, such as Chat or Completion. reading: how to parse the answer, final after `open`."""

    reading: Reading

    async def open(self, *, stream: bool) -> Turn: ...


class Parsed(NamedTuple):
    """A whole answer: its parts, the answer itself, the result that has it, and the counts of tokens."""

    pieces: Sequence[Piece]
    answer: CompletionOutput
    output: RequestOutput
    tally: Tally


async def parsed(work: Opening) -> Parsed:
    """Wait for the answer and parse it. Raises APIError, RequestError, EngineDown."""
    turn = await work.open(stream=False)
    try:
        (output,), tally = await collect(turn)
    finally:
        turn.close()
    (answer,) = output.outputs
    reader = AnswerReader(work.reading)
    return Parsed([*reader.push(answer.text), *reader.flush()], answer, output, tally)


class PieceEvents(ABC):
    """The base of streams of parsed answers (sse.Events).

    A subclass defines `write`, `end` and `failed`. last, output: the chunk with the finish reason and the whole result,
    once they have come.
    """

    def __init__(self, work: Opening, turn: Turn) -> None:
        self.tally = Tally(turn.requests)
        self.last: OutputChunk | None = None
        self.output: RequestOutput | None = None
        self._reader = AnswerReader(work.reading)

    def begin(self) -> bytes:
        """Write nothing: the first chunk is the first event."""
        return b""

    def chunks(self, batch: Batch) -> bytes:
        """Return the events of new chunks. Raises APIError for an answer that failed."""
        data = b""
        for _, chunk in batch:
            self.tally.take(chunk)
            pieces = self._reader.push(chunk.text)
            self.output = chunk.output or self.output
            if chunk.finish_reason is not None:
                self.last = chunk
                pieces += self._reader.flush()
            data += self.write(pieces, chunk)
        return data

    @abstractmethod
    def write(self, pieces: Sequence[Piece], chunk: OutputChunk) -> bytes:
        """Return the events of the parts that a chunk completed."""

    @abstractmethod
    def end(self) -> bytes:
        """Return the last events of a complete answer."""

    @abstractmethod
    def failed(self, error: APIError) -> bytes:
        """Return the last events of an answer that ended with an error."""
