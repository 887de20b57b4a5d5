"""GET /metrics: Prometheus' text format, with the names that vLLM's and llama.cpp's dashboards expect, and our own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from ridgeline.sched.counts import Histogram
from ridgeline.serve.engine.client import EngineDown
from ridgeline.serve.engine.messages import Report
from ridgeline.serve.http.connections import REASONS, Connections
from ridgeline.serve.service import Service

PATIENCE_SECONDS = 2.0  # for an engine that is in a long step


class Page:
    """Lines, as they are collected. labels: of every sample."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels, self._lines = dict(labels), list[str]()

    def value(self, kind: str, name: str, text: str, value: float, **labels: str) -> None:
        """A counter or a gauge without further samples."""
        self.values(kind, name, text, [(labels, value)])

    def values(self, kind: str, name: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> None:
        """A counter or a gauge."""
        self._head(kind, name, text)
        self._lines += [f"{name}{self._braces(labels)} {value:.17g}" for labels, value in samples]

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """A histogram."""
        self._head("histogram", name, text)
        total = 0
        for bound, n in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            total += n
            self._lines.append(f"{name}_bucket{self._braces({'le': bound})} {total}")
        self._lines += [f"{name}_sum{self._braces({})} {histogram.sum:.17g}", f"{name}_count{self._braces({})} {total}"]

    def text(self) -> str:
        """All of it."""
        return "\n".join([*self._lines, ""])

    def _head(self, kind: str, name: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def _braces(self, labels: Mapping[str, str]) -> str:
        pairs = [f'{k}="{_escaped(v)}"' for k, v in {**self._labels, **labels}.items()]
        return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def exposition(service: Service) -> str:
    """The page. While there is no engine, it has what the HTTP process knows."""
    page = Page({"model_name": service.name, "engine": "0"})
    report: Report | None
    try:
        report = await asyncio.wait_for(service.client.report(), PATIENCE_SECONDS if service.client.up else 0.0)
        service.last_report = report
    except (TimeoutError, EngineDown):
        report = service.last_report if service.client.state == "ready" else None
    _server(page, service)
    if report is not None:
        _requests(page, report)
        _engine(page, report)
    return page.text()


def _server(page: Page, service: Service) -> None:
    client, gate = service.client, service.gate
    page.value("gauge", "ridgeline:engine_up", "1 while the engine can answer.", client.up)
    page.value("gauge", "ridgeline:engine_silent_seconds", "Since the engine's last sign of life.",
               client.watch.silent_s)  # fmt: skip
    page.value("counter", "ridgeline:engine_restarts_total", "Engine processes started again.", client.restarts)
    page.value("gauge", "ridgeline:answers_open", "Answers running or waiting.", gate.open)
    page.value("gauge", "ridgeline:answers_capacity", "Answers that may run or wait.", gate.capacity)
    page.value("counter", "ridgeline:requests_refused_total", "Refused: the queue was full.", gate.refused)
    _connections(page, service.connections)
    roof = service.ledger.roof()
    page.value("gauge", "ridgeline:roof_bytes_per_second", "That memory gives at most.", roof["bytes_per_s"])
    page.value("gauge", "ridgeline:roof_flops_per_second", "Operations at most.", roof["flops_per_s"])
    page.histogram("ridgeline:delivery_seconds", "Of a stream's chunks, from commit to socket.", service.delivery)
    samples = [({"handler": path, "status": str(s)}, float(n)) for (path, s), n in service.statuses.items()]
    page.values("counter", "http_requests_total", "Requests by path and status.", samples)


def _connections(page: Page, connections: Connections) -> None:
    page.value("gauge", "ridgeline:connections_open", "Connections that are open.", len(connections))
    page.value("gauge", "ridgeline:connections_capacity", "Connections that may be open.", connections.limit)
    page.value("counter", "ridgeline:connections_total", "Connections that were accepted.", connections.accepted)
    page.value("counter", "ridgeline:connections_refused_total", "Connections closed at once: all were in use.",
               connections.refused)  # fmt: skip
    page.values("counter", "ridgeline:connections_ended_total", "Connections that the server ended, by reason.",
                [({"reason": reason}, float(connections.ended[reason])) for reason in REASONS])  # fmt: skip
    page.value("counter", "ridgeline:accept_errors_total", "Errors of the system while a connection was accepted.",
               connections.accept_errors)  # fmt: skip


def _requests(page: Page, report: Report) -> None:
    m = report.meters
    page.value("counter", "vllm:prompt_tokens_total", "Prompt tokens of requests that ended.", m.prompt_tokens)
    page.value("counter", "vllm:generation_tokens_total", "Tokens generated.", m.generation_tokens)
    sources = [("local_compute", m.prompt_tokens - m.cached_tokens), ("local_cache_hit", m.cached_tokens)]
    page.values("counter", "vllm:prompt_tokens_by_source_total", "Prompt tokens: computed, found in the cache.",
                [({"source": source}, n) for source, n in sources])  # fmt: skip
    page.values("counter", "vllm:request_success_total", "Answers that ended, by reason.",
                [({"finished_reason": reason}, n) for reason, n in sorted(m.finished.items())])  # fmt: skip
    for name, text, histogram in _histograms(report):
        page.histogram(name, text, histogram)


def _histograms(report: Report) -> Iterator[tuple[str, str, Histogram]]:
    m = report.meters
    yield "vllm:time_to_first_token_seconds", "From arrival to the first token.", m.ttft
    yield "vllm:inter_token_latency_seconds", "Between two tokens of an answer.", m.inter_token
    yield "vllm:request_time_per_output_token_seconds", "Mean of a request, after its first token.", m.per_token
    yield "vllm:e2e_request_latency_seconds", "From arrival to the last token.", m.e2e
    yield "vllm:request_queue_time_seconds", "From arrival to the first step.", m.queue
    yield "vllm:request_inference_time_seconds", "From the first step to the last token.", m.inference
    yield "vllm:request_prefill_time_seconds", "From the first step to the first token.", m.prefill
    yield "vllm:request_decode_time_seconds", "From the first token to the last.", m.decode
    yield "vllm:request_prompt_tokens", "Of a request.", m.request_prompt_tokens
    yield "vllm:request_generation_tokens", "Of a request.", m.request_generation_tokens
    yield "vllm:request_num_preemptions", "Times that a request's answers had to make room.", m.request_preemptions
    if report.stats is not None and (times := report.stats.page_times) is not None:
        yield "vllm:kv_block_lifetime_seconds", "Of a page in the prefix index, until it was lost.", times.lifetime
        yield "vllm:kv_block_idle_before_evict_seconds", "Of the same page, since nobody held it.", times.idle
        yield "vllm:kv_block_reuse_gap_seconds", "Between two uses of a page.", times.reuse_gap
    yield "vllm:iteration_tokens_total", "New tokens of a step.", m.step_tokens
    yield "ridgeline:step_seconds", "Of a step of the engine, measured.", m.step_s


def _engine(page: Page, report: Report) -> None:
    m, stats = report.meters, report.stats
    page.value("counter", "ridgeline:steps_total", "Steps of the engine.", m.steps)
    page.value("counter", "ridgeline:steps_failed_total", "Steps that failed.", m.failed_steps)
    page.values("counter", "ridgeline:page_checks_total",
                "Checks of the books of pages, made once the engine has been idle for a second.",
                [({"found": found}, float(m.page_checks[found])) for found in ("agreed", "wrong")])  # fmt: skip
    page.value("counter", "ridgeline:engine_busy_seconds_total", "Time in steps.", m.busy_s)
    page.value("counter", "ridgeline:engine_alive_seconds_total", "Time since the engine's process began.", m.alive_s)
    page.value("counter", "ridgeline:step_bytes_total", "Bytes that steps moved, by the cost model.", m.step_bytes)
    page.value("counter", "ridgeline:step_flops_total", "Operations of steps, by the cost model.", m.step_flops)
    page.value("counter", "ridgeline:predicted_step_seconds_total",
               "Time that steps should take; 0 where the machine is not calibrated.",
               m.predicted_s)  # fmt: skip
    page.value("gauge", "ridgeline:roof_fraction", "Time of all steps at the roof, of their measured time.",
               m.roof_s / m.busy_s if m.busy_s else 0.0)  # fmt: skip
    page.value("counter", "llamacpp:n_decode_total", "Steps that computed.", m.forwards)
    page.value("gauge", "llamacpp:n_busy_slots_per_decode", "Sequences in a step that computed, on average.",
               m.sequences / m.forwards if m.forwards else 0.0)  # fmt: skip
    if stats is None:
        return
    pages, used = sum(g.num_pages for g in stats.groups), sum(g.used_pages for g in stats.groups)
    page.value("gauge", "vllm:num_requests_running", "Sequences that run.", stats.running)
    page.value("gauge", "vllm:num_requests_waiting", "Sequences that wait.", stats.waiting)
    page.value("gauge", "vllm:kv_cache_usage_perc", "Of all pages, 0 to 1.", used / pages if pages else 0.0)
    page.value("counter", "vllm:prefix_cache_queries_total", "Tokens looked up.", stats.queried_tokens)
    page.value("counter", "vllm:prefix_cache_hits_total", "Tokens found.", stats.hit_tokens)
    page.value("counter", "vllm:num_preemptions_total", "Sequences that had to make room.",
               stats.preempted_recompute + stats.preempted_swap)  # fmt: skip
    page.values("gauge", "ridgeline:pages_used", "Pages held by sequences.",
                [({"group": g.name}, float(g.used_pages)) for g in stats.groups])  # fmt: skip
    page.values("gauge", "ridgeline:pages", "Pages.", [({"group": g.name}, float(g.num_pages)) for g in stats.groups])
    page.value("counter", "llamacpp:prompt_tokens_total", "Prompt tokens computed.", m.prompt_tokens - m.cached_tokens)
    page.value("counter", "llamacpp:tokens_predicted_total", "Tokens generated.", m.generation_tokens)
    page.value("gauge", "llamacpp:requests_processing", "Sequences that run.", stats.running)
    page.value("gauge", "llamacpp:requests_deferred", "Sequences that wait.", stats.waiting)
