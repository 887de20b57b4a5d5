"""The HTTP application: endpoints, errors, protection."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from ridgeline import __version__
from ridgeline.errors import RidgelineError
from ridgeline.serve import routes
from ridgeline.serve.client import EngineDown
from ridgeline.serve.errors import APIError, as_api_error, dumps, invalid
from ridgeline.serve.guard import Guard
from ridgeline.serve.page import page_router
from ridgeline.serve.service import Service


class JSON(Response):
    """Any object as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class Fault(BaseModel):
    """What went wrong. param: the field. code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class Told(BaseModel):
    """Every error, in the shape of OpenAI's."""

    error: Fault


def build_app(service: Service) -> FastAPI:
    """Everything that is served, over one engine."""
    app = FastAPI(
        title="Ridgeline",
        version=__version__,
        description="OpenAI's API on top of Ridgeline's engine. Unknown fields are errors.",
        root_path=service.options.root_path,
        default_response_class=JSON,
        docs_url=None,
        redoc_url=None,
        responses={
            400: {"model": Told, "description": "What is wrong with the request."},
            "default": {"model": Told, "description": "Why else there is no answer."},
        },
    )
    app.state.service = service
    app.include_router(routes.router)
    app.include_router(page_router())
    for kind in (HTTPException, RequestValidationError, APIError, EngineDown, RidgelineError):
        app.add_exception_handler(kind, _on_error)
    app.add_middleware(Guard, service=service)
    if service.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(service.options.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    told = as_api_error(error) or _of_framework(error)
    if told is None:  # a fault of ours, which the guard answers
        raise error
    return JSON(told.body(), told.status, told.headers())


def _of_framework(error: Exception) -> APIError | None:
    if isinstance(error, RequestValidationError):
        return invalid(error.errors())
    if isinstance(error, HTTPException) and isinstance(error.__cause__, APIError):
        return error.__cause__  # while the body was read
    if isinstance(error, HTTPException):
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        text = "there is no such URL; /docs lists those that there are" if code == "unknown_url" else str(error.detail)
        return APIError(error.status_code, text, code=code)
    return None
