"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}. Write JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.types import Send

from ridgeline.errors import HelpersBusy, RequestError, TokenizerError
from ridgeline.serve.engine.client import EngineDown

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    413: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error", 503: "service_unavailable",
}  # fmt: skip


_PIECE = 1 << 15  # number of list elements that are encoded at once
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False)


class APIError(Exception):
    """An error that is sent to the client. param: the field that caused it. code: for programs. retry_after: seconds
    after which the client may try again.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        retry_after: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    def body(self) -> dict[str, Any]:
        """Return the JSON object to send."""
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers of the error's response."""
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return headers | ({"www-authenticate": "Bearer"} if self.status == 401 else {})


def as_api_error(error: Exception) -> APIError | None:
    """Return the error to send for an exception, or None for a bug, about which a client gets no details."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError | TokenizerError):
        return APIError(400, str(error))
    if isinstance(error, HelpersBusy):
        return APIError(429, str(error), code="helpers_busy", retry_after=2)
    if isinstance(error, EngineDown):
        return APIError(503, str(error), code="engine_down", retry_after=2)
    return None


def internal() -> APIError:
    """Return the error to send for a bug of the server."""
    return APIError(500, "internal error of the server; its log has the details", code="internal_error")


TOO_LONG = ("too_long", "string_too_long")


def invalid(errors: Any) -> APIError:
    """Return the error to send for pydantic's errors about a body.

    It describes the first one, or the first list that is too long: where a field takes several types, the errors of the
    others only say that it has another type.
    """
    found = sorted(errors, key=lambda error: error["type"] not in TOO_LONG)
    first: Mapping[str, Any] = found[0] if found else {"loc": (), "msg": "invalid", "type": "value_error"}
    name = ".".join(str(part) for part in first["loc"] if part != "body")
    kind, more = str(first["type"]), f" (and {len(errors) - 1} more errors)" if len(errors) > 1 else ""
    if kind == "extra_forbidden":
        text = f"{name} is not a known field; /docs lists the known fields{more}"
        return APIError(400, text, param=name, code="unknown_parameter")
    if not name and kind in ("model_attributes_type", "missing"):
        return APIError(400, "the body is not a JSON object; send one with Content-Type: application/json")
    if kind == "json_invalid":
        why = first.get("ctx", {}).get("error", first["msg"])
        return APIError(400, f"the body is not valid JSON: {why}", code="invalid_json")
    return APIError(400, f"{name or 'the body'}: {first['msg']}{more}", param=name or None, code="invalid_value")


def dumps(value: Any) -> bytes:
    """Return JSON as UTF-8. A lone surrogate, which a client may have sent, becomes a question mark."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


async def send_error(error: APIError, send: Send, told: Mapping[str, Any] | None = None) -> None:
    """Answer an ASGI request with an error and close the connection. told: the JSON to send; None: OpenAI's."""
    body = dumps(error.body() if told is None else told)
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    raw = [(name.encode(), value.encode()) for name, value in {**headers, **error.headers()}.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def dumps_object(value: Mapping[str, Any]) -> bytes:
    """Return an object with long lists as JSON. Lists are encoded in pieces, between which other threads can run."""
    return b"{" + b",".join(dumps(key) + b":" + _long(item) for key, item in value.items()) + b"}"


def _long(value: Any) -> bytes:
    if not isinstance(value, list):
        return dumps(value)
    pieces = (dumps(value[i : i + _PIECE])[1:-1] for i in range(0, len(value), _PIECE))
    return b"[" + b",".join(pieces) + b"]"
