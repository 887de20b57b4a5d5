"""The entry point for servers: any number of requests at once, each an asynchronous stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ridgeline.engine.thread import EngineThread
from ridgeline.llm import LLM
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.request import Prompt
from ridgeline.spec.request import OutputChunk, Params, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from ridgeline.load.chat import Message
    from ridgeline.sched.stats import Stats


class AsyncLLM:
    """A model that answers any number of requests at once, from one event loop. The engine runs in its own thread.

        async with AsyncLLM("path-or-hub-id") as llm:
            async for chunk in llm.generate("Once upon a time", SamplingParams(max_tokens=64)):
                print(chunk.text, end="")

    It takes the arguments of LLM and raises the same errors. A request ends early when its iterator is closed or its
    task is cancelled. The noise of a request without a seed derives from its number, in the order of arrival.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._llm = LLM(model, **options)
        self._indices = count()
        self._engine = EngineThread(self._llm.session)

    @property
    def llm(self) -> LLM:
        """Return the model, its settings and its tokenizer. Only the engine's thread may generate with it."""
        return self._llm

    async def generate(
        self, prompt: Prompt, sampling_params: Params | None = None, *, priority: int = 0, lora: str = ""
    ) -> AsyncIterator[OutputChunk]:
        """Answer one prompt, piece by piece; the last chunk has the whole result as `output`. lora: see LLM.generate.

        Raises RequestError or TokenizerError for a prompt that cannot be served, and EngineClosed after `close`. An
        error in a step of the engine is raised in all requests that were open.
        """
        params = sampling_params or SamplingParams(**self._llm.default_sampling_fields())
        index = next(self._indices)

        def make() -> GenerationRequest:
            request = self._llm.frontend.request(prompt, params, index, priority)
            return replace(request, lora=lora).with_grammar(self._llm.grammars)

        # Tokenizing a long prompt and compiling a grammar take a while, and other requests have chunks to deliver.
        request = await asyncio.to_thread(make)
        async for chunk in self._chunks(request):
            yield chunk

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        priority: int = 0,
        lora: str = "",
    ) -> AsyncIterator[OutputChunk]:
        """Answer a conversation through the model's own chat template, as `generate`. tools: see LLM.chat."""
        tokenizer = self._llm.frontend.tokenizer()
        ids = await asyncio.to_thread(lambda: tokenizer.encode_chat(messages, tools=tools))
        async for chunk in self.generate(ids, sampling_params, priority=priority, lora=lora):
            yield chunk

    async def answer(
        self, prompt: Prompt, sampling_params: Params | None = None, *, priority: int = 0, lora: str = ""
    ) -> RequestOutput:
        """Return the whole result at once."""
        output = None
        async for chunk in self.generate(prompt, sampling_params, priority=priority, lora=lora):
            output = chunk.output
        assert output is not None
        return output

    async def stats(self) -> Stats | None:
        """Return pages used, waste inside pages, prefix hit rate and preemptions, between two steps of the engine."""
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Stats | None] = loop.create_future()

        def give(stats: Stats | None) -> None:
            if not found.cancelled():
                found.set_result(stats)

        self._engine.stats(lambda stats: _post(loop, lambda: give(stats)))
        return await found

    def close(self) -> None:
        """End all requests and the engine's thread. May be called again."""
        self._engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _chunks(self, request: GenerationRequest) -> AsyncIterator[OutputChunk]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[OutputChunk | Exception]()
        end = self._engine.add(request, lambda item: _post(loop, lambda: arrived.put_nowait(item)))
        try:
            while True:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.output is not None:
                    return
        finally:
            end()


def _post(loop: asyncio.AbstractEventLoop, command: Callable[[], None]) -> None:
    """Run `command` in an event loop, from another thread. Does nothing if the loop is closed."""
    try:
        loop.call_soon_threadsafe(command)
    except RuntimeError:
        if not loop.is_closed():
            raise
