"""Features of a server that are off by default: TLS, prompts in the log, traces."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from cpu.serving import serving
from ridgeline.serve.traces import Traces
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput, SamplingParams, Timing


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """A collector of traces. Yield its URL and the bodies that it received."""
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
        finally:
            server.shutdown()
            thread.join()


def test_tls_traces_and_prompts_in_the_log(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    with collector() as (endpoint, bodies):
        args = (
            "--ssl-keyfile",
            key,
            "--ssl-certfile",
            certificate,
            "--log-requests",
            "--otlp-traces-endpoint",
            endpoint,
        )
        with serving("pocket", *args) as server:
            assert "https://127.0.0.1" in server.said()
            with pytest.raises(OSError):
                server.ask("GET", "/health")
            server.trusted = ssl.create_default_context()
            with pytest.raises(ssl.SSLCertVerificationError):
                server.ask("GET", "/health")
            server.trusted.load_verify_locations(certificate)
            asked = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
            status, whole = server.post("/v1/completions", prompt="zebra = ", **asked)
            assert status == 200 and "zebra = " in server.said()
            messages = [{"role": "user", "content": "import os"}]
            body = {"messages": messages, "stream": True, "n": 2, "seed": 3, **asked}
            _, data, _ = server.raw("POST", "/v1/chat/completions", body)
            assert data.endswith(b"data: [DONE]\n\n")
            assert server.stop() == 0
    found: dict[str, dict[str, Any]] = {}
    for sent in bodies:
        for resource in ExportTraceServiceRequest.FromString(sent).resource_spans:
            for span in (s for scope in resource.scope_spans for s in scope.spans):
                found[span.name] = {a.key: a.value for a in span.attributes}
                assert b"zebra" not in sent
    assert set(found) == {"text_completion pocket", "chat pocket"}
    usage = found["text_completion pocket"]
    assert usage["gen_ai.usage.input_tokens"].int_value == whole["usage"]["prompt_tokens"]
    assert usage["gen_ai.usage.output_tokens"].int_value == 5
    chat = found["chat pocket"]
    assert chat["gen_ai.request.choice.count"].int_value == 2 and chat["gen_ai.request.seed"].int_value == 3
    reasons = [v.string_value for v in chat["gen_ai.response.finish_reasons"].array_value.values]
    assert reasons == ["length", "length"]


def test_a_span_describes_its_request() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces = Traces(provider, "m")
    whole = traces.begin("chat", SamplingParams(temperature=0.5, max_tokens=7, stop=["x"]), 1, 3)
    output = RequestOutput("p", [1, 2, 3], [CompletionOutput(0, token_ids=[1, 2], finish_reason="stop")],
                           Timing(0.1, 0.2, 0.3, 4.0, 0.05))  # fmt: skip
    whole.take(OutputChunk(0, "a", (1,), (), None, None, None, None))
    whole.take(OutputChunk(0, "b", (2,), (), "stop", None, None, output))
    whole.end()
    whole.end()
    traces.begin("chat", SamplingParams(), 1, 1).end("EngineDown")
    first, second = exporter.get_finished_spans()
    assert first.name == "chat m" and first.attributes is not None and second.attributes is not None
    wanted = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "ridgeline", "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 7, "gen_ai.request.temperature": 0.5, "gen_ai.request.stop_sequences": ("x",),
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2, "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_to_first_token": 0.1, "gen_ai.latency.time_in_queue": 0.05, "gen_ai.latency.e2e": 0.3,
    }  # fmt: skip
    assert {name: first.attributes.get(name) for name in wanted} == wanted
    assert second.attributes["error.type"] == "EngineDown"
    assert second.attributes["gen_ai.response.finish_reasons"] == ("abort",)
