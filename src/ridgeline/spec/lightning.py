"""Define lightning attention: linear attention whose state decays by a fixed factor for each head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.mixer import Cut, RecurrentBase, require, require_positive
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import SSD_CHUNK, in_chunks


@dataclass(frozen=True, slots=True)
class LightningAttention(RecurrentBase):
    """Linear attention with a decay that is not learned (MiniMax-01, arXiv:2501.08313, 2.2; arXiv:2401.04658).

    q, k, v = act(qkv(x)), the rows of qkv as [head, (q, k, v), head_dim]; h = exp(-s) h + v k; y = h q;
    out(norm(y) sigmoid(gate(x))), the norm over all heads. s of head i is slope_scale x 2^(-8 (i + 1) / num_heads).
    """

    inputs: ClassVar[tuple[str, ...]] = ("qkv", "gate")

    num_heads: int
    head_dim: int
    norm: RMSNorm
    slope_scale: float = 1.0
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        require_positive(num_heads=self.num_heads, head_dim=self.head_dim)
        problem = f"slope_scale must not be negative, not {self.slope_scale}: the state would grow"
        require(self.slope_scale >= 0, problem)
        check_activation(self.activation)

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def slopes(self) -> tuple[float, ...]:
        """Return s of each head: each token multiplies the state by exp(-s)."""
        return tuple(self.slope_scale * 2.0 ** (-8 * (i + 1) / self.num_heads) for i in range(self.num_heads))

    def weights(self, width: int) -> Iterator[Weight]:
        yield from linear("qkv", width, 3 * self.inner_size)
        yield from linear("gate", width, self.inner_size)
        yield from self.norm.weights("out_norm", self.inner_size)
        yield from linear("out", self.inner_size, width, split="in")

    def state(self) -> State:
        return State(((self.num_heads, self.head_dim, self.head_dim),), lookback=1, snapshot=True)

    def work(self, tokens: int, context: int) -> int:
        return tokens * 3 * self.inner_size * self.head_dim

    def cut(self) -> Cut:
        return Cut(self.num_heads, self.num_heads)

    def part(self, size: int) -> Self:
        raise ValueError("the norm over all heads of lightning attention would need the numbers of all ranks")

    def scan_numbers(self, tokens: int, padded: int, seqs: int) -> int:
        chunked, chunks = in_chunks(tokens, padded, seqs)
        inputs, size = 7 * tokens * self.inner_size, self.head_dim  # qkv before and after its activation, the gate
        along = chunked * self.num_heads * (10 * size + 3 * SSD_CHUNK)
        return inputs + along + 4 * chunks * self.inner_size * size

    def cost_key(self) -> Self:
        return replace(self, slope_scale=1.0)
