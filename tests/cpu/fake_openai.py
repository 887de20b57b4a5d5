"""Run an OpenAI server with invented texts, whose timing a test decides."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

# Maps the number of a request and its body to the pauses before each of its events (in seconds), or to an error status.
Plan = Callable[[int, dict[str, Any]], Sequence[float] | int]


@dataclass
class FakeServer:
    """A fake server. url: its address. came: arrival time of each completion request (time.perf_counter). bodies: the
    bodies of these requests.
    """

    plan: Plan
    owner: str = "somebody"
    usage: bool = True
    reason: str | None = "stop"
    mute: bool = False  # whether every second text is held back
    url: str = ""
    came: list[float] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                size = next((int(line.split(":")[1]) for line in head.split("\r\n") if "content-length" in line), 0)
                body = await reader.readexactly(size)
                if head.startswith("get /v1/models"):
                    whole(writer, 200, {"data": [{"id": "fake", "owned_by": self.owner, "max_model_len": 512}]})
                elif head.startswith(("post /v1/completions", "post /v1/chat/completions")):
                    await self.complete(writer, json.loads(body))
                else:
                    whole(writer, 404, {"error": {"message": "no"}})
        writer.close()

    async def complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        number = len(self.came)
        self.came.append(time.perf_counter())
        self.bodies.append(body)
        plan = self.plan(number, body)
        if isinstance(plan, int):
            whole(writer, plan, {"error": {"message": f"refused with {plan}"}})
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        due, chat = time.perf_counter(), "messages" in body
        if chat:
            event(writer, {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]})
        for i, pause in enumerate(plan):
            due += pause
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if self.mute and i % 2:
                continue
            text = {"delta": {"content": "x"}} if chat else {"text": "x"}
            event(writer, {"choices": [{"index": 0, **text, "finish_reason": None}]})
        end = {"delta": {}} if chat else {"text": ""}
        event(writer, {"choices": [{"index": 0, **end, "finish_reason": self.reason}]})
        if self.usage:
            event(writer, {"choices": [], "usage": {"prompt_tokens": 77, "completion_tokens": len(plan)}})
        piece(writer, b"data: [DONE]\n\n")
        piece(writer, b"")


def event(writer: asyncio.StreamWriter, value: Any) -> None:
    piece(writer, b"data: " + json.dumps(value).encode() + b"\n\n")


def piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def whole(writer: asyncio.StreamWriter, status: int, value: Any) -> None:
    data = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)


@contextlib.contextmanager
def fake_server(plan: Plan, **fields: Any) -> Iterator[FakeServer]:
    """Run a server in a thread until the context ends."""
    fake, loop = FakeServer(plan, **fields), asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.answer, "127.0.0.1", 0))
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
