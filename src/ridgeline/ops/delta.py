"""The gated delta rule as compositions of primitives, in both of its forms."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.ops import api
from ridgeline.ops.api import Array, Weights
from ridgeline.ops.parts import Arrays, Parts, Primitives
from ridgeline.spec import GatedDelta, KimiDelta


def gated_delta(case: GatedDelta, weights: Weights, table: Primitives) -> Parts:
    """Return the three parts of a mixer with its weights."""
    linears = weights.linears
    return _delta(case, linears["decay"].apply, linears["gate"].apply, weights, table)


def kimi_delta(case: KimiDelta, weights: Weights, table: Primitives) -> Parts:
    """Return the three parts of a mixer with its weights."""
    decay_a, decay_b, gate_a, gate_b = (weights.linears[n] for n in ("decay_a", "decay_b", "gate_a", "gate_b"))
    return _delta(
        case, lambda x: decay_b.apply(decay_a.apply(x)), lambda x: gate_b.apply(gate_a.apply(x)), weights, table
    )


def _delta(
    case: GatedDelta | KimiDelta,
    decay: Callable[[Array], Array],
    gate: Callable[[Array], Array],
    weights: Weights,
    table: Primitives,
) -> Parts:
    conv, act = table.primitive(api.SHORT_CONV), table.primitive(api.ACTIVATION, case)
    rule, norm_gate = table.primitive(api.DELTA_RULE, case), table.primitive(api.NORM_GATE, case)
    linears, arrays = weights.linears, weights.arrays
    filters = [arrays[f"{name}_conv.weight"] for name in "qkv"]

    def before(x: Array) -> tuple[Arrays, Array]:
        return (*(linears[f"in_{name}"].apply(x) for name in "qkv"), decay(x), linears["beta"].apply(x)), gate(x)

    def along(inputs: Arrays, states: Arrays, lengths: Array) -> tuple[Array, Arrays]:
        qkv, seen = [], []
        for x, state, weight in zip(inputs[:3], states[:3], filters, strict=True):
            y, left = conv(x, state, weight, None, lengths)
            qkv.append(act(y))
            seen.append(left)
        y, h = rule(*qkv, *inputs[3:], arrays["A_log"], arrays["dt_bias"], states[3], lengths)
        return y, (*seen, h)

    return Parts(before, along, lambda y, z: linears["out"].apply(norm_gate(y, z, arrays["gate_norm.weight"])))
