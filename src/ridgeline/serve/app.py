"""Build the HTTP application from the endpoints, the middleware and the handlers of errors."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ridgeline import __version__
from ridgeline.errors import RidgelineError
from ridgeline.serve.api import routes
from ridgeline.serve.api.described import JSON, errors
from ridgeline.serve.dialects.routes import dialect_routers
from ridgeline.serve.engine.client import EngineDown
from ridgeline.serve.http.errors import APIError, as_api_error, invalid
from ridgeline.serve.http.guard import Guard
from ridgeline.serve.http.page import page_router
from ridgeline.serve.http.request_ids import RequestIds
from ridgeline.serve.http.shapes import shaped
from ridgeline.serve.service import Service


def build_app(service: Service) -> FastAPI:
    """Return the application that serves one model."""
    app = FastAPI(
        title="Ridgeline",
        version=__version__,
        description="The APIs of OpenAI, Anthropic, Ollama, llama.cpp and vLLM for a model that Ridgeline serves. "
        "Unknown fields are errors.",
        root_path=service.options.root_path,
        default_response_class=JSON,
        docs_url=None,
        redoc_url=None,
        responses={**errors()},
    )
    app.state.service = service
    app.include_router(routes.router)
    for router in dialect_routers(service.options):
        app.include_router(router)
    app.include_router(page_router())
    for kind in (HTTPException, RequestValidationError, APIError, EngineDown, RidgelineError):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(Guard, service=service)
    app.add_middleware(RequestIds)
    if service.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    api_error = as_api_error(error) or _of_framework(error)
    if api_error is None:  # a bug, which the guard answers with 500
        raise error
    more = error.headers if isinstance(error, HTTPException) and error.headers else {}  # a 405 has the header Allow
    return JSON(shaped(api_error, request.scope["path"]), api_error.status, {**api_error.headers(), **more})


def _of_framework(error: Exception) -> APIError | None:
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, HTTPException) and isinstance(error.__cause__, APIError):
        return error.__cause__  # raised while the body was read
    if isinstance(error, HTTPException):
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        text = "this URL does not exist; /docs lists all URLs" if code == "unknown_url" else str(error.detail)
        return APIError(error.status_code, text, code=code)
    return None
