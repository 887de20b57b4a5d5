"""Recurrent mixers as compositions of primitives. See `ops.parts.Parts` for the three parts of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ridgeline.ops import api
from ridgeline.ops.api import Array, Weights
from ridgeline.ops.delta import gated_delta, kimi_delta
from ridgeline.ops.lru import gated_lru
from ridgeline.ops.parts import Arrays, Parts, Primitives
from ridgeline.spec import (
    S4,
    S4D,
    GatedConvolution,
    GatedDelta,
    GatedLRU,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    RecurrentMixer,
    ShortConvolution,
    TaylorAttention,
)


def bind_mixer(case: RecurrentMixer, weights: Weights, table: Primitives) -> Parts:
    """Return the three parts of a mixer with its weights."""
    return _KINDS[type(case)](case, weights, table)


def input_matrices(case: RecurrentMixer) -> tuple[str, ...]:
    """Return the names of the matrices that multiply the block's input; a backend may pack them as one."""
    return case.inputs


def _mamba(case: Mamba, weights: Weights, table: Primitives) -> Parts:
    split, conv = table.primitive(api.SPLIT), table.primitive(api.SHORT_CONV)
    act, gate = table.primitive(api.ACTIVATION, case), table.primitive(api.GATE)
    scan = table.primitive(api.SELECTIVE_SCAN, case)
    sizes = (case.dt_rank, case.state_size, case.state_size)
    norms = [inner_norm(case, name, size, weights, table) for name, size in zip(("dt", "b", "c"), sizes, strict=True)]
    linears, arrays = weights.linears, weights.arrays

    def before(x: Array) -> tuple[Arrays, Array]:
        x, z = split(linears["in"].apply(x), (case.inner_size, case.inner_size))
        return (x,), z

    def along(inputs: Arrays, states: Arrays, lengths: Array) -> tuple[Array, Arrays]:
        x, seen = conv(inputs[0], states[0], arrays["conv.weight"], weights.vector("conv.bias"), lengths)
        x = act(x)
        dt, b, c = (norm(part) for norm, part in zip(norms, split(linears["x"].apply(x), sizes), strict=True))
        y, h = scan(x, linears["dt"].apply(dt), arrays["A_log"], b, c, arrays["D"], states[1], lengths)
        return y, (seen, h)

    return Parts(before, along, lambda y, z: linears["out"].apply(gate(y, z)))


def inner_norm(case: Mamba, name: str, size: int, weights: Weights, table: Primitives) -> Callable[[Array], Array]:
    """Return the norm of dt, b or c before they are used."""
    if case.inner_norm is None:
        return lambda x: x
    kernel = table.primitive(api.NORM, case.inner_norm)
    ones = np.ones(size, np.float32)
    weighted = case.inner_norm_weights
    weight = weights.arrays[f"{name}_norm.weight"] if weighted else table.memory.put(ones, "float32", "float32")
    return lambda x: kernel(x, weight, None)


def _mamba2(case: Mamba2, weights: Weights, table: Primitives) -> Parts:
    split, conv = table.primitive(api.SPLIT), table.primitive(api.SHORT_CONV)
    act, scaled, gated = table.primitive(api.ACTIVATION, case), _input_scales(case, table), _gated(case, weights, table)
    ssd = table.primitive(api.SSD, case)
    linears, arrays = weights.linears, weights.arrays
    shared = case.num_groups * case.state_size

    def before(x: Array) -> tuple[Arrays, Array]:
        z, xbc, dt = scaled(*split(linears["in"].apply(x), (case.inner_size, case.conv_channels, case.num_heads)))
        return (xbc, dt), z

    def along(inputs: Arrays, states: Arrays, lengths: Array) -> tuple[Array, Arrays]:
        xbc, dt = inputs
        xbc, seen = conv(xbc, states[0], arrays["conv.weight"], weights.vector("conv.bias"), lengths)
        x, b, c = split(act(xbc), (case.inner_size, shared, shared))
        y, h = ssd(x, dt, arrays["dt_bias"], arrays["A_log"], b, c, arrays["D"], states[1], lengths)
        return y, (seen, h)

    return Parts(before, along, lambda y, z: linears["out"].apply(gated(y, z)))


def _gated(case: Mamba2, weights: Weights, table: Primitives) -> Callable[[Array, Array], Array]:
    """Return the function of y and z whose result Mamba-2 projects: y silu(z), with a norm where the mixer has one."""
    if case.norm is None:
        return table.primitive(api.GATE)
    norm, weight = table.primitive(api.GATED_NORM, case), weights.arrays["gate_norm.weight"]
    return lambda y, z: norm(y, z, weight)


def _input_scales(case: Mamba2, table: Primitives) -> Callable[[Array, Array, Array], Arrays]:
    """Return the function that multiplies z, the joined x, B and C, and dt by the factors of Mamba-2."""
    if case.input_scales is None:
        return lambda *inputs: inputs
    split, scale, join = table.primitive(api.SPLIT), table.primitive(api.SCALE), table.primitive(api.JOIN)
    of_z, *of_xbc, of_dt = case.input_scales
    shared = case.num_groups * case.state_size

    def run(z: Array, xbc: Array, dt: Array) -> Arrays:
        parts = split(xbc, (case.inner_size, shared, shared))
        x, b, c = (scale(part, factor) for part, factor in zip(parts, of_xbc, strict=True))
        return scale(z, of_z), join(join(x, b), c), scale(dt, of_dt)

    return run


def _short_convolution(case: ShortConvolution, weights: Weights, table: Primitives) -> Parts:
    split, conv = table.primitive(api.SPLIT), table.primitive(api.SHORT_CONV)
    multiply, sizes = table.primitive(api.MULTIPLY), (case.channels,) * 3
    linears, arrays = weights.linears, weights.arrays

    def before(x: Array) -> tuple[Arrays, Array]:
        b, c, x = split(linears["in"].apply(x), sizes)
        return (multiply(b, x),), c

    def along(inputs: Arrays, states: Arrays, lengths: Array) -> tuple[Array, Arrays]:
        y, seen = conv(inputs[0], states[0], arrays["conv.weight"], weights.vector("conv.bias"), lengths)
        return y, (seen,)

    return Parts(before, along, lambda y, c: linears["out"].apply(multiply(c, y)))


def _gated_convolution(case: GatedConvolution, weights: Weights, table: Primitives) -> Parts:
    split, conv = table.primitive(api.SPLIT), table.primitive(api.SHORT_CONV)
    act, multiply = table.primitive(api.ACTIVATION, case), table.primitive(api.MULTIPLY)
    linears, arrays = weights.linears, weights.arrays

    def before(x: Array) -> tuple[Arrays, Array]:
        x, gate = split(linears["in"].apply(x), (case.channels,) * 2)
        return (x,), gate

    def along(inputs: Arrays, states: Arrays, lengths: Array) -> tuple[Array, Arrays]:
        y, seen = conv(inputs[0], states[0], arrays["conv.weight"], weights.vector("conv.bias"), lengths)
        return act(y), (seen,)

    return Parts(before, along, lambda y, gate: linears["out"].apply(multiply(y, gate)))


def _taylor_attention(case: TaylorAttention, weights: Weights, table: Primitives) -> Parts:
    attend, linears = table.primitive(api.TAYLOR_ATTENTION, case), weights.linears

    def before(x: Array) -> tuple[Arrays, Array]:
        return tuple(linears[name].apply(x) for name in "qkv"), x

    def along(inputs: Arrays, states: Arrays, lengths: Array) -> tuple[Array, Arrays]:
        q, k, v = inputs
        y, sums = attend(q, k, v, states[0], lengths)
        return y, (sums,)

    return Parts(before, along, lambda y, x: linears["o"].apply(y))


def _lightning_attention(case: LightningAttention, weights: Weights, table: Primitives) -> Parts:
    attend, act = table.primitive(api.LIGHTNING_ATTENTION, case), table.primitive(api.ACTIVATION, case)
    heads, cut = table.primitive(api.SPLIT_HEADS), table.primitive(api.CUT)
    norm, gated = table.primitive(api.NORM, case.norm), table.primitive(api.SIGMOID_GATE)
    linears, weight, size = weights.linears, weights.arrays["out_norm.weight"], case.head_dim

    def before(x: Array) -> tuple[Arrays, Array]:
        qkv = heads(act(linears["qkv"].apply(x)), case.num_heads)
        return tuple(cut(qkv, i * size, (i + 1) * size) for i in range(3)), linears["gate"].apply(x)

    def along(inputs: Arrays, states: Arrays, lengths: Array) -> tuple[Array, Arrays]:
        q, k, v = inputs
        y, h = attend(q, k, v, states[0], lengths)
        return y, (h,)

    return Parts(before, along, lambda y, z: linears["out"].apply(gated(norm(y, weight, None), z)))


def _state_space(case: S4 | S4D, weights: Weights, table: Primitives) -> Parts:
    scan, act = table.primitive(api.STATE_SPACE, case), table.primitive(api.ACTIVATION, case)
    split, gated, sizes = table.primitive(api.SPLIT), table.primitive(api.SIGMOID_GATE), (case.channels,) * 2
    low_rank = ("P", "B") if isinstance(case, S4) else ()
    system = [weights.arrays[name] for name in ("log_dt", "A_log", "A_imag", *low_rank, "C", "D")]

    def along(inputs: Arrays, states: Arrays, lengths: Array) -> tuple[Array, Arrays]:
        y, h = scan(inputs[0], *system, states[0], lengths)
        return y, (h,)

    def after(y: Array, x: Array) -> Array:
        a, b = split(weights.linears["out"].apply(act(y)), sizes)
        return gated(a, b)

    return Parts(lambda x: ((x,), x), along, after)


# A kind of mixer -> the function that composes its parts.
_KINDS: Mapping[type[RecurrentMixer], Callable[[Any, Weights, Primitives], Parts]] = {
    Mamba: _mamba,
    Mamba2: _mamba2,
    ShortConvolution: _short_convolution,
    GatedConvolution: _gated_convolution,
    TaylorAttention: _taylor_attention,
    LightningAttention: _lightning_attention,
    S4: _state_space,
    S4D: _state_space,
    GatedDelta: gated_delta,
    KimiDelta: kimi_delta,
    GatedLRU: gated_lru,
}
