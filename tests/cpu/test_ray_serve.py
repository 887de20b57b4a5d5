"""The server under Ray Serve: built from a line of the command, and with the guards of the server."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import httpx
import psutil
import pytest

from cpu.serving import until
from cpu.test_ray import NEEDS_RAY, Engines
from cpu.test_replicas import stream_of
from ridgeline.cli.ray_serve import build, read
from ridgeline.errors import RequestError
from ridgeline.serve.logs import start_log

ROOT = Path(__file__).parents[2]
START_SECONDS = 240.0  # for the next line of an application that starts


def test_the_line_of_the_command_is_read_as_the_command_reads_it() -> None:
    found = read("pocket --replicas 3 --max-num-seqs 8 --api-key 'a b'")
    assert (found.model, found.replicas, found.arguments["engine"].max_num_seqs) == ("pocket", 3, 8)
    assert len(found.options.key_hashes) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    (
        ({}, "args has nothing; give one"),
        ({"model": "pocket"}, "args has model; give one"),
        ({"serve": "pocket --ray local"}, "--ray is not an option here"),
        ({"serve": "pocket --max-waiting -1"}, "--max-waiting is -1"),
        ({"serve": 5}, "`serve` is 5; it must be one line of text"),
        ({"serve": ["pocket", "--replicas"]}, "`serve` is .'pocket', '--replicas'.; it must be one line of text"),
        ({"serve": None}, "`serve` is None; it must be one line of text"),
        ({"serve": "pocket --api-key 'a"}, "cannot be read: No closing quotation; close each quotation"),
        ({"serve": "pocket --nonsense 1"}, "No such option: --nonsense"),
        ({"serve": "pocket --replicas many"}, "Invalid value for '--replicas'"),
    ),
)
def test_a_wrong_file_is_one_line(args: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as raised:
        build(args)
    assert "\n" not in str(raised.value)


def test_quiet_holds_where_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line is read in one process, whose log does not change, and the server runs in another."""
    guard = logging.getLogger("ridgeline.serve.http.guard")
    monkeypatch.setattr(guard, "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger("uvicorn"), "level", logging.NOTSET)
    assert not read("pocket").quiet and read("pocket --quiet").quiet and guard.level == logging.NOTSET
    start_log(quiet=True)
    assert guard.level == logging.WARNING


def _read_into(said: queue.Queue[str], output: TextIO) -> None:
    """Read lines until the output ends, which an empty text stands for."""
    for line in output:
        said.put(line)
    said.put("")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the application's standard error output, where Ray writes those of its processes too."""
    return tmp_path_factory.mktemp("front") / "log"


@pytest.fixture(scope="module")
def front(log: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Return the address of an application with two engines, and its process."""
    command = [sys.executable, "-m", "cpu.ray_front", str(ROOT / "deploy/ray/serve.yaml")]
    line = "pocket --replicas 2 --max-num-seqs 16 --max-body-bytes 100000"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [*command, line],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT / "tests",
        )
    assert process.stdin is not None and process.stdout is not None
    said, output, family = queue.Queue[str](), process.stdout, psutil.Process(process.pid)
    reading = threading.Thread(target=_read_into, args=(said, output), daemon=True)
    reading.start()
    children = list[psutil.Process]()
    try:
        while not (line := said.get(timeout=START_SECONDS)).startswith("http://"):
            assert line, "the application did not start"
        children = family.children(recursive=True)
        yield line.strip(), family
        process.stdin.close()
        assert process.wait(120) == 0
        until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children), 30)
    finally:
        if process.poll() is None:
            children = family.children(recursive=True)
            process.kill()
            process.wait()
        for each in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        reading.join(20)
        process.stdin.close()
        output.close()


@NEEDS_RAY
@pytest.mark.slow
def test_the_guards_of_the_server_hold_behind_the_proxy(front: tuple[str, psutil.Process], log: Path) -> None:
    url, _ = front
    with httpx.Client(base_url=url, timeout=120) as client:
        answer = client.post("/v1/completions", content=b"x" * 100_001)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        answer = client.post("/v1/completions", content=(b"x" * 50_000 for _ in range(3)))  # its length is not known
        assert answer.status_code == 413
        answer = client.get("/v1/models", headers={"host": "evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")
        assert client.post("/v1/completions", json={"prompt": "a", "nonsense": 1}).status_code == 400
        assert client.get("/nowhere").json()["error"]["code"] == "unknown_url"
        body = {"prompt": "def f(", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200 and next(answer.iter_lines()).startswith("data: ")
        until(lambda: all(each["running"] == 0 for each in client.get("/live").json()["replicas"]))  # it was aborted
        assert client.get("/live").json()["tokens"]["generated"] < 900
    until(lambda: "GET '/v1/models' 403 " in log.read_text())


@NEEDS_RAY
@pytest.mark.slow
def test_streams_continue_behind_the_proxy(front: tuple[str, psutil.Process]) -> None:
    """kill -9 of an engine while eight streams run: no error, and the bits of a run without."""
    url, family = front
    with ThreadPoolExecutor(8) as pool, httpx.Client(base_url=f"{url}/v1", timeout=240) as client:
        wanted = list(pool.map(lambda i: stream_of(client, i), range(8)))
        engines = Engines(family)
        running = [pool.submit(stream_of, client, i) for i in range(8)]

        def replicas() -> list[dict[str, int]]:
            found: list[dict[str, int]] = json.loads(client.get(f"{url}/live").text)["replicas"]
            return found

        until(lambda: sum(each["running"] for each in replicas()) >= 4)
        engines.busiest().send_signal(signal.SIGKILL)
        assert [each.result() for each in running] == wanted
        assert sum(each["moved"] for each in replicas()) > 0
