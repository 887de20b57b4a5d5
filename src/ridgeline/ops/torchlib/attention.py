"""Attention by kernels that torch calls, and by those of flash-attn."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ridgeline.ops.api import DenseKeyValues, PagedKeyValues
from ridgeline.ops.reference import stored
from ridgeline.ops.reference.paged import paged_attention as definition
from ridgeline.spec import Attention
from ridgeline.spec.sight import CAUSAL

PROMPT_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]  # best first
FA3, FLASH = "flash_attn_interface", "flash_attn"  # modules
FLASH_PAGE = 256  # flash-attn reads pages of a multiple of so many tokens
HALVES = (torch.bfloat16, torch.float16)
# (q [T, H, D], kv, ends of the sequences' queries [N + 1], keys of each sequence [N], most keys) -> [T, H, D]
Attend = Callable[[Tensor, PagedKeyValues, Tensor, Tensor, int], Tensor]


def refuses_prompts(case: Attention) -> str | None:
    """Return why torch's fused attention does not serve whole prompts of a case; None if it does."""
    if case.window is not None:
        return "torch's fused attention of prompts has no windows"
    return _refuses(case)


def _refuses(case: Attention) -> str | None:
    if case.softcap is not None or case.sinks or case.pattern is not None or case.alibi is not None:
        return "these kernels have no soft caps, sinks, patterns or slopes (alibi)"
    if case.sight != CAUSAL:
        return "these kernels are called for causal attention only"
    return None


def prompts(case: Attention) -> Callable[..., Tensor]:
    """Return ATTENTION in bfloat16: cuDNN's kernel where it serves the case, else FlashAttention 2."""

    def attend(q: Tensor, kv: DenseKeyValues, sinks: None = None) -> Tensor:
        keys, values = (
            stored.as_floats(x, torch.bfloat16, s).split(list(kv.lengths))
            for x, s in zip(kv[:2], kv.scales, strict=True)
        )
        found = []
        with sdpa_kernel(PROMPT_BACKENDS, set_priority=True):
            for rows in zip(q.bfloat16().split(list(kv.lengths)), keys, values, strict=True):
                heads = (x.transpose(0, 1)[None] for x in rows)  # [1, heads, n, D]
                out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=case.scale, enable_gqa=True)
                found.append(out[0].transpose(0, 1))
        return torch.cat(found).flatten(1).to(q.dtype)

    return attend


def refuses_varlen(case: Attention) -> str | None:
    """Return why torch's `varlen_attn` does not serve a case; None if it does."""
    if find_spec(FA3) is None:
        return f"torch's varlen_attn reads pages with FlashAttention 3, and its package {FA3} is not installed"
    return _refuses(case)


def refuses_flash(case: Attention) -> str | None:
    """Return why flash-attn does not serve a case; None if it does."""
    if find_spec(FLASH) is None:
        return "flash-attn is not installed"
    return _refuses(case)


def varlen(case: Attention) -> Callable[..., Tensor]:
    """Return PAGED_ATTENTION by torch's `varlen_attn` with FlashAttention 3."""
    from torch.nn.attention import activate_flash_attention_impl
    from torch.nn.attention.varlen import varlen_attn

    activate_flash_attention_impl("FA3")

    def run(q: Tensor, kv: PagedKeyValues, ends: Tensor, keys: Tensor, most: int) -> Tensor:
        pages: Any = kv.keys
        layout: Any = kv.layout
        return varlen_attn(
            q, pages, kv.values, ends, None, len(q), most, scale=case.scale, window_size=_window(case),
            enable_gqa=True, seqused_k=keys, block_table=layout.tables.int(),
        )  # fmt: skip

    return _paged(case, run, 1)


def flash(case: Attention) -> Callable[..., Tensor]:
    """Return PAGED_ATTENTION by flash-attn."""
    attend = import_module(FLASH).flash_attn_varlen_func

    def run(q: Tensor, kv: PagedKeyValues, ends: Tensor, keys: Tensor, most: int) -> Tensor:
        layout: Any = kv.layout
        return attend(
            q, kv.keys, kv.values, ends, _ends(keys), len(q), most, softmax_scale=case.scale, causal=True,
            window_size=_window(case), block_table=layout.tables.int(),
        )  # fmt: skip

    return _paged(case, run, FLASH_PAGE)


def _window(case: Attention) -> tuple[int, int]:
    """Return how many keys before and after its own position a query reads; -1: all."""
    return (-1 if case.window is None else case.window - 1), 0


def _ends(counts: Tensor) -> Tensor:
    """Return 0 and the sums of the first 1, 2, ... counts, int32."""
    return F.pad(counts.cumsum(0), (1, 0)).int()


def _paged(case: Attention, run: Attend, page_unit: int) -> Callable[..., Tensor]:
    """Return PAGED_ATTENTION out of a kernel over pages. Drafts in trees, and other pages, take the definition.

    page_unit: the kernel reads pages of a multiple of so many tokens.
    """
    other = definition(case)

    def attend(q: Tensor, kv: PagedKeyValues, sinks: Tensor | None = None) -> Tensor:
        pages: Any = kv.keys
        layout: Any = kv.layout
        if layout.paths is not None or pages.dtype not in HALVES or pages.shape[1] % page_unit:
            return other(q, kv, sinks)
        keys = (layout.starts + layout.lengths).int()
        out = run(q.to(pages.dtype), kv, _ends(layout.lengths), keys, layout.tables.shape[1] * pages.shape[1])
        return out.flatten(1).to(q.dtype)

    return attend
