"""One file per way to store a matrix; each is an ops.api.Linear with a stated error bound."""

from ridgeline.quant.plain import PlainLinear

__all__ = ["PlainLinear"]
