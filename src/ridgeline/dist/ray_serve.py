"""Serve a model under Ray Serve: its proxy has the connections, and one deployment has the server and the router."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from ridgeline.dist.fleet import Fleet
from ridgeline.dist.local import check_replicas
from ridgeline.dist.ray_cluster import clients_of
from ridgeline.serve.asgi import Application
from ridgeline.serve.logs import start_log
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.server import opened
from ridgeline.serve.service import Service

FRONT = "Front"  # name of the deployment


def application(
    model: str, arguments: Mapping[str, Any], options: ServeOptions, replicas: int, *, quiet: bool = False
) -> Any:
    """Return a Ray Serve application whose one deployment answers HTTP requests with `replicas` engines.

    arguments: arguments of LLM. quiet: no line in the log for each request. The limit of open requests is
    --max-connections; the server's own limits answer 429 earlier.
    """
    from ray import serve

    check_replicas(replicas)

    def fleet(model: str, options: Mapping[str, Any], on_loading: Any, patience: Any) -> Fleet:
        return Fleet(clients_of(model, options, replicas, on_loading, patience))

    def service() -> AbstractAsyncContextManager[Service]:
        start_log(quiet=quiet)  # in the process of the deployment
        return opened(model, arguments, options, fleet, lambda loading: None)

    def front() -> Application:
        return Application(service)

    deployment = serve.deployment(
        name=FRONT, num_replicas=1, max_ongoing_requests=options.max_connections, ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=options.shutdown_timeout,
    )  # fmt: skip
    return deployment(serve.ingress(front)()).bind()
