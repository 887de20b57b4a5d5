"""Low-rank terms that a model is built with, beside its matrices."""

from __future__ import annotations

from collections.abc import Mapping

from ridgeline.ops import OpsTable
from ridgeline.ops.api import Array
from ridgeline.quant import LowRank, store
from ridgeline.spec import ModelSpec
from ridgeline.spec.encoder import LABEL_MATRICES, TYPE_TABLE
from ridgeline.spec.per_layer import TABLE
from ridgeline.spec.quant import PLAIN

Terms = tuple[Array, Array]  # the matrices of a low-rank term: down [r, in], up [out, r]


def check_low_rank(spec: ModelSpec, low_rank: Mapping[str, Terms]) -> None:
    """Raise ValueError for a term of a weight that is no matrix, or that is looked up."""
    tables = ("embed.weight", "position_embed.weight", TABLE, TYPE_TABLE, *LABEL_MATRICES)
    known = {w.name for w in spec.weights() if w.is_matrix and len(w.shape) == 2 and w.name not in tables}
    if unknown := set(low_rank).difference(known):
        raise ValueError(
            f"no matrix {min(unknown)!r} that takes a low-rank term; matrices are {', '.join(sorted(known)[:4])} ..."
        )


def stored_term(matrices: Terms | None, table: OpsTable) -> LowRank | None:
    """Return a term whose matrices are stored as floats; None for None."""
    return None if matrices is None else LowRank(*(store(matrix, None, table, PLAIN) for matrix in matrices))
