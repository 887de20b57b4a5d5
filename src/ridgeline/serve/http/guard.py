"""Check every request before its endpoint: Host header, API key, size. Log one line. Bodies are not read here."""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ridgeline.serve.http.credentials import check_host, host_of, key_in, values
from ridgeline.serve.http.errors import APIError, internal, send_error
from ridgeline.serve.http.shapes import shaped
from ridgeline.serve.keys import CURRENT
from ridgeline.serve.service import Service

# Paths that need no API key: the state of the server and its documentation.
OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/", "/docs", "/openapi.json"})
OPEN_FOLDER = "/page/"  # files of the page at /, which asks the user for a key itself
FREQUENT_PATH = "/live"  # each open page requests it every second, so it is not logged
NO_ANSWER = 499  # nginx's status for a client that disconnected
log = logging.getLogger(__name__)


class Guard:
    """ASGI middleware that checks, counts and logs requests."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service
        self._open: Counter[bytes] = Counter()  # open requests of each key
        self.statuses = service.statuses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, service = time.perf_counter(), NO_ANSWER, self._service
        CURRENT.set(None)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if told := service.keys.headers(CURRENT.get()):
                    more = [(name.encode(), value.encode()) for name, value in told.items()]
                    message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        key: bytes | None = None
        try:
            key = self._enter(scope)
            await self._app(scope, _limited(receive, self._service.options.max_body_bytes), sending)
        except APIError as e:
            await send_error(e, sending, shaped(e, scope["path"]))
        except Exception as e:  # not raised again: uvicorn would log its message, which may contain a prompt
            begun, status = status != NO_ANSWER, 500
            log.error("internal error: %s", fault(e, with_message=self._service.options.log_requests))
            if not begun:
                await send_error(internal(), sending, shaped(internal(), scope["path"]))
        finally:
            if key is not None:
                self._open[key] -= 1
            route = scope.get("route")  # None for unknown paths, which are counted as one since there is no limit
            self.statuses[getattr(route, "path", ""), status] += 1
            level = logging.DEBUG if scope["path"] == FREQUENT_PATH and status == 200 else logging.INFO
            seconds = time.perf_counter() - started
            log.log(level, "%s %r %s %.3f s", scope["method"], scope["path"], status, seconds)

    def _enter(self, scope: Scope) -> bytes | None:
        """Check a request; count it as an open request of its key; return the key's hash, or None without keys.

        The size is checked last, so that a client without a key does not learn the limit. Raises APIError.
        """
        options, headers = self._service.options, scope["headers"]
        host = host_of(headers, scope["http_version"])
        if not options.key_hashes:
            check_host(host, options)
        key = self._key(scope)
        lengths = values(headers, b"content-length")
        if lengths and lengths[0].isdigit() and int(lengths[0][:20]) > options.max_body_bytes:
            raise _too_large(options.max_body_bytes)
        CURRENT.set(key)
        if key is not None:
            if scope["method"] == "POST":
                self._service.keys.enter(key)
            self._count(key)
        return key

    def _key(self, scope: Scope) -> bytes | None:
        """Return the hash of the request's key, or None if no key is needed. Raises APIError."""
        options, path = self._service.options, scope["path"]
        if not options.key_hashes or path in OPEN_PATHS or path.startswith(OPEN_FOLDER):
            return None
        key = options.key_of(key_in(scope["headers"]))
        if key is None:
            raise APIError(
                401,
                "a valid API key is needed; send the header Authorization: Bearer KEY, or x-api-key: KEY",
                code="invalid_api_key",
            )
        return key

    def _count(self, key: bytes) -> None:
        limit = self._service.options.max_concurrency_per_key
        if limit is not None and self._open[key] >= limit:
            raise APIError(
                429, f"this API key has {limit} open requests, which is the limit; wait until one ends",
                code="too_many_requests", retry_after=1,
            )  # fmt: skip
        self._open[key] += 1


def fault(error: BaseException, *, with_message: bool) -> str:
    """Return an exception's traceback for the log. with_message: add its message, which may contain a client's text."""
    if with_message:
        return "".join(traceback.format_exception(error))
    return f"{type(error).__name__}\n{''.join(traceback.format_tb(error.__traceback__))}".rstrip()


def _limited(receive: Receive, limit: int) -> Receive:
    """Return a `receive` that raises APIError once a body is longer than `limit` bytes."""
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
