"""Check the Host header and read the API key of a request."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from ridgeline.serve.http.errors import APIError
from ridgeline.serve.options import LOOPBACK, ServeOptions

Headers = Iterable[tuple[bytes, bytes]]


def values(headers: Headers, name: bytes) -> list[bytes]:
    """Return the values of all headers with this name (lower case), in their order."""
    return [value for found, value in headers if found == name]


def host_of(headers: Headers, http_version: str) -> str:
    """Return the Host header, or "" if an HTTP/1.0 request has none.

    Raises APIError if an HTTP/1.1 request does not have exactly one.
    """
    found = values(headers, b"host")
    if len(found) > 1 or (not found and http_version != "1.0"):
        raise APIError(
            400, f"the request has {len(found)} Host headers; HTTP/1.1 needs exactly one", code="invalid_host"
        )
    return found[0].decode("latin-1") if found else ""


def check_host(host: str, options: ServeOptions) -> None:
    """Raise APIError if `host` is not a name of this server.

    This protects a server without API keys against DNS rebinding: the owner of a web page can let its name point to
    this machine, and the page could then use the server. IP addresses are safe, so all of them are allowed.
    """
    name = _without_port(host).lower().rstrip(".")
    allowed = {*LOOPBACK, *(name.lower() for name in (options.host, *options.allowed_hosts))}
    if not name or name in allowed or "*" in allowed or name.endswith(".localhost") or _is_address(name):
        return
    raise APIError(
        403, f"the host {name!r:.100} is not a name of this server; start the server with --allowed-hosts NAME, or "
        "with an API key", code="host_not_allowed",
    )  # fmt: skip


def key_in(headers: Headers) -> bytes:
    """Return the API key of a request, or b"" if it has none. Raises APIError if it has several."""
    bearers, keys = values(headers, b"authorization"), values(headers, b"x-api-key")
    if len(bearers) + len(keys) > 1:
        raise APIError(
            400, f"the request has {len(bearers)} Authorization and {len(keys)} x-api-key headers; send exactly one",
            code="several_api_keys",
        )  # fmt: skip
    if keys:
        return keys[0].strip()
    scheme, _, given = (bearers or [b""])[0].partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


def _without_port(host: str) -> str:
    """Return the name, or the IP address without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
