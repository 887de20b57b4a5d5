"""Servers without free file descriptors, with a hanging engine, with interrupted streams, and with hosts and keys."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator

import pytest

from cpu.serving import Server, head, serving, until

LONG = {"prompt": "def f(", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


def test_few_files_and_many_connections() -> None:
    """With more connections than open files allow, the server logs a few lines and still answers."""
    few = ("sh", "-c", 'ulimit -n 200; exec "$@"', "sh")
    with serving("pocket", "--quiet", "--timeout-headers", "2", prefix=few) as server:
        assert "200 files (ulimit -n); the limit is now 120" in server.said()
        before = len(server.said())
        with contextlib.ExitStack() as stack:
            for i in range(400):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
                sock.sendall((b"GET /health HTTP/1.1\r\n", b"", b"", b"no HTTP\r\n\r\n")[i % 4])
            assert server.ask("GET", "/health")[0] == 200
            assert 100 < server.metric("ridgeline:connections_open") <= 136
            until(lambda: server.metric("ridgeline:connections_open") <= 3)
        assert server.post("/v1/completions", prompt="x", max_tokens=1)[0] == 200
        ended = server.metric("ridgeline:connections_ended_total") + server.metric(
            "ridgeline:connections_refused_total"
        )
        assert ended >= 300  # the others got an error at once, since they sent no HTTP
        new = server.said()[before:]
        assert "Traceback" not in new and len(new.splitlines()) < 10, new


@pytest.fixture(scope="module")
def open_server() -> Iterator[Server]:
    limits = ("--timeout-heartbeat", "1", "--timeout-engine", "4", "--max-num-seqs", "8")
    with serving("pocket", "--allowed-hosts", "llm.example", *limits) as server:
        yield server


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200), ("127.0.0.1:8000", 200), ("LOCALHOST:1", 200), ("a.localhost", 200), ("[::1]:8000", 200),
        ("192.168.1.5:8000", 200), ("llm.example:80", 200), ("llm.example.", 200), ("evil.example", 403),
        ("127.0.0.1.evil.example", 403), ("localhost.evil.example:8000", 403), ("evil.example:127", 403),
        ("llm.example\r\nhost: llm.example", 400),
    ],
)  # fmt: skip
def test_only_names_of_this_server_are_hosts(open_server: Server, host: str, status: int) -> None:
    """A page of another site can let its name point to this machine and then act as this server's page."""
    found, answer = open_server.told(head("/version", f"host: {host}"))
    assert found == status
    if status == 403:
        assert answer["error"]["code"] == "host_not_allowed" and "--allowed-hosts" in answer["error"]["message"]


def test_http_1_1_needs_a_host(open_server: Server) -> None:
    assert open_server.told(head("/version"))[1]["error"]["code"] == "invalid_host"
    assert open_server.told(b"GET /version HTTP/1.0\r\n\r\n")[0] == 200


def test_a_client_that_closes_its_side_gets_a_stream(open_server: Server) -> None:
    sock = open_server.stream("/v1/completions", {**LONG, "max_tokens": 40})
    sock.shutdown(socket.SHUT_WR)
    data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    assert b'"finish_reason":"length"' in data and b"data: [DONE]\n\n" in data


def test_a_stopped_engine_is_silent_and_then_restarted(open_server: Server) -> None:
    server, pid = open_server, open_server.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: server.ask("GET", "/health")[0] == 503)
    _, answer = server.ask("GET", "/health")
    assert (answer["http"], answer["engine"], answer["error"]["code"]) == ("ok", "silent", "engine_down")
    assert server.ask("GET", "/ready")[0] == 503 and server.metric("ridgeline:engine_up") == 0
    os.kill(pid, signal.SIGCONT)
    until(lambda: server.ask("GET", "/health")[0] == 200)
    assert server.engine_pid() == pid
    os.kill(pid, signal.SIGSTOP)
    sock = server.stream("/v1/completions", LONG)  # it waits for an engine that never answers
    until(lambda: server.ask("GET", "/health")[1]["restarts"] == 1)
    assert b"no heartbeat" in sock.recv(1 << 16)
    until(lambda: server.ask("GET", "/health")[0] == 200)
    assert server.engine_pid() != pid and "no heartbeat for 4 s (--timeout-engine)" in server.said()
    assert server.post("/v1/completions", prompt="x", max_tokens=1)[0] == 200


def test_interrupted_streams_end_with_an_error() -> None:
    with serving("pocket", "--shutdown-timeout", "0", "--max-model-len", "1024") as server:
        socks = [server.stream("/v1/completions", {**LONG, "n": 4}) for _ in range(2)]
        whole = server.send("/v1/completions", {**LONG, "n": 4})
        server.until("vllm:num_requests_running", 12)
        server.process.send_signal(signal.SIGTERM)
        for sock in socks:
            data = b"".join(iter(lambda: sock.recv(1 << 16), b""))  # noqa: B023
            events = [line for line in data.splitlines() if line.startswith(b"data: ")]
            assert events[-1] == b"data: [DONE]"
            assert json.loads(events[-2][6:])["error"]["message"] == "the server is stopping"
        data = b"".join(iter(lambda: whole.recv(1 << 16), b""))
        assert data.startswith(b"HTTP/1.1 503 ") and b"the server is stopping" in data
        assert server.process.wait(20) == 0
        for sock in (*socks, whole):
            sock.close()
