"""The numpy backend: it has every primitive, so that every model runs without compiled kernels and without torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

from ridgeline.errors import DeviceError
from ridgeline.ops import api
from ridgeline.ops.api import Backend, Memory, Op, Weights
from ridgeline.ops.draws import accept, draw
from ridgeline.ops.driver import Driver
from ridgeline.ops.host import attention as a
from ridgeline.ops.host import delta, indexed, latent, lru, quant, s4, stored
from ridgeline.ops.host import experts as e
from ridgeline.ops.host import primitives as p
from ridgeline.ops.host import recurrent as r
from ridgeline.ops.host.memory import NumpyMemory

_PLAIN: dict[Op[Any], Callable[..., Any]] = {
    api.EMBEDDING: p.embedding, api.LINEAR: p.linear, api.ROTARY: p.rotary, api.SPLIT_HEADS: p.split_heads,
    api.ADD_TERMS: p.add_terms,
    api.ADD: p.add, api.SCALE: p.scale, api.SOFTCAP: p.softcap, api.TAKE: p.take, api.CUT: p.cut, api.JOIN: p.join,
    api.MIX: p.mix, api.CLAMP: p.clamp,
    api.READ_STATE: r.read_state, api.WRITE_STATE: r.write_state, api.GATHER: r.gather, api.SPLIT: r.split,
    api.SHORT_CONV: r.short_conv, api.GATE: r.gate, api.SIGMOID_GATE: r.sigmoid_gate, api.MULTIPLY: p.multiply,
    api.DECODE_LAYOUT: p.decode_layout, api.KNOWN_TOKENS: p.known_tokens, api.KEEP_TOKENS: p.keep_tokens,
    api.BLOCK_LINEAR: lru.block_linear,
    api.BEST: p.best, api.DRAW: draw, api.ACCEPT: accept,
    api.QUANTIZED_ROWS: quant.rows, api.ROUND_BF16: quant.round_bf16,
}  # fmt: skip
_BY_CASE: dict[Op[Any], Callable[[Any], Callable[..., Any]]] = {
    api.NORM: p.norm, api.ROPE: p.rope, api.GROW_QUERIES: p.grow_queries, api.ATTENTION_GATE: r.attention_gate,
    api.ATTENTION: a.attention, api.PAGED_ATTENTION: a.paged_attention,
    api.WRITE_PAGES: a.write_pages, api.MOVE_ROWS: a.move_rows, api.STORE_ROWS: stored.store_rows,
    api.LATENT_ATTENTION: latent.latent_attention, api.PAGED_LATENT_ATTENTION: latent.paged_latent_attention,
    api.SELECT_KEYS: indexed.select_keys, api.INDEXED_ATTENTION: indexed.indexed_attention,
    api.ACTIVATION: p.activation, api.XIELU: p.xielu,
    api.ROUTE: e.route, api.EXPERTS: e.experts,
    api.QUANTIZE: quant.quantize, api.DEQUANTIZE: quant.dequantize, api.QUANTIZED_LINEAR: quant.quantized_linear,
    api.SELECTIVE_SCAN: r.selective_scan, api.SSD: r.ssd, api.TAYLOR_ATTENTION: r.taylor_attention,
    api.GATED_NORM: r.gated_norm, api.LIGHTNING_ATTENTION: r.lightning_attention,
    api.STATE_SPACE: s4.state_space,
    api.DELTA_RULE: delta.delta_rule, api.NORM_GATE: delta.norm_gate, api.GATED_LRU: lru.gated_lru,
}  # fmt: skip
# These move numbers without arithmetic, so that numpy gives no warnings about overflow or NaN.
_MOVES = (
    api.EMBEDDING, api.SPLIT_HEADS, api.TAKE, api.CUT, api.JOIN, api.WRITE_PAGES, api.READ_STATE, api.WRITE_STATE,
    api.GATHER, api.SPLIT, api.DECODE_LAYOUT, api.KNOWN_TOKENS, api.KEEP_TOKENS,
    api.BEST,
)  # fmt: skip


class NumpyBackend:
    """All primitives, and no fused stage. Infinities and NaN pass through without a warning, as in torch."""

    name = "numpy"

    def refuses(self, op: Op[Any], case: object) -> str | None:
        return None if op in _PLAIN or op in _BY_CASE else "defined by its composition"

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        return None

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
        kernel = _PLAIN[op] if op in _PLAIN else _BY_CASE[op](case)
        return kernel if op in _MOVES else np.errstate(all="ignore")(kernel)

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        raise DeviceError(f"the numpy backend has no fused {op.name}")


def open_host(threads: int | None = None) -> tuple[Memory, tuple[Backend, ...], Driver | None]:
    """Return numpy's memory, the backends that work on it, best first, and the driver of their kernels.

    threads: number of threads for kernels. Default: the number of usable physical cores. Raises DeviceError for kernels
    that were compiled from other sources.
    """
    if find_spec("ridgeline._kernels") is None:
        return NumpyMemory(), (NumpyBackend(),), None
    try:
        from ridgeline._kernels import Pool, usable_cores
        from ridgeline.ops.cpu.backend import CpuBackend
        from ridgeline.ops.cpu.record import CpuDriver
    except ImportError as e:
        raise DeviceError(
            f"the compiled kernels do not fit this version of Ridgeline: {e}; install Ridgeline again, or compile them "
            "again in a checkout"
        ) from None
    pool = Pool(threads or usable_cores())
    return NumpyMemory(), (CpuBackend(pool), NumpyBackend()), CpuDriver(pool)
