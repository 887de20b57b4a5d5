"""Serve one model to all endpoints: tokenize and check prompts, and send requests to the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from ridgeline import __version__
from ridgeline.errors import RequestError, RidgelineError
from ridgeline.load.adapter import find_adapter
from ridgeline.load.chat import reads_roles
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.request import Frontend, Prompt, Rendered, TextToEncode, answer_tokens
from ridgeline.sched.counts import Histogram
from ridgeline.serve.api import reasoning, tools
from ridgeline.serve.engine.client import Answers, Batch
from ridgeline.serve.engine.handle import EngineHandle
from ridgeline.serve.engine.machine import StepLedger
from ridgeline.serve.engine.messages import Ready, Report
from ridgeline.serve.engine.meters import DELIVERY
from ridgeline.serve.gate import Gate
from ridgeline.serve.helpers.pool import LONG_TEXT, Helpers
from ridgeline.serve.http.connections import Connections
from ridgeline.serve.http.errors import APIError
from ridgeline.serve.keys import CURRENT, Keys
from ridgeline.serve.options import ServeOptions
from ridgeline.serve.shares import Bill, Shares
from ridgeline.serve.traces import RequestTrace, Traces
from ridgeline.spec.prompt import PromptOptions
from ridgeline.spec.request import OutputChunk, SamplingParams

T = TypeVar("T")
CUT_CHARS = 1 << 17  # characters of a text for an encoder at least: documents are often longer, and are cut
QUICK_IDS = 256  # token ids, which are checked in some 0.1 ms
# Parameters whose check may take long: words are tokenized, and lists may have many ids.
SLOW_FIELDS = (
    "bad_words", "dry_multiplier", "logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids",
    "bad_token_sequences",
)  # fmt: skip

log = logging.getLogger(__name__)


class Turn:
    """A client's request that was sent to the engine: its prompts, its chunks and its trace."""

    def __init__(
        self, requests: Sequence[GenerationRequest], answers: Answers, trace: RequestTrace | None,
        count: Callable[[OutputChunk], None] = lambda chunk: None,
    ) -> None:  # fmt: skip
        """count: called with each chunk, to count its tokens."""
        self._count = count
        self.requests, self._answers, self._trace = requests, answers, trace
        self.listen = answers.listen
        self._closed = False

    async def batch(self) -> Batch:
        """Wait for the next chunks and return them, as Answers.take does. An empty list means the end."""
        await self._answers.wait()
        return self.take()

    @property
    def waiting(self) -> bool:
        """Return whether there is nothing to take yet."""
        return self._answers.waiting

    def check(self) -> None:
        """Raise the error with which the engine refused the request, if any."""
        try:
            self._answers.check()
        except Exception as e:  # only noted in the trace
            if self._trace is not None:
                self._trace.end(type(e).__name__)
            raise

    def take(self) -> Batch:
        """Return all chunks that arrived since the last call, as Answers.take does."""
        self.check()
        batch = self._answers.take()
        for _, chunk in batch:
            self._count(chunk)
        if self._trace is not None:
            for _, chunk in batch:
                self._trace.take(chunk)
        return batch

    @property
    def committed(self) -> float:
        """Return the time at which the engine made the first chunk of the last batch (time.perf_counter)."""
        return self._answers.committed

    def close(self) -> None:
        """Abort the request if it is not finished. May be called again."""
        if not self._closed:
            self._closed = True
            self._answers.close()
            if self._trace is not None:
                self._trace.end()


class Service:
    """A served model: its tokenizer, its limits, its engine."""

    def __init__(
        self, client: EngineHandle, ready: Ready, options: ServeOptions, connections: Connections | None = None
    ) -> None:
        """connections: the server's connections; None if there is no HTTP server."""
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
        self.gate = Gate(ready.config.max_num_seqs * client.engines, options.max_waiting)
        self.created = int(time.time())
        self.draining = False
        self.statuses: Counter[tuple[str, int]] = Counter()  # number of responses by path and status
        self.delivery = Histogram(DELIVERY)  # seconds from the moment at which a token was made to its write
        self.last_report: Report | None = None
        endpoint = options.otlp_traces_endpoint
        self.traces = None if endpoint is None else Traces.to(endpoint, options.names[0])
        self._numbers = count()
        self.keys = Keys(options.api_keys)
        self.shares = Shares(self.gate.running, self._weight_of) if options.api_keys else None
        self.adapters = dict(options.adapters)  # name -> folder or hub id
        self.prefix_resets = 0  # how often the prefix cache was reset
        # Answers do not depend on other requests: equal requests with a seed give equal texts under one fingerprint.
        self.fingerprint = f"ridgeline-{__version__}-{ready.device}-invariant"

    def _max_chars(self) -> int | None:
        """Return --max-prompt-chars. Its default is the text length that fills the context with the longest token."""
        if self.options.max_prompt_chars is not None or self.tokenizer is None:
            return self.options.max_prompt_chars
        least = CUT_CHARS if self.ready.spec.encoder else 0
        return max(least, self.max_model_len * self.tokenizer.longest_token)

    @property
    def name(self) -> str:
        """Return the name of the model in answers."""
        return self.options.names[0]

    @property
    def asleep(self) -> bool:
        """Return whether the engine was sent to sleep and is not ready again."""
        return self.client.state in ("sleeping", "starting")

    def defaults(self) -> Mapping[str, Any]:
        """Return the sampling parameters that the model's generation_config.json recommends."""
        return self.ready.sampling_defaults

    def check_model(self, name: str | None, *, adapters: bool = False) -> None:
        """Raise APIError if `name` is not a served name of the model. adapters: a name of an adapter is one, too."""
        if name is None or name in self.options.names or (adapters and name in self.adapters):
            return
        if name in self.adapters:
            raise APIError(
                400, f"{name!r} is an adapter, which this endpoint does not use; name the model {self.name!r}",
                param="model", code="model_not_supported",
            )  # fmt: skip
        known = ", ".join((*self.options.names, *self.adapters))
        raise APIError(
            404, f"the model {name!r:.100} does not exist here; this server has {known:.1000}", param="model",
            code="model_not_found",
        )  # fmt: skip

    def adapter_of(self, model: str | None) -> str:
        """Return the adapter that a request names as its model; "" for the model itself."""
        return model if model is not None and model in self.adapters else ""

    def answers_as(self, model: str | None) -> str:
        """Return the name of the model in the answer to a request: that of the adapter, or the first served name."""
        return self.adapter_of(model) or self.name

    async def adapt(self, name: str, source: str | None) -> None:
        """Load an adapter, or drop it if there is no source. Raises APIError, RequestError, EngineDown."""
        if source is None and name not in self.adapters:
            raise APIError(
                404, f"there is no adapter {name!r:.100}; /v1/models lists those that are loaded", param="lora_name",
                code="adapter_not_found",
            )  # fmt: skip
        if source is not None and name in (*self.options.names, *self.adapters):
            raise APIError(400, f"the name {name!r:.100} is in use; unload it or take another", param="lora_name")
        if source is not None:  # a download here does not hold up the engine
            given = source
            source = str(await self.off_loop(lambda: _found(given)))
        await self.client.adapt(name, source)
        if source is None:
            self.adapters.pop(name, None)
        else:
            self.adapters[name] = source

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run work that takes a while in a thread, so that the event loop can deliver chunks of other requests."""
        return await asyncio.to_thread(work)

    async def tokenize(self, work: TextToEncode) -> list[int]:
        """Return the token ids of a text, even if they exceed the context length. Long texts go to a helper process.

        Raises RequestError, TokenizerError, APIError.
        """
        tokenizer = self.frontend.tokenizer()
        self.frontend.check_size(work.text)
        if len(work.text) > LONG_TEXT:
            return await self.helpers.encode(work)
        return await self.off_loop(lambda: work.ids(tokenizer))

    async def token_ids(self, prompts: Sequence[Prompt | Rendered], answer_tokens: int) -> list[list[int]]:
        """Return the token ids of each prompt. Raises RequestError if a text is certain to exceed the context."""
        long = await self._long_ones(prompts, answer_tokens)
        return await self.off_loop(lambda: [
            long[i] if i in long else self.frontend.encode(prompt, answer_tokens) for i, prompt in enumerate(prompts)
        ])  # fmt: skip

    async def _long_ones(self, prompts: Sequence[Prompt | Rendered], answer_tokens: int) -> dict[int, list[int]]:
        """Tokenize the long prompts in a helper process. Return their token ids by index."""
        found = {}
        for index, prompt in enumerate(prompts):
            if _characters(prompt) > LONG_TEXT:
                found[index] = await self._long_one(prompt, answer_tokens)
        return found

    async def _long_one(self, prompt: Prompt | Rendered, answer_tokens: int) -> list[int]:
        work = await self.off_loop(lambda: self.frontend.text_of(prompt, answer_tokens))
        assert work is not None
        return await self.tokenize(work)

    def _weight_of(self, key: bytes | None) -> float:
        known = self.options.api_keys.get(key or b"")
        return 1.0 if known is None else known.weight

    def _salted(self, reading: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return fields of PromptOptions whose salt no prompt before the last reset of the prefix cache had."""
        if not self.prefix_resets:
            return reading
        return {**reading, "cache_salt": f"{self.prefix_resets} {reading.get('cache_salt', '')}"}

    async def open(
        self, make: Callable[[], Awaitable[Sequence[Prompt | Rendered]]], num_prompts: int, params: SamplingParams, *,
        operation: str, priority: int | None, reading: Mapping[str, Any], stream: bool, model: str | None = None,
    ) -> Turn:  # fmt: skip
        """Send a request to the engine.

        make: makes the prompts, once the request has its slots in the queue. operation: name of the request's span.
        reading: fields of PromptOptions for the prompts. stream: send chunks while the answer is generated. model: the
        name in the request, which may be that of an adapter. Raises APIError, RequestError, EngineDown.
        """
        lora = self.adapter_of(model)
        arrived, sequences = time.perf_counter(), num_prompts * params.n
        self.gate.enter(sequences)
        numbers = [next(self._numbers) for _ in range(num_prompts)]

        async def build() -> list[GenerationRequest]:
            prompts = [read_as(prompt, self._salted(reading)) for prompt in await make()]
            long = await self._long_ones(prompts, answer_tokens(params))

            def checked() -> list[GenerationRequest]:
                return [
                    replace(self.frontend.request(prompt, params, number, priority or 0, long.get(index)), lora=lora)
                    for index, (number, prompt) in enumerate(zip(numbers, prompts, strict=True))
                ]

            return checked() if _is_quick(prompts, params) else await self.off_loop(checked)

        try:
            requests = await build()
            if self.options.log_requests:
                log.info("prompts %s", [r.prompt or list(r.prompt_token_ids) for r in requests])
            bill = await self._turn_of(requests, sequences)
        except BaseException:
            self.gate.leave(sequences)
            raise

        def done() -> None:
            self.gate.leave(sequences)
            bill.close()

        try:
            answers = self.client.submit(requests, arrived, stream=stream, on_done=done)
        except BaseException:
            done()
            raise
        trace = None
        if self.traces is not None:
            tokens = sum(len(r.prompt_token_ids) for r in requests)
            trace = self.traces.begin(operation, params, num_prompts, tokens)
        return Turn(requests, answers, trace, bill.count if stream else bill.count_whole)

    async def _turn_of(self, requests: Sequence[GenerationRequest], sequences: int) -> Bill:
        """Wait for the request's turn among those of other keys, and charge its prompts to its key."""
        key, tokens = CURRENT.get(), sum(len(r.prompt_token_ids) for r in requests)
        if self.shares is not None:
            await self.shares.enter(key, sequences, tokens)
        self.keys.charge(key, tokens)
        return Bill(self.keys, self.shares, key, sequences)


def _found(source: str) -> Path:
    """Return the folder of an adapter. Raises RequestError."""
    try:
        return find_adapter(source)
    except RidgelineError as e:
        raise RequestError(str(e)) from None


def read_as(prompt: Prompt | Rendered, reading: Mapping[str, Any]) -> Prompt | Rendered:
    """Return a prompt with fields of PromptOptions."""
    if not reading:
        return prompt
    if isinstance(prompt, Rendered):
        return replace(prompt, options=PromptOptions.of(reading))
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, **reading}


def _characters(prompt: Prompt | Rendered) -> int:
    """Return the number of characters of a prompt's text, 0 if it has no text."""
    if isinstance(prompt, Rendered):
        return len(prompt.text)
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(text) if isinstance(text, str) else 0


def _is_quick(prompts: Sequence[Prompt | Rendered], params: SamplingParams) -> bool:
    """Return whether a request is checked in less time than it takes to hand it to a thread."""
    if any(getattr(params, name) for name in SLOW_FIELDS):
        return False
    return len(prompts) == 1 and isinstance(prompts[0], list) and len(prompts[0]) <= QUICK_IDS


def as_prompts(given: str | list[Any]) -> list[Prompt]:
    """Return the prompts of a request as a list. given: a text, a list of token ids, or a list of either.

    Raises RequestError for an empty list.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError("the prompt is an empty list; give at least one text or token id")
    return [given] if isinstance(given[0], int) else list(given)
