"""All primitives that have kernels."""

from __future__ import annotations

from ridgeline.ops.cpu import (
    attention,
    elementwise,
    experts,
    indexed,
    latent,
    linear,
    low_rank,
    recurrent,
    state,
    state_space,
    tokens,
)
from ridgeline.ops.cpu.kernel import Kernels

KERNELS: Kernels = {
    **linear.KERNELS, **attention.KERNELS, **latent.KERNELS, **indexed.KERNELS, **recurrent.KERNELS,
    **state_space.KERNELS,
    **state.KERNELS, **elementwise.KERNELS, **low_rank.KERNELS, **experts.KERNELS, **tokens.KERNELS,
}  # fmt: skip
