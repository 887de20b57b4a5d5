"""Activation functions inside of kernels."""

import triton
import triton.language as tl

from ridgeline.ops.triton.numbers import tanh


@triton.jit
def sigmoid(x):
    """Return the logistic function of x, float32."""
    return tl.div_rn(1.0, 1.0 + tl.exp(-x))


@triton.jit
def activated(x, NAME: tl.constexpr):
    """Return an activation of x, float32, by its name in `spec.activation`."""
    if NAME == "silu":
        found = tl.div_rn(x, 1.0 + tl.exp(-x))
    elif NAME == "gelu":
        found = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        found = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        found = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        if NAME == "relu2":
            found = found * found
    return found


@triton.jit
def clamped_swiglu(gate, up, alpha, limit):
    """Return `spec.mlp.ClampedSwiGLU` of two numbers, float32. NaN stays NaN."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate * sigmoid(alpha * gate) * (up + 1.0)
