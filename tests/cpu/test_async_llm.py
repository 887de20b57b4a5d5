"""AsyncLLM gives the tokens of LLM, with any number of clients that start, disconnect and fail at any time."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from oracle.build import build
from oracle.families import CASES
from ridgeline import LLM, AsyncLLM, OutputChunk, SamplingParams
from ridgeline.engine.thread import EngineClosed
from ridgeline.errors import RequestError, TokenizerError
from ridgeline.runtime.runner import DeviceRunner

PROMPTS = [[5, 6, 7], [9] * 30, [5, 6, 8, 11], [3]]
PARAMS = [SamplingParams(max_tokens=8 + i, seed=i, n=1 + i % 2, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build(CASES["qwen2_window"], path)
    return str(path)


@pytest.fixture(scope="module")
def wanted(folder: str) -> list[list[list[int]]]:
    outputs = LLM(folder, cache="off").generate(PROMPTS, PARAMS)
    return [[a.token_ids for a in output.outputs] for output in outputs]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 60))


async def collect(llm: AsyncLLM, i: int, delay: float = 0.0) -> list[list[int]]:
    """Return the answers to one prompt, joined from the chunks and compared with the result."""
    await asyncio.sleep(delay)
    answers: list[list[int]] = [[] for _ in range(PARAMS[i].n)]
    last: OutputChunk | None = None
    async for chunk in llm.generate(PROMPTS[i], PARAMS[i]):
        answers[chunk.index] += chunk.token_ids
        last = chunk
    assert last is not None and last.output is not None
    assert [a.token_ids for a in last.output.outputs] == answers
    return answers


def test_many_clients_get_the_tokens_of_naive_sampling(folder: str, wanted: list[list[list[int]]]) -> None:
    async def main() -> None:
        async with AsyncLLM(folder) as llm:
            jobs = [collect(llm, i % 4, 0.003 * i) for i in range(16)]
            assert await asyncio.gather(*jobs) == wanted * 4
            stats = await llm.stats()
            assert stats is not None
            assert (stats.running, stats.waiting) == (0, 0)

    run(main())


def test_a_client_that_disconnects_affects_no_other(folder: str, wanted: list[list[list[int]]]) -> None:
    """The client closes the iterator or cancels its task at every possible chunk, and the
    engine removes the request.
    """

    async def leave(llm: AsyncLLM, after: int) -> None:
        chunks = llm.generate([4, 4, 4], SamplingParams(max_tokens=50, ignore_eos=True))
        for _ in range(after):
            await anext(chunks)
        await chunks.aclose()

    async def cancelled(llm: AsyncLLM, after: int) -> None:
        came, reached = itertools.count(1), asyncio.Event()

        async def read() -> None:
            async for _ in llm.generate([4, 4], SamplingParams(max_tokens=120, ignore_eos=True)):
                if next(came) == after:
                    reached.set()
                # wait also where many chunks are ready, so that the task is cancelled between them
                await asyncio.sleep(0)

        task = asyncio.create_task(read())
        await (reached.wait() if after else asyncio.sleep(0))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> None:
        async with AsyncLLM(folder) as llm:
            leavers = [leave(llm, n) for n in range(6)] + [cancelled(llm, n) for n in range(5)]
            results = await asyncio.gather(*(collect(llm, i) for i in range(4)), *leavers)
            assert results[:4] == wanted
            stats = await llm.stats()
            assert stats is not None
            assert (stats.running, stats.waiting, stats.groups[0].used_pages) == (0, 0, 0)

    run(main())


def test_a_bad_request_fails_alone(folder: str, wanted: list[list[list[int]]]) -> None:
    async def main() -> None:
        async with AsyncLLM(folder) as llm:
            good = [asyncio.create_task(collect(llm, i)) for i in range(4)]
            for bad in ([], [10**6], "no tokenizer", [[1]]):
                with pytest.raises((RequestError, TokenizerError)):
                    await llm.answer(bad)  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="exceed the context"):
                await llm.answer([3], SamplingParams(max_tokens=10**6))
            assert [await g for g in good] == wanted

    run(main())


@pytest.mark.parametrize("error", [MemoryError("the device is full"), SystemExit("an extension gave up")], ids=repr)
def test_an_error_in_a_step_ends_only_open_requests(
    folder: str, wanted: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    async def main() -> None:
        async with AsyncLLM(folder) as llm:
            submit, failed = DeviceRunner.submit, False

            def failing(runner: DeviceRunner, plan: Any, sampling: Any) -> Any:
                nonlocal failed
                if not failed and len(plan.works) == sum(len(answers) for answers in wanted):
                    failed = True
                    raise error
                return submit(runner, plan, sampling)

            monkeypatch.setattr(DeviceRunner, "submit", failing)
            # The engine begins when all requests have arrived, so that one step has the rows of all.
            arrived = threading.Event()
            llm._engine.stats(lambda _: arrived.wait(60))
            requests = [asyncio.create_task(collect(llm, i)) for i in range(4)]
            while llm._engine._inbox.qsize() < len(requests):
                await asyncio.sleep(0)
            arrived.set()
            lost = await asyncio.gather(*requests, return_exceptions=True)
            kind = MemoryError if isinstance(error, MemoryError) else RuntimeError  # nobody's client should exit
            assert failed and all(isinstance(e, kind) for e in lost)
            assert [await collect(llm, i) for i in range(4)] == wanted

    run(main())


def test_closing_ends_every_request(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        llm = AsyncLLM(folder)
        # The engine waits in its second step, after one token of the answer, until it is being closed.
        steps, begun, closing = itertools.count(), asyncio.Event(), threading.Event()
        submit, loop = DeviceRunner.submit, asyncio.get_running_loop()

        def waiting(runner: DeviceRunner, plan: Any, sampling: Any) -> Any:
            if next(steps) == 1:
                loop.call_soon_threadsafe(begun.set)
                assert closing.wait(60)
            return submit(runner, plan, sampling)

        monkeypatch.setattr(DeviceRunner, "submit", waiting)
        task = asyncio.create_task(llm.answer([3], SamplingParams(max_tokens=90, ignore_eos=True)))
        await begun.wait()
        closed = asyncio.create_task(asyncio.to_thread(llm.close))
        while not llm._engine._closed:  # from here on, it waits for the engine's thread
            await asyncio.sleep(0)
        closing.set()
        await closed
        llm.close()
        with pytest.raises(EngineClosed):
            await task
        with pytest.raises(EngineClosed, match="closed"):
            await llm.answer([3])
        assert not any(t.name == "ridgeline-engine" and t.is_alive() for t in threading.enumerate())

    run(main())


def test_a_closed_event_loop_affects_no_other(folder: str, wanted: list[list[list[int]]]) -> None:
    llm = AsyncLLM(folder)

    async def abandon() -> None:
        chunks = llm.generate([4], SamplingParams(max_tokens=60, ignore_eos=True))
        await anext(chunks)

    run(abandon())
    assert run(collect(llm, 1)) == wanted[1]
    llm.close()


def test_wrong_page_tables_are_found_when_idle(
    folder: str, wanted: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ridgeline.engine.thread.IDLE_SECONDS", 0.05)

    async def main() -> None:
        async with AsyncLLM(folder) as llm:
            check, checked = llm.llm.session.check, threading.Event()
            monkeypatch.setattr(llm.llm.session, "check", lambda: (check(), checked.set()))
            assert await collect(llm, 1) == wanted[1]
            await asyncio.to_thread(checked.wait, 60)
            assert checked.is_set() and not caplog.records
            llm.llm.session._generator._scheduler._cache.pools[0].take()  # type: ignore[attr-defined]
            assert await collect(llm, 1) == wanted[1]
            for _ in range(1200):
                if caplog.records:
                    break
                await asyncio.sleep(0.05)
            assert "is inconsistent" in caplog.text
            assert await collect(llm, 1) == wanted[1]

    run(main())
