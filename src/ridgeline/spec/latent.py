"""Multi-head latent attention: keys and values of all heads are two matrices times one short vector, which is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ridgeline.spec.norm import Norm
from ridgeline.spec.rope import Rope
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ValueError(message)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """MLA (arXiv:2405.04434, 2.1): causal softmax attention over a latent c = norm(kv_a x) of `kv_lora_rank` numbers.

    A head's key is [k_up c, k_rope] and its value v_up c. k_up and v_up are the rows of `kv_b`, head by head; k_rope,
    of `qk_rope_head_dim` numbers, alone carries the rotation and is the same for all heads. Kept of a token are c and
    k_rope, both ready for use: normed, rotated.

    scale: factor on q @ k. latent_norm: of c, and of the queries' latent. q_lora_rank: queries are q_b norm(q_a x);
    None is q x. rope: of k_rope and of the last `qk_rope_head_dim` numbers of every query. latent_bias: on q_a, kv_a.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    latent_norm: Norm
    q_lora_rank: int | None = None
    rope: Rope | None = None
    latent_bias: bool = False
    out_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            _require((value := getattr(self, name)) > 0, f"{name} must be positive, not {value}")
        rank = self.q_lora_rank
        _require(rank is None or rank > 0, f"q_lora_rank must be positive, not {rank}")
        _require(self.scale > 0, f"the attention scale must be positive, not {self.scale}")
        if self.rope:
            dim, rotated = self.rope.dim, self.qk_rope_head_dim
            _require(dim == rotated, f"rope dim {dim} is not qk_rope_head_dim {rotated}: all of that part is rotated")

    @property
    def qk_head_dim(self) -> int:
        """Numbers of a query, and of a rebuilt key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row(self) -> int:
        """Numbers kept of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def weights(self, width: int) -> Iterator[Weight]:
        heads, bias = self.num_heads, self.latent_bias
        if self.q_lora_rank is None:
            yield from linear("q", width, heads * self.qk_head_dim)
        else:
            yield from linear("q_a", width, self.q_lora_rank, bias=bias, split=None)
            yield from self.latent_norm.weights("q_a_norm", self.q_lora_rank)
            yield from linear("q_b", self.q_lora_rank, heads * self.qk_head_dim)
        yield from linear("kv_a", width, self.row, bias=bias, split=None)
        yield from self.latent_norm.weights("kv_a_norm", self.kv_lora_rank)
        yield Weight("kv_b.weight", (heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank), "head")
        yield from linear("o", heads * self.v_head_dim, width, bias=self.out_bias, split="in")

    def state(self) -> State:
        return State(((1, self.row),))

    def work(self, tokens: int, context: int) -> int:
        """Of the cheaper form, but for kv_b once for each of the tokens: the count of the weights has that."""
        least = min(self.absorbed_work(tokens, context), self.rebuilt_work(tokens, context))
        return least - tokens * self._up_work

    def absorbed_work(self, tokens: int, context: int) -> int:
        """Multiply-accumulates, kv_b included, if queries and results pass through kv_b and keys stay latents."""
        pairs = tokens * context * self.num_heads
        return tokens * self._up_work + pairs * (self.row + self.kv_lora_rank)

    def rebuilt_work(self, tokens: int, context: int) -> int:
        """The same, if the keys and values of every token in the context are made from its latent."""
        pairs = tokens * context * self.num_heads
        return max(tokens, context) * self._up_work + pairs * (self.qk_head_dim + self.v_head_dim)

    def absorbs(self, tokens: int, context: int) -> bool:
        """Which of the two forms costs less for queries of `tokens` tokens over `context` ones, these included."""
        return self.absorbed_work(tokens, context) <= self.rebuilt_work(tokens, context)

    @property
    def _up_work(self) -> int:
        """kv_b times one latent; equally, its parts times one query and one result."""
        return self.num_heads * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
