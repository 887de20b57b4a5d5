"""Run long work of the HTTP process in helper processes: parse large bodies, tokenize long texts, render templates.

A helper process does not delay other clients' streams, gives its memory back, and is killed at its limits.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.bounded import BoundedPool, Limits, Setup
from ridgeline.errors import BoundExceeded, HelpersBusy
from ridgeline.load.chat import RENDERING, render_job
from ridgeline.runtime.request import TextToEncode
from ridgeline.serve.helpers import jobs
from ridgeline.serve.helpers.packed import unpack
from ridgeline.serve.http.errors import APIError

LONG_TEXT = 1 << 16  # characters of a text that a helper tokenizes

PARSING = Limits(10.0, 2 << 30)
TOKENIZING = Limits(60.0, 6 << 30)
SIZE, WAITING = 2, 16


class Helpers:
    """The helper processes of a server. tokenizer: folder of the tokenizer; None for a model without one."""

    def __init__(self, tokenizer: Path | None) -> None:
        self._pool = BoundedPool(SIZE, max_waiting=WAITING)
        setup = Setup(jobs.open_tokenizer, (str(tokenizer),)) if tokenizer is not None else None
        self._tokenizers = BoundedPool(SIZE, max_waiting=WAITING, setup=setup)

    async def parse(self, body: bytes) -> Any:
        """Return the JSON value of a body. Raises RequestError, JSONDecodeError, APIError."""
        wrong, *parts = await self._run("the body was not parsed", self._pool, jobs.parse_body, body, limits=PARSING)
        if wrong:
            raise json.JSONDecodeError(wrong, "", *parts)
        return unpack(parts)

    async def encode(self, work: TextToEncode) -> list[int]:
        """Return the token ids of a text. Raises RequestError, APIError."""
        what = f"the text of {len(work.text)} characters was not tokenized"
        data = work.text.encode("utf-8", "surrogatepass")
        ids = await self._run(
            what, self._tokenizers, jobs.encode_text, data, work.is_chat, work.add_special_tokens, work.max_tokens,
            work.truncation_side, limits=TOKENIZING,
        )  # fmt: skip
        return await asyncio.to_thread(lambda: array("I", ids).tolist())

    async def render(self, source: str, name: str, data: Mapping[str, Any]) -> str:
        """Return a conversation rendered with a chat template. Raises APIError, RequestError, TokenizerError."""
        text = await self._run(
            "the chat template was stopped", self._pool, render_job, source, name, dict(data), limits=RENDERING
        )  # fmt: skip
        return str(text, "utf-8", "surrogatepass")

    def close(self) -> None:
        """End the helper processes."""
        self._pool.close()
        self._tokenizers.close()

    async def _run(self, what: str, pool: BoundedPool, function: Any, *args: Any, limits: Limits) -> Any:
        try:
            return await pool.run(function, *args, limits=limits)
        except BoundExceeded as e:
            raise APIError(400, f"{what}: {e}", code="too_expensive") from None
        except HelpersBusy as e:
            raise APIError(429, f"{what}: {e}", code="helpers_busy", retry_after=2) from None
