"""The server survives clients that disconnect, do not read or are too many, an engine that dies, and signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu.serving import Server, head, serving, until
from ridgeline import LLM, SamplingParams

LONG = {"prompt": "def f(", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("pocket", "--max-num-seqs", "8", "--max-waiting", "4") as server:
        yield server


@pytest.fixture(scope="module")
def wanted() -> str:
    (output,) = LLM("pocket").generate(
        "import os", SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.1)
    )
    return output.outputs[0].text


def good(server: Server, wanted: str) -> None:
    status, answer = server.post("/v1/completions", prompt="import os", max_tokens=12, temperature=0)
    assert (status, answer["choices"][0]["text"]) == (200, wanted)


def first_event(sock: socket.socket) -> bytes:
    data = b""
    while b"data: " not in data:
        piece = sock.recv(4096)
        assert piece, data
        data += piece
    return data


def rest(sock: socket.socket) -> bytes:
    data = b""
    while b"[DONE]" not in data:
        piece = sock.recv(1 << 16)
        if not piece:
            break
        data += piece
    return data


def test_a_disconnect_frees_pages_within_two_steps(server: Server, wanted: str) -> None:
    """Clients disconnect during a stream, before the first token, and while they wait for a whole answer."""
    socks = [server.stream("/v1/completions", LONG) for _ in range(3)]
    for sock in socks:
        first_event(sock)
    assert server.metric("vllm:num_requests_running") == 3
    before = server.metric("ridgeline:steps_total")
    for sock in socks:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
        sock.close()
    server.until("ridgeline:pages_used", 0)
    # The three clients disconnect at almost the same time, and each may cost two steps.
    assert server.metric("ridgeline:steps_total") - before < 40
    sock = server.send("/v1/completions", LONG)
    server.until("vllm:num_requests_running", 1)
    sock.close()
    server.until("vllm:num_requests_running", 0)
    server.until("ridgeline:answers_open", 0)
    good(server, wanted)


def test_a_client_that_does_not_read_delays_no_other(server: Server, wanted: str) -> None:
    sock = server.stream("/v1/completions", {**LONG, "logprobs": 20, "n": 4, "max_tokens": 250})
    for _ in range(3):
        good(server, wanted)
    data = rest(sock)
    assert data.count(b'"finish_reason":"length"') == 4
    sock.close()


def test_a_full_queue_says_when_to_retry(server: Server, wanted: str) -> None:
    socks = [server.stream("/v1/completions", LONG) for _ in range(12)]
    server.until("ridgeline:answers_open", 12)
    status, data, headers = server.raw("POST", "/v1/completions", {"prompt": "x"})
    error = json.loads(data)["error"]
    assert (status, error["code"], error["type"]) == (429, "queue_full", "rate_limit_error")
    assert int(headers["retry-after"]) >= 1
    assert server.ask("GET", "/ready")[0] == 503
    assert server.ask("GET", "/health")[0] == 200
    for sock in socks:
        sock.close()
    server.until("ridgeline:answers_open", 0)
    assert server.ask("GET", "/ready")[0] == 200
    good(server, wanted)


def test_an_engine_that_dies_is_restarted(server: Server, wanted: str) -> None:
    socks = [server.stream("/v1/completions", LONG) for _ in range(3)]
    for sock in socks:
        first_event(sock)
    waiting: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: waiting.append(server.post("/v1/completions", **LONG)))
    thread.start()
    server.until("vllm:num_requests_running", 4)
    os.kill(server.engine_pid(), signal.SIGKILL)
    for sock in socks:
        error = json.loads(rest(sock).rsplit(b"data: ", 2)[1].splitlines()[0])["error"]
        assert (error["code"], error["type"]) == ("engine_down", "service_unavailable")
        assert error["message"] == "the engine process ended by signal 9, and is restarting; try again"
    thread.join()
    assert (waiting[0][0], waiting[0][1]["error"]["code"]) == (503, "engine_down")
    status, answer = server.ask("GET", "/health")
    assert status == 503 and "restarting" in answer["error"]["message"]
    status, _, headers = server.raw("POST", "/v1/completions", {"prompt": "x"})
    assert status == 503 and "retry-after" in headers
    until(lambda: server.ask("GET", "/health")[0] == 200)
    assert server.metric("ridgeline:engine_restarts_total") == 1
    assert server.metric("ridgeline:answers_open") == 0
    good(server, wanted)


def check_who_asks(server: Server) -> None:
    """A key in one of two headers is checked before the body. The engine process has no keys."""
    assert server.ask("GET", "/v1/models", x_api_key="beta")[0] == 200
    assert server.ask("GET", "/v1/models", x_api_key="gamma")[0] == 401
    status, answer = server.ask("GET", "/v1/models", x_api_key="beta", authorization="Bearer beta")
    assert (status, answer["error"]["code"]) == (400, "several_api_keys")
    host = "host: evil.example"  # accepted, since a page of another site has no key
    assert server.told(head("/v1/models", host, "x-api-key: beta"))[0] == 200
    twice = ["authorization: Bearer beta"] * 2
    assert server.told(head("/v1/models", host, *twice))[1]["error"]["code"] == "several_api_keys"
    # The body is too large and never sent. A client without a key only gets the message that the key is missing.
    data = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 999999\r\n"
    assert server.told(data + b"\r\n")[0] == 401
    assert server.told(data + b"x-api-key: beta\r\n\r\n")[0] == 413
    environment = Path(f"/proc/{server.engine_pid()}/environ").read_bytes()
    assert b"OMP_NUM_THREADS" in environment and b"RIDGELINE_API_KEY" not in environment


def test_keys_sizes_and_invalid_http(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# a comment\nalpha\n")
    args = ("pocket", "--api-key-file", str(keys), "--max-concurrency-per-key", "2", "--max-body-bytes", "2000")
    with serving(*args, "--allowed-origins", "https://a.example", env={"RIDGELINE_API_KEY": "beta"}) as server:
        for given in ({}, {"authorization": "Bearer gamma"}, {"authorization": "alpha"}, {"authorization": "Bearer "}):
            status, answer = server.ask("GET", "/v1/models", **given)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        assert server.ask("GET", "/health")[0] == 200
        for key in ("alpha", "beta"):
            assert server.ask("GET", "/v1/models", authorization=f"Bearer {key}")[0] == 200
        check_who_asks(server)
        ask = {"authorization": "Bearer alpha"}
        status, answer = server.ask("POST", "/v1/completions", {"prompt": "x" * 3000}, **ask)
        assert (status, answer["error"]["code"]) == (413, "body_too_large")
        # A body without a Content-Length.
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alpha\r\n"
            sock.sendall(f"{head}content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n".encode())
            sock.sendall(b"800\r\n" + b"x" * 2048 + b"\r\n0\r\n\r\n")
            assert b" 413 " in sock.recv(4096)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.sendall(b"\x16\x03\x01 what\r\n\r\n")
            assert b'"code":"invalid_http"' in sock.recv(4096)
        socks = [server.stream("/v1/completions", LONG, **ask) for _ in range(2)]
        for sock in socks:
            first_event(sock)
        assert server.ask("GET", "/v1/models", **ask)[0] == 429
        assert server.ask("GET", "/v1/models", authorization="Bearer beta")[0] == 200
        for sock in socks:
            sock.close()
        status, _, headers = server.raw("GET", "/health", origin="https://a.example")
        assert headers["access-control-allow-origin"] == "https://a.example"
        assert "access-control-allow-origin" not in server.raw("GET", "/health", origin="https://b.example")[2]
        server.stop()
        assert "alpha" not in server.log and "xxx" not in server.log


def refuses(server: Server) -> bool:
    """Return whether the server refuses connections."""
    try:
        socket.create_connection(("127.0.0.1", server.port), timeout=20).close()
    except OSError:
        return True
    return False


def test_sigterm_lets_running_requests_finish() -> None:
    with serving("pocket") as server:
        sock = server.stream("/v1/completions", {**LONG, "max_tokens": 400})
        first_event(sock)
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server))
        assert b"data: [DONE]" in rest(sock)
        sock.close()
        assert server.process.wait(20) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine, 0)


@pytest.mark.slow
def test_a_client_that_does_not_read_does_not_delay_the_end() -> None:
    """Its answer is complete, so its slots are free. Its connection is closed after --shutdown-timeout."""
    with serving("pocket", "--shutdown-timeout", "1") as server:
        sock = server.stream("/v1/completions", {**LONG, "logprobs": 20, "n": 20, "max_tokens": 400})
        first_event(sock)
        server.until("vllm:num_requests_running", 0, 60)
        assert server.metric("ridgeline:answers_open") == 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        sock.close()


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AssertionError, match="ridgeline: "):
        Server(str(tmp_path))
