"""The real-gated linear recurrent unit as a composition of primitives; see `ops.parts.Parts` for its three parts."""

from __future__ import annotations

from ridgeline.ops import api
from ridgeline.ops.api import Array, Weights
from ridgeline.ops.parts import Arrays, Parts, Primitives
from ridgeline.spec import GatedLRU


def gated_lru(case: GatedLRU, weights: Weights, table: Primitives) -> Parts:
    conv, product = table.primitive(api.SHORT_CONV), table.primitive(api.BLOCK_LINEAR)
    scan, act = table.primitive(api.GATED_LRU, case), table.primitive(api.ACTIVATION, case)
    multiply, linears, arrays = table.primitive(api.MULTIPLY), weights.linears, weights.arrays

    def before(x: Array) -> tuple[Arrays, Array]:
        return (linears["in"].apply(x),), linears["gate"].apply(x)

    def along(inputs: Arrays, states: Arrays, lengths: Array) -> tuple[Array, Arrays]:
        x, seen = conv(inputs[0], states[0], arrays["conv.weight"], arrays["conv.bias"], lengths)
        gates = (product(x, arrays[f"{n}.weight"], arrays[f"{n}.bias"]) for n in ("input_gate", "decay_gate"))
        y, begun, h = scan(x, *gates, arrays["decay"], states[1], states[2], lengths)
        return y, (seen, begun, h)

    return Parts(before, along, lambda y, gate: linears["out"].apply(multiply(y, act(gate))))
