"""`ridgeline serve` reports an address that it cannot use in one line, before it loads the model."""

from __future__ import annotations

import socket

import pytest

from ridgeline.errors import RequestError
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.server import _bind


def options(host: str, port: int) -> ServeOptions:
    return ServeOptions(names=("x",), host=host, port=port)


@pytest.mark.parametrize(
    ("host", "port", "words"),
    [
        ("127.0.0.1", 80808, "--port is 80808; it must be 0 (any free port) to 65535"),
        ("127.0.0.1", -1, "--port is -1; it must be 0"),
        ("no-such-host.invalid", 0, "set --host to an address of this machine"),
        ("a" * 70 + ".b", 0, "set --host to an address of this machine"),
        ("", -5, "--port is -5"),
        ("192.0.2.1", 0, "--host must be an address of this machine"),
        ("::1::", 0, "--host"),
    ],
)
def test_an_address_that_cannot_be_used(host: str, port: int, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        _bind(options(host, port))
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RequestError, match="choose another --port"):
        _bind(options("127.0.0.1", taken.getsockname()[1]))
