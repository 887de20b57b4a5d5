"""Run a server in a separate process, as a user would start it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 60.0


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until a condition is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"the condition is not true after {seconds:g} s"
        time.sleep(0.05)


class Server:
    """Runs `ridgeline serve` with some arguments, and sends requests to it."""

    def __init__(
        self, *args: str, env: dict[str, str] | None = None, prefix: Sequence[str] = (), start_s: float = START_SECONDS
    ) -> None:
        command = [*prefix, sys.executable, "-m", "ridgeline", "serve", *args, "--port", "0"]
        self._log = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads would fill up
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self.process = subprocess.Popen(command, stderr=self._log, env=environment)
        self.trusted: ssl.SSLContext | None = None  # set for a server that uses TLS
        self._socks: list[socket.socket] = []
        try:
            self.port = self._port(start_s)
        except BaseException:
            self.stop(signal.SIGKILL)
            raise

    def _port(self, seconds: float) -> int:
        """Wait until the server listens, and return its port."""
        end = time.monotonic() + seconds
        while not (found := re.search(r"serving .* at https?://(?:127\.0\.0\.1|0\.0\.0\.0):(\d+)", self.said())):
            assert self.process.poll() is None and time.monotonic() < end, self.said()
            time.sleep(0.05)
        return int(found[1])

    def said(self) -> str:
        """Return everything that the server has written to stderr."""
        return Path(self._log.name).read_text()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Send one request; return its status and JSON. A body of bytes is sent unchanged."""
        status, data, _ = self.raw(method, path, body, **headers)
        return status, json.loads(data)

    def raw(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Send one request; return its status, body and headers."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        if self.trusted is not None:
            connection = http.client.HTTPSConnection("localhost", self.port, timeout=60, context=self.trusted)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, data, {"content-type": "application/json", **named})
            response = connection.getresponse()
            return response.status, response.read(), {k.lower(): v for k, v in response.getheaders()}

    def post(self, path: str, **body: Any) -> tuple[int, Any]:
        return self.ask("POST", path, body)

    def told(self, data: bytes) -> tuple[int, Any]:
        """Send bytes on a new connection; return the status and JSON of the answer, and close the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as sock:
            sock.sendall(data)
            answer = b""
            while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
                piece = sock.recv(1 << 16)
                assert piece, answer
                answer += piece
        return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])

    def stream(self, path: str, body: dict[str, Any], **headers: str) -> socket.socket:
        """Return a connection that has sent a request for a stream and read nothing. It is closed with the server at
        the latest.
        """
        return self.send(path, {**body, "stream": True}, **headers)

    def send(self, path: str, body: dict[str, Any], **headers: str) -> socket.socket:
        """Return a connection that has sent a request and read nothing."""
        data = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        named = {"host": "127.0.0.1", "content-type": "application/json", "content-length": str(len(data)), **headers}
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in named.items()) + "\r\n"
        sock.sendall(head.encode() + data)
        self._socks.append(sock)
        return sock

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        _, data, _ = self.raw("GET", "/metrics")
        lines = [line for line in data.decode().splitlines() if re.match(re.escape(name) + r"[{ ]", line)]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def until(self, name: str, value: float, seconds: float = 20.0) -> None:
        """Wait until a metric has this value."""
        end = time.monotonic() + seconds
        while (found := self.metric(name)) != value:
            assert time.monotonic() < end, f"{name} is {found}, not {value}"
            time.sleep(0.05)

    def engine_pid(self) -> int:
        """Return the id of the engine's process, which is a child of the server's process."""
        (pid,) = self.engine_pids()
        return pid

    def engine_pids(self) -> list[int]:
        """Return the ids of all engine processes, the oldest first."""
        command = ["ps", "-ww", "-o", "pid=,args=", "--sort=start_time", "--ppid", str(self.process.pid)]
        lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
        return [int(line.split()[0]) for line in lines if "ridgeline.serve.engine.worker" in line]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal to the server and return its exit status."""
        self.process.send_signal(number)
        status = self.process.wait(30)
        for sock in self._socks:
            sock.close()
        self.log = self.said()
        self._log.close()
        return status


@contextlib.contextmanager
def serving(
    *args: str, env: dict[str, str] | None = None, prefix: Sequence[str] = (), start_s: float = START_SECONDS
) -> Iterator[Server]:
    """Run a server, and stop it when the context ends."""
    server = Server(*args, env=env, prefix=prefix, start_s=start_s)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()


def head(path: str, *headers: str) -> bytes:
    """Return a GET request with these headers and no others."""
    return "\r\n".join([f"GET {path} HTTP/1.1", *headers, "", ""]).encode()


CHAT_TEMPLATE = """\
{%- if tools %}tools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}
{% endif -%}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""


def write_template(folder: Path) -> str:
    """Write a chat template for models that have none."""
    path = folder / "template.jinja"
    path.write_text(CHAT_TEMPLATE)
    return str(path)
