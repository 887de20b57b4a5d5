"""Connect the HTTP process and the engine process.

Where a process can inherit open files, the pipe is a pair of sockets, one of which the engine process inherits.
Elsewhere (Windows) the engine process connects to a port on the loopback address, and proves with a secret from its
standard input that it is the right process: messages are pickled, so no other process may connect.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

CONNECT_SECONDS = 60.0  # for the new process to import its modules and connect
POLL_SECONDS = 0.5
SECRET_BYTES = 32
LOOPBACK = "127.0.0.1"
CAN_INHERIT = os.name == "posix"


def start_process(
    command: Sequence[str], env: Mapping[str, str] | None = None, *, inherit: bool = CAN_INHERIT
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start `command` with one more argument, which it passes to `connect`. Return the process and our end of the pipe.

    env: environment of the process; None inherits ours. Raises OSError.
    """
    return _inheriting(command, env) if inherit else _connecting(command, env)


def connect(argument: str) -> socket.socket:
    """Return the end of the pipe in a process that `start_process` started with this argument. Raises OSError."""
    kind, number = argument.split(":")
    if kind == "port":
        secret = sys.stdin.buffer.read(SECRET_BYTES)
        pipe = socket.create_connection((LOOPBACK, int(number)), CONNECT_SECONDS)
        pipe.settimeout(None)
        pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pipe.sendall(secret)
        return pipe
    # dup returns the lowest free file number: select only accepts numbers below 1024.
    pipe = socket.socket(fileno=os.dup(int(number)))
    os.close(int(number))
    return pipe


def _inheriting(command: Sequence[str], env: Mapping[str, str] | None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        try:
            line = [*command, f"file:{number}"]
            return subprocess.Popen(line, stdin=subprocess.DEVNULL, env=env, pass_fds=[number]), ours
        except BaseException:
            ours.close()
            raise


def _connecting(command: Sequence[str], env: Mapping[str, str] | None) -> tuple[subprocess.Popen[bytes], socket.socket]:
    secret = secrets.token_bytes(SECRET_BYTES)
    with socket.create_server((LOOPBACK, 0)) as listener:
        line = [*command, f"port:{listener.getsockname()[1]}"]
        process = subprocess.Popen(line, stdin=subprocess.PIPE, env=env)
        try:
            assert process.stdin is not None
            with process.stdin as known:
                known.write(secret)
            return process, _accepted(listener, process, secret)
        except BaseException:
            process.kill()
            process.wait()
            raise


def _accepted(listener: socket.socket, process: subprocess.Popen[bytes], secret: bytes) -> socket.socket:
    """Return the first connection that sends the secret. Raises OSError if none does in time."""
    listener.settimeout(POLL_SECONDS)
    end = time.monotonic() + CONNECT_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ConnectionError(f"it ended with status {process.returncode}")
        try:
            pipe, _ = listener.accept()
        except TimeoutError:
            continue
        if hmac.compare_digest(_received_secret(pipe), secret):
            pipe.settimeout(None)
            pipe.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return pipe
        pipe.close()
    raise ConnectionError(f"it did not connect within {CONNECT_SECONDS:.0f} s")


def _received_secret(pipe: socket.socket) -> bytes:
    """Return the first bytes of a new connection, or b"" if it does not send enough in time."""
    pipe.settimeout(POLL_SECONDS)
    shown = b""
    try:
        while len(shown) < SECRET_BYTES and (part := pipe.recv(SECRET_BYTES - len(shown))):
            shown += part
    except OSError:
        return b""
    return shown
