"""Engines that actors start: the adapter with actors of this process, and with Ray where it is installed."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
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
from ridgeline.ops.devices import threads_of
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.serve.engine.client import EngineClient
from ridgeline.serve.engine.messages import HEADER, Chunks, Report, Submit, frame
from ridgeline.serve.engine.meters import EngineMeters

# Where RIDGELINE_TESTS_RAY is set, as in .ci/nightly, these tests fail without Ray.
NEEDS_RAY = pytest.mark.skipif(
    find_spec("ray") is None and "RIDGELINE_TESTS_RAY" not in os.environ,
    reason="Ray is not installed: pip install 'ridgeline[ray]'",
)


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
        self.broken: dict[str, Exception] = {}  # errors of the next calls of methods
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
        if method in self.broken:
            raise self.broken.pop(method)
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


async def written(process: RayProcess) -> None:
    """Wait until all messages to the engine are on its machine."""
    assert process._writing is not None
    await process._writing


def test_messages_pass_in_order_in_both_directions() -> None:
    """Writes that meet a call on its way are joined, and an engine that ends ends the pipe after its last message."""

    async def run() -> None:
        here = Here(delay_s=0.005)
        process = await RayProcess.start(here.actors)
        assert process.pid == 7 and process.ahead_s == 0.0
        sent = [struct.pack("<I", i) for i in range(200)]
        for data in sent:
            process.write(data)
        await written(process)
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


@pytest.mark.parametrize("error", (ActorEnded("the object store is full"), RuntimeError()))
def test_an_engine_that_misses_a_message_starts_again(error: Exception) -> None:
    """The reader hears of it after all that has arrived, and no later message is sent without the lost one."""

    async def run() -> None:
        here = Here()
        process = await RayProcess.start(here.actors)
        here.broken["write"] = error
        here.pipe.says.put_nowait(b"first")
        assert await process.read() == b"first"
        reading = asyncio.create_task(process.read())
        process.write(b"submit 1")
        for _ in range(2):  # each later read too
            with pytest.raises(ConnectionError, match=str(error) or "RuntimeError"):
                await asyncio.wait_for(reading, 20)
            reading = asyncio.create_task(process.read())
        reading.cancel()
        process.write(b"abort 1")
        await asyncio.sleep(0.01)
        assert not here.pipe.got and here.calls.count("write") == 1
        assert await process.end(0.0) == " by signal 9" and here.killed == 1

    asyncio.run(run())


def test_the_clock_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that drifts is followed, also after a reading that failed."""
    monkeypatch.setattr(ray_process, "CLOCK_SECONDS", 0.01)

    async def run() -> None:
        here = Here(skew_s=5000.0)
        process = await RayProcess.start(here.actors)
        client = EngineClient("pocket", {}, lambda loading: None)
        client._process = process
        here.broken["clock"], here.skew_s = TimeoutError(), 6000.0
        async with asyncio.timeout(20):
            while abs(client._ahead_s - 6000.0) > 0.5:
                await asyncio.sleep(0.01)
        await process.end(0.0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("here", "says"),
    (
        ({"version": "0.0.9"}, "that machine has Ridgeline 0.0.9"),
        ({"delay_s": 9.0}, "no machine of the cluster had room"),
        ({"broken": {"clock": TimeoutError()}}, "it was placed, but its actor did not answer within 10 s"),
        ({"broken": {"start": ActorEnded()}}, "its actor failed: ActorEnded"),
        ({"ended": True}, "its actor failed: The actor is dead."),
    ),
)
def test_an_engine_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch, here: dict[str, Any], says: str) -> None:
    monkeypatch.setattr(ray_process, "PLACE_SECONDS", 0.05)

    async def run() -> None:
        given = dict(here)
        ended, broken = given.pop("ended", False), given.pop("broken", {})
        actors = Here(**given)
        actors.ended, actors.broken = ended, dict(broken)
        with pytest.raises(OSError, match=says):
            await RayProcess.start(actors.actors)
        assert actors.killed == 1

    asyncio.run(run())


def test_times_follow_the_clock_of_the_machine() -> None:
    """The engine gets times of its own clock, and the server gets back times of its own."""

    async def run() -> None:
        here = Here(skew_s=5000.0)
        client = EngineClient("pocket", {}, lambda loading: None)
        client._process = process = await RayProcess.start(here.actors)
        client.state = "ready"
        now = time.perf_counter()
        request = GenerationRequest([1], SamplingParams(), ())
        answers = client.submit([request], now, stream=True, on_done=lambda: None)
        await written(process)
        assert bytes(here.pipe.got) == frame(Submit(0, request, now + client._ahead_s, True))
        assert abs(client._ahead_s - 5000.0) < 0.5 and len(here.pipe.got) > HEADER.size
        client._take(Chunks(now + client._ahead_s, [(0, (0, "a", (1,), (), None, None, None, None))], False))
        answers.take()
        assert answers.committed == pytest.approx(now)
        got, client._shares_cores = len(here.pipe.got), client._process.shares_cores
        client._take(Chunks(now, [], True))  # a local engine would be told that all is written
        assert not client._shares_cores and len(here.pipe.got) == got
        assert process._writing is not None and process._writing.done()
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
        ({}, 256, (Machine(2, 0),), ("cpu", 256, 0.0078, 0)),
        ({"tensor_parallel_size": 2}, 2, TWO, ("cpu", 1, 8, 0)),
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
    if wanted[0] != "cuda":
        assert found.options["most_threads"] * options.get("tensor_parallel_size", 1) in (1, found.cpus)
        assert found.cpus * replicas <= sum(each.cpus for each in machines)


@pytest.mark.parametrize(
    ("given", "sharing", "most", "wanted"),
    ((None, 1, 3, 3), (None, 2, 3, 3), (None, 4, 3, 2), (None, 1, 9, None), (5, 1, 3, 5)),
)
def test_an_engine_keeps_to_the_cores_that_are_reserved(
    monkeypatch: pytest.MonkeyPatch, given: int | None, sharing: int, most: int, wanted: int | None
) -> None:
    kernels = pytest.importorskip("ridgeline._kernels")
    monkeypatch.setattr(kernels, "usable_cores", lambda: 8)
    assert threads_of("cpu", given, sharing, most) == wanted


def test_bad_input_of_ray_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"^--ray needs Ray: pip install 'ridgeline\[ray\]'$"):
        opener("local", 2)
    monkeypatch.setattr(ray_cluster, "find_spec", lambda name: name)
    with pytest.raises(RequestError, match="--ray is ray://host:10001; give HOST:PORT"):
        opener("ray://host:10001", 2)
    with pytest.raises(RequestError, match="--replicas is 0"):
        opener("local", 0)
    with socket.socket() as bound:  # nobody else can take its port, and nobody listens
        bound.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{bound.getsockname()[1]}"
        for address, says in (
            ("nowhere", "it must be HOST:PORT, auto or local"),
            ("127.0.0.1:" + "1" * 5000, "a port is at most 65535"),
            ("127.0.0.1:65536", "a port is at most 65535"),
            (closed, "start a head node there"),
        ):
            with pytest.raises(RequestError, match=says):
                connect(address)
    for options, machines, says in (
        ({}, (), "Ray may use no core"),
        ({"threads": 9}, TWO, "room for 1 with 9 threads"),
        ({"device": "cuda"}, TWO, "the cluster has 0 GPUs"),
        ({"threads": 0}, TWO, "threads is 0; set --threads from 1 to 16"),
        ({"threads": -1}, TWO, "threads is -1"),
    ):
        with pytest.raises(DeviceError, match=says):
            share_of(options, 2, machines)
    for wrong, says in (
        ({"device": "cuda:1"}, "--device is cuda:1, which is one GPU; with --ray use auto, cpu, reference or cuda"),
        ({"device": "tpu"}, "--device is tpu, which is unknown; with --ray use auto, cpu, reference or cuda"),
        ({"tensor_parallel_size": 0}, "--tensor-parallel-size. is 0; it must be 1 to"),
        ({"tensor_parallel_size": -1}, "--tensor-parallel-size. is -1"),
    ):
        with pytest.raises(RequestError, match=says):
            share_of(wrong, 2, TWO)


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    (
        (RuntimeError(), RequestError, "^--ray local: RuntimeError; give HOST:PORT"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (TypeError("no option _temp_dir"), TypeError, "^no option _temp_dir$"),
    ),
)
def test_the_folder_of_ray_has_a_short_path(
    error: BaseException, kind: type[BaseException], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A long TMPDIR does not lengthen it. A start that fails or is interrupted leaves no folder."""
    for name in (*ray_cluster.LOOPBACK_ONLY, "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "")
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    folders = list[Path]()

    def init(**options: Any) -> None:
        folders.append(Path(options["_temp_dir"]))
        raise error

    ended = list[str]()
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init, shutdown=lambda: ended.append("Ray")))
    with pytest.raises(kind, match=says):
        connect("local")
    (folder,) = folders
    assert ended == ["Ray"]
    assert len(str(folder)) < 30 and not folder.exists()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("pocket", "--ray", "local", "--replicas", "2", "--max-num-seqs", "16", start_s=240) as server:
        yield server


class Engines:
    """The engine processes below a process, and the time that each had computed when this was made."""

    def __init__(self, family: psutil.Process) -> None:
        found = family.children(recursive=True)
        self._before = {e: e.cpu_times().user for e in found if "ridgeline.serve.engine.worker" in e.cmdline()}

    def busiest(self) -> psutil.Process:
        """Return the one that has computed most since then: the router may send all requests to one engine."""
        return max(self._before, key=lambda engine: engine.cpu_times().user - self._before[engine])


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
            engines = Engines(psutil.Process(server.process.pid))
            running = [pool.submit(stream_of, client, i) for i in range(10)]
            moved = server.metric("ridgeline:replica_moved_total")
            until(lambda: server.metric("vllm:num_requests_running") >= 4)
            engine = engines.busiest()
            killed = engine.parent() if kills_actor else engine
            assert killed is not None
            killed.send_signal(signal.SIGKILL)
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
    """Its processes end with the server, also when it is killed, some of Ray's own after a minute; a stopped server
    removes Ray's folder too.
    """
    server = Server("pocket", "--ray", "local", start_s=240)
    family = psutil.Process(server.process.pid).children(recursive=True)
    (raylet,) = (each for each in family if each.name() == "raylet")
    folder = Path(next(a.partition("=")[2] for a in raylet.cmdline() if a.startswith("--session_dir="))).parent
    assert folder.is_dir()
    server.stop(number)
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in family), 150)
    assert number == signal.SIGKILL or not folder.exists()
