"""Medusa: heads on the last hidden state, each of which proposes a token further ahead (arXiv:2401.10774)."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.nn.heads.parts import Parts
from ridgeline.ops import api
from ridgeline.ops.api import Array
from ridgeline.spec import MLP
from ridgeline.spec.heads import MedusaSpec


class MedusaHead:
    """The heads of a Medusa model. Head k proposes the token k + 2 positions after the one whose state it reads: the
    target itself gives the one in between.
    """

    def __init__(self, spec: MedusaSpec, parts: Parts) -> None:
        self.spec, self._parts = spec, parts
        self._add = parts.table.primitive(api.ADD)
        self._act = parts.table.primitive(api.ACTIVATION, MLP(spec.hidden_size, "silu"))
        self._blocks = [
            [parts.product(f"blocks.{h}.{b}") for b in range(spec.num_blocks)] for h in range(spec.num_heads)
        ]
        self._heads = [parts.head(f"heads.{h}", None) for h in range(1 if spec.shared_head else spec.num_heads)]
        self.to_target: Callable[[Array], Array] = parts.to_target
        self.vocabulary = parts.vocabulary

    def logits(self, hidden: Array, count: int | None = None) -> list[Array]:
        """Return the logits [n, draft_vocab_size] of each head for the target's hidden states after its last norm.

        hidden: [n, hidden_size], as `Model.hidden` returns them. count: only the first heads, so many; None: all.
        """
        return [self.logits_of(hidden, number) for number in range(self.spec.num_heads if count is None else count)]

    def logits_of(self, hidden: Array, number: int) -> Array:
        """Return the logits [n, draft_vocab_size] of one head. number: from 0."""
        x = hidden
        for block in self._blocks[number]:
            x = self._add(x, self._act(block(x)), 1.0)
        return self._heads[0 if self.spec.shared_head else number].project(x)

    def constants(self) -> list[Array]:
        """Return all arrays that a step reads besides its inputs, except those that kernels own."""
        return self._parts.constants()
