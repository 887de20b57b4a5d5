"""Run the transform between the last norm and the output head."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ridgeline.nn.branches import OuterNorm
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Array, HeadStage, Linear
from ridgeline.spec import MLP, ModelSpec


class TransformedHead:
    """The last norm, the transform and the output head of a model that has a transform; an `ops.api.HeadStage`.

    Args:
        head: the stage of the output head. Only its product is used.
        dense: the matrix of the transform.
        scale: factor on the delta of the last branch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        head: HeadStage,
        dense: Linear,
        weights: Mapping[str, Array],
        table: OpsTable,
        scale: float,
    ) -> None:
        own = spec.head_transform
        assert own is not None
        self._head, self._dense, self._scale = head, dense, scale
        dense.prepare()
        self._act = table.primitive(api.ACTIVATION, MLP(spec.hidden_size, own.activation))
        self._last_norm, self._norm = (
            OuterNorm(norm, name, weights, table) for norm, name in ((spec.norm, "norm"), (own.norm, "head_norm"))
        )
        self._add, self._take = table.primitive(api.ADD), table.primitive(api.TAKE)

    def __call__(self, residual: Array, delta: Array | None, rows: Array | None) -> Array:
        if rows is not None:
            residual, delta = self._take(residual, rows), None if delta is None else self._take(delta, rows)
        return self.project(self._last_norm(residual if delta is None else self._add(residual, delta, self._scale)))

    @property
    def rows(self) -> Callable[[Array], Array] | None:
        return self._head.rows

    def project(self, x: Array) -> Array:
        return self._head.project(self._norm(self._act(self._dense.apply(x))))
