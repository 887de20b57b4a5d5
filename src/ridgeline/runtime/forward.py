"""The forward pass of a step, of which logits are computed for the rows that are asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.nn.model import Model
from ridgeline.nn.step import Stream
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array
from ridgeline.runtime.graphs import Decoded
from ridgeline.runtime.layout import Ints
from ridgeline.runtime.orders import Project, Tell, tell_nobody
from ridgeline.sample.logit_rows import LogitRows, Pieces, rows_of_piece
from ridgeline.sample.sampler import Best

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward pass of a step, up to the head. Its logits must be read before the next step runs.

    Rows are the tokens of the works, one work after the other. decoded: set if the step was run from a recording,
    which includes the head for all rows. features: [T, hidden_size], which the drafter's tap takes from it.
    canvas_rows: index of each token in the stream, if the stream is that of the canvases alone. tell: tells the other
    ranks of a model that is cut what to compute.
    """

    model: Model
    stream: Stream
    table: OpsTable
    decoded: Decoded | None = None
    features: Array | None = None
    canvas_rows: Ints | None = None
    tell: Tell = tell_nobody

    def logits(self, rows: Ints | None = None) -> Floats:
        """Return the logits [n, vocabulary] of n of the step's tokens (None: of all)."""
        return self.table.memory.get(self.on_device(rows))

    def on_device(self, rows: Ints | None = None) -> Array:
        """Return these logits on the device."""
        if rows is not None and self.canvas_rows is not None:
            rows = self.canvas_rows[rows]
        given = None if rows is None else self.table.memory.integers(rows)
        if self.decoded is None:
            self.tell(Project(rows))
            return self.model.logits(self.stream, given)
        return self.decoded.logits if given is None else self.table.primitive(api.TAKE)(self.decoded.logits, given)

    def fetch(self, rows: Ints | None) -> Callable[[], Floats]:
        """Begin to copy these logits to the host, and return a function that waits for them.

        On a CPU they are there, and may be those of a later step afterwards.
        """
        driver = self.table.driver
        if driver is None or not driver.runs_ahead:
            found = self.logits(rows)
            return lambda: found
        fetched = driver.fetch((self.on_device(rows),))
        return lambda: fetched()[0]

    def pieces(self, rows: Ints | None) -> Pieces:
        """Return these logits as pieces that are computed when they are read."""
        of = np.arange(int(self.stream.residual.shape[0])) if rows is None else rows
        vocab_size = self.model.spec.vocab_size
        return Pieces(
            lambda first, end: self.logits(of[first:end]), lambda first, end: self.kept(of[first:end]), vocab_size
        )

    def kept(self, rows: Ints) -> LogitRows:
        """Return the logits of some of the step's tokens for later. Until then only the inputs of the head are kept."""
        memory, per = self.table.memory, rows_of_piece(self.model.spec.vocab_size)
        hidden = self.table.primitive(api.TAKE)(self.model.hidden(self.stream), memory.integers(rows))
        inputs = memory.get(hidden).copy()

        def read(first: int, end: int) -> Floats:
            some = inputs[first : min(end, first + per)]
            return memory.get(self.model.project(memory.put(some, "float32", "float32")))

        return LogitRows(len(rows), read, lambda: self.kept(rows))

    def best(self) -> Best | None:
        """Return the best token of each row, if the step has computed it already."""
        if self.decoded is None or self.table.driver is None:
            return None
        return Best(*self.table.driver.fetch((self.decoded.best, self.decoded.best_logits))())
