"""The triton backend: ops that our kernels for GPUs serve. The reference backend serves the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ridgeline.ops import api
from ridgeline.ops.api import Backend, Memory, Op, Weights
from ridgeline.ops.reference.backend import open_reference
from ridgeline.ops.triton.launch import Launch, launch
from ridgeline.ops.triton.packing import refuses_format
from ridgeline.ops.triton.products import StoredProduct, refuses_linear


class Kernels(NamedTuple):
    """All kernels of a backend share these: how they are started, and the slices of `products.Dense`."""

    launch: Launch
    slices: int


class Stage(NamedTuple):
    """A stage: why a case has no kernel, or None; and a function that makes the kernel of a case with its weights."""

    refuses: Callable[[Any], str | None]
    make: Callable[[Any, Weights, Kernels], Callable[..., Any]]


def product(case: Any, weights: Weights, kernels: Kernels) -> Callable[..., Any]:
    return StoredProduct(weights.linears["matrix"], kernels.slices, kernels.launch)


STAGES: Mapping[Op[Any], Stage] = {api.PRODUCT: Stage(refuses_format, product)}


class TritonBackend:
    """Kernels over torch's tensors on a GPU.

    Args:
        start: starts kernels. Tests replace it.
        refusal: why no op is served on this device, or None.
        slices: bfloat16 numbers that stand for one number of a token in products with exact activations: 2, or 1 for
            products that are faster and less exact (`quant.bounds.sliced_bound`).
    """

    name = "triton"

    def __init__(self, start: Launch = launch, slices: int = 2, refusal: str | None = None) -> None:
        self._kernels, self._refusal = Kernels(start, slices), refusal

    def refuses(self, op: Op[Any], case: object) -> str | None:
        if self._refusal is not None:
            return self._refusal
        return STAGES[op].refuses(case) if op in STAGES else "no kernel of ours serves it yet"

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        named = [*weights.linears.items(), *((name, m) for name, all in weights.experts.items() for m in all)]
        for name, linear in named:
            if linear.unfused is not None and op is not api.PRODUCT:
                return f"{name} {linear.unfused}"
            if reason := refuses_format(linear.format) or refuses_linear(linear):
                return f"{name}: {reason}"
        return None

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
        raise NotImplementedError(f"the triton backend has no {op.name}")

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        return STAGES[op].make(case, weights, self._kernels)


LEAST_CAPABILITY = 8, 0  # older GPUs have no products of bfloat16


def open_gpu(device: str) -> tuple[Memory, tuple[Backend, ...]]:
    """Return torch's memory on a GPU, and the backends that work on it, best first."""
    found = torch.cuda.get_device_capability(device)
    refusal = None
    if found < LEAST_CAPABILITY:
        wanted, has = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, found))
        refusal = f"kernels need a GPU of compute capability {wanted} or higher, and this one has {has}"
    memory, backends = open_reference(device)
    return memory, (TritonBackend(refusal=refusal), *backends)
