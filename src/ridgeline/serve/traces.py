"""Send one OpenTelemetry span for each request, with the attributes of the semantic conventions for generative AI.

The attributes gen_ai.* are those of opentelemetry.io/docs/specs/semconv/gen-ai. Latencies have vLLM's names, since the
conventions have none yet. Spans contain no text of prompts or answers.
"""

from __future__ import annotations

import importlib
from typing import Any

from ridgeline import __version__
from ridgeline.errors import RequestError
from ridgeline.spec.request import OutputChunk, SamplingParams


class Traces:
    """Makes the spans. provider: an opentelemetry TracerProvider. model: the name of the model in answers."""

    def __init__(self, provider: Any, model: str) -> None:
        self._provider, self._model = provider, model
        self._tracer = provider.get_tracer("ridgeline", __version__)

    @classmethod
    def to(cls, endpoint: str, model: str) -> Traces:
        """Send spans in batches to a collector, by OTLP over HTTP. Raises RequestError if the extra is missing."""
        try:
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        except ImportError:
            raise RequestError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'ridgeline[traces]'") from None
        resource = resources.Resource.create({"service.name": "ridgeline", "service.version": __version__})
        provider = sdk.TracerProvider(resource=resource)
        provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint=endpoint)))
        return cls(provider, model)

    def begin(self, operation: str, params: SamplingParams, num_prompts: int, input_tokens: int) -> RequestTrace:
        """Begin the span of a request that is sent to the engine. operation: gen_ai.operation.name."""
        values = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "ridgeline",
            "gen_ai.request.model": self._model,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
            "gen_ai.request.frequency_penalty": params.frequency_penalty,
            "gen_ai.request.presence_penalty": params.presence_penalty,
            "gen_ai.request.seed": params.seed,
            "gen_ai.request.stop_sequences": list(params.stop) or None,
            "gen_ai.usage.input_tokens": input_tokens,
            "ridgeline.request.prompts": num_prompts,
        }
        attributes = {name: value for name, value in values.items() if value is not None}
        kind = importlib.import_module("opentelemetry.trace").SpanKind.SERVER
        return RequestTrace(self._tracer.start_span(f"{operation} {self._model}", kind=kind, attributes=attributes))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


class RequestTrace:
    """The span of one request, from its start in the engine to its last token or the client's disconnect."""

    def __init__(self, span: Any) -> None:
        self._span = span
        self._tokens = 0
        self._reasons: list[str] = []
        self._open = True

    def take(self, chunk: OutputChunk) -> None:
        """Add a chunk. Only the last chunk of a prompt has figures for the span."""
        if chunk.output is None:
            return
        timing = chunk.output.timing
        self._tokens += sum(len(answer.token_ids) for answer in chunk.output.outputs)
        self._reasons += [str(answer.finish_reason) for answer in chunk.output.outputs]
        self._span.set_attributes({
            "gen_ai.latency.time_to_first_token": timing.ttft_s,
            "gen_ai.latency.time_in_queue": timing.queued_s,
            "gen_ai.latency.e2e": timing.total_s,
        })  # fmt: skip

    def end(self, error: str | None = None) -> None:
        """End the span. Later calls do nothing. error: type of the error if the request failed."""
        if not self._open:
            return
        self._open = False
        reasons = self._reasons or ["abort"]
        self._span.set_attributes({
            "gen_ai.usage.output_tokens": self._tokens, "gen_ai.response.finish_reasons": reasons,
        })  # fmt: skip
        if error is not None:
            self._span.set_attribute("error.type", error)
        self._span.end()
