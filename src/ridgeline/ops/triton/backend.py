"""The triton backend: ops that our kernels for GPUs serve. The reference backend serves the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ridgeline.ops import api
from ridgeline.ops.api import Backend, Memory, Op, Weights
from ridgeline.ops.driver import Driver
from ridgeline.ops.reference.backend import open_reference, torch_device
from ridgeline.ops.table import GPU_BACKEND, NO_KERNEL
from ridgeline.ops.torchlib.backend import TorchlibBackend, chosen_ops
from ridgeline.ops.triton import descriptors, experts, latent, mixers, recurrent, routing, stages, state
from ridgeline.ops.triton.descriptors import DescriptorBackend
from ridgeline.ops.triton.launch import CountingLaunch, Launch, launch
from ridgeline.ops.triton.layouts import decode_layout, keep, known
from ridgeline.ops.triton.packing import refuses_format
from ridgeline.ops.triton.paged import paged_attention, refuses_attention
from ridgeline.ops.triton.products import refuses_linear, refuses_together
from ridgeline.ops.triton.record import GpuDriver
from ridgeline.ops.triton.stages import TOGETHER, Stage
from ridgeline.ops.triton.tokens import accept, best, draw, norm, refuses_pages, write_pages

LEAST_CAPABILITY = 8, 0  # older GPUs have no products of bfloat16


class Primitive(NamedTuple):
    """A primitive: why a case has no kernel, or None; and a function that makes the kernel of a case."""

    refuses: Callable[[Any], str | None]
    make: Callable[[Any, Launch], Callable[..., Any]]


def never(case: object) -> None:
    """Refuse nothing."""


PRIMITIVES: Mapping[Op[Any], Primitive] = {
    api.PAGED_ATTENTION: Primitive(refuses_attention, paged_attention),
    api.PAGED_LATENT_ATTENTION: Primitive(latent.refuses_latents, latent.paged_latent_attention),
    api.NORM: Primitive(never, norm),
    api.WRITE_PAGES: Primitive(refuses_pages, write_pages),
    api.BEST: Primitive(never, lambda case, launch: best(launch)),
    api.DRAW: Primitive(never, lambda case, launch: draw(launch)),
    api.ACCEPT: Primitive(never, lambda case, launch: accept(launch)),
    api.READ_STATE: Primitive(never, lambda case, launch: state.read_state),
    api.WRITE_STATE: Primitive(never, lambda case, launch: state.write_state),
    **{op: Primitive(recurrent.refuses_states, make) for op, make in recurrent.RECURRENCES.items()},
    **{op: Primitive(never, make) for op, make in recurrent.ROWS.items()},
    api.ROUTE: Primitive(routing.refuses_route, routing.route),
    api.DECODE_LAYOUT: Primitive(never, lambda case, launch: decode_layout(launch)),
    api.KNOWN_TOKENS: Primitive(never, lambda case, launch: known(launch)),
    api.KEEP_TOKENS: Primitive(never, lambda case, launch: keep(launch)),
}
STAGES: Mapping[Op[Any], Stage] = {
    **stages.STAGES, **latent.STAGES, **experts.STAGES, **mixers.STAGES,
}  # fmt: skip


class TritonBackend:
    """Kernels over torch's tensors on a GPU.

    Args:
        start: starts kernels. Tests replace it.
        refusal: why no op is served on this device, or None.
    """

    name = GPU_BACKEND

    def __init__(self, start: Launch = launch, refusal: str | None = None) -> None:
        self._launch, self._refusal = start, refusal

    def refuses(self, op: Op[Any], case: object) -> str | None:
        if self._refusal is not None:
            return self._refusal
        found = PRIMITIVES.get(op) or STAGES.get(op)
        return NO_KERNEL if found is None else found.refuses(case)

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        for name, linear in weights.linears.items():
            if linear.unfused is not None and op is not api.PRODUCT:
                return f"{name} {linear.unfused}"
            if reason := refuses_format(linear.format) or refuses_linear(linear):
                return f"{name}: {reason}"
        if reason := experts.refuses_experts(weights.experts):
            return reason
        for names in TOGETHER:
            if reason := refuses_together([weights.linears[n] for n in names if n in weights.linears]):
                return f"among matrices that one kernel multiplies with at once, {reason}"
        return None

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
        return PRIMITIVES[op].make(case, self._launch)

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        return STAGES[op].make(case, weights, self._launch)


def open_gpu(device: str, overrides: Mapping[str, str]) -> tuple[Memory, tuple[Backend, ...], Driver]:
    """Return torch's memory on a GPU, the backends that work on it, best first, and what records their steps.

    overrides: as in `open_table`.
    """
    found = torch.cuda.get_device_capability(device)

    def refusal(least: tuple[int, int]) -> str | None:
        wanted, has = (".".join(map(str, version)) for version in (least, found))
        if found >= least:
            return None
        return f"kernels need a GPU of compute capability {wanted} or higher, and this one has {has}"

    memory, backends = open_reference(device)
    start = CountingLaunch()
    ours = (
        TorchlibBackend(chosen_ops(overrides)),
        DescriptorBackend(start, chosen_ops(overrides, descriptors.NAME), refusal(descriptors.LEAST_CAPABILITY)),
        TritonBackend(start, refusal=refusal(LEAST_CAPABILITY)),
    )
    return memory, (*ours, *backends), GpuDriver(torch_device(device), start)
