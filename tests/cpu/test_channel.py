"""The pipe to the engine's process, both where files can be inherited and where they cannot."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial

import pytest

from ridgeline.serve.engine import channel
from ridgeline.serve.engine.channel import CAN_INHERIT, start_process
from ridgeline.serve.engine.client import EngineClient

ECHO = """
import sys, time
from ridgeline.serve.engine.channel import connect
time.sleep(float(sys.argv[1]))
pipe = connect(sys.argv[2])
while data := pipe.recv(4096):
    pipe.sendall(data)
"""
WAYS = [
    pytest.param(True, marks=pytest.mark.skipif(not CAN_INHERIT, reason="this system does not inherit files")),
    False,
]


@pytest.mark.parametrize("inherit", WAYS)
def test_both_ends_send_until_one_is_closed(inherit: bool) -> None:
    process, pipe = start_process([sys.executable, "-c", ECHO, "0"], inherit=inherit)
    with pipe:
        pipe.settimeout(30)
        for message in (b"x", b"y" * 4000):
            pipe.sendall(message)
            assert b"".join(iter_exactly(pipe, len(message))) == message
    assert process.wait(30) == 0


def iter_exactly(pipe: socket.socket, size: int) -> list[bytes]:
    """Return the pieces that the pipe gives until there are `size` bytes."""
    found: list[bytes] = []
    while (left := size - sum(map(len, found))) > 0:
        found.append(pipe.recv(left))
    return found


@pytest.mark.parametrize("said", [b"", b"z" * channel.SECRET_BYTES])
def test_a_stranger_does_not_get_the_pipe(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program of this machine connects first, sends nothing or something wrong, and is rejected."""
    monkeypatch.setattr(channel, "POLL_SECONDS", 0.1)
    strangers = []
    create = socket.create_server

    def listen(address: tuple[str, int]) -> socket.socket:
        listener = create(address)
        strangers.append(socket.create_connection(listener.getsockname()))
        strangers[0].sendall(said)
        return listener

    monkeypatch.setattr(channel.socket, "create_server", listen)
    process, pipe = start_process([sys.executable, "-c", ECHO, "0"], inherit=False)
    with pipe, strangers[0]:
        pipe.settimeout(30)
        pipe.sendall(b"ours")
        assert pipe.recv(10) == b"ours"
        strangers[0].settimeout(30)
        with suppress(ConnectionResetError):
            assert strangers[0].recv(10) == b""
    assert process.wait(30) == 0


def test_a_process_that_ends_before_it_connects_is_an_error_at_once() -> None:
    with pytest.raises(ConnectionError, match="status 7"):
        start_process([sys.executable, "-c", "raise SystemExit(7)"], inherit=False)


def test_a_process_that_never_connects_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "CONNECT_SECONDS", 0.3)
    monkeypatch.setattr(channel, "POLL_SECONDS", 0.1)
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(channel.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0])
    with pytest.raises(ConnectionError, match="did not connect"):
        start_process([sys.executable, "-c", "import time; time.sleep(60)"], inherit=False)
    assert started[0].returncode is not None


def test_an_engine_answers_where_files_are_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.serve.engine.process.start_process", partial(start_process, inherit=False))

    async def start() -> str:
        client = EngineClient("pocket", {}, lambda loading: None)
        ready = await client.start()
        await client.close()
        return ready.device

    assert asyncio.run(start()) == "cpu"
