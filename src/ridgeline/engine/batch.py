"""The engine as a Generator: a whole list of requests, continuously batched."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.engine import Engine, Event
from ridgeline.errors import RequestError
from ridgeline.plan.resolve import EngineConfig
from ridgeline.runtime.batch import GenerationRequest, OnDone, OnToken, Progress
from ridgeline.runtime.load import LoadedModel


class EngineGenerator:
    """A runtime.batch.Generator over one Engine, whose prefix cache lives on between runs."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self._loaded = loaded
        self.engine = Engine(loaded, config)

    def run(self, requests: Sequence[GenerationRequest], on_token: OnToken, on_done: OnDone) -> None:
        progress = [Progress.begin(r) for r in requests]
        try:
            for i, p in enumerate(progress):
                self._add(i, p, on_done)
            while len(self.engine):
                for event in self.engine.step():
                    self._take(event, progress[event.request], on_token, on_done)
        except BaseException:  # an interrupt, say, in the middle of a step: its plan can never be committed
            self.engine = Engine(self._loaded, self.engine.config)
            raise

    def _add(self, index: int, progress: Progress, on_done: OnDone) -> None:
        request = progress.request
        try:
            self.engine.add(index, request.prompt_token_ids, request.params, request.noise)
        except RequestError as e:  # this one can never fit; the others run
            for output in progress.outputs:
                output.finish_reason, output.error = "error", str(e)
            on_done(index, progress.result(self._loaded))

    def _take(self, event: Event, progress: Progress, on_token: OnToken, on_done: OnDone) -> None:
        output = progress.outputs[event.choice]
        if output.finish_reason is not None:  # a stop string ended it while a step was in flight
            return
        progress.token_came()
        if event.choice == 0:  # the others share the first one's prompt
            progress.num_cached_tokens = event.num_cached_tokens
        output.finish_reason, output.stop_reason = event.finish_reason, event.stop_reason
        if event.error is not None:
            output.error = str(event.error)
        elif event.token is not None:
            output.token_ids.append(event.token)
            if output.logprobs is not None and event.logprobs is not None:
                output.logprobs.append(event.logprobs)
            stop = on_token(event.request, event.choice, event.token, event.finish_reason == "stop")
            if stop is not None:
                output.finish_reason, output.stop_reason = "stop", stop
                self.engine.finish(event.request, event.choice)
        if output.finish_reason is not None:
            progress.open -= 1
            if not progress.open:
                on_done(event.request, progress.result(self._loaded))
