"""How endpoints read their bodies: small ones here, large ones in a helper process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from ridgeline.errors import RequestError
from ridgeline.serve.errors import APIError
from ridgeline.serve.helpers import LARGE_BODY
from ridgeline.serve.parse import parse
from ridgeline.serve.service import Service

SMALL_BODY = 1 << 16


class _Request(Request):
    async def json(self) -> Any:
        body = await self.body()
        service: Service = self.app.state.service
        try:
            if len(body) > LARGE_BODY:
                return await service.helpers.parse(body)
            found = parse(body)
            if len(body) > SMALL_BODY:
                await asyncio.sleep(0)  # streams are written between the parser and the validation
            return found
        except RequestError as e:
            raise APIError(400, str(e), code="too_long") from None


class BodyRoute(APIRoute):
    """An endpoint whose bodies are read so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(_Request(request.scope, request.receive))

        return handle
