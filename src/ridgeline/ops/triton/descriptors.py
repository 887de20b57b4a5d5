"""Attention over pages that loads keys and values through tensor descriptors (TMA): the backend `descriptors`.

It is the kernel of the triton backend with other loads, and gives the same bits. Nobody has measured which of the two
is faster, so it serves only users who name it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from ridgeline.errors import DeviceError
from ridgeline.ops import api
from ridgeline.ops.api import Op, Weights
from ridgeline.ops.table import NO_KERNEL
from ridgeline.ops.triton.launch import Launch
from ridgeline.ops.triton.paged import LARGEST_KEPT, LEAST_COLUMNS, paged_attention, refuses_attention
from ridgeline.spec import Attention

NAME = "descriptors"
LEAST_CAPABILITY = 9, 0  # older GPUs have no unit that copies tiles


class DescriptorBackend:
    """PAGED_ATTENTION through tensor descriptors.

    Args:
        chosen: names of the ops that the user gave to this backend (`--ops paged_attention=descriptors`).
        refusal: why no op is served on this device, or None.
    """

    name = NAME

    def __init__(self, start: Launch, chosen: Collection[str] = (), refusal: str | None = None) -> None:
        self._launch, self._chosen, self._refusal = start, frozenset(chosen), refusal

    def refuses(self, op: Op[Any], case: Any) -> str | None:
        if op is not api.PAGED_ATTENTION:
            return NO_KERNEL
        if self._refusal is not None:
            return self._refusal
        if isinstance(case, Attention):
            size = case.head_dim
            if size & (size - 1) or not LEAST_COLUMNS <= size <= LARGEST_KEPT:
                return (
                    f"heads have {size} numbers; descriptors read powers of two from {LEAST_COLUMNS} to {LARGEST_KEPT}"
                )
            if reason := refuses_attention(case):
                return reason
        if op.name not in self._chosen:
            return f"nobody has measured it; --ops {op.name}={NAME} chooses it, for pages of 64 tokens and more"
        return None

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        return NO_KERNEL

    def primitive(self, op: Op[Any], case: Any) -> Callable[..., Any]:
        return paged_attention(case, self._launch, described=True)

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        raise DeviceError(f"{op.name}: {NO_KERNEL}")
