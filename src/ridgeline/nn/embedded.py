"""Per-layer embeddings: what a step's tokens have for all layers, and the branch of a layer that reads them."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.nn.step import Embedded
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, Linear, Weights
from ridgeline.spec import GatedMLP, ModelSpec

Rows = Callable[[Array], Array]  # token ids [T] -> rows of a table [T, numbers]
Branch = Callable[[Array, Embedded], Array]  # (stream [T, width], embeddings) -> delta [T, width]


class EmbeddedInputs:
    """Looks up the embeddings of all layers, and computes their other part from the stream.

    project: the matrix [layers * size, width]. rows: looks up rows of the table.
    """

    def __init__(self, spec: ModelSpec, project: Linear, rows: Rows, table: OpsTable) -> None:
        project.prepare()
        self._project, self._rows, self._factor = project, rows, spec.hidden_size**-0.5
        self._scale = table.primitive(api.SCALE)

    def __call__(self, x: Array, token_ids: Array) -> Embedded:
        """Return the embeddings of tokens whose stream before the first layer is x [T, width]."""
        return Embedded(self._scale(self._project.apply(x), self._factor), self._rows(token_ids))


def embedded_branch(spec: ModelSpec, layer: int, weights: Weights, norm_weight: Array, table: OpsTable) -> Branch:
    """Return out(act(gate(x)) * e) of a layer. norm_weight: [size], of the norm of the part that the stream gives."""
    branch, model = spec.embedded(layer), spec.layer_embeddings
    assert branch and model
    first, last, root = layer * branch.size, (layer + 1) * branch.size, branch.size**0.5
    gate, out = weights.linears["gate"], weights.linears["out"]
    gate.prepare()
    out.prepare()
    norm, act = table.primitive(api.NORM, model.norm), table.primitive(api.ACTIVATION, GatedMLP(1, branch.activation))
    cut, add, scale = table.primitive(api.CUT), table.primitive(api.ADD), table.primitive(api.SCALE)

    def run(x: Array, embedded: Embedded) -> Array:
        own = norm(cut(embedded.projected, first, last), norm_weight, None)
        both = scale(add(own, cut(embedded.rows, first, last), root), 2**-0.5)
        return out.apply(act(gate.apply(x), both))

    return run
