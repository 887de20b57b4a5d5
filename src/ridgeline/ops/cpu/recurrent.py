"""Recurrent mixers by kernels: the recurrence over the tokens, for one token as for many.

States keep channels next to each other, as the kernels need: [n, S, D] for Mamba, [n, H, S, P] for Mamba-2, [n, H,
features, P + 1] for BASED, [n, H, D, D] with values last for lightning attention, [n, N / 2, 2, C] for S4 and S4D. The
arrays have the shapes that the spec gives.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ridgeline import _kernels
from ridgeline._kernels import Matrix, Pool
from ridgeline.ops import api
from ridgeline.ops.cpu.kernel import Kernel, Kernels, empty, never
from ridgeline.ops.cpu.linear import rows_of
from ridgeline.ops.cpu.matrices import Floats, Ndarray, PackedOnce, build_rows, once
from ridgeline.ops.cpu.state import State, locate
from ridgeline.spec import GatedDelta, GatedLRU, KimiDelta, LightningAttention, Mamba, Mamba2, TaylorAttention


def short_conv(case: None, pool: Pool) -> Callable[..., tuple[Floats, State]]:
    by_token = once(lambda weight: weight[:, 0].T)  # [k, C]

    def run(x: Floats, before: State, weight: Ndarray, bias: Floats | None, lengths: Ndarray) -> tuple[Floats, State]:
        y, (left, at) = empty(pool, *x.shape), locate(before)
        _kernels.short_conv(
            pool, rows_of(x), at.before, by_token(weight), bias, lengths, rows_of(y), at.after, at.read, at.write
        )
        return y, left

    return run


def selective_scan(case: Mamba, pool: Pool) -> Callable[..., tuple[Floats, State]]:
    negative = once(lambda a_log: -np.exp(a_log.T.astype(np.float32)))  # [S, D]

    def run(
        x: Floats, dt: Floats, a_log: Ndarray, b: Floats, c: Floats, d: Floats, h: State, lengths: Ndarray
    ) -> tuple[Floats, State]:
        y, (left, at) = empty(pool, *x.shape), locate(h)
        inputs = rows_of(x), rows_of(dt), negative(a_log), rows_of(b), rows_of(c)
        _kernels.selective_scan(pool, *inputs, d, at.before, lengths, rows_of(y), at.after, at.read, at.write)
        return y, left

    return run


def ssd(case: Mamba2, pool: Pool) -> Callable[..., tuple[Floats, State]]:
    negative = once(lambda a_log: -np.exp(a_log.astype(np.float32)))
    limits = case.dt_least, float("inf") if case.dt_most is None else case.dt_most

    def run(
        x: Floats, dt: Floats, dt_bias: Floats, a_log: Ndarray, b: Floats, c: Floats, d: Floats, h: State,
        lengths: Ndarray,
    ) -> tuple[Floats, State]:  # fmt: skip
        y, (left, at) = empty(pool, *x.shape), locate(h)
        inputs = rows_of(x), rows_of(dt), dt_bias, negative(a_log), rows_of(b), rows_of(c), d
        _kernels.linear_scan(
            pool, case.num_groups, *inputs, *limits, at.before, lengths, rows_of(y), at.after, at.read, at.write
        )
        return y, left

    return run


def taylor_attention(case: TaylorAttention, pool: Pool) -> Callable[..., tuple[Floats, State]]:
    def run(q: Floats, k: Floats, v: Floats, h: State, lengths: Ndarray) -> tuple[Floats, State]:
        y, (left, at) = empty(pool, *v.shape), locate(h)
        inputs = case.features == "hedgehog", rows_of(q), rows_of(k), rows_of(v)
        _kernels.taylor_scan(pool, case.num_heads, *inputs, at.before, lengths, rows_of(y), at.after, at.read, at.write)
        return y, left

    return run


def lightning_attention(case: LightningAttention, pool: Pool) -> Callable[..., tuple[Floats, State]]:
    decay = np.exp(-np.array(case.slopes)).astype(np.float32)

    def run(q: Floats, k: Floats, v: Floats, h: State, lengths: Ndarray) -> tuple[Floats, State]:
        y, (left, at) = empty(pool, *v.shape[:2], case.inner_size), locate(h)
        heads = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
        _kernels.lightning_scan(
            pool, heads[0], heads[1], heads[2], decay, at.before, lengths, rows_of(y), at.after, at.read, at.write
        )
        return y, left

    return run


def delta_rule(case: GatedDelta | KimiDelta, pool: Pool) -> Callable[..., tuple[Floats, State]]:
    rate = once(lambda a_log: -np.exp(a_log.astype(np.float32)))

    def run(
        q: Floats, k: Floats, v: Floats, decay: Floats, beta: Floats, a_log: Ndarray, dt_bias: Floats, h: State,
        lengths: Ndarray,
    ) -> tuple[Floats, State]:  # fmt: skip
        y, (left, at) = empty(pool, *v.shape), locate(h)
        inputs = rows_of(q), rows_of(k), rows_of(v), rows_of(decay), rows_of(beta), rate(a_log), dt_bias
        _kernels.delta_scan(
            pool, case.num_key_heads, case.reach, *inputs, at.before, lengths, rows_of(y), at.after, at.read, at.write
        )
        return y, left

    return run


def norm_gate(case: GatedDelta | KimiDelta, pool: Pool) -> Callable[[Floats, Floats, Floats], Floats]:
    silu, offset, eps = isinstance(case, GatedDelta), np.float32(case.norm.offset), case.norm.eps
    moved = once(lambda weight: offset + weight)

    def run(y: Floats, z: Floats, weight: Floats) -> Floats:
        out = empty(pool, *y.shape)
        _kernels.norm_gate(pool, silu, eps, rows_of(y), rows_of(z), moved(weight), rows_of(out))
        return out

    return run


def block_linear(case: None, pool: Pool) -> Callable[[Floats, Ndarray, Floats], Floats]:
    def pack(weight: Ndarray, bias: Floats) -> list[Matrix]:
        return [build_rows(pool, *part) for part in zip(weight, bias, strict=True)]

    packed = PackedOnce(pack)

    def run(x: Floats, weight: Ndarray, bias: Floats) -> Floats:
        groups, rows, columns = weight.shape
        parts = rows_of(x).reshape(-1, groups, columns)
        out = empty(pool, len(parts), groups, rows)
        _kernels.multiply_heads(pool, packed(weight, bias), parts, out)
        return out.reshape(*x.shape[:-1], groups * rows)

    return run


def gated_lru(case: GatedLRU, pool: Pool) -> Callable[..., tuple[Floats, State, State]]:
    rate = once(lambda decay: -case.rate * np.logaddexp(0.0, decay.astype(np.float64)))

    def run(
        x: Floats, into: Floats, gate: Floats, decay: Ndarray, begun: State, h: State, lengths: Ndarray
    ) -> tuple[Floats, State, State]:
        y, (begins, flag), (left, at) = empty(pool, *x.shape), locate(begun), locate(h)
        inputs = rows_of(x), rows_of(into), rows_of(gate), rate(decay), flag.before, at.before, lengths
        pages = flag.read, flag.write, at.read, at.write
        _kernels.gated_lru(pool, *inputs, rows_of(y), flag.after, at.after, *pages)
        return y, begins, left

    return run


KERNELS: Kernels = {
    api.BLOCK_LINEAR: Kernel(never, block_linear),
    api.GATED_LRU: Kernel(never, gated_lru),
    api.LIGHTNING_ATTENTION: Kernel(never, lightning_attention),
    api.DELTA_RULE: Kernel(never, delta_rule),
    api.NORM_GATE: Kernel(never, norm_gate),
    api.SHORT_CONV: Kernel(never, short_conv),
    api.SELECTIVE_SCAN: Kernel(never, selective_scan),
    api.SSD: Kernel(never, ssd),
    api.TAYLOR_ATTENTION: Kernel(never, taylor_attention),
}
