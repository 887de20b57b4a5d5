"""Answer a file of requests in OpenAI's batch format. Requests that already have a result are skipped."""

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
from ridgeline.serve.api.scores import rerank, score
from ridgeline.serve.api.types import Body, ChatBody, CompletionBody, EmbeddingBody, RerankBody, ScoreBody
from ridgeline.serve.api.types_responses import ResponseBody
from ridgeline.serve.engine.client import EngineClient, EngineDown
from ridgeline.serve.http import unknown
from ridgeline.serve.http.errors import APIError, as_api_error, dumps, internal, invalid
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.service import Service
from ridgeline.spec.folders import write_whole

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody, "/v1/responses": ResponseBody,
    "/v1/embeddings": EmbeddingBody, "/v1/score": ScoreBody, "/v1/rerank": RerankBody,
}  # fmt: skip
TRIES = 3  # attempts for a request that is lost when the engine process ends
PATIENCE_SECONDS = 60.0  # to wait for an engine that restarts
RETRY_SECONDS = 0.05  # between two attempts while the queue is full


@dataclass(frozen=True, slots=True)
class Line:
    """A request of a batch. id: its custom_id, which its result has too."""

    id: str
    url: str
    body: Mapping[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Read all requests of a file. Raises RequestError with the line's number for an invalid line."""
    lines: list[Line] = []
    known: dict[str, int] = {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise RequestError(f"cannot read {path}: {reason}; name a file with one request in each line") from None
    for number, given in enumerate(text.split("\n"), 1):  # JSON strings may contain Unicode's other line ends
        if given.strip():
            try:
                line = _line(json.loads(given))
            except (ValueError, RecursionError) as e:
                raise RequestError(f"{path}, line {number}: {e}") from None
            if line.id in known:
                raise RequestError(f"{path}, line {number}: line {known[line.id]} has the same custom_id {line.id!r}")
            known[line.id] = number
            lines.append(line)
    if not lines:
        raise RequestError(f"{path} has no requests; write one request in each line")
    return lines


def _line(given: Any) -> Line:
    if not isinstance(given, dict) or not isinstance(given.get("custom_id"), str):
        raise RequestError("custom_id is missing; a request is an object with custom_id, method, url and body")
    if given.get("method", "POST") != "POST" or given.get("url") not in BODIES:
        raise RequestError(
            f"{given.get('method')} {given.get('url')!r} is not supported; supported are POST {', '.join(BODIES)}"
        )
    if not isinstance(given.get("body"), dict):
        raise RequestError("body must be a JSON object: the fields of the request")
    if given["body"].get("stream"):
        raise RequestError("a batch cannot stream; leave stream out")
    return Line(given["custom_id"], given["url"], given["body"])


def read_done(path: Path) -> dict[str, bool]:
    """Return the ids that have a result in a file of results, and whether each result is an error.

    Lines with temporary errors (429, 5xx) and an incomplete last line are removed from the file, so that those
    requests are answered again. Raises RequestError for a file without results of a batch.
    """
    if not path.exists():
        return {}
    if not path.is_file():
        raise RequestError(f"{path} is not a regular file; choose another --output")
    data = path.read_bytes()
    lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
    done, kept = dict[str, bool](), list[bytes]()
    try:
        for line in filter(bytes.strip, lines):
            result = json.loads(line)
            name, status = str(result["custom_id"]), int(result["response"]["status_code"])
            if not _temporary(status):
                done[name] = status != 200
                kept.append(line)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise RequestError(f"{path} exists but has no results of a batch; choose another --output") from None
    if (whole := b"".join(kept)) != data:
        try:
            write_whole(path, whole.decode())
        except OSError as e:
            raise RequestError(f"cannot write to {path}: {e.strerror}") from None
    return done


def _temporary(status: int) -> bool:
    """Return whether a status is due to the server's state at that moment and not to the request."""
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
    """Answer requests concurrently and append each result to `output` as soon as it is complete.

    on_ready: called once the model is loaded. on_done: called with each result. Raises RidgelineError for a model that
    cannot be loaded and for an output that cannot be written.
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
                raise failed from None  # one task could not write to the output, which cancelled the others
    finally:
        if service is not None:
            await asyncio.to_thread(service.helpers.close)
        await client.close()


def _opened(output: Path) -> BinaryIO:
    """Open the file of results for appending. Raises RequestError."""
    try:
        return output.open("ab", buffering=0)
    except OSError as e:
        raise RequestError(f"cannot write to {output}: {e.strerror}") from None


def _append(file: BinaryIO, output: Path, line: bytes) -> None:
    """Append a whole line or nothing. Raises RequestError if the disk is full."""
    end, data = os.fstat(file.fileno()).st_size, memoryview(line)
    try:
        while data:
            data = data[file.write(data) :]
    except OSError as e:
        with contextlib.suppress(OSError):
            os.ftruncate(file.fileno(), end)
        raise RequestError(f"cannot write to {output}: {e.strerror}; run the command again to continue") from None


async def _result(service: Service, line: Line) -> dict[str, Any]:
    """Answer a request; return its result."""
    ignored: list[str] = []
    try:
        status, body = 200, await _answer(service, line, ignored)
    except Exception as e:
        failure = invalid(e.errors()) if isinstance(e, ValidationError) else as_api_error(e) or internal()
        status, body = failure.status, failure.body()
    warned = {"warning": unknown.warning(ignored)} if ignored else {}
    response = {"status_code": status, "request_id": uuid.uuid4().hex, **warned, "body": body}
    error = None if status == 200 else {"code": body["error"]["code"], "message": body["error"]["message"]}
    return {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.id, "response": response, "error": error}


async def _answer(service: Service, line: Line, ignored: list[str]) -> dict[str, Any]:
    for attempt in range(1, TRIES + 1):
        try:
            return await _queued(service, line, ignored)
        except EngineDown:
            if attempt == TRIES:
                raise
            await _until_ready(service)
    raise APIError(503, "the engine is down")


async def _queued(service: Service, line: Line, ignored: list[str]) -> dict[str, Any]:
    """Answer a request; try again while the queue is full. The queue has only this batch's requests, so it empties."""
    while True:
        try:
            return await _sent(service, line, ignored)
        except HelpersBusy:  # the helpers compile other structures of this batch
            pass
        except APIError as e:
            if e.status != 429:
                raise
        await asyncio.sleep(RETRY_SECONDS)


async def _sent(service: Service, line: Line, ignored: list[str]) -> dict[str, Any]:
    """Answer a request. ignored: is set to the unknown fields that were left out."""
    body, ignored[:] = unknown.read(BODIES[line.url], line.body, service.options.unknown_fields)
    if isinstance(body, CompletionBody):
        return await Completion(service, body).answer()
    if isinstance(body, ChatBody):
        return await Chat(service, body).answer()
    if isinstance(body, ResponseBody):
        return await responses.Response(service, body).answer()
    if isinstance(body, ScoreBody):
        return await score(service, body)
    if isinstance(body, RerankBody):
        return await rerank(service, body)
    assert isinstance(body, EmbeddingBody)
    return await embeddings(service, body)


async def _until_ready(service: Service) -> None:
    for _ in range(int(PATIENCE_SECONDS * 10)):
        if service.client.state == "ready":
            return
        await asyncio.sleep(0.1)
