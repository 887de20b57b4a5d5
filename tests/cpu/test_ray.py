"""Engines that actors start: the adapter with actors of this process, and with Ray where it is installed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx
import psutil
import pytest

from cpu.serving import Server, serving, until
from cpu.test_replicas import stream_of
from ridgeline import LLM, SamplingParams, __version__
from ridgeline.dist import ray_cluster, ray_process
from ridgeline.dist.ray_cluster import Machine, connect, opener, share_of
from ridgeline.dist.ray_process import Actors, Hello, RayProcess, Relay
from ridgeline.errors import DeviceError, RequestError
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.serve.engine.client import EngineClient
from ridgeline.serve.engine.messages import HEADER, Chunks, Report, Submit, frame
from ridgeline.serve.engine.meters import EngineMeters

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'ridgeline[ray]'")


class ActorEnded(Exception):
    """Stands for Ray's error."""


class Pipe:
    """An engine process without a process: what the engine gets, and messages that it sends. None: the pipe ends."""

    def __init__(self) -> None:
        self.pid, self.ahead_s, self.shares_cores = 7, 0.0, True
        self.got, self.says = bytearray(), asyncio.Queue[bytes | None]()

    async def read(self) -> bytes:
        if (data := await self.says.get()) is None:
            raise ConnectionError
        return data

    def write(self, data: bytes) -> None:
        self.got += data

    async def end(self, patience_s: float) -> str:
        return " by signal 9"


class Here:
    """Actors in this process. delay_s: time of each call. skew_s: how far their clock is ahead of ours."""

    def __init__(self, version: str = __version__, delay_s: float = 0.0, skew_s: float = 0.0) -> None:
        self.version, self.delay_s, self.skew_s = version, delay_s, skew_s
        self.pipe, self.calls, self.killed, self.ended = Pipe(), list[str](), 0, False
        self.actors = Actors(self._start, self._call, self._messages, self._kill, (ActorEnded,))

    def _start(self) -> Relay:
        relay = Relay()
        relay._process = self.pipe
        return relay

    async def _call(self, relay: Relay, method: str, *args: Any) -> Any:
        await asyncio.sleep(self.delay_s)
        self.calls.append(method)
        if self.ended:
            raise ActorEnded("died\nThe actor is dead.")
        if method == "start":
            return Hello(self.pipe.pid, self.version)
        if method == "clock":
            return await relay.clock() + self.skew_s
        return await getattr(relay, method)(*args)

    async def _messages(self, relay: Relay) -> AsyncIterator[list[bytes]]:
        async for found in relay.messages():
            if self.ended:
                raise ActorEnded
            yield found

    def _kill(self, relay: Relay) -> None:
        self.killed += 1


def test_messages_pass_in_order_in_both_directions() -> None:
    """Writes that meet a call on its way are joined, and an engine that ends ends the pipe after its last message."""

    async def run() -> None:
        here = Here(delay_s=0.005)
        process = await RayProcess.start(here.actors)
        assert process.pid == 7 and process.ahead_s == 0.0
        sent = [struct.pack("<I", i) for i in range(200)]
        for data in sent:
            process.write(data)
        await process._writing  # type: ignore[misc]
        assert bytes(here.pipe.got) == b"".join(sent) and here.calls.count("write") <= 2
        for i in range(50):
            here.pipe.says.put_nowait(b"%d" % i)
        here.pipe.says.put_nowait(None)
        assert [await process.read() for _ in range(50)] == [b"%d" % i for i in range(50)]
        with pytest.raises(ConnectionError, match="engine process ended"):
            await process.read()
        assert await process.end(0.0) == " by signal 9" and here.killed == 1

    asyncio.run(run())


def test_an_actor_that_ends_is_an_engine_that_ends() -> None:
    async def run() -> None:
        here = Here()
        process = await RayProcess.start(here.actors)
        here.ended = True
        here.pipe.says.put_nowait(b"lost")
        process.write(b"lost")
        with pytest.raises(ConnectionError, match="actor"):
            await process.read()
        assert await process.end(0.0) == " with its actor" and here.killed == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("here", "says"),
    (
        ({"version": "0.0.9"}, "that machine has Ridgeline 0.0.9"),
        ({"delay_s": 9.0}, "no machine of the cluster had room"),
        ({"ended": True}, "its actor failed: The actor is dead."),
    ),
)
def test_an_engine_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, here: dict[str, Any], says: str) -> None:
    monkeypatch.setattr(ray_process, "PLACE_SECONDS", 0.05)

    async def run() -> None:
        given = dict(here)
        ended = given.pop("ended", False)
        actors = Here(**given)
        actors.ended = ended
        with pytest.raises(OSError, match=says):
            await RayProcess.start(actors.actors)
        assert actors.killed == 1

    asyncio.run(run())


def test_times_follow_the_clock_of_the_machine() -> None:
    """The engine gets times of its own clock, and the server gets back times of its own."""

    async def run() -> None:
        here = Here(skew_s=5000.0)
        client = EngineClient("pocket", {}, lambda loading: None)
        client._process = await RayProcess.start(here.actors)
        client._ahead_s, client.state = client._process.ahead_s, "ready"
        now = time.perf_counter()
        request = GenerationRequest([1], SamplingParams(), ())
        answers = client.submit([request], now, stream=True, on_done=lambda: None)
        await client._process._writing  # type: ignore[attr-defined]
        assert bytes(here.pipe.got) == frame(Submit(0, request, now + client._ahead_s, True))
        assert abs(client._ahead_s - 5000.0) < 0.5 and len(here.pipe.got) > HEADER.size
        client._take(Chunks(now + client._ahead_s, [(0, (0, "a", (1,), (), None, None, None, None))], False))
        answers.take()
        assert answers.committed == pytest.approx(now)
        got, client._shares_cores = len(here.pipe.got), client._process.shares_cores
        client._take(Chunks(now, [], True))  # a local engine would be told that all is written
        assert not client._shares_cores and len(here.pipe.got) == got and client._process._writing.done()  # type: ignore[attr-defined]
        asked = asyncio.create_task(client.report())
        await asyncio.sleep(0)
        meters = EngineMeters()
        meters.ttft.observe(0.25)
        meters.move(client._ahead_s)
        assert meters.ttft.recent(now) is not None  # far ahead: never old enough to be left out
        assert meters.ttft.recent(now + 3000) is not None
        client._take(Report(1, None, meters))
        found = (await asked).meters.ttft
        assert found.recent(now) is not None and found.recent(now + 3000) is None

    asyncio.run(run())


TWO = (Machine(8, 0), Machine(16, 0))


@pytest.mark.parametrize(
    ("options", "replicas", "machines", "wanted"),
    (
        ({}, 2, TWO, ("cpu", 1, 8, 0)),
        ({}, 4, TWO, ("cpu", 2, 4, 0)),
        ({"device": "reference"}, 1, TWO, ("reference", 1, 8, 0)),
        ({}, 4, (Machine(2, 0),), ("cpu", 4, 0.5, 0)),
        ({"threads": 3, "tensor_parallel_size": 2}, 3, TWO, ("cpu", 2, 6, 0)),
        ({}, 3, (Machine(8, 4),), ("cuda", None, 1, 1)),
        ({"device": "cpu"}, 3, (Machine(8, 4),), ("cpu", 3, 2, 0)),
    ),
)
def test_replicas_share_the_machines(
    options: dict[str, Any], replicas: int, machines: Sequence[Machine], wanted: tuple[Any, ...]
) -> None:
    found = share_of(options, replicas, machines)
    assert (found.options["device"], found.options.get("sharing"), found.cpus, found.gpus) == wanted
    assert options.items() <= (found.options | {k: v for k, v in options.items() if k == "device"}).items()


def test_bad_input_of_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"^--ray needs Ray: pip install 'ridgeline\[ray\]'$"):
        opener("local", 2)
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: name)
    with pytest.raises(RequestError, match="--ray is ray://host:10001; give HOST:PORT"):
        opener("ray://host:10001", 2)
    with pytest.raises(RequestError, match="--replicas is 0"):
        opener("local", 0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = f"127.0.0.1:{free.getsockname()[1]}"
    for address, says in (("nowhere", "it must be HOST:PORT, auto or local"), (closed, "start a head node there")):
        with pytest.raises(RequestError, match=says):
            connect(address)
    for options, machines, says in (
        ({}, (), "Ray may use no core"),
        ({"threads": 9}, TWO, "room for 1 with 9 threads"),
        ({"device": "cuda"}, TWO, "the cluster has 0 GPUs"),
    ):
        with pytest.raises(DeviceError, match=says):
            share_of(options, 2, machines)
    with pytest.raises(RequestError, match="--device is cuda:1"):
        share_of({"device": "cuda:1"}, 2, TWO)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("pocket", "--ray", "local", "--replicas", "2", "--max-num-seqs", "16", start_s=240) as server:
        yield server


def _engines(server: Server) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in found if "ridgeline.serve.engine.worker" in each.cmdline()]


@NEEDS_RAY
@pytest.mark.slow
def test_ray_listens_on_the_loopback_address_only(server: Server) -> None:
    """Each port of Ray, of its workers and of the server is out of reach of other machines."""
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    open_at = {c.laddr.ip for p in family for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert open_at and open_at <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert not any(c.laddr.port == 8265 for p in family for c in p.net_connections("inet"))  # the dashboard


@NEEDS_RAY
@pytest.mark.slow
def test_nobody_notices_that_an_engine_or_an_actor_is_killed(server: Server) -> None:
    """kill -9 of an engine, then of an actor, while ten streams run: no error, and the bits of a run without."""
    with ThreadPoolExecutor(10) as pool, httpx.Client(base_url=server.url, timeout=240) as client:
        wanted = list(pool.map(lambda i: stream_of(client, i), range(10)))
        for kills_actor in (False, True):
            running = [pool.submit(stream_of, client, i) for i in range(10)]
            moved = server.metric("ridgeline:replica_moved_total")
            until(lambda: server.metric("vllm:num_requests_running") >= 4)
            engine = _engines(server)[0]
            (engine.parent() if kills_actor else engine).send_signal(signal.SIGKILL)  # type: ignore[union-attr]
            assert [r.result() for r in running] == wanted
            assert server.metric("ridgeline:replica_moved_total") > moved
            until(lambda: all(each["state"] == "ready" for each in server.ask("GET", "/live")[1]["replicas"]), 300)
    (output,) = LLM("pocket").generate(
        "def f0(", SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, repetition_penalty=1.1)
    )
    assert wanted[0][0][0] == output.outputs[0].text


@NEEDS_RAY
@pytest.mark.slow
@pytest.mark.parametrize("number", (signal.SIGTERM, signal.SIGKILL))
def test_nothing_of_ray_is_left(number: int) -> None:
    """Its processes end with the server, also when it is killed; a stopped server removes Ray's folder too."""
    server = Server("pocket", "--ray", "local", start_s=240)
    family = psutil.Process(server.process.pid).children(recursive=True)
    (raylet,) = (each for each in family if each.name() == "raylet")
    folder = next(a.partition("=")[2] for a in raylet.cmdline() if a.startswith("--session_dir=")).rpartition("/")[0]
    assert os.path.isdir(folder)  # noqa: PTH112 - a path in an argument
    server.stop(number)
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family), 30)
    assert number == signal.SIGKILL or not os.path.exists(folder)  # noqa: PTH110
