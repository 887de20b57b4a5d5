"""Define latent attention over keys that an indexer selects: DeepSeek Sparse Attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from ridgeline.spec.latent import LatentAttention
from ridgeline.spec.mixer import Cut, Mixer, Traffic, require, require_positive
from ridgeline.spec.norm import LayerNorm
from ridgeline.spec.pattern import capped
from ridgeline.spec.rope import Rope
from ridgeline.spec.state import State
from ridgeline.spec.weight import Weight, linear
from ridgeline.spec.workspace import FLOAT, KeysRead, Phases, StepSize


@dataclass(frozen=True, slots=True)
class Indexer:
    """Scores of keys: score(t, s) = sum over heads h of w[t, h] max(0, q[t, h] . k[s]) / sqrt(num_heads head_dim).

    w and k are computed from the layer's input, k with a norm; q from the compressed queries of the attention. A query
    attends to the `top_k` keys with the highest scores among those that it may see, and to all if they are no more. The
    earlier of equal scores is chosen; NaN is the highest score. So no batch, chunk or page changes the choice.

    Args:
        num_heads, head_dim: Heads of q, and numbers of k and of each head of q.
        top_k: Keys that a query attends to.
        norm: The norm of k.
        interleaved: Whether neighboring numbers rotate together; the first numbers of q and k rotate by the
            attention's angles.
    """

    num_heads: int
    head_dim: int
    top_k: int
    norm: LayerNorm
    interleaved: bool = False

    def __post_init__(self) -> None:
        require_positive(num_heads=self.num_heads, head_dim=self.head_dim, top_k=self.top_k)


@dataclass(frozen=True, slots=True)
class IndexedAttention(Mixer):
    """Latent attention over the keys that an indexer selects (DeepSeek-V3.2, arXiv:2512.02556).

    The state of a token is its latent row, and the indexer's key after norm and rotation.
    """

    inputs: ClassVar[tuple[str, ...]] = ("q_a", "kv_a", "index_k", "index_weights")
    keeps_latents: ClassVar[bool] = True

    latent: LatentAttention
    indexer: Indexer

    def __post_init__(self) -> None:
        require(self.latent.q_lora_rank is not None, "an indexer reads compressed queries: q_lora_rank must be given")
        rotated, size = self.latent.qk_rope_head_dim, self.indexer.head_dim
        require(rotated <= size, f"the {rotated} rotated numbers are more than the {size} of an indexer's head")

    @property
    def rope(self) -> Rope | None:
        return self.latent.rope

    @property
    def query_group(self) -> int:
        return self.latent.query_group

    @property
    def value_size(self) -> int:
        return self.latent.value_size

    def weights(self, width: int) -> Iterator[Weight]:
        own, rank = self.indexer, self.latent.q_lora_rank or 0
        yield from self.latent.weights(width)
        yield from linear("index_q", rank, own.num_heads * own.head_dim, split=None)
        yield from linear("index_k", width, own.head_dim, split=None)
        yield from own.norm.weights("index_k_norm", own.head_dim)
        yield from linear("index_weights", width, own.num_heads, split=None)

    def state(self) -> State:
        return State((*self.latent.state().parts, (1, self.indexer.head_dim)))

    def work(self, tokens: int, context: int) -> int:
        """Return the multiply-accumulates: the indexer scores all keys, and absorbed attention reads its choice."""
        m, own = self.latent, self.indexer
        pairs = tokens * context - tokens * (tokens - 1) // 2  # a query sees all tokens up to its own
        read = self._read(tokens, context)
        return pairs * own.num_heads * (own.head_dim + 1) + read * m.num_heads * (m.row + m.kv_lora_rank)

    def traffic(self, tokens: int, context: int) -> Traffic:
        m, own = self.latent, self.indexer
        state = own.head_dim * context + m.row * min(context, self._read(tokens, context))
        results = m.num_heads * (m.row + m.kv_lora_rank) + own.num_heads * (own.head_dim + 1)
        return Traffic(state, tokens * results)

    def _read(self, tokens: int, context: int) -> int:
        """Return the keys that the last `tokens` of `context` tokens attend to together."""
        return capped(context, self.indexer.top_k) - capped(context - tokens, self.indexer.top_k)

    def cut(self) -> Cut:
        return self.latent.cut()

    def part(self, size: int) -> Self:
        """Return a part of the heads; latents and the indexer are copied, so that all ranks select the same keys."""
        return replace(self, latent=self.latent.part(size))

    def workspace(self, step: StepSize, width: int, keys: KeysRead) -> Phases:
        m, own = self.latent.workspace(step, width, keys), self.indexer
        made = FLOAT * step.tokens * (4 * own.num_heads * own.head_dim + 2 * own.num_heads + 4 * own.head_dim)
        several = max(keys.one, keys.every)
        gathered = 3 * FLOAT * several * own.head_dim
        # Scores of each head, then their sum, its order and the choice; the choice as a mask.
        scores = step.queries * keys.one * (3 * FLOAT * own.num_heads + 40)
        chosen = 24 * step.queries * min(own.top_k, keys.one)
        return Phases(m.before + made, m.during + made + gathered + scores + chosen, m.held)

    def resident_numbers(self, width: int, *, several: bool) -> int:
        own = self.indexer
        more = (own.num_heads + 2) * own.head_dim + own.num_heads + 4 * own.top_k
        return self.latent.resident_numbers(width, several=several) + more
