"""Connect to a Ray cluster, or start Ray on this machine alone, and serve a model with engines on its machines."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ridgeline.dist.fleet import Fleet
from ridgeline.dist.local import check_replicas
from ridgeline.dist.ray_process import Actors, RayProcess, Relay, lines_of
from ridgeline.errors import DeviceError, RequestError
from ridgeline.ops.table import CPU, REFERENCE
from ridgeline.runtime.ranks import check_ranks
from ridgeline.serve.engine.client import EngineClient
from ridgeline.serve.engine.messages import Loading
from ridgeline.serve.engine.watch import Patience
from ridgeline.serve.server import MAX_PORT, OpenEngine

LOCAL = "local"  # the address that starts Ray on this machine
AUTO = "auto"  # the address of the cluster that runs on this machine
REACH_SECONDS = 5.0  # for the head node to accept a connection; Ray itself waits for more than a minute
SOCKETS = "/tmp" if os.name == "posix" else None  # Ray's sockets lie below, and their paths may have about 100 bytes
CORE_PARTS = 10_000  # into which Ray divides a core
STORE_BYTES = 128 << 20  # of Ray's object store here; messages are small and rarely use it
# Ray on this machine alone: no reports of use, ports on the loopback address, and a token that each call must have.
# Ray has no option for the loopback address. It takes it where clusters are off, as on macOS and Windows by default.
LOOPBACK_ONLY = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}


@dataclass(frozen=True, slots=True)
class Machine:
    """The cores and GPUs of one machine that Ray may use."""

    cpus: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Share:
    """Share of a replica: arguments of LLM, and the cores and GPUs that Ray reserves for it."""

    options: Mapping[str, Any]
    cpus: float
    gpus: int


class RayFleet(Fleet):
    """Replicas on the machines of a Ray cluster. Closing it leaves the cluster, or ends the Ray that was started."""

    def __init__(self, clients: Sequence[EngineClient], leave: Callable[[], None]) -> None:
        super().__init__(clients)
        self._leave = leave

    async def close(self) -> None:
        """End all engines and every open request, then leave Ray. May be called again."""
        await super().close()
        await asyncio.to_thread(self._leave)


def opener(address: str, replicas: int) -> OpenEngine:
    """Return a function that opens replicas on a Ray cluster.

    address: HOST:PORT of the cluster, "auto" for the one that runs here, or "local", which starts Ray on this machine
    alone. Raises RequestError without Ray.
    """
    check_replicas(replicas)
    if find_spec("ray") is None:
        raise RequestError("--ray needs Ray: pip install 'ridgeline[ray]'")
    if "://" in address:
        raise RequestError(
            f"--ray is {address}; give HOST:PORT of a cluster that this machine belongs to (`ray start`), or local"
        )

    def fleet(
        model: str, options: Mapping[str, Any], on_loading: Callable[[Loading], None], patience: Patience
    ) -> RayFleet:
        leave = connect(address)
        try:
            return RayFleet(clients_of(model, options, replicas, on_loading, patience), leave)
        except BaseException:
            leave()
            raise

    return fleet


def clients_of(
    model: str, options: Mapping[str, Any], replicas: int, on_loading: Callable[[Loading], None], patience: Patience
) -> list[EngineClient]:
    """Return the engines on a cluster that this process has connected to. Raises RequestError, DeviceError."""
    share = share_of(options, replicas, machines())
    start = functools.partial(RayProcess.start, actors_of(share))
    return [EngineClient(model, share.options, on_loading, patience, start) for _ in range(replicas)]


def connect(address: str) -> Callable[[], None]:
    """Connect to a cluster; return the function that leaves it. Raises RequestError."""
    folder = None
    if address not in (LOCAL, AUTO):
        _check_reachable(address)
    if address == LOCAL:
        folder = tempfile.mkdtemp(prefix="ridgeline-ray-", dir=SOCKETS)
        os.environ.update(LOOPBACK_ONLY)
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    import ray

    def leave() -> None:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    with contextlib.ExitStack() as undo:
        undo.callback(leave)  # also after Ctrl-C
        try:
            if folder is not None:
                ray.init(
                    address=LOCAL, include_dashboard=False, object_store_memory=STORE_BYTES, _temp_dir=folder,
                    logging_level=logging.ERROR,
                )  # fmt: skip
            else:
                ray.init(address=address, logging_level=logging.ERROR)
        except (TypeError, AttributeError):  # Ray's functions have changed: no address helps
            raise
        except Exception as e:  # Ray raises Exception itself where its processes start too slowly
            raise RequestError(
                f"--ray {address:.200}: {lines_of(e)[0]:.300}; give HOST:PORT of a cluster that this machine belongs "
                "to, or local"
            ) from None
        undo.pop_all()
    return leave


def _check_reachable(address: str) -> None:
    """Raise RequestError for an address that is not HOST:PORT, or where nobody listens."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > len(str(MAX_PORT)) or int(port) > MAX_PORT:
        raise RequestError(
            f"--ray is {address:.200}; it must be HOST:PORT, {AUTO} or {LOCAL}, and a port is at most {MAX_PORT}"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, UnicodeError) as e:
        raise RequestError(
            f"--ray is {address:.200}: {e}; start a head node there (`ray start --head --port {port}`), or use {LOCAL}"
        ) from None


def machines() -> list[Machine]:
    """Return the machines of the cluster on which Ray may run something."""
    import ray

    found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [Machine(one["CPU"], one.get("GPU", 0)) for one in found if one.get("CPU", 0) >= 1]


def share_of(options: Mapping[str, Any], replicas: int, machines: Sequence[Machine]) -> Share:
    """Return what each replica gets. Replicas are spread over the machines; each machine is shared by its replicas.

    options: arguments of LLM. Raises RequestError, DeviceError for a cluster without room.
    """
    device, ranks = options.get("device") or "auto", options.get("tensor_parallel_size", 1)
    check_ranks(ranks, CPU)  # the engine checks the device, on its machine
    if not machines:
        raise DeviceError("--ray: Ray may use no core of any machine of this cluster; add machines (`ray status`)")
    gpus = sum(int(each.gpus) for each in machines)
    if device == "auto":
        device = "cuda" if gpus else CPU
    if device not in (CPU, REFERENCE):
        if device != "cuda":
            what = "which is one GPU" if device.startswith("cuda:") else "which is unknown"
            raise RequestError(f"--device is {device:.100}, {what}; with --ray use auto, {CPU}, {REFERENCE} or cuda")
        if replicas > gpus:
            raise DeviceError(f"--replicas is {replicas}, but the cluster has {gpus} GPUs; each replica needs one")
        return Share({**options, "device": device}, 1, 1)
    sharing = math.ceil(replicas / len(machines))
    cores = math.floor(min(each.cpus for each in machines)) / sharing
    cores = math.floor(cores) or math.floor(cores * CORE_PARTS) / CORE_PARTS  # Ray takes no 1.5 cores
    if (threads := options.get("threads")) is not None:
        if threads < 1:
            most = math.floor(max(each.cpus for each in machines))
            raise DeviceError(f"threads is {threads}; set --threads from 1 to {most}, the cores of the largest machine")
        cores = threads * ranks
        room = sum(int(each.cpus // cores) for each in machines)
        if replicas > room:
            raise DeviceError(
                f"--replicas is {replicas}, but the cluster has room for {room} with {cores} threads each; use fewer "
                "--replicas or --threads"
            )
    kept = {"device": device, "sharing": sharing, "most_threads": max(1, math.floor(cores) // ranks)}
    return Share({**options, **kept}, cores, 0)


def actors_of(share: Share) -> Actors:
    """Return what starts and ends the actors of replicas."""
    import ray

    placed = ray.remote(Relay).options(num_cpus=share.cpus, num_gpus=share.gpus, scheduling_strategy="SPREAD")

    def call(actor: Any, method: str, *args: Any) -> Awaitable[Any]:
        answer: Awaitable[Any] = getattr(actor, method).remote(*args)
        return answer

    return Actors(placed.remote, call, _messages, ray.kill, (ray.exceptions.RayError,))


async def _messages(actor: Any) -> AsyncIterator[list[bytes]]:
    async for found in actor.messages.options(num_returns="streaming").remote():
        yield await found
