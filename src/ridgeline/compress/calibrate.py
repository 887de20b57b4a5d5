"""Quantize a model part by part: collect the inputs of a part, choose its codes, run the quantized part.

Inputs come from the parts before it as they were quantized, so that errors of earlier layers count. Nothing but the
streams of the calibration sequences, one part and the sums over its inputs is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ridgeline.compress.choose import Chosen, choose_codes, matrix_keys, scale_part
from ridgeline.compress.grid import Floats
from ridgeline.compress.inputs import Inputs, MatrixKey, Observer
from ridgeline.compress.layers import Calibration, Part, keys_of
from ridgeline.compress.outliers import outlier_report
from ridgeline.compress.scheme import Scheme
from ridgeline.errors import RequestError
from ridgeline.nn.capture import Capture
from ridgeline.ops import OpsTable
from ridgeline.ops.arrays import QuantizedStack
from ridgeline.ops.host.memory import dtype_of
from ridgeline.spec.dtype import DType
from ridgeline.spec.quant import Format

SEARCH_TOKENS = 16_384  # calibration tokens on which AWQ compares candidates


class Quantizer:
    """Quantizes the parts of a model, one after the other.

    Args:
        calibration: the streams that reach the first part; None to round to nearest without data.
        table: kernels of the device, which must be on the host.
        dtype: type in which the checkpoint stores its floats.
        formats: returns the format of a matrix by its name; None for one that stays as it is.
    """

    def __init__(
        self, calibration: Calibration | None, table: OpsTable, scheme: Scheme, dtype: DType,
        formats: Callable[[str], Format | None],
    ) -> None:  # fmt: skip
        self._calibration, self._table, self._scheme, self._dtype = calibration, table, scheme, dtype
        self._formats = formats

    def quantize(self, part: Part, stored: Mapping[str, Any]) -> Chosen:
        """Return the codes of a part, and let the streams pass through it.

        stored: the weights of the part as they are in the checkpoint. Raises RequestError if inputs are not finite.
        """
        weights: dict[str, Any] = dict(stored)
        formats = {w.name: f for w in part.matrices if (f := self._formats(w.name)) is not None}
        keys = [key for key in matrix_keys(part) if key.name in formats]
        for key in keys:
            weights[key.name] = np.asarray(stored[key.name], np.float32)
        inputs = self._observe(part, weights, keys)
        found = Chosen(outliers=outlier_report({key: seen.max_abs for key, seen in inputs.items()}))
        if self._calibration is not None:
            loss = _PartLoss(self._calibration, part, weights, self._table)
            changed = scale_part(part, weights, inputs, self._scheme, self._dtype, formats, loss)
            found.changed = {name: self._as_stored(w) for name, w in changed.items() if name not in formats}
        threads = self._table.driver.threads if self._table.driver else None
        choose_codes(keys, weights, inputs, self._scheme, formats, found, threads)
        self.advance(part, weights, found)
        return found

    def _observe(self, part: Part, weights: Mapping[str, Any], keys: list[MatrixKey]) -> Mapping[MatrixKey, Inputs]:
        if self._calibration is None:
            return {}
        observer = Observer(keys, with_products=self._scheme.method in ("gptq", "awq"))
        capture = Capture(part.spec, observer.names, observer.receive)
        self._calibration.observe(part, weights, self._table, capture, observer)
        for key, seen in observer.inputs.items():
            if not seen.is_finite():
                raise RequestError(
                    f"the input of {key} is not finite on the calibration text: the checkpoint is damaged"
                )
        return observer.inputs

    def _as_stored(self, weight: Floats) -> Floats:
        """Return float32 numbers rounded to the type of the checkpoint."""
        found: Floats = weight.astype(dtype_of(self._dtype)).astype(np.float32)
        return found

    def advance(self, part: Part, stored: Mapping[str, Any], found: Chosen) -> None:
        """Let the streams pass through a part that is quantized. stored: its weights as they are in the checkpoint.

        If codes do not depend on data, inputs are only reported, and are those of the original model.
        """
        if self._calibration is None:
            return
        own = {**found.changed, **rounded(part, found)} if self._scheme.needs_data else {}
        try:
            self._calibration.advance(part, {**stored, **own}, self._table)
        except FloatingPointError as e:
            raise RequestError(f"{e} computes NaN or infinity with quantized weights; take more bits") from None


class _PartLoss:
    """The squared error of a part's output where some of its weights are replaced; a `BlockLoss`."""

    def __init__(self, calibration: Calibration, part: Part, weights: Mapping[str, Any], table: OpsTable) -> None:
        self._calibration, self._part, self._weights, self._table = calibration, part, weights, table
        self._expected: list[Floats] = []
        self.batches = calibration.first(SEARCH_TOKENS)

    def __call__(self, replaced: Mapping[str, Floats], batches: slice) -> float:
        if not self._expected:
            self._expected.extend(self._outputs({}, slice(0, self.batches)))
        pairs = zip(self._expected[batches], self._outputs(replaced, batches), strict=True)
        return sum(float(np.square(a - b).sum(dtype=np.float64)) for a, b in pairs)

    def _outputs(self, replaced: Mapping[str, Floats], batches: slice) -> Iterator[Floats]:
        weights = {**self._weights, **replaced}
        for stream in self._calibration.run(self._part, weights, self._table, batches):
            yield np.asarray(stream.residual)


def rounded(part: Part, found: Chosen) -> dict[str, Any]:
    """Return the quantized matrices of a part, by name.

    Where activations are exact, they are floats: products with them are the same, and faster.
    """
    out: dict[str, Any] = {}
    for w in part.matrices:
        keys = [key for key in keys_of(w) if key in found.codes]
        if keys:
            matrices = [found.codes[key] for key in keys]
            is_exact = matrices[0].format.activations == "exact"
            several: Any = np.stack([found.numbers(key) for key in keys]) if is_exact else QuantizedStack(matrices)
            out[w.name] = several[0] if len(w.shape) == 2 else several
    return out
