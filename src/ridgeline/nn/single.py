"""Build and run one layer of a model alone, for calibration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ridgeline.nn.binding import How, mixer_norm
from ridgeline.nn.capture import Capture
from ridgeline.nn.model import Model, build_layer
from ridgeline.nn.step import Step, Stream
from ridgeline.ops import OpsTable
from ridgeline.ops.api import Array
from ridgeline.spec import ModelSpec
from ridgeline.spec.per_layer import EMBEDDED_NORM
from ridgeline.spec.quant import AS_STORED

LayerBlock = Callable[[Stream, Step], Stream]


def layer_block(
    model: Model, spec: ModelSpec, index: int, weights: Mapping[str, Array], table: OpsTable,
    capture: Capture | None = None,
) -> LayerBlock:  # fmt: skip
    """Return layer `index` of `spec` as a function of a stream whose delta is None, and a step.

    Args:
        model: computes rotations; its own layers are not used.
        weights: the weights of this layer, by name: floats, or codes and scales.
        capture: receives the inputs of matrices that it asks for.
    """
    if spec.embedded(index):
        weights = {**weights, EMBEDDED_NORM: model.weights[EMBEDDED_NORM]}
    if spec.is_beside(index):
        own = f"{mixer_norm(spec, index)}."
        weights = {**weights, **{name: model.weights[name] for name in model.weights if name.startswith(own)}}
    block = build_layer(index, spec, weights, How(table, AS_STORED, {}, capture, model.kv_scales), 1.0)
    return lambda stream, step: model.run_block(block, stream, step, model.rotaries(step))
