"""Stream completions and chats: write chunks as events with choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ridgeline.serve.api.tally import Tally
from ridgeline.serve.api.types import StreamOptions
from ridgeline.serve.engine.client import Batch
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.http.sse import DONE, Envelope, event
from ridgeline.spec.request import OutputChunk


class ChoiceEvents:
    """Writes the events of one request (sse.Events).

    head: the fields that every event begins with. usage: makes the usage object of a tally. deltas: makes the choices
    of a chunk as JSON, given the index of its prompt; each choice becomes an event.
    """

    def __init__(
        self, head: Mapping[str, Any], options: StreamOptions | None, tally: Tally,
        usage: Callable[[Tally], dict[str, Any]], deltas: Callable[[int, OutputChunk], Sequence[bytes]],
    ) -> None:  # fmt: skip
        self._envelope, self._tally, self._usage, self._deltas = Envelope(head), tally, usage, deltas
        # include_usage: false overrides continuous_usage_stats.
        self._always = bool(options and options.continuous_usage_stats and options.include_usage is not False)
        self._in_the_end = bool(options and options.include_usage)

    def begin(self) -> bytes:
        """Write nothing: the first chunk is the first event."""
        return b""

    def chunks(self, batch: Batch) -> bytes:
        data = b""
        for prompt_index, chunk in batch:
            self._tally.take(chunk)
            usage = self._usage(self._tally) if self._always else None
            for choice in self._deltas(prompt_index, chunk):
                data += self._envelope.event(choice, usage)
        return data

    def end(self) -> bytes:
        return (self._envelope.event(b"", self._usage(self._tally)) if self._in_the_end else b"") + DONE

    def failed(self, error: APIError) -> bytes:
        return event(error.body()) + DONE


def token_ids(chunk: OutputChunk) -> bytes:
    """Return the last field of a choice as JSON: the ids of the chunk's tokens."""
    return b',"token_ids":[%b]' % ",".join(map(str, chunk.token_ids)).encode()
