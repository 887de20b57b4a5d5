"""The HTTP process's end of the pipe, without a process behind it."""

from __future__ import annotations

import asyncio
from typing import Any

from ridgeline.serve.client import EngineClient
from ridgeline.serve.messages import Abort, Embed


def client_without_engine(sent: list[Any]) -> EngineClient:
    """A client that is ready; what it would send is written down instead."""
    client = EngineClient("pocket", {}, lambda loading: None)
    client.state = "ready"
    client._send = sent.append  # type: ignore[method-assign]
    return client


def test_an_embedding_whose_client_leaves_is_aborted() -> None:
    sent: list[Any] = []

    async def run() -> None:
        task = asyncio.create_task(client_without_engine(sent).embed([[1]], "mean"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    assert sent == [Embed(0, [[1]], "mean"), Abort(0)]
