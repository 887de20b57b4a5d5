"""Define multi-head latent attention (MLA): one short vector is kept for the keys and values of all heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ridgeline.spec.mixer import Cut, Mixer, Traffic, require, share
from ridgeline.spec.norm import Norm
from ridgeline.spec.rope import Rope
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import FLOAT, KeysRead, Phases, StepSize


@dataclass(frozen=True, slots=True)
class LatentAttention(Mixer):
    """MLA (arXiv:2405.04434, 2.1): causal softmax attention over a latent c = norm(kv_a x) of `kv_lora_rank` numbers.

    A head's key is [k_up c, k_rope] and its value v_up c. k_up and v_up are the rows of `kv_b`, head by head. k_rope
    has `qk_rope_head_dim` numbers and is the same for all heads; only k_rope is rotated. The state of a token is c
    after the norm and k_rope after the rotation.

    Args:
        scale: Factor on q @ k.
        latent_norm: Norm of c, and of the latent of the queries.
        q_lora_rank: Queries are q_b norm(q_a x). None: they are q x.
        rope: Rotation of k_rope and of the last `qk_rope_head_dim` numbers of every query.
        latent_bias: Whether q_a and kv_a have biases.
        latent_scale: Factor on c after its norm (LongCat-Flash).
    """

    inputs: ClassVar[tuple[str, ...]] = ("q", "q_a", "kv_a")

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
    latent_scale: float = 1.0

    keeps_latents: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            require((value := getattr(self, name)) > 0, f"{name} must be positive, not {value}")
        rank = self.q_lora_rank
        require(rank is None or rank > 0, f"q_lora_rank must be positive, not {rank}")
        require(self.scale > 0, f"the attention scale must be positive, not {self.scale}")
        require(self.latent_scale > 0, f"the scale of latents must be positive, not {self.latent_scale}")
        if self.rope:
            dim, rotated = self.rope.dim, self.qk_rope_head_dim
            require(dim == rotated, f"rope dim {dim} is not qk_rope_head_dim {rotated}: all of that part is rotated")

    @property
    def qk_head_dim(self) -> int:
        """Return the size of a query, and of a rebuilt key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row(self) -> int:
        """Return how many numbers are kept of a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_group(self) -> int:
        """Return the number of query heads that share the same keys: all of them."""
        return self.num_heads

    @property
    def value_size(self) -> int:
        """Return the numbers of a latent: in the absorbed form it is the value of all heads."""
        return self.kv_lora_rank

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
        """Return the multiply-accumulates of the form that the engine takes, absorbed or rebuilt.

        kv_b times the latent of each new token is not in it, since the weights count it.
        """
        pairs = tokens * context - tokens * (tokens - 1) // 2  # a query sees all tokens up to its own
        if self.absorbs(tokens, context):
            return pairs * self.num_heads * (self.row + self.kv_lora_rank)
        return pairs * self.num_heads * (self.qk_head_dim + self.v_head_dim) + (context - tokens) * self._up_work

    def traffic(self, tokens: int, context: int) -> Traffic:
        state = self.row * context
        if self.absorbs(tokens, context):
            return Traffic(state, tokens * self.num_heads * (self.row + self.kv_lora_rank))
        rebuilt = 2 * context * self.num_heads * (self.qk_nope_head_dim + self.v_head_dim)  # written, then read
        return Traffic(state, tokens * self.num_heads * (self.qk_head_dim + self.v_head_dim) + rebuilt)

    def cut(self) -> Cut:
        return Cut(self.num_heads, 1)

    def part(self, size: int) -> Self:
        """Return a part of the heads; latents are copied."""
        return replace(self, num_heads=share("heads", self.num_heads, size))

    def workspace(self, step: StepSize, width: int, keys: KeysRead) -> Phases:
        q = FLOAT * step.tokens * self.num_heads * self.qk_head_dim
        out = FLOAT * step.tokens * self.num_heads * self.v_head_dim
        row = FLOAT * step.tokens * self.row
        before = 3 * q + 4 * row + 2 * FLOAT * step.tokens * (self.q_lora_rank or 0)
        return Phases(before, q + row + self._paged_bytes(step, keys), q + out + row)

    def _paged_bytes(self, step: StepSize, keys: KeysRead) -> int:
        """Return the bytes of attention over pages: gathered latents, keys or queries made of them, scores, results."""
        heads, key = self.num_heads, self.qk_head_dim + self.v_head_dim
        several = max(keys.one, min(keys.every, step.block // max(heads, self.row)))
        gathered = several * ((3 if keys.is_narrow else 2) * FLOAT * self.row + 32)
        # For one head: its keys and values, or queries and results as long as latents. A block holds several heads.
        of_head = max(several * key, step.queries * (self.row + self.kv_lora_rank))
        up = (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
        made = 3 * FLOAT * min(heads * of_head, max(step.block, of_head))
        made += 2 * FLOAT * min(heads * up, max(step.block, up))
        scores = min(step.queries * keys.one * heads, max(step.block, keys.one * heads))
        results = 4 * FLOAT * step.queries * heads * max(self.qk_head_dim, self.v_head_dim)
        return gathered + made + (4 * FLOAT + 2) * scores + results

    def resident_numbers(self, width: int, *, several: bool) -> int:
        return self.num_heads * (self.qk_head_dim + 2 * self.v_head_dim) + 2 * self.row

    def absorbed_work(self, tokens: int, context: int) -> int:
        """Return the multiply-accumulates if queries and results pass through kv_b, and keys stay latents.

        Every query is counted with all `context` tokens; kv_b is included.
        """
        pairs = tokens * context * self.num_heads
        return tokens * self._up_work + pairs * (self.row + self.kv_lora_rank)

    def rebuilt_work(self, tokens: int, context: int) -> int:
        """Return the multiply-accumulates if the keys and values of all `context` tokens are computed from latents.

        Every query is counted with all `context` tokens; kv_b is included.
        """
        pairs = tokens * context * self.num_heads
        return max(tokens, context) * self._up_work + pairs * (self.qk_head_dim + self.v_head_dim)

    def absorbs(self, tokens: int, context: int) -> bool:
        """Return whether the absorbed form costs less for the last `tokens` of `context` tokens."""
        return self.absorbed_work(tokens, context) <= self.rebuilt_work(tokens, context)

    @property
    def _up_work(self) -> int:
        """Return the multiply-accumulates of kv_b with one latent.

        Its parts with one query and one result take as many.
        """
        return self.num_heads * (self.qk_nope_head_dim + self.v_head_dim) * self.kv_lora_rank
