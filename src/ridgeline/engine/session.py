"""Requests between their arrival and their result: text, stop strings, timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from ridgeline.errors import RequestError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.generator import Event, GenerationRequest, Generator
from ridgeline.sample.grammar import Grammars
from ridgeline.sample.text import AnswerText
from ridgeline.sched.stats import Stats, StepShape
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput, SamplingParams, Timing, TokenLogprobs

Sink = Callable[[OutputChunk], None]


class Session:
    """Feeds requests to a generator and passes their results to their sinks. Not for several threads at once."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer | None, grammars: Grammars | None = None) -> None:
        self._generator, self._tokenizer, self._grammars = generator, tokenizer, grammars
        self._open: dict[int, _Open] = {}
        self._ids = count()

    def __len__(self) -> int:
        """Return the number of requests that are not complete."""
        return len(self._open)

    def add(self, request: GenerationRequest, sink: Sink, arrived: float | None = None) -> int:
        """Queue a request; its id. arrived: when the request arrived (time.perf_counter). Default: now.

        Raises RequestError, and queues nothing, if it can never fit, or if its structured output is not valid.
        """
        if self._grammars is not None:
            request = request.with_grammar(self._grammars)
        request_id = next(self._ids)
        opened = _Open(request, sink, self._tokenizer, time.perf_counter() if arrived is None else arrived)
        self._generator.add(request_id, request)
        self._open[request_id] = opened
        return request_id

    def abort(self, request_id: int) -> None:
        """End a request at any moment: its sink is not called again. Nothing happens if it was complete."""
        if self._open.pop(request_id, None) is not None:
            self._generator.abort(request_id)

    def __contains__(self, request_id: int) -> bool:
        """Return whether the request is open: not complete, aborted, or lost with a step that raised."""
        return request_id in self._open

    def step(self) -> None:
        """Run one step of the generator and call the sinks of the requests that have new tokens.

        After an exception in here (an interrupt, an error of a sink or of the device) the generator's step can never be
        committed. So all requests are dropped, and their sinks are not called; new requests can be added.
        """
        try:
            for event in self._generator.step():
                self._take(event)
        except BaseException:
            self._open.clear()
            self._generator.reset()
            raise

    def stats(self) -> Stats | None:
        """Return pages, prefix hits and preemptions; None for a generator without a cache."""
        return self._generator.stats()

    def last_step(self) -> StepShape:
        """Return what the last step computed; () if it only collected."""
        return self._generator.last_step()

    def check(self) -> None:
        """Check the bookkeeping of pages while idle. If it is wrong, drop all requests and raise AssertionError."""
        try:
            self._generator.check()
        except AssertionError:
            self._open.clear()
            self._generator.reset()
            raise

    def _take(self, event: Event) -> None:
        opened = self._open.get(event.request)
        if opened is None:
            return
        chunk, stopped = opened.take(event)
        if chunk is None:
            return
        if stopped:
            self._generator.finish(event.request, event.choice)
        if chunk.output is not None:
            del self._open[event.request]
        opened.sink(chunk)


class _Open:
    """A request that is not complete."""

    def __init__(self, request: GenerationRequest, sink: Sink, tokenizer: Tokenizer | None, arrived: float) -> None:
        params, prompt, n = request.params, request.prompt_token_ids, request.num_answers
        logprobs = isinstance(params, SamplingParams) and params.logprobs is not None
        self.request, self.sink = request, sink
        self._outputs = [CompletionOutput(i, logprobs=[] if logprobs else None) for i in range(n)]
        self._texts = None
        if tokenizer is not None:
            skip = params.skip_special_tokens
            self._texts = [AnswerText(tokenizer.detokenizer(skip, prompt), params) for _ in range(n)]
        self._pieces: list[list[str]] = [[] for _ in range(n)]
        self._num_open = n
        self._start = self._last = arrived
        self._first: float | None = None
        self._scheduled: float | None = None
        self._num_cached = 0
        self._num_preempted = [0] * n
        self._num_passes = [0] * n
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None

    def take(self, event: Event) -> tuple[OutputChunk | None, bool]:
        """Return the chunk for an event (None: the answer was over), and whether a stop string ended the answer."""
        answer = self._outputs[event.choice]
        if answer.finish_reason is not None:  # a stop string ended it while a step was in flight
            return None, False
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._scheduled = self._scheduled or event.scheduled
        self._num_preempted[event.choice] = event.num_preempted
        self._num_passes[event.choice] = event.num_passes
        if event.choice == 0:  # the other choices share its prompt
            self._num_cached = event.num_cached_tokens
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *event.prompt_logprobs]
        answer.finish_reason, answer.stop_reason, answer.score = event.finish_reason, event.stop_reason, event.score
        answer.error = None if event.error is None else str(event.error)
        text, num_taken, stop = self._text(event)
        if stop is not None:
            answer.finish_reason, answer.stop_reason = "stop", stop
        answer.token_ids += event.tokens[:num_taken]
        if answer.logprobs is not None:
            answer.logprobs += event.logprobs[:num_taken]
        return self._chunk(answer, text, event.tokens[:num_taken], event.logprobs[:num_taken]), stop is not None

    def _text(self, event: Event) -> tuple[str, int, str | None]:
        """Return the new text, the number of tokens up to a stop string, and that string, if there is one."""
        if self._texts is None:
            return "", len(event.tokens), None
        text, whole = self._texts[event.choice], ""
        for i, token in enumerate(event.tokens, 1):
            piece, stop = text.push(token, event.finish_reason == "stop" and i == len(event.tokens))
            whole += piece
            if stop is not None:
                return whole, i, stop
        return whole, len(event.tokens), None

    def _chunk(
        self, answer: CompletionOutput, text: str, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]
    ) -> OutputChunk:
        pieces, over = self._pieces[answer.index], answer.finish_reason is not None
        if over and self._texts is not None:
            text += self._texts[answer.index].flush()
        pieces.append(text)
        if over:
            answer.text = "".join(pieces)
            self._num_open -= 1
        return OutputChunk(
            answer.index, text, tokens, logprobs, answer.finish_reason, answer.stop_reason, answer.error,
            self._result() if not self._num_open else None,
        )  # fmt: skip

    def _result(self) -> RequestOutput:
        request = self.request
        return RequestOutput(
            request.prompt, list(request.prompt_token_ids), self._outputs, self._timing(), self._num_cached,
            prompt_logprobs=self._prompt_logprobs, num_preempted=sum(self._num_preempted),
            num_passes=sum(self._num_passes),
        )  # fmt: skip

    def _timing(self) -> Timing:
        first, total = (self._first or self._start) - self._start, self._last - self._start
        total_tokens = sum(len(o.token_ids) for o in self._outputs)
        longest = max(len(o.token_ids) for o in self._outputs)
        per_token = (total - first) / (longest - 1) if longest > 1 else None
        queued = (self._scheduled or self._start) - self._start
        return Timing(first, per_token, total, total_tokens / total if total else 0.0, queued)


def error_output(request: GenerationRequest, error: RequestError) -> RequestOutput:
    """Return the result of a request that could not be queued."""
    answers = [CompletionOutput(i, finish_reason="error", error=str(error)) for i in range(request.num_answers)]
    ids = list(request.prompt_token_ids)
    return RequestOutput(request.prompt, ids, answers, Timing(0.0, None, 0.0, 0.0))
