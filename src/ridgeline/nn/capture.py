"""Outputs of layers by name, for measuring importance, training drafts and distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ridgeline.ops.api import Array
from ridgeline.spec import ModelSpec

EMBED, NORM = "embed", "norm"


def output_names(spec: ModelSpec) -> Iterator[str]:
    """Yield the names of the outputs that a forward pass can capture, in the order in which they are computed.

    Each output is [T, hidden_size]:
        embed: the residual stream before the first layer.
        layers.I.mixer, layers.I.mlp: the result of a branch of layer I, before the branch's outer norm and its scale.
        layers.I: the residual stream after layer I.
        norm: the residual stream after the last norm.
    """
    yield EMBED
    for i, layer in enumerate(spec.layers):
        if layer.mixer:
            yield f"layers.{i}.mixer"
        if layer.mlp:
            yield f"layers.{i}.mlp"
        yield f"layers.{i}"
    yield NORM


class Capture:
    """The outputs of one forward pass that are asked for by name: `outputs[name]` after the pass.

    Args:
        spec: the model that will run.
        names: names out of `output_names(spec)`.

    Raises:
        ValueError: for a name that the model does not have.
    """

    def __init__(self, spec: ModelSpec, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self.outputs: dict[str, Array] = {}
        if unknown := self._names.difference(output_names(spec)):
            raise ValueError(
                f"the model has no output {min(unknown)!r}: its {len(spec.layers)} layers have outputs such as embed, "
                "layers.0.mixer, layers.0.mlp, layers.0 and norm"
            )

    def put(self, name: str, output: Callable[[], Array]) -> None:
        """Keep an output if it is asked for; only then it is computed."""
        if name in self._names:
            self.outputs[name] = output()
