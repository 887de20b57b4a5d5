"""A decoder of the Llama family, and steps over pages without an engine around them."""

from __future__ import annotations

from typing import Any

import numpy as np

from ridgeline.nn import Model
from ridgeline.ops import OpsTable
from ridgeline.runtime.arena import Arena
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.runtime.step import PagedStep
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope
from ridgeline.spec.groups import state_groups
from ridgeline.spec.storage import HALVES, Storage


def llama(width: int, layers: int, heads: int, kv_heads: int, head_dim: int, inner: int, vocabulary: int) -> ModelSpec:
    """Return the spec of a decoder with a head of its own."""
    attention = Attention(heads, kv_heads, head_dim, head_dim**-0.5, rope=Rope(head_dim))
    layer = Layer(attention, GatedMLP(inner), RMSNorm(), None, 1.0)
    return ModelSpec("test", vocabulary, width, 512, (layer,) * layers, RMSNorm())


class Paged:
    """Runs steps of a model over pages of 16 tokens."""

    def __init__(
        self, spec: ModelSpec, weights: Any, table: OpsTable, rows: int, tokens: int, storage: Storage = HALVES
    ) -> None:
        self.model, self.table = Model(spec, weights, table, tokens), table
        (self.group,) = state_groups(spec, page_tokens=16, storage=storage)
        pages = self.group.num_pages(tokens)
        self.arena = Arena([self.group], [rows * pages + 1], [0], table.memory)
        self.tables = np.arange(1, rows * pages + 1).reshape(rows, pages)
        self.inputs = DraftInputs(rows, 0, table)

    def step(self, tokens: list[list[int]], starts: list[int]) -> PagedStep:
        """Return the step for the next tokens of the first sequences."""
        rows, memory = np.arange(len(tokens)), self.table.memory
        slices = Slices.plain(rows, np.array(starts), np.array([len(t) for t in tokens]))
        layout = build_layout(slices, self.tables, self.group.page_tokens, self.group.lookback, memory)
        flat = np.concatenate([np.array(t) for t in tokens])
        positions = memory.integers(slices.positions())
        return PagedStep(memory.integers(flat), positions, slices, [layout], self.arena, self.inputs, self.table)

    def logits(self, tokens: list[list[int]], starts: list[int]) -> Any:
        """Return the logits of all tokens."""
        return self.model.logits(self.model.forward(self.step(tokens, starts)))
