"""Sequences in pages for tests of attention, with NaN in every slot that must not be read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from interpreted.guarded import interpreted, reference
from ridgeline.ops import api
from ridgeline.ops.api import PagedKeyValues, PagedRows
from ridgeline.ops.triton import paged
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import Attention, LatentAttention
from ridgeline.spec.storage import UNSCALED
from ridgeline.spec.trees import paths

TABLE, REFERENCE = interpreted(), reference()
NAN = float("nan")


class Sequences:
    """Keys and values, or latents, in pages of random numbers; pages and slots behind the last token are NaN.

    given: the last argument of attention, which is kv_b, or sinks.
    """

    poison: ClassVar = {torch.int8: 127, torch.uint8: 127}  # bytes of NaN: of e4m3, and in the scales of int8

    def __init__(
        self, case: Attention | LatentAttention, ends: list[int], page: int, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.case, self.page = case, page
        self.is_latent = isinstance(case, LatentAttention)
        rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        count = -(-max(ends) // page)
        free = rng.permutation(np.arange(1, len(ends) * count + 1)).tolist()
        self.tables = np.zeros((len(ends), count), np.int64)
        kept = case.state().parts
        heads, numbers = kept[0]
        shape = len(ends) * count + 1, len(kept), page, heads, numbers + 4 * (dtype == torch.int8)
        self.parts = torch.full(shape, self.poison.get(dtype, NAN), dtype=dtype).unbind(1)
        self.scales = (0.02, 0.03) if dtype == torch.uint8 else UNSCALED
        write = REFERENCE.primitive(api.WRITE_PAGES, case)
        for row, end in enumerate(ends):
            for index in range(-(-end // page)):
                self.tables[row, index] = free.pop()
            slots = torch.arange(end)
            rows = torch.randn(len(kept), end, heads, numbers, generator=generator)
            pages = torch.from_numpy(self.tables)[row, slots // page]
            write(self.parts, tuple(rows), pages, slots % page, self.scales)
        size = case.qk_head_dim if isinstance(case, LatentAttention) else case.head_dim
        self.q = [torch.randn(end, case.num_heads, size, generator=generator) * 4 for end in ends]
        self.given: torch.Tensor | None = None
        if isinstance(case, LatentAttention):
            up = case.num_heads, case.qk_nope_head_dim + case.v_head_dim, case.kv_lora_rank
            self.given = torch.randn(up, generator=generator) * case.kv_lora_rank**-0.5
        elif case.sinks:
            self.given = torch.randn(case.num_heads, generator=generator)

    def step(
        self, rows: list[int], starts: list[int], counts: list[int], trees: list[list[int]] | None = None
    ) -> tuple[torch.Tensor, Any]:
        """Return the queries of a step, and what it reads. Pages before the window are freed, and NaN.

        trees: the parents of each sequence's drafts, which are its last tokens.
        """
        state, parts, tables = self.case.state(), tuple(part.clone() for part in self.parts), self.tables.copy()
        views = [view for part in parts for view in paged.views_of(part) if view is not None]
        for row, start, count in zip(rows, starts, counts, strict=True):
            for index in range(-(-state.first_tokens // self.page), max(0, start - state.lookback) // self.page):
                for view in views:
                    view[tables[row, index]] = self.poison.get(view.dtype, NAN)
                tables[row, index] = 0
            for slot in range(start + count, -(-(start + count) // self.page) * self.page):
                for view in views:
                    view[tables[row, slot // self.page], slot % self.page] = self.poison.get(view.dtype, NAN)
        slices = Slices.plain(np.array(rows), np.array(starts), np.array(counts))
        if trees is not None:
            bits = [np.array([0] * (n - len(tree)) + paths(tree)) for n, tree in zip(counts, trees, strict=True)]
            slices = replace(slices, drafts=np.array([len(tree) for tree in trees]), paths=np.concatenate(bits))
        layout = build_layout(slices, tables, self.page, state.lookback, REFERENCE.memory, state.first_tokens)
        q = torch.cat([self.q[row][s : s + n] for row, s, n in zip(rows, starts, counts, strict=True)])
        kv = PagedRows(parts, layout, self.scales) if self.is_latent else PagedKeyValues(*parts, layout, self.scales)
        return q, kv

    def error(
        self, rows: list[int], starts: list[int], counts: list[int], trees: list[list[int]] | None = None
    ) -> float:
        """Return the largest difference from the definition in float64."""
        q, kv = self.step(rows, starts, counts, trees)
        op: Any = api.PAGED_LATENT_ATTENTION if self.is_latent else api.PAGED_ATTENTION
        got = TABLE.primitive(op, self.case)(q, kv, self.given)
        wanted = REFERENCE.primitive(op, self.case)(q.double(), kv, self.given)
        return float((got - wanted).abs().max())
