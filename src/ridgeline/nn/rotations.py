"""The rotations of a model's positions on a device: their frequencies, and the angles of a step's tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ridgeline.nn.rotary import FrequencyTables, frequencies
from ridgeline.nn.step import Step
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Rotary
from ridgeline.spec import Regimes, Rope


class Rotations:
    """Holds the frequencies of each kind of rotation of a model.

    Args:
        ropes: kinds of rotation.
        regimes: lengths of sequences at which frequencies change.
        max_model_len: longest context in tokens that will be served.
    """

    def __init__(self, ropes: Iterable[Rope], regimes: Regimes, max_model_len: int, table: OpsTable) -> None:
        self._table_rows, self._rotary = table.primitive(api.EMBEDDING), table.primitive(api.ROTARY)
        # None: every rotation depends on the position alone.
        self.tables = FrequencyTables(regimes) if regimes.breaks else None
        self._frequencies: dict[Rope, tuple[Array, float]] = {}  # [dim / 2], or a row for each regime
        for rope in ropes:
            by_length = self.tables if rope.follows_length else None
            inverse, factor = by_length.table(rope) if by_length else frequencies(rope, max_model_len)
            self._frequencies[rope] = table.memory.put(inverse, "float32", "float32"), factor

    def __call__(self, step: Step) -> Mapping[Rope, Rotary]:
        """Return the rotation of each of the step's tokens, for each kind of rotation."""
        if self.tables is None:
            return {rope: self._rotary(step.positions, *f) for rope, f in self._frequencies.items()}
        rows = step.frequency_rows(self.tables)
        return {
            rope: self._rotary(
                step.positions, self._table_rows(inverse, rows) if rope.follows_length else inverse, factor
            )
            for rope, (inverse, factor) in self._frequencies.items()
        }

    def constants(self) -> list[Array]:
        """Return the arrays of frequencies."""
        return [inverse for inverse, _ in self._frequencies.values()]
