"""A file of requests, answered: OpenAI's batch format. What is in the results already is not asked again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import ValidationError

from ridgeline.errors import HelpersBusy, RequestError
from ridgeline.serve.api import responses
from ridgeline.serve.api.chat import Chat
from ridgeline.serve.api.completions import Completion
from ridgeline.serve.api.embeddings import embeddings
from ridgeline.serve.api.types import Body, ChatBody, CompletionBody, EmbeddingBody
from ridgeline.serve.api.types_responses import ResponseBody
from ridgeline.serve.engine.client import EngineClient, EngineDown
from ridgeline.serve.http import unknown
from ridgeline.serve.http.errors import APIError, as_api_error, dumps, internal, invalid
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.service import Service
from ridgeline.spec.folders import write_whole

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/v1/responses": ResponseBody,
    "/v1/embeddings": EmbeddingBody,
}  # fmt: skip
TRIES = 3  # of a request that an engine took down with it
PATIENCE_SECONDS = 60.0  # for an engine that is being started again
PLACE_SECONDS = 0.05  # between two looks whether there are places


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch. id: the client's own; answers are matched by it."""

    id: str
    url: str
    body: Mapping[str, Any]


def read_lines(path: Path) -> list[Line]:
    """All requests of a file. Raises RequestError, with the line's number, for what is none."""
    lines: list[Line] = []
    known: dict[str, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RequestError(f"{path}: {e}") from None
    for number, given in enumerate(text.split("\n"), 1):  # JSON's texts may hold Unicode's other line ends
        if given.strip():
            try:
                line = _line(json.loads(given))
            except (ValueError, RecursionError) as e:
                raise RequestError(f"{path}, line {number}: {e}") from None
            if line.id in known:
                raise RequestError(f"{path}, line {number}: custom_id {line.id!r} is that of line {known[line.id]} too")
            known[line.id] = number
            lines.append(line)
    if not lines:
        raise RequestError(f"{path} has no requests")
    return lines


def _line(given: Any) -> Line:
    if not isinstance(given, dict) or not isinstance(given.get("custom_id"), str):
        raise RequestError("a request is an object with custom_id, method, url and body; custom_id is missing")
    if given.get("method", "POST") != "POST" or given.get("url") not in BODIES:
        raise RequestError(
            f"{given.get('method')} {given.get('url')!r} is no request; known are POST {', '.join(BODIES)}"
        )
    if not isinstance(given.get("body"), dict):
        raise RequestError("body is no object")
    if given["body"].get("stream"):
        raise RequestError("stream means nothing in a batch; leave it out")
    return Line(given["custom_id"], given["url"], given["body"])


def read_done(path: Path) -> dict[str, bool]:
    """The ids that have an answer in a file of results, and whether it is an error.

    What failed through no fault of the request (a full queue, an engine that went down) is to be asked again: those
    lines are taken away, as is a last line that was cut off, by a power cut say. Raises RequestError for a file that
    holds no results.
    """
    if not path.exists():
        return {}
    if not path.is_file():
        raise RequestError(f"{path} is not a file that a next run could go on with; choose another -o")
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    done, kept = dict[str, bool](), list[bytes]()
    try:
        for line in filter(bytes.strip, lines):
            result = json.loads(line)
            name, status = str(result["custom_id"]), int(result["response"]["status_code"])
            if not _passing(status):
                done[name] = status != 200
                kept.append(line)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"{path} is there and holds no results of a batch; choose another -o") from None
    if (whole := b"".join(kept)) != data:
        try:
            write_whole(path, whole.decode())
        except OSError as e:
            raise RequestError(f"cannot write to {path}: {e.strerror}") from None
    return done


def _passing(status: int) -> bool:
    """Is it no answer to the request, but the state of the server at that moment?"""
    return status == 429 or status >= 500


async def run_batch(
    model: str,
    llm_options: Mapping[str, Any],
    options: ServeOptions,
    lines: list[Line],
    output: Path,
    *,
    on_ready: Callable[[Service], None],
    on_done: Callable[[Mapping[str, Any]], None],
) -> None:
    """Answer requests, as many at once as the engine runs, and add each answer to a file as soon as it is there.

    on_done: called with each line of the results. Raises RidgelineError for a model that cannot be loaded.
    """
    client = EngineClient(model, llm_options, lambda loading: None)
    service: Service | None = None
    try:
        service = Service(client, await client.start(), options)
        on_ready(service)
        queue = iter(lines)
        with _opened(output) as file:

            async def work(queue: Iterator[Line]) -> None:
                for line in queue:
                    result = await _result(service, line)
                    _append(file, output, dumps(result) + b"\n")
                    on_done(result)

            count = min(len(lines), service.gate.running + service.gate.running // 4)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(count):
                        group.create_task(work(queue))
            except ExceptionGroup as errors:
                failed: BaseException | None = errors.subgroup(RequestError)
                if failed is None:
                    raise
                while isinstance(failed, BaseExceptionGroup):
                    failed = failed.exceptions[0]
                raise failed from None  # the output cannot be written, which ended all tasks
    finally:
        if service is not None:
            await asyncio.to_thread(service.helpers.close)
        await client.close()


def _opened(output: Path) -> BinaryIO:
    """The file of results, at its end. Raises RequestError."""
    try:
        return output.open("ab", buffering=0)
    except OSError as e:
        raise RequestError(f"cannot write to {output}: {e.strerror}") from None


def _append(file: BinaryIO, output: Path, line: bytes) -> None:
    """Write a whole line or none of it. Raises RequestError where the disk is full."""
    end, data = os.fstat(file.fileno()).st_size, memoryview(line)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as e:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), end)
        raise RequestError(f"cannot write to {output}: {e.strerror}; run again, it goes on") from None


async def _result(service: Service, line: Line) -> dict[str, Any]:
    """The line of the results."""
    ignored: list[str] = []
    try:
        status, body = 200, await _answer(service, line, ignored)
    except Exception as e:
        told = invalid(e.errors()) if isinstance(e, ValidationError) else as_api_error(e) or internal()
        status, body = told.status, told.body()
    warned = {"warning": unknown.warning(ignored)} if ignored else {}
    response = {"status_code": status, "request_id": uuid.uuid4().hex, **warned, "body": body}
    error = None if status == 200 else {"code": body["error"]["code"], "message": body["error"]["message"]}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.id, "response": response, "error": error}


async def _answer(service: Service, line: Line, ignored: list[str]) -> dict[str, Any]:
    for attempt in range(1, TRIES + 1):
        try:
            return await _placed(service, line, ignored)
        except EngineDown:
            if attempt == TRIES:
                raise
            await _until_ready(service)
    raise APIError(503, "the engine is down")


async def _placed(service: Service, line: Line, ignored: list[str]) -> dict[str, Any]:
    """The answer, as soon as there are places: all of them are this batch's, so some become free."""
    while True:
        try:
            return await _sent(service, line, ignored)
        except HelpersBusy:  # other structures of this batch are being checked
            pass
        except APIError as e:
            if e.status != 429:
                raise
        await asyncio.sleep(PLACE_SECONDS)


async def _sent(service: Service, line: Line, ignored: list[str]) -> dict[str, Any]:
    """The answer. ignored: becomes the fields that are not known and were left out."""
    body, ignored[:] = unknown.read(BODIES[line.url], line.body, service.options.unknown_fields)
    if isinstance(body, CompletionBody):
        return await Completion(service, body).answer()
    if isinstance(body, ChatBody):
        return await Chat(service, body).answer()
    if isinstance(body, ResponseBody):
        return await responses.Response(service, body).answer()
    assert isinstance(body, EmbeddingBody)
    return await embeddings(service, body)


async def _until_ready(service: Service) -> None:
    for _ in range(int(PATIENCE_SECONDS * 10)):
        if service.client.state == "ready":
            return
        await asyncio.sleep(0.1)
