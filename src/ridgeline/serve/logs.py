"""The log of the server: a line for each request, restarts of engines and warnings, on the standard error output."""

from __future__ import annotations

import logging


def start_log(*, quiet: bool) -> None:
    """Write what the server logs to the standard error output. quiet: no line for each request."""
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # it warns of every malformed request
    if quiet:
        logging.getLogger("ridgeline.serve.http.guard").setLevel(logging.WARNING)
