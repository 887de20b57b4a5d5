"""Define linear attention whose features imitate softmax: the Taylor expansion (BASED), or learned maps (Hedgehog)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from ridgeline.spec.mixer import Cut, RecurrentBase, require_positive, share
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import SSD_CHUNK, in_chunks

Features = Literal["taylor", "hedgehog"]
LEAST_FEATURE = (
    1e-30  # of Hedgehog: the weight of a key is at least LEAST_FEATURE / feature_dim, so no sum of weights is 0
)


@dataclass(frozen=True, slots=True)
class TaylorAttention(RecurrentBase):
    """Linear attention whose weights are close to those of softmax attention.

    The weight of a key is a product of features of q and features of k, so the keys and values seen so far are one
    matrix. The features are one of:

    taylor: the weight is 1 + s + s^2 / 2 with s = q k / sqrt(feature_dim), which is softmax attention to the second
        order of its scores: BASED (arXiv:2402.18668).
    hedgehog: the features of x are softmax(x) and softmax(-x): Hedgehog (arXiv:2402.04347). Each is at least
        LEAST_FEATURE, because no sum of weights may be 0. Its learned map of queries and keys is a part of the
        matrices q and k.

    feature_dim: size of a head's queries and keys. head_dim: size of its values.
    """

    inputs: ClassVar[tuple[str, ...]] = ("q", "k", "v")
    imitates_softmax: ClassVar[bool] = True

    num_heads: int
    head_dim: int
    feature_dim: int
    features: Features = "taylor"

    def __post_init__(self) -> None:
        require_positive(num_heads=self.num_heads, head_dim=self.head_dim, feature_dim=self.feature_dim)

    @property
    def num_features(self) -> int:
        """Return the number of features of a query or a key: the terms of order 0, 1 and 2, or two softmaxes."""
        if self.features == "hedgehog":
            return 2 * self.feature_dim
        return 1 + self.feature_dim + self.feature_dim**2

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("q", width, self.num_heads * self.feature_dim)
        yield from linear("k", width, self.num_heads * self.feature_dim)
        yield from linear("v", width, self.num_heads * self.head_dim)
        yield from linear("o", self.num_heads * self.head_dim, width, split="in")

    def state(self) -> State:
        # For each feature the sum of values and, in a last row, the sum of weights.
        return State(((self.num_heads, self.head_dim + 1, self.num_features),), lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 2 * self.num_heads * (self.head_dim + 1) * self.num_features

    def cut(self) -> Cut:
        return Cut(self.num_heads, self.num_heads)

    def part(self, size: int) -> Self:
        return replace(self, num_heads=share("heads", self.num_heads, size))

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        chunked, chunks = in_chunks(tokens, padded, seqs)
        heads, values, features = self.num_heads, self.head_dim + 1, self.num_features
        along = chunked * heads * (6 * values + 5 * features + 5 * SSD_CHUNK)
        return 4 * tokens * heads * values + along + 4 * chunks * heads * values * features
