"""Serve the files of the pages at / and /docs, with headers that forbid a browser to run any other code."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import PurePosixPath

from fastapi import APIRouter
from fastapi.responses import Response

from ridgeline.serve.http import form
from ridgeline.serve.http.errors import APIError

TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mjs": "text/javascript",
    ".svg": "image/svg+xml", ".json": "application/json", ".md": "text/plain", "": "text/plain",
}  # fmt: skip
# Allow scripts, styles and connections of this server only, and no frame around the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}  # fmt: skip


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Return the path, with slashes, and the bytes of every file in a folder and its subfolders."""
    for one in folder.iterdir():
        if one.is_dir():
            yield from _files(one, f"{prefix}{one.name}/")
        else:
            yield f"{prefix}{one.name}", one.read_bytes()


def page_router() -> APIRouter:
    """Return the routes of the pages and their files. The files are read once."""
    router = APIRouter()
    parts = dict(_files(files("ridgeline.serve.http") / "static"))
    parts[form.NAME] = form.form_script().encode()

    def part(name: str) -> Response:
        kind = TYPES[PurePosixPath(name).suffix]
        return Response(parts[name], media_type=f"{kind}; charset=utf-8", headers=HEADERS)

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return part("index.html")

    @router.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return part("docs.html")

    @router.get("/page/{name:path}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in parts:
            raise APIError(404, f"the page has no file {name!r:.100}", code="unknown_url")
        return part(name)

    return router
