"""What all endpoints share: the model's facts, the way from text to a request, places in the queue, the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, TypeVar

from ridgeline import __version__
from ridgeline.errors import RequestError
from ridgeline.load.chat import reads_roles
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.request import Frontend, Prompt, Rendered, TextToEncode, answer_tokens
from ridgeline.sched.counts import Histogram
from ridgeline.serve.api import reasoning, tools
from ridgeline.serve.engine.client import Answers, Batch, EngineClient
from ridgeline.serve.engine.machine import StepLedger
from ridgeline.serve.engine.messages import Ready, Report
from ridgeline.serve.engine.meters import DELIVERY
from ridgeline.serve.gate import Gate
from ridgeline.serve.helpers.pool import LONG_TEXT, Helpers
from ridgeline.serve.http.connections import Connections
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.traces import RequestTrace, Traces
from ridgeline.spec.prompt import PromptOptions
from ridgeline.spec.request import SamplingParams

T = TypeVar("T")

log = logging.getLogger(__name__)


class Turn:
    """One client's request on its way: its prompts, what comes of them."""

    def __init__(self, requests: Sequence[GenerationRequest], answers: Answers, trace: RequestTrace | None) -> None:
        self.requests, self._answers, self._trace = requests, answers, trace
        self.listen = answers.listen
        self._closed = False

    async def batch(self) -> Batch:
        """The next that comes, as Answers.take."""
        await self._answers.come()
        return self.take()

    @property
    def waiting(self) -> bool:
        """As Answers.waiting."""
        return self._answers.waiting

    def check(self) -> None:
        """As Answers.check: what is refused is refused before a stream begins."""
        try:
            self._answers.check()
        except Exception as e:  # given on: the trace only ends with its name
            if self._trace is not None:
                self._trace.end(type(e).__name__)
            raise

    def take(self) -> Batch:
        """As Answers.take."""
        self.check()
        batch = self._answers.take()
        if self._trace is not None:
            for _, chunk in batch:
                self._trace.take(chunk)
        return batch

    @property
    def committed(self) -> float:
        """When the engine had the first chunk of the last batch (time.perf_counter)."""
        return self._answers.committed

    def close(self) -> None:
        """End what is open. May be called again."""
        if not self._closed:
            self._closed = True
            self._answers.close()
            if self._trace is not None:
                self._trace.end()


class Service:
    """One model, served."""

    def __init__(
        self, client: EngineClient, ready: Ready, options: ServeOptions, connections: Connections | None = None
    ) -> None:
        """connections: of the server; None without one."""
        self.client, self.ready, self.options = client, ready, options
        self.connections = Connections(0, options.timeouts) if connections is None else connections
        self.tokenizer: Tokenizer | None = None
        if ready.tokenizer is not None:
            self.tokenizer = Tokenizer.from_folder(ready.tokenizer)
            if options.chat_template is not None:
                self.tokenizer.set_chat_template(options.chat_template)
        template = self.tokenizer.chat_template.source if self.tokenizer and self.tokenizer.chat_template else None
        self.knows_roles = template is not None and reads_roles(template)
        self.tool_parser = options.tool_call_parser or tools.suggested(template)
        self.reasoning_parser = options.reasoning_parser or reasoning.suggested(template)
        self.max_model_len = ready.config.max_model_len
        self.frontend = Frontend(
            ready.spec, self.tokenizer, ready.no_tokenizer, self.max_model_len, options.seed, self._max_chars()
        )  # fmt: skip
        self.helpers = Helpers(ready.tokenizer)
        self.ledger = StepLedger(ready.deployment)
        self.gate = Gate(ready.config.max_num_seqs, options.max_waiting)
        self.created = int(time.time())
        self.draining = False
        self.statuses: Counter[tuple[str, int]] = Counter()  # of responses, by path
        self.delivery = Histogram(DELIVERY)  # of the chunks of streams, from commit to socket
        self.last_report: Report | None = None
        endpoint = options.otlp_traces_endpoint
        self.traces = None if endpoint is None else Traces.to(endpoint, options.names[0])
        self._places = count()
        # Answers do not depend on company: the same request and seed under the same fingerprint give the same text.
        self.fingerprint = f"ridgeline-{__version__}-{ready.device}-invariant"

    def _max_chars(self) -> int | None:
        """Characters of a text, unless it is given: as many as fill the context if each token is the longest one."""
        if self.options.max_prompt_chars is not None or self.tokenizer is None:
            return self.options.max_prompt_chars
        return self.max_model_len * self.tokenizer.longest_token

    @property
    def name(self) -> str:
        """Of the model, as answers say it."""
        return self.options.names[0]

    def defaults(self) -> Mapping[str, Any]:
        """Sampling parameters that the model's generation_config.json recommends."""
        return self.ready.sampling_defaults

    def check_model(self, name: str | None) -> None:
        """Raises APIError for another model than this one."""
        if name is not None and name not in self.options.names:
            raise APIError(
                404, f"the model {name!r:.100} is not served here; {', '.join(self.options.names)} is",
                param="model", code="model_not_found",
            )  # fmt: skip

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run what takes a while (tokenizing, templates) in a thread: other requests have chunks to deliver."""
        return await asyncio.to_thread(work)

    async def tokenize(self, work: TextToEncode) -> list[int]:
        """The ids of a text, whether they fit the context or not; a helper process makes those of a long text.

        Raises RequestError, TokenizerError, APIError.
        """
        tokenizer = self.frontend.tokenizer()
        self.frontend.check_size(work.text)
        if len(work.text) > LONG_TEXT:
            return await self.helpers.encode(work)
        return await self.off_loop(lambda: work.ids(tokenizer))

    async def token_ids(self, prompts: Sequence[Prompt | Rendered], answer_tokens: int) -> list[list[int]]:
        """Those of each prompt. Raises RequestError for one that does not fit the context by arithmetic."""
        long = await self._long_ones(prompts, answer_tokens)
        return await self.off_loop(lambda: [
            long[i] if i in long else self.frontend.encode(prompt, answer_tokens) for i, prompt in enumerate(prompts)
        ])  # fmt: skip

    async def _long_ones(self, prompts: Sequence[Prompt | Rendered], answer_tokens: int) -> dict[int, list[int]]:
        """The ids of the prompts that helpers tokenize, by place."""
        found = {}
        for place, prompt in enumerate(prompts):
            if _characters(prompt) > LONG_TEXT:
                found[place] = await self._long_one(prompt, answer_tokens)
        return found

    async def _long_one(self, prompt: Prompt | Rendered, answer_tokens: int) -> list[int]:
        work = await self.off_loop(lambda: self.frontend.text_of(prompt, answer_tokens))
        assert work is not None
        return await self.tokenize(work)

    async def open(
        self, make: Callable[[], Awaitable[Sequence[Prompt | Rendered]]], num_prompts: int, params: SamplingParams, *,
        operation: str, priority: int | None, reading: Mapping[str, Any], stream: bool,
    ) -> Turn:  # fmt: skip
        """Send prompts to the engine. make: gives them. operation: what traces call it. reading: how the prompts are
        read, as fields of PromptOptions.

        Raises APIError, RequestError, EngineDown.
        """
        arrived, places = time.perf_counter(), num_prompts * params.n
        self.gate.enter(places)
        numbers = [next(self._places) for _ in range(num_prompts)]

        async def build() -> list[GenerationRequest]:
            prompts = [read_as(prompt, reading) for prompt in await make()]
            long = await self._long_ones(prompts, answer_tokens(params))
            return await self.off_loop(lambda: [
                self.frontend.request(prompt, params, number, priority or 0, long.get(place))
                for place, (number, prompt) in enumerate(zip(numbers, prompts, strict=True))
            ])  # fmt: skip

        try:
            requests = await build()
            if self.options.log_requests:
                log.info("prompts %s", [r.prompt or list(r.prompt_token_ids) for r in requests])
            answers = self.client.submit(requests, arrived, stream=stream, over=lambda: self.gate.leave(places))
        except BaseException:
            self.gate.leave(places)
            raise
        trace = None
        if self.traces is not None:
            tokens = sum(len(r.prompt_token_ids) for r in requests)
            trace = self.traces.begin(operation, params, num_prompts, tokens)
        return Turn(requests, answers, trace)


def read_as(prompt: Prompt | Rendered, reading: Mapping[str, Any]) -> Prompt | Rendered:
    """A text, token ids or a rendered conversation, with fields of PromptOptions."""
    if not reading:
        return prompt
    if isinstance(prompt, Rendered):
        return replace(prompt, options=PromptOptions.of(reading))
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **reading}


def _characters(prompt: Prompt | Rendered) -> int:
    """How long the text of a prompt is; 0 of one that has none."""
    if isinstance(prompt, Rendered):
        return len(prompt.text)
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(text) if isinstance(text, str) else 0


def as_prompts(given: str | list[Any]) -> list[Prompt]:
    """One text, one list of token ids, or a list of either, as a list. Raises RequestError for none."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("the prompt is an empty list; give at least one text or token id")
    return [given] if isinstance(given[0], int) else list(given)
