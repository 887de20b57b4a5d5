"""Replicas on this machine: one engine process each, which share its cores and its memory or have a GPU each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.dist.fleet import Fleet
from ridgeline.errors import DeviceError, RequestError
from ridgeline.ops.devices import devices, resolve_device
from ridgeline.ops.table import CPU, REFERENCE
from ridgeline.serve.engine.client import EngineClient
from ridgeline.serve.engine.handle import EngineHandle
from ridgeline.serve.engine.messages import Loading
from ridgeline.serve.engine.watch import Patience
from ridgeline.serve.server import OpenEngine

MAX_REPLICAS = 256


def opener(options: Mapping[str, Any], replicas: int) -> OpenEngine:
    """Return a function that opens the engine, or the replicas, that serve a model.

    options: arguments of LLM. Raises RequestError, DeviceError for replicas that this machine has no device for.
    """
    each = options_of_replicas(options, replicas)
    if replicas == 1:
        return EngineClient

    def fleet(
        model: str, options: Mapping[str, Any], on_loading: Callable[[Loading], None], patience: Patience
    ) -> EngineHandle:
        return Fleet([EngineClient(model, own, on_loading, patience) for own in each])

    return fleet


def check_replicas(replicas: int) -> None:
    """Raise RequestError for a number of replicas that is not possible."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise RequestError(f"--replicas is {replicas}; it must be 1 to {MAX_REPLICAS}")


def options_of_replicas(options: Mapping[str, Any], replicas: int) -> list[dict[str, Any]]:
    """Return the arguments of LLM for each replica."""
    check_replicas(replicas)
    if replicas == 1:
        return [dict(options)]
    device = resolve_device(options.get("device", "auto"))
    if device in (CPU, REFERENCE):
        return [{**options, "device": device, "sharing": replicas} for _ in range(replicas)]
    found = [each.name for each in devices() if each.name.startswith("cuda")]
    if options.get("device") not in (None, "auto", "cuda"):
        raise RequestError(f"--replicas is {replicas}, and --device {options['device']} is one GPU; use --device cuda")
    if replicas > len(found):
        raise DeviceError(f"--replicas is {replicas}, but this machine has {len(found)} GPUs; each replica needs one")
    return [{**options, "device": name} for name in found[:replicas]]
