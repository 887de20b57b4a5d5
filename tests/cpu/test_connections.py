"""Connections that are too many, too slow, silent or half-closed: the server ends each of them
and still serves others.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from cpu.http_server import Running, json_of, request, running, scenario
from ridgeline.serve.http.accept import Acceptor, raise_file_limit
from ridgeline.serve.http.connections import OTHER_FILES, RESERVE, Connections, Timeouts, fitting
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.server import _bind

SHORT = 0.15
CLOSE = "connection: close"


def test_two_thousand_half_open_connections_go_away() -> None:
    """Half of them send a part of their headers, the others nothing; other connections are served meanwhile."""
    files = raise_file_limit()
    assert files is None or files > 4200

    async def test(server: Running) -> None:
        socks = [socket.socket() for _ in range(2000)]
        for i, sock in enumerate(socks):
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
            if i % 2 == 0:
                sock.send(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx-more: ")
        await server.until(lambda: server.connections.accepted == 2000)
        assert b"hello" in await server.ask(request("/echo", b"hello", CLOSE))
        await server.until(lambda: not len(server.connections))
        assert server.connections.ended["headers"] == 2000
        told, silent = socks[0].recv(4096), socks[1].recv(4096)
        assert told.startswith(b"HTTP/1.1 408 ") and json_of(told)["error"]["code"] == "timeout" and silent == b""
        for sock in socks:
            sock.close()

    scenario(test, limit=4000, headers=1.0)


def test_headers_that_come_one_byte_at_a_time() -> None:
    async def test(server: Running) -> None:
        reader, writer = await server.open()
        for byte in request("/echo", b"", *["x: " + "y" * 4000]):
            writer.write(bytes([byte]))
            await asyncio.sleep(0.002)
            if reader.at_eof() or server.connections.ended["headers"]:
                break
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
        assert server.connections.ended == {"headers": 1}

    scenario(test, headers=SHORT)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_comes_one_byte_at_a_time(chunked: bool) -> None:
    """No pause between two bytes is too long, but the whole body is."""

    async def test(server: Running) -> None:
        size = "transfer-encoding: chunked" if chunked else "content-length: 5000"
        reader, writer = await server.open(f"POST /echo HTTP/1.1\r\nhost: a\r\n{size}\r\n\r\n".encode())
        while not server.connections.ended:
            writer.write(b"1\r\nx\r\n" if chunked else b"x")
            await asyncio.sleep(0.01)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 ") and "bytes a second" in json_of(answer)["error"]["message"]
        writer.close()
        assert server.connections.ended == {"body": 1}

    scenario(test, body=SHORT)


def test_a_long_body_may_take_longer() -> None:
    """A rate of 16 KiB a second is fast enough."""

    async def test(server: Running) -> None:
        reader, writer = await server.open(request("/echo", b"x" * 100_000, CLOSE)[:-1])
        await asyncio.sleep(3 * SHORT)
        writer.write(b"x")
        assert (await reader.read()).endswith(b"x" * 100_000)
        writer.close()

    scenario(test, body=SHORT)


@pytest.mark.parametrize("more", [b"", b"\r\n", b"\r\n\r\n\r\n"])
def test_an_idle_connection_is_closed(more: bytes) -> None:
    """A connection is also closed if it only sends empty lines, which begin no request, but which ended uvicorn's own
    timeout.
    """

    async def test(server: Running) -> None:
        reader, writer = await server.open(request("/echo", b"one"))
        assert (await reader.readuntil(b"one")).startswith(b"HTTP/1.1 200 ")
        await asyncio.sleep(SHORT / 3)
        writer.write(request("/echo", b"two"))  # used again before the timeout
        await reader.readuntil(b"two")
        writer.write(more)
        assert await asyncio.wait_for(reader.read(), 20) == b"" or more
        writer.close()
        assert server.connections.ended == {"headers" if more else "idle": 1}

    scenario(test, keep_alive=SHORT, headers=SHORT)


def test_a_body_that_is_not_needed_is_bounded() -> None:
    """The answer is sent while the body still arrives: the client reads the answer, and the connection ends."""

    async def test(server: Running) -> None:
        reader, writer = await server.open(request("/early", b"x" * 3_000_000)[:2_000_000])
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 401 ") and answer.endswith(b"who?")
        writer.write(b"x" * 1_000_000)  # the connection is not reset, though nobody reads the body
        await writer.drain()
        writer.close()
        await server.until(lambda: not len(server.connections))

    scenario(test)


def test_a_refused_client_that_still_sends() -> None:
    """A client that sends after a broken chunk reads why it was refused: its bytes are dropped for a while."""

    async def test(server: Running) -> None:
        head = b"POST /echo HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
        reader, writer = await server.open(head + b"no size\r\n" + b"x" * 1_000_000)
        answer = await asyncio.wait_for(reader.read(), 20)
        assert answer.startswith(b"HTTP/1.1 400 ") and json_of(answer)["error"]["code"] == "invalid_http"
        writer.write(b"x" * 1_000_000)
        await writer.drain()
        writer.close()
        await server.until(lambda: not len(server.connections))

    scenario(test)


@pytest.mark.parametrize("path", ["/stream", "/large"])
def test_a_reader_that_stops(path: str) -> None:
    """An answer that is not read, streamed or not, is dropped after a while."""

    async def test(server: Running) -> None:
        sock = socket.create_connection(("127.0.0.1", server.port))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request(path, b"1000000" if path == "/stream" else b"30000000"))
        await server.until(lambda: server.connections.ended["write"] == 1)
        await server.until(lambda: not len(server.connections))
        sock.close()

    scenario(test, write=SHORT)


def test_one_connection_more_than_there_may_be() -> None:
    """A connection beyond the limit may request /health; to stay within the reserve, the server closes the one that has
    waited longest.
    """

    async def test(server: Running) -> None:
        busy = [await server.open(request("/wait")) for _ in range(2)]
        await server.until(lambda: len(server.server.server_state.tasks) == 2)
        answer = await server.ask(request("/echo", b"x" * 2_000_000))
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer
        assert json_of(answer)["error"]["code"] == "too_many_connections"
        await server.until(lambda: len(server.connections) == 2)
        silent = [await server.open() for _ in range(5)]
        for path in ("/health", "/metrics"):
            answer = await server.ask(request(path, b"", method="GET"))
            assert answer.startswith(b"HTTP/1.1 200 ") and b"connection: close" in answer
        assert server.connections.ended["room"] == 4
        for _, writer in silent:
            writer.close()
        server.app.go.set()
        for reader, writer in busy:
            await reader.readuntil(b"waited")
            writer.close()
        await server.until(lambda: len(server.connections) == 0)
        assert b"hello" in await server.ask(request("/echo", b"hello", CLOSE))

    scenario(test, limit=2, reserve=2)


def test_idle_connections_are_closed_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Running) -> None:
        idle = [await server.open(request("/echo", b"x")) for _ in range(2)]
        for reader, _ in idle:
            await reader.readuntil(b"\r\n\r\nx")
        assert b"hello" in await server.ask(request("/echo", b"hello", CLOSE))
        assert server.connections.ended == {"room": 1} and not server.connections.refused
        assert await idle[0][0].read() == b""  # the connection that has waited longest
        for _, writer in idle:
            writer.close()

    monkeypatch.setattr("ridgeline.serve.http.connections.ROOM_SECONDS", 0.0)
    scenario(test, limit=2)


def test_no_files_are_left(caplog: pytest.LogCaptureFixture) -> None:
    """The loop pauses between two attempts, logs one line, and accepts connections when files are available again."""

    class Listener(socket.socket):
        tries = 0

    async def run() -> None:
        loop, made = asyncio.get_running_loop(), asyncio.Event()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)

        async def sock_accept(listener: Any) -> Any:
            Listener.tries += 1
            if Listener.tries < 4:
                raise OSError(errno.EMFILE, "Too many open files")
            if Listener.tries == 4:
                return ours, None
            return await loop.create_future()

        loop.sock_accept = sock_accept  # type: ignore[method-assign]
        connections = Connections(5, Timeouts())

        class Made(asyncio.Protocol):
            def connection_made(self, transport: Any) -> None:
                made.set()

        acceptor = Acceptor(Listener(), connections, lambda slot: Made())
        acceptor.start()
        await asyncio.wait_for(made.wait(), 20)
        assert connections.accept_errors == 3 and Listener.tries == 5
        await acceptor.close()
        theirs.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    assert caplog.text.count("Too many open files") == 1 and "Traceback" not in caplog.text


def test_small_writes_are_sent_at_once() -> None:
    """Nagle's algorithm would hold an event back until the client has acknowledged the one before: 40 ms on Linux."""

    async def run() -> None:
        listener, made = _bind(ServeOptions(("m",), port=0)), asyncio.Queue[asyncio.BaseTransport]()
        listener.listen()

        class Made(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.put_nowait(transport)

        acceptor = Acceptor(listener, Connections(1, Timeouts()), lambda slot: Made())
        acceptor.start()
        with socket.create_connection(listener.getsockname()):
            transport = await asyncio.wait_for(made.get(), 20)
            assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            transport.close()
        await acceptor.close()

    asyncio.run(run())


def test_the_limit_of_files() -> None:
    assert fitting(4096, None) == 4096 and fitting(10, 100_000) == 10
    assert fitting(4096, 200) == 200 - RESERVE - OTHER_FILES and fitting(4096, 20) == 1
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(("path", "body"), [("/wait", b""), ("/stream", b"500")])
def test_a_client_that_closes_its_side_gets_its_answer(version: str, path: str, body: bytes) -> None:
    async def test(server: Running) -> None:
        reader, writer = await server.open(request(path, body, version=version))
        writer.write_eof()
        if path == "/wait":
            await server.app.begun.wait()
            await asyncio.sleep(0.2)
            assert server.app.ended == []
            server.app.go.set()
        answer = await asyncio.wait_for(reader.read(), 20)
        while answer.startswith(b"HTTP/1.1 100 "):
            answer = answer.partition(b"\r\n\r\n")[2]
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        if path == "/wait":
            assert rest == b"waited"
        elif version == "1.1":
            assert b"data: 499\n" in rest and rest.endswith(b"0\r\n\r\n")
        else:  # HTTP/1.0 has no chunks: it would take their sizes for text
            assert rest == b"".join(b"data: %d\n\n" % i for i in range(500)) and b"chunked" not in head
        writer.close()

    scenario(test)


def test_a_lost_client_differs_from_a_half_closed_one() -> None:
    """A lost connection and a half-closed one look alike until something is sent."""

    async def test(server: Running) -> None:
        _, writer = await server.open(request("/wait"))
        await server.app.begun.wait()
        writer.close()
        await server.until(lambda: server.app.ended == ["gone"])

    scenario(test)


def test_pipelined_requests_are_answered_after_the_side_is_closed() -> None:
    async def test(server: Running) -> None:
        reader, writer = await server.open(request("/wait") + request("/echo", b"second"))
        writer.write_eof()
        await server.app.begun.wait()
        server.app.go.set()
        answer = await asyncio.wait_for(reader.read(), 20)
        assert b"waited" in answer and answer.endswith(b"second")
        writer.close()

    scenario(test)


def test_the_names_that_we_use_of_uvicorn() -> None:
    """The test fails with the name if an update of uvicorn renames one that protocol.py and plain.py use."""

    async def test(server: Running) -> None:
        _, writer = await server.open(request("/wait"))
        await server.app.begun.wait()
        (protocol,) = server.server.server_state.connections
        for name in ("transport", "flow", "pipeline", "cycle", "app", "loop", "scope", "scheme"):
            assert hasattr(protocol, name), name
        cycle = protocol.cycle  # type: ignore[union-attr]
        for name in ("transport", "flow", "scope", "keep_alive", "disconnected", "message_event", "response_started",
                     "response_complete", "on_response", "default_headers", "send"):  # fmt: skip
            assert hasattr(cycle, name), name
        assert {"write", "close", "is_closing"} >= {
            name for name in dir(cycle.transport) if not name.startswith("_")
        }, "the cycle's transport is ours"
        writer.close()

    scenario(test)
    for kind, names in (
        (HttpToolsProtocol, ("on_response_complete", "_unset_keepalive_if_required", "send_400_response", "shutdown")),
        (RequestResponseCycle, ("run_asgi", "receive")),
    ):
        assert not [name for name in names if not hasattr(kind, name)]


def test_a_server_that_stops_waits_for_open_requests() -> None:
    async def run() -> None:
        async with running() as server:
            server.server.config.timeout_graceful_shutdown = 20
            reader, writer = await server.open(request("/wait"))
            _, silent = await server.open()
            await server.app.begun.wait()
            ending = asyncio.create_task(server.server.shutdown())
            with pytest.raises(OSError):
                for _ in range(1000):
                    (await server.open())[1].close()
                    await asyncio.sleep(0.001)
            assert not ending.done()
            server.app.go.set()
            assert b"waited" in await reader.read()
            await ending
            for end in (writer, silent):
                end.close()

    asyncio.run(run())
