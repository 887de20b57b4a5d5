"""Linear attention whose past fades by a fixed factor: lightning attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ridgeline.spec.activation import Activation, check_activation
from ridgeline.spec.norm import RMSNorm
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear


@dataclass(frozen=True, slots=True)
class LightningAttention:
    """Linear attention with a decay that no weight sets (MiniMax-01, arXiv:2501.08313, 2.2; arXiv:2401.04658).

    q, k, v = act(qkv(x)), the rows of qkv as [head, (q, k, v), head_dim]; h = exp(-s) h + v k; y = h q;
    out(norm(y) sigmoid(gate(x))), the norm over all heads. s of head i is slope_scale x 2^(-8 (i + 1) / num_heads).
    """

    num_heads: int
    head_dim: int
    norm: RMSNorm
    slope_scale: float = 1.0
    activation: Activation = "silu"

    rope: ClassVar[None] = None

    def __post_init__(self) -> None:
        for name in ("num_heads", "head_dim"):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be positive, not {size}")
        if not self.slope_scale >= 0:
            raise ValueError(f"slope_scale must not be negative, not {self.slope_scale}: the past would grow")
        check_activation(self.activation)

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def slopes(self) -> tuple[float, ...]:
        """s of each head: what a token takes from the logarithm of what is kept."""
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
