"""What stands before every endpoint: hosts, keys, sizes, one line of log. None of it looks into a body."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.http.credentials import check_host, host_of, key_in, values
from ridgeline.serve.http.errors import APIError, internal, send_error
from ridgeline.serve.service import Service

# What may be asked without a key: that the server lives, and how to talk to it.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/", "/docs", "/openapi.json"})
OPEN_FOLDER = "/page/"  # the parts of the page at /, which asks for a key itself
ASKED_OFTEN = "/live"  # every second by each open page: no lines of log
NO_ANSWER = 499  # the client went away; nginx's
log = logging.getLogger(__name__)


class Guard:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._open: Counter[bytes] = Counter()  # requests of each key
        self.statuses = service.statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), NO_ANSWER

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        key: bytes | None = None
        try:
            key = self._enter(scope)
            await self._app(scope, _limited(receive, self._service.options.max_body_bytes), sending)
        except APIError as e:
            await send_error(e, sending)
        except Exception as e:  # not given on: the HTTP server would log its message, which may hold a prompt
            begun, status = status != NO_ANSWER, 500
            log.error("a fault of the server: %s", fault(e, with_message=self._service.options.log_requests))
            if not begun:
                await send_error(internal(), sending)
        finally:
            if key is not None:
                self._open[key] -= 1
            route = scope.get("route")  # of what no endpoint answers there is none, and paths are without number
            self.statuses[getattr(route, "path", ""), status] += 1
            level = logging.DEBUG if scope["path"] == ASKED_OFTEN and status == 200 else logging.INFO
            seconds = time.perf_counter() - started
            log.log(level, "%s %r %s %.3f s", scope["method"], scope["path"], status, seconds)

    def _enter(self, scope: Scope) -> bytes | None:
        """The key's hash, counted as one more of its requests. The size is looked at last: strangers learn nothing of
        it. Raises APIError.
        """
        options, headers = self._service.options, scope["headers"]
        host = host_of(headers, scope["http_version"])
        if not options.key_hashes:
            check_host(host, options)
        key = self._key(scope)
        lengths = values(headers, b"content-length")
        if lengths and lengths[0].isdigit() and int(lengths[0][:20]) > options.max_body_bytes:
            raise _too_large(options.max_body_bytes)
        if key is not None:
            self._count(key)
        return key

    def _key(self, scope: Scope) -> bytes | None:
        """The hash of the request's key; None where none is needed. Raises APIError."""
        options, path = self._service.options, scope["path"]
        if not options.key_hashes or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        key = options.key_of(key_in(scope["headers"]))
        if key is None:
            raise APIError(
                401, "a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY", code="invalid_api_key"
            )
        return key

    def _count(self, key: bytes) -> None:
        limit = self._service.options.max_concurrency_per_key
        if limit is not None and self._open[key] >= limit:
            raise APIError(
                429, f"this key has {limit} requests open, its limit; wait for one to end", code="too_many_requests",
                retry_after=1,
            )  # fmt: skip
        self._open[key] += 1


def fault(error: BaseException, *, with_message: bool) -> str:
    """Where an exception arose, for the log. Its message may hold what a client sent, so it is asked for."""
    if with_message:
        return "".join(traceback.format_exception(error))
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()


def _limited(receive: Receive, limit: int) -> Receive:
    """A body that does not say its length is cut off where it becomes too long."""
    size = 0

    async def receiving() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise _too_large(limit)
        return message

    return receiving


def _too_large(limit: int) -> APIError:
    return APIError(413, f"the body is larger than {limit} bytes (--max-body-bytes)", code="body_too_large")
