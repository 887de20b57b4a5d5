"""Write an error as the API of its path does: OpenAI's, Anthropic's, Ollama's or llama.cpp's."""

from __future__ import annotations

from typing import Any, Literal

from ridgeline.serve.http.errors import APIError

Shape = Literal["openai", "anthropic", "ollama", "llama.cpp"]
LLAMA_CPP = frozenset({"/completion", "/completions", "/infill", "/apply-template", "/props", "/slots"})
_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_LLAMA_CPP = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    503: "unavailable_error",
}  # fmt: skip


def shape_of(path: str) -> Shape:
    """Return the shape of the errors of a path."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return "anthropic"
    if path.startswith("/api/"):
        return "ollama"
    return "llama.cpp" if path in LLAMA_CPP else "openai"


def shaped(error: APIError, path: str) -> dict[str, Any]:
    """Return the JSON object that tells an error to clients of a path."""
    match shape_of(path):
        case "anthropic":
            return {"type": "error", "error": {"type": _kind(error, _ANTHROPIC, "api_error"), "message": error.message}}
        case "ollama":
            return {"error": error.message}
        case "llama.cpp":
            kind = _kind(error, _LLAMA_CPP, "server_error")
            return {"error": {"code": error.status, "message": error.message, "type": kind}}
        case _:
            return error.body()


def _kind(error: APIError, kinds: dict[int, str], internal: str) -> str:
    return kinds.get(error.status, internal if error.status >= 500 else "invalid_request_error")
