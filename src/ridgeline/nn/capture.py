"""Outputs of layers and inputs of matrices by name, for importance, calibration, drafts and distillation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ridgeline.errors import RequestError
from ridgeline.nn.wrapped import Wrapped, WrappedProduct
from ridgeline.ops.api import Array, Linear, Product
from ridgeline.spec import ModelSpec

EMBED, NORM, INPUT = "embed", "norm", ".input"
EXPERTS = "experts"


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


def input_names(spec: ModelSpec) -> Iterator[str]:
    """Yield the names of the inputs of matrices, layer by layer: the weight's name with `input` for `weight`.

    Each input is [..., columns of the matrix]. An expert's number follows `experts`: layers.0.mlp.experts.3.down.input
    has the tokens that were sent to expert 3, and is left out of a pass that sends it none.
    """
    for weight in spec.weights():
        module, _, kind = weight.name.rpartition(".")
        if not weight.name.startswith("layers.") or kind != "weight" or not weight.is_matrix:
            continue
        prefix, found, name = module.partition(f".{EXPERTS}.")
        if found:
            yield from (f"{prefix}.{EXPERTS}.{e}.{name}{INPUT}" for e in range(weight.shape[0]))
        elif len(weight.shape) == 2:
            yield module + INPUT


class Capture:
    """Receives outputs of layers and inputs of matrices by name.

    `Model.forward(step, capture)` gives it outputs. Inputs are seen only by a model that was built for them:
    `Model(..., capture=capture)`, whose stages with such a matrix are composed instead of fused.

    Args:
        spec: the model that will run.
        names: names out of `output_names(spec)` and `input_names(spec)`.
        receive: called with each name and its array as soon as it is computed. None: `outputs[name]` keeps the array
            of the last pass.

    Raises:
        RequestError: for a name that the model does not have.
    """

    def __init__(
        self, spec: ModelSpec, names: Iterable[str], receive: Callable[[str, Array], None] | None = None
    ) -> None:
        self._names = frozenset(names)
        self.outputs: dict[str, Array] = {}
        self._receive = receive or self.outputs.__setitem__
        inputs = frozenset(input_names(spec))
        self.has_inputs = not self._names.isdisjoint(inputs)
        if unknown := self._names - inputs.union(output_names(spec)):
            raise RequestError(
                f"the model has no output {min(unknown)!r}: its {len(spec.layers)} layers have outputs such as embed, "
                "layers.0.mixer, layers.0.mlp, layers.0 and norm, and inputs of matrices such as "
                f"{min(inputs, default='none')}"
            )

    def put(self, name: str, output: Callable[[], Array]) -> None:
        """Pass an output on if it is asked for; only then it is computed."""
        if name in self._names:
            self._receive(name, output())

    def watched(self, linear: Linear, name: str) -> Linear:
        """Return the matrix, or one that gives its inputs to this object if `name` is asked for."""
        return _Watched(linear, name, self) if name in self._names else linear


class _Watched(Wrapped):
    """A matrix that gives its inputs to a Capture; an `ops.api.Linear`."""

    def __init__(self, linear: Linear, name: str, capture: Capture) -> None:
        super().__init__(linear)
        self._name, self._capture = name, capture

    @property
    def unfused(self) -> str:
        return "has an input that is captured"

    @property
    def apply(self) -> Product:
        return _WatchedProduct(self._linear.apply, self._name, self._capture)


class _WatchedProduct(WrappedProduct):
    """A product that gives its input to a Capture first."""

    def __init__(self, product: Product, name: str, capture: Capture) -> None:
        super().__init__(product)
        self._name, self._capture = name, capture

    def __call__(self, x: Array) -> Array:
        self._capture.put(self._name, lambda: x)
        return self._product(x)
