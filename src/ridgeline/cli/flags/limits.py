"""Define the options of `serve` that protect the server from clients and from an engine that hangs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ridgeline.serve.engine.watch import Patience
    from ridgeline.serve.http.connections import Timeouts

PROTECTION = "Protection"


def _limit(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PROTECTION)


AllowedOrigins = Annotated[
    list[str] | None,
    _limit(
        "--allowed-origins",
        help="Sites whose pages may read answers (CORS). May be given several times. Default: none.",
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    _limit("--allowed-hosts", help="Further names of this server that a Host header may have if no API key is set. "
           "* allows all. May be given several times. Default: addresses, localhost and --host."),
]  # fmt: skip
MaxConnections = Annotated[
    int,
    _limit("--max-connections", help="Connections that may be open at once. The server takes fewer if the system's "
           "limit of open files is lower; 16 more are accepted for /health, /ready and /metrics."),
]  # fmt: skip
TimeoutHeaders = Annotated[
    float, _limit("--timeout-headers", help="Seconds that a client may take to send a request's headers.")
]
TimeoutBody = Annotated[
    float,
    _limit("--timeout-body", help="Seconds that a client may take to send a body; each 16 KiB that arrive add one."),
]
TimeoutKeepAlive = Annotated[
    float, _limit("--timeout-keep-alive", help="Seconds that a connection stays open without a request.")
]
TimeoutWrite = Annotated[
    float, _limit("--timeout-write", help="Seconds that a client may stop reading before its connection is closed.")
]
TimeoutHeartbeat = Annotated[
    float,
    _limit("--timeout-heartbeat", help="Seconds without a heartbeat of the engine before /health answers 503; 0: no "
           "limit. The engine sends one twice a second, also during long steps."),
]  # fmt: skip
TimeoutEngine = Annotated[
    float,
    _limit("--timeout-engine", help="Seconds without a heartbeat of the engine before it is replaced; 0: no limit."),
]
TimeoutStep = Annotated[
    float,
    _limit("--timeout-step", help="Seconds that one step or embedding may take before the engine is replaced; 0: no "
           "limit. Raise it where a slow machine needs longer for a long prompt."),
]  # fmt: skip

_TIMEOUTS = ("headers", "body", "keep_alive", "write")
_PATIENCE = ("heartbeat", "engine", "step")


def timeouts_of(given: Mapping[str, Any]) -> Timeouts:
    """Return the timeouts among the values of options. Raises RequestError for one out of range."""
    from ridgeline.serve.http.connections import Timeouts

    return Timeouts(**_seconds(given, _TIMEOUTS, least=0.05))


def patience_of(given: Mapping[str, Any]) -> Patience:
    """Return the limits on a silent or hanging engine. Raises RequestError for one out of range."""
    from ridgeline.serve.engine.watch import Patience

    return Patience(**_seconds(given, _PATIENCE, least=1.0, or_zero=True))


def _seconds(
    given: Mapping[str, Any], names: tuple[str, ...], least: float, *, or_zero: bool = False
) -> dict[str, float]:
    from ridgeline.errors import RequestError

    found = {name: given[f"timeout_{name}"] for name in names}
    for name, seconds in found.items():
        if not (least <= seconds < float("inf") or (or_zero and seconds == 0)):
            rule = f"must be a finite number, at least {least:g} s{', or 0 for no limit' if or_zero else ''}"
            raise RequestError(f"--timeout-{name.replace('_', '-')} is {seconds:g}; it {rule}")
    return found
