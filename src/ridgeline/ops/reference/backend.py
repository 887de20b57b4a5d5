"""The reference backend, torch's own fused attention beside it, and torch's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ridgeline.errors import DeviceError
from ridgeline.ops import api
from ridgeline.ops.api import Backend, DenseKeyValues, Memory, Op, QuantizedMatrix, Weights
from ridgeline.ops.arrays import ARRAYS
from ridgeline.ops.reference import delta, indexed, latent, lru, paged, quant, s4, stored
from ridgeline.ops.reference import primitives as p
from ridgeline.ops.reference import recurrent as r
from ridgeline.ops.reference.failures import said_in_one_line
from ridgeline.ops.table import REFERENCE
from ridgeline.spec import Attention
from ridgeline.spec.sight import CAUSAL
from ridgeline.spec.storage import StateDType
from ridgeline.system import free_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64,
          "int8": torch.int8, "fp8": torch.uint8}  # fmt: skip

_PLAIN = {
    api.LINEAR: p.linear, api.SPLIT_HEADS: p.split_heads,
    api.ADD_TERMS: p.add_terms,
    api.ADD: p.add, api.SCALE: p.scale, api.SOFTCAP: p.softcap, api.TAKE: p.take, api.CUT: p.cut, api.JOIN: p.join,
    api.MIX: p.mix, api.CLAMP: p.clamp,
    api.WRITE_STATE: r.write_state, api.GATHER: r.gather, api.SPLIT: r.split,
    api.SHORT_CONV: r.short_conv, api.GATE: r.gate, api.SIGMOID_GATE: r.sigmoid_gate, api.MULTIPLY: r.multiply,
    api.DECODE_LAYOUT: p.decode_layout, api.KNOWN_TOKENS: p.known_tokens, api.KEEP_TOKENS: p.keep_tokens,
    api.BLOCK_LINEAR: lru.block_linear,
    api.BEST: p.best, api.DRAW: p.draw, api.ACCEPT: p.accept, api.ROUND_BF16: quant.round_bf16,
}  # fmt: skip
_BY_CASE = {
    api.NORM: p.norm, api.ROPE: p.rope, api.GROW_QUERIES: p.grow_queries, api.ATTENTION_GATE: r.attention_gate,
    api.ATTENTION: p.attention, api.PAGED_ATTENTION: paged.paged_attention,
    api.WRITE_PAGES: paged.write_pages, api.MOVE_ROWS: paged.move_rows,
    api.STORE_ROWS: stored.store_rows,
    api.LATENT_ATTENTION: latent.latent_attention, api.PAGED_LATENT_ATTENTION: latent.paged_latent_attention,
    api.SELECT_KEYS: indexed.select_keys, api.INDEXED_ATTENTION: indexed.indexed_attention,
    api.ACTIVATION: p.activation, api.XIELU: p.xielu,
    api.ROUTE: p.route, api.EXPERTS: p.experts,
    api.QUANTIZE: quant.quantize, api.DEQUANTIZE: quant.dequantize, api.QUANTIZED_LINEAR: quant.quantized_linear,
    api.SELECTIVE_SCAN: r.selective_scan, api.SSD: r.ssd, api.TAYLOR_ATTENTION: r.taylor_attention,
    api.GATED_NORM: r.gated_norm, api.LIGHTNING_ATTENTION: r.lightning_attention,
    api.STATE_SPACE: s4.state_space,
    api.DELTA_RULE: delta.delta_rule, api.NORM_GATE: delta.norm_gate, api.GATED_LRU: lru.gated_lru,
}  # fmt: skip
# These ops start a computation and fix its type. Every other op computes in the type of its arguments.
_BEGINNINGS = {
    api.EMBEDDING: p.embedding, api.QUANTIZED_ROWS: quant.rows, api.ROTARY: p.rotary, api.READ_STATE: r.read_state,
}  # fmt: skip


class ReferenceBackend:
    """All primitives, and no fused stage: the composition of a stage is its definition.

    dtype: the type in which a model computes.
    """

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._plain = {**_PLAIN, **{op: begin(dtype) for op, begin in _BEGINNINGS.items()}}

    def refuses(self, op: Op[Any], case: object) -> str | None:
        return None if op in self._plain or op in _BY_CASE else "defined by its composition"

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        return None

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
        return self._plain[op] if op in self._plain else _BY_CASE[op](case)

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        raise DeviceError(f"the reference backend has no fused {op.name}")


class SdpaBackend:
    """torch's scaled_dot_product_attention, which stores no [tokens, context] matrix where torch fuses it."""

    name = "sdpa"

    def refuses(self, op: Op[Any], case: object) -> str | None:
        if op is not api.ATTENTION:
            return "attention only"
        if isinstance(case, Attention) and case.softcap is not None:
            return "cannot cap scores"
        if isinstance(case, Attention) and (case.sinks or case.alibi is not None):
            return "does not support sinks and slopes (alibi)"
        if isinstance(case, Attention) and case.pattern is not None:
            return "supports whole windows only"
        if isinstance(case, Attention) and case.sight != CAUSAL:
            return "supports causal attention only"
        return None

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        return None

    def primitive(self, op: Op[Any], case: Attention) -> Callable[..., Any]:
        def attend(q: torch.Tensor, kv: DenseKeyValues, sinks: None = None) -> torch.Tensor:
            rows = q, *(stored.as_floats(x, q.dtype, scale) for x, scale in zip(kv[:2], kv.scales, strict=True))
            sequences = zip(*(x.split(list(kv.lengths)) for x in rows), strict=True)
            return torch.cat([_sdpa(case, *sequence) for sequence in sequences]).flatten(1)

        return attend

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        raise DeviceError(f"sdpa has no fused {op.name}")


def _sdpa(case: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    groups = case.num_heads // case.num_kv_heads
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, H, n, D]
    n = q.shape[2]
    if case.window is None or n <= case.window:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=case.scale)
        return out[0].transpose(0, 1)
    blocks = []
    for start in range(0, n, p.QUERY_BLOCK):  # bounds the mask to a block of queries by its window
        end, first = min(start + p.QUERY_BLOCK, n), max(0, start - case.window + 1)
        mask = p.visible(start, end - start, end, case, q.device)[:, first:]
        keys, values = k[:, :, first:end], v[:, :, first:end]
        blocks.append(F.scaled_dot_product_attention(q[:, :, start:end], keys, values, mask, scale=case.scale))
    return torch.cat(blocks, 2)[0].transpose(0, 1)


def torch_device(name: str) -> torch.device:
    """Return torch's device for one of our device names."""
    return torch.device("cpu" if name == REFERENCE else name)


class TorchMemory:
    """Memory of torch tensors on one device, `reference` or a GPU. dtype: the type in which a model computes."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float32) -> None:
        self.device, self._dtype = device, dtype
        self.float_bytes = dtype.itemsize
        self.on_host = device == REFERENCE
        self._device = torch_device(device)

    def put(self, host: np.ndarray, dtype: str, to: str) -> torch.Tensor:
        tensor = torch.from_numpy(host)
        if dtype == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        return tensor.to(device=self._device, dtype=DTYPES[to]).contiguous()

    def integers(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64)).to(self._device)

    def quantized(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        given = {name: part for name in ARRAYS if (part := getattr(matrix, name)) is not None}
        return replace(matrix, **{name: torch.from_numpy(part).to(self._device) for name, part in given.items()})

    def get(self, array: torch.Tensor) -> np.ndarray:
        return array.detach().float().cpu().numpy()

    def to_host(self, array: torch.Tensor) -> np.ndarray:
        return array.detach().cpu().numpy()

    def from_host(self, host: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(host)).to(self._device)

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext() if self.on_host else said_in_one_line()

    def free_bytes(self) -> int | None:
        if self.on_host:
            return free_bytes()
        torch.cuda.empty_cache()  # torch keeps what was freed, and would take it before other memory
        return torch.cuda.mem_get_info(self._device)[0]

    def widen(self, array: torch.Tensor) -> torch.Tensor:
        return array.float()

    def pages(self, num_pages: int, num_bytes: int) -> torch.Tensor:
        return torch.empty((num_pages, num_bytes), device=self._device, dtype=torch.uint8)

    def page_view(self, pages: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: StateDType) -> torch.Tensor:
        kept = DTYPES[dtype]
        return pages[:, offset : offset + math.prod(shape) * kept.itemsize].view(kept).unflatten(1, shape)

    def zeros(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, device=self._device, dtype=self._dtype)

    def copy_pages(self, pages: torch.Tensor, source: Sequence[int], target: Sequence[int]) -> None:
        pages[list(target)] = pages[list(source)]

    def pages_out(self, pages: torch.Tensor, index: Sequence[int]) -> np.ndarray:
        return pages[list(index)].cpu().numpy()

    def pages_in(self, pages: torch.Tensor, index: Sequence[int], host: np.ndarray) -> None:
        pages[list(index)] = torch.from_numpy(host).to(self._device)

    def random(self, shape: tuple[int, ...], dtype: str, std: float, seed: int) -> torch.Tensor:
        generator = torch.Generator(self._device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=self._device, dtype=DTYPES[dtype]).mul_(std)


def open_reference(device: str, *, exact: bool = False) -> tuple[Memory, tuple[Backend, ...]]:
    """Return torch's memory on `device`, and the backends that work on it, best first. exact: see `open_table`."""
    dtype = torch.float64 if exact else torch.float32
    return TorchMemory(device, dtype), (SdpaBackend(), ReferenceBackend(dtype))
