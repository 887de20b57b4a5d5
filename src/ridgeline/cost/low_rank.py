"""Cost of low-rank terms: what an adapter of rank r adds to each step, in bytes and operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.cost.operations import Operation
from ridgeline.cost.precision import Precision
from ridgeline.spec import ModelSpec
from ridgeline.spec.dtype import DTYPE_BYTES, DType


@dataclass(frozen=True, slots=True)
class LowRankTerm:
    """A term up(down(x)) beside a matrix [rows, columns]: down [rank, columns], up [rows, rank]."""

    rank: int
    rows: int
    columns: int

    @property
    def num_params(self) -> int:
        return self.rank * (self.rows + self.columns)

    def flops(self, tokens: int) -> int:
        """Return operations for `tokens` tokens: both products, and the sum with the matrix's own product."""
        return tokens * (2 * self.num_params + self.rows)

    def numbers_moved(self, tokens: int) -> int:
        """Return the activations that are read and written: both products, then the sum of two results of `rows`."""
        return tokens * (self.columns + 2 * self.rank + self.rows + 3 * self.rows)


def low_rank_terms(spec: ModelSpec, ranks: Mapping[str, int]) -> Mapping[str, LowRankTerm]:
    """Return the terms of ranks by weight name. Raises ValueError for a name that is no matrix, or a rank below 1."""
    shapes = {w.name: w.shape for w in spec.weights() if w.is_matrix and len(w.shape) == 2}
    for name, rank in ranks.items():
        if name not in shapes or rank < 1:
            raise ValueError(f"rank {rank} of {name}: the name must be a matrix of the model, and the rank at least 1")
    return {name: LowRankTerm(rank, *shapes[name]) for name, rank in ranks.items()}


def low_rank_operations(
    spec: ModelSpec, ranks: Mapping[str, int], tokens: int, precision: Precision, stored: DType = "float32"
) -> tuple[Operation, ...]:
    """Return the operations that low-rank terms add to a step.

    Args:
        ranks: rank by weight name.
        tokens: tokens of the step. All of them take the same terms.
        stored: type of the terms' matrices.
    """
    alike = Counter((name.split(".", 2)[-1], term) for name, term in low_rank_terms(spec, ranks).items())
    return tuple(
        Operation(
            f"low rank {name.removesuffix('.weight')}", "weights", layers, term.flops(tokens),
            term.num_params * DTYPE_BYTES[stored], 0.0, precision.activation_bytes(term.numbers_moved(tokens)),
            precision.compute, passes=((term.num_params, float(tokens)),), stored=stored,
        )
        for (name, term), layers in alike.items()
    )  # fmt: skip
