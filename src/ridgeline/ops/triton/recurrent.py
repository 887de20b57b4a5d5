"""Recurrent primitives. States are read and written in their pages, or in copies. Both give the same bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.ops import api
from ridgeline.ops.api import Op
from ridgeline.ops.s4 import token_terms
from ridgeline.ops.triton import scans
from ridgeline.ops.triton.launch import Compiled, Counters, Launch
from ridgeline.ops.triton.paged import power_above
from ridgeline.ops.triton.rows import activate
from ridgeline.ops.triton.state import State, locate
from ridgeline.spec import (
    S4,
    S4D,
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    TaylorAttention,
)

ACTIVATE_BLOCK = 1024  # numbers that one program activates
CONV_CHANNELS, CONV_TOKENS = 256, 16  # that one program filters
STATE_NUMBERS = 4096  # of a state that one program holds in registers
STATE_SPACE_NUMBERS = 512  # complex numbers of a state of S4 that one program holds, and up to seven terms of each
MOST_STATES = 256  # numbers of a state that one sum adds up
MOST_FEATURES = 2048  # of a key of BASED
Scan = Callable[..., tuple[Tensor, State]]


class Rows(NamedTuple):
    """Inputs [n, m, ...] of a recurrence as rows: token t of sequence i is row i * m + t."""

    data: Tensor
    stride: int


def rows_of(x: Tensor) -> Rows:
    """Return rows of x [n, m, ...] without a copy where numbers of a token, or of a head, are neighbors."""
    if x.stride(-1) != 1 or (x.shape[0] > 1 and x.stride(0) != x.shape[1] * x.stride(1)):
        x = x.contiguous()
    return Rows(x, x.stride(1) if x.shape[1] > 1 else x.stride(0))


def block_of(width: int, states: int) -> int:
    """Return how many rows of a state [width, states] one program holds: a fact of the state alone."""
    return max(1, min(power_above(width), STATE_NUMBERS // power_above(states)))


def short_conv(case: object, launch: Launch, activation: str = "none") -> Scan:
    """Return SHORT_CONV, with an activation of its results."""

    def run(x: Tensor, before: State, weight: Tensor, bias: Tensor | None, lengths: Tensor) -> tuple[Tensor, State]:
        (n, m, channels), (rows, stride), kept = x.shape, rows_of(x), weight.shape[-1] - 1
        y, (left, at) = x.new_empty(x.shape), locate(before)
        tokens = max(CONV_TOKENS, kept)
        launch(
            scans.convolve, (-(-channels // CONV_CHANNELS), -(-m // tokens), n), Compiled(2),
            x=rows, weight=weight, bias=bias, y=y, **at.arguments(), lengths=lengths, m=m, x_stride=stride,
            channels=channels, KEPT=kept, HAS_BIAS=bias is not None, NAME=activation, TOKENS=tokens,
            BLOCK=CONV_CHANNELS,
        )  # fmt: skip
        return y, left

    return run


def ssd(case: Mamba2, launch: Launch) -> Scan:
    block = block_of(case.head_dim, case.state_size)
    most = float("inf") if case.dt_most is None else case.dt_most

    def run(
        x: Tensor, dt: Tensor, dt_bias: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, h: State,
        lengths: Tensor,
    ) -> tuple[Tensor, State]:  # fmt: skip
        given, (y, (left, at)) = [rows_of(r) for r in (x, b, c, dt)], (x.new_empty(x.shape), locate(h))
        launch(
            scans.linear_scan, (-(-case.head_dim // block), case.num_heads, x.shape[0]), Compiled(4),
            x=given[0].data, b=given[1].data, c=given[2].data, dt=given[3].data, dt_bias=dt_bias, a_log=a_log, skip=d,
            decays=None, y=y, **at.arguments(), lengths=lengths, m=x.shape[1], x_stride=given[0].stride,
            b_stride=given[1].stride, c_stride=given[2].stride, dt_stride=given[3].stride, least=case.dt_least,
            most=most, X_HEAD=case.head_dim, B_HEAD=case.state_size, C_HEAD=case.state_size,
            SHARED=case.num_heads // case.num_groups, HEADS=case.num_heads, WIDTH=case.head_dim,
            STATES=case.state_size, IS_SSD=True, BLOCK_P=block, BLOCK_S=power_above(case.state_size),
        )  # fmt: skip
        return y, left

    return run


def decays_of(case: LightningAttention) -> Callable[[torch.device], Tensor]:
    """Return a function of a device that gives the decay of each head there."""
    decays = torch.from_numpy(np.exp(-np.array(case.slopes)).astype(np.float32))
    return cache(lambda device: decays.to(device))


def lightning_attention(case: LightningAttention, launch: Launch) -> Scan:
    size, block = case.head_dim, block_of(case.head_dim, case.head_dim)
    decays = decays_of(case)

    def run(q: Tensor, k: Tensor, v: Tensor, h: State, lengths: Tensor) -> tuple[Tensor, State]:
        given = [rows_of(r) for r in (v, k, q)]
        y, (left, at) = v.new_empty((*v.shape[:2], case.inner_size)), locate(h)
        heads = [r.data.stride(2) for r in given]
        launch(
            scans.linear_scan, (-(-size // block), case.num_heads, v.shape[0]), Compiled(4),
            x=given[0].data, b=given[1].data, c=given[2].data, dt=None, dt_bias=None, a_log=None, skip=None,
            decays=decays(v.device), y=y, **at.arguments(), lengths=lengths, m=v.shape[1], x_stride=given[0].stride,
            b_stride=given[1].stride, c_stride=given[2].stride, dt_stride=0, least=0.0, most=0.0, X_HEAD=heads[0],
            B_HEAD=heads[1], C_HEAD=heads[2], SHARED=1, HEADS=case.num_heads, WIDTH=size, STATES=size, IS_SSD=False,
            BLOCK_P=block, BLOCK_S=power_above(size),
        )  # fmt: skip
        return y, left

    return run


def selective_scan(case: Mamba, launch: Launch) -> Scan:
    """Return SELECTIVE_SCAN. With a gate, results are multiplied by silu(gate)."""
    block = min(128, block_of(case.inner_size, case.state_size))

    def run(
        x: Tensor, dt: Tensor, a_log: Tensor, b: Tensor, c: Tensor, d: Tensor, h: State, lengths: Tensor,
        gate: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        z = None if gate is None else rows_of(gate)
        given, (y, (left, at)) = [rows_of(r) for r in (x, dt, b, c)], (x.new_empty(x.shape), locate(h))
        launch(
            scans.selective_scan, (-(-case.inner_size // block), x.shape[0]), Compiled(4),
            x=given[0].data, dt=given[1].data, b=given[2].data, c=given[3].data, z=z and z.data, a_log=a_log, skip=d,
            y=y, z_stride=z.stride if z else 0, HAS_GATE=z is not None, **at.arguments(),
            lengths=lengths, m=x.shape[1], x_stride=given[0].stride, dt_stride=given[1].stride,
            b_stride=given[2].stride, c_stride=given[3].stride, channels=case.inner_size, STATES=case.state_size,
            BLOCK=block, BLOCK_S=power_above(case.state_size),
        )  # fmt: skip
        return y, left

    return run


def delta_rule(case: GatedDelta | KimiDelta, launch: Launch) -> Scan:
    block = block_of(case.head_dim, case.key_dim)

    def run(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, a_log: Tensor, dt_bias: Tensor, h: State,
        lengths: Tensor,
    ) -> tuple[Tensor, State]:  # fmt: skip
        given, (y, (left, at)) = [rows_of(r) for r in (q, k, v, decay, beta)], (v.new_empty(v.shape), locate(h))
        names = "q", "k", "v", "decay", "beta"
        inputs = {name: rows.data for name, rows in zip(names, given, strict=True)}
        strides = {f"{name}_stride": rows.stride for name, rows in zip(names, given, strict=True)}
        launch(
            scans.delta_scan, (-(-case.head_dim // block), case.num_heads, v.shape[0]), Compiled(4),
            **inputs, **strides, a_log=a_log, dt_bias=dt_bias, y=y, **at.arguments(), lengths=lengths, m=v.shape[1],
            scale=case.key_dim**-0.5, reach=case.reach, SHARED=case.num_heads // case.num_key_heads,
            HEADS=case.num_heads, KEYS=case.key_dim, WIDTH=case.head_dim, BY_CHANNEL=isinstance(case, KimiDelta),
            BLOCK_P=block, BLOCK_K=power_above(case.key_dim),
        )  # fmt: skip
        return y, left

    return run


def state_space(case: S4 | S4D, launch: Launch, activation: str = "none") -> Scan:
    """Return STATE_SPACE, with an activation of its results."""
    modes, found = case.state_size // 2, dict[int, Tensor]()
    block = max(1, STATE_SPACE_NUMBERS // power_above(modes))

    def terms(system: Sequence[Tensor]) -> Tensor:
        """Return [6 or 14, channels, modes], which are computed once for the weights of a layer."""
        key = id(system[0])
        if key not in found:
            parts = token_terms(case, torch.exp, *(x.double() for x in system))
            found[key] = torch.stack([x for part in parts for x in (part.real, part.imag)]).float()
            weakref.finalize(system[0], found.pop, key, None)
        return found[key]

    def run(u: Tensor, *others: Any) -> tuple[Tensor, State]:
        *system, d, h, lengths = others
        (x, stride), y, (left, at) = rows_of(u), u.new_empty(u.shape), locate(h)
        launch(
            scans.state_space_scan, (-(-case.channels // block), u.shape[0]), Compiled(4),
            u=x, terms=terms(system), skip=d, y=y, **at.arguments(), lengths=lengths, m=u.shape[1], u_stride=stride,
            channels=case.channels, MODES=modes, LOW_RANK=isinstance(case, S4), NAME=activation, BLOCK=block,
            BLOCK_M=power_above(modes),
        )  # fmt: skip
        return y, left

    return run


def taylor_attention(case: TaylorAttention, launch: Launch) -> Scan:
    block = block_of(case.head_dim, case.num_features)
    counters = Counters()

    def run(q: Tensor, k: Tensor, v: Tensor, h: State, lengths: Tensor) -> tuple[Tensor, State]:
        given, (y, (left, at)) = [rows_of(r) for r in (q, k, v)], (v.new_empty(v.shape), locate(h))
        n = v.shape[0]
        launch(
            scans.taylor_scan, (-(-case.head_dim // block), case.num_heads, n), Compiled(4),
            q=given[0].data, k=given[1].data, v=given[2].data, y=y, **at.arguments(), lengths=lengths,
            arrived=counters(n * case.num_heads, v.device), m=v.shape[1], q_stride=given[0].stride,
            k_stride=given[1].stride, v_stride=given[2].stride, scale=case.feature_dim**-0.25, HEADS=case.num_heads,
            DIM=case.feature_dim, WIDTH=case.head_dim, HEDGEHOG=case.features == "hedgehog", BLOCK_P=block,
            BLOCK_S=power_above(case.num_features),
        )  # fmt: skip
        return y, left

    return run


def gated_norm(case: Mamba2 | GatedDelta | KimiDelta, launch: Launch) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return GATED_NORM or NORM_GATE."""
    is_ssd = isinstance(case, Mamba2)
    groups = case.num_groups if isinstance(case, Mamba2) else case.num_heads

    def run(y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        size, rows = y.shape[-1] // groups, [flat(x) for x in (y, z)]
        out = torch.empty(y.shape, dtype=torch.float32, device=y.device)
        if rows[0].shape[0]:
            launch(
                scans.gated_rows, (rows[0].shape[0], groups), Compiled(1 if size <= 256 else 4),
                y=rows[0], z=rows[1], weight=weight, out=out, y_stride=rows[0].stride(0), z_stride=rows[1].stride(0),
                size=size, offset=case.norm.offset, eps=case.norm.eps,
                NAME="sigmoid" if isinstance(case, KimiDelta) else "silu", GATE_FIRST=is_ssd, BY_GROUP=not is_ssd,
                BLOCK=power_above(size),
            )  # fmt: skip
        return out

    return run


def multiply(name: str) -> Callable[[object, Launch], Callable[[Tensor, Tensor], Tensor]]:
    """Return a maker of MULTIPLY, GATE or SIGMOID_GATE. name: the activation of the second factor."""

    def make(case: object, launch: Launch) -> Callable[[Tensor, Tensor], Tensor]:
        def run(y: Tensor, z: Tensor) -> Tensor:
            rows, width = [flat(x) for x in (y, z)], y.shape[-1]
            out = torch.empty(y.shape, dtype=torch.float32, device=y.device)
            if rows[0].shape[0]:
                launch(
                    scans.multiply_rows, (rows[0].shape[0], -(-width // ACTIVATE_BLOCK)), Compiled(4),
                    y=rows[0], z=rows[1], out=out, y_stride=rows[0].stride(0), z_stride=rows[1].stride(0),
                    width=width, NAME=name, BY_ROW=rows[1].shape[1] < width, BLOCK=ACTIVATE_BLOCK,
                )  # fmt: skip
            return out

        return run

    return make


def flat(x: Tensor) -> Tensor:
    """Return x [..., n] as rows whose numbers are neighbors."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def activation(case: Any, launch: Launch) -> Callable[[Tensor], Tensor]:
    """Return ACTIVATION for rows without a gate."""

    def run(x: Tensor) -> Tensor:
        rows, width = flat(x), x.shape[-1]
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        if rows.shape[0]:
            launch(
                activate, (rows.shape[0], -(-width // ACTIVATE_BLOCK)), Compiled(4),
                x=rows, out=out, width=width, stride=rows.stride(0), NAME=case.activation,
                BLOCK=ACTIVATE_BLOCK,
            )  # fmt: skip
        return out

    return run


# What a sum of a recurrence adds up, if it is not state_size, and how many of them at most.
SUMMED: Mapping[type[Any], tuple[str, int]] = {
    LightningAttention: ("head_dim", MOST_STATES), GatedDelta: ("key_dim", MOST_STATES),
    KimiDelta: ("key_dim", MOST_STATES), TaylorAttention: ("num_features", MOST_FEATURES),
}  # fmt: skip


def refuses_states(case: Any) -> str | None:
    """Return why no kernel computes a recurrence; None if one does, and without a case if one computes some."""
    if case is None:
        return None
    states, most = SUMMED.get(type(case), ("state_size", MOST_STATES))
    if getattr(case, states) > most:
        return f"sums are over {getattr(case, states)} numbers of a state; kernels take {most} at most"
    return None


Makers = Mapping[Op[Any], Callable[[Any, Launch], Callable[..., Any]]]
RECURRENCES: Makers = {
    api.SSD: ssd, api.LIGHTNING_ATTENTION: lightning_attention, api.SELECTIVE_SCAN: selective_scan,
    api.DELTA_RULE: delta_rule, api.STATE_SPACE: state_space, api.TAYLOR_ATTENTION: taylor_attention,
}  # fmt: skip
ROWS: Makers = {
    api.SHORT_CONV: short_conv, api.GATED_NORM: gated_norm, api.NORM_GATE: gated_norm, api.MULTIPLY: multiply("none"),
    api.GATE: multiply("silu"), api.SIGMOID_GATE: multiply("sigmoid"),
}  # fmt: skip
