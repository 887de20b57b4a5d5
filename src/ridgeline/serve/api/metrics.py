"""GET /metrics: write the server's metrics in Prometheus' text format.

Metrics have vLLM's or llama.cpp's names where those projects have the same metric, so that their dashboards work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence

from ridgeline.sched.counts import Histogram
from ridgeline.sched.stats import Stats
from ridgeline.serve.engine.client import EngineDown
from ridgeline.serve.engine.handle import EngineHandle
from ridgeline.serve.engine.messages import Report
from ridgeline.serve.http.connections import REASONS, Connections
from ridgeline.serve.keys import Use
from ridgeline.serve.service import Service
from ridgeline.settings import EngineConfig
from ridgeline.system import resident_bytes

PATIENCE_SECONDS = 2.0  # to wait for an engine that is in a long step


class Page:
    """Collects the lines of the answer. labels: labels that every sample has."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels, self._lines = dict(labels), list[str]()

    def value(self, kind: str, name: str, text: str, value: float, **labels: str) -> None:
        """Add a counter or a gauge with one sample. text: its HELP text."""
        self.values(kind, name, text, [(labels, value)])

    def values(self, kind: str, name: str, text: str, samples: Sequence[tuple[Mapping[str, str], float]]) -> None:
        """Add a counter or a gauge with several samples, each with its labels."""
        self._head(kind, name, text)
        self._lines += [f"{name}{self._braces(labels)} {value:.17g}" for labels, value in samples]

    def histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """Add a histogram."""
        self._head("histogram", name, text)
        total = 0
        for bound, n in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            total += n
            self._lines.append(f"{name}_bucket{self._braces({'le': bound})} {total}")
        self._lines += [f"{name}_sum{self._braces({})} {histogram.sum:.17g}", f"{name}_count{self._braces({})} {total}"]

    def text(self) -> str:
        """Return all lines."""
        return "\n".join([*self._lines, ""])

    def _head(self, kind: str, name: str, text: str) -> None:
        self._lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]

    def _braces(self, labels: Mapping[str, str]) -> str:
        pairs = [f'{k}="{_escaped(v)}"' for k, v in {**self._labels, **labels}.items()]
        return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


async def exposition(service: Service) -> str:
    """Return all metrics as text. Without an engine, only those of the HTTP process."""
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
        _memory(page, service, report)
    return page.text()


def _server(page: Page, service: Service) -> None:
    client, gate = service.client, service.gate
    page.value("gauge", "ridgeline:engine_up", "1 while the engine can answer, else 0.", client.up)
    page.value("gauge", "ridgeline:engine_silent_seconds", "Time since the last message of the engine, in seconds.",
               client.silent_s)  # fmt: skip
    page.value("counter", "ridgeline:engine_restarts_total", "Number of restarts of the engine process.",
               client.restarts)  # fmt: skip
    page.value("gauge", "ridgeline:answers_open", "Number of sequences that run or wait.", gate.open)
    page.value("gauge", "ridgeline:answers_capacity", "Largest number of sequences that may run or wait.",
               gate.capacity)  # fmt: skip
    page.value("counter", "ridgeline:requests_refused_total",
               "Number of requests refused with 429 because the queue was full.", gate.refused)  # fmt: skip
    _replicas(page, client)
    _keys(page, service)
    _cache(page, service.ready.config)
    _connections(page, service.connections)
    roof = service.ledger.roof()
    page.value("gauge", "ridgeline:roof_bytes_per_second", "Peak memory bandwidth, in bytes per second.",
               roof["bytes_per_s"])  # fmt: skip
    page.value("gauge", "ridgeline:roof_flops_per_second", "Peak compute, in floating-point operations per second.",
               roof["flops_per_s"])  # fmt: skip
    page.histogram("ridgeline:delivery_seconds",
                   "Time from the moment at which a token was made to its write to the socket, in seconds.",
                   service.delivery)  # fmt: skip
    samples = [({"handler": path, "status": str(s)}, float(n)) for (path, s), n in service.statuses.items()]
    page.values("counter", "http_requests_total", "Number of HTTP requests, by path and status.", samples)


# Names in `EngineHandle.replicas`, kinds, names of metrics, and what they are.
REPLICAS = (
    ("running", "gauge", "ridgeline:replica_running", "Number of prompts that a replica answers."),
    ("routed", "counter", "ridgeline:replica_prompts_total", "Number of prompts that were sent to a replica."),
    ("moved", "counter", "ridgeline:replica_moved_total", "Number of prompts that left a replica, whose engine ended."),
    ("prompt_tokens", "counter", "ridgeline:replica_prompt_tokens_total", "Prompt tokens of a replica's answers."),
    ("hit_tokens", "counter", "ridgeline:replica_cached_tokens_total",
     "Prompt tokens of a replica's answers that were found in its prefix cache."),
    ("restarts", "counter", "ridgeline:replica_restarts_total", "Number of restarts of a replica's engine process."),
)  # fmt: skip


def _replicas(page: Page, client: EngineHandle) -> None:
    if found := client.replicas():
        names = [{"replica": str(each["replica"])} for each in found]
        page.values("gauge", "ridgeline:replica_up", "1 while a replica can answer, else 0.",
                    [(name, float(r["state"] == "ready")) for name, r in zip(names, found, strict=True)])  # fmt: skip
        for field, kind, metric, text in REPLICAS:
            samples = [(name, float(each[field])) for name, each in zip(names, found, strict=True)]
            page.values(kind, metric, text, samples)


# Kinds, names and descriptions of the metrics of each API key with limits, and their values.
KEYS: tuple[tuple[str, str, str, Callable[[Use], int]], ...] = (
    ("counter", "ridgeline:key_requests_total", "Number of requests of an API key that were let in.",
     lambda use: use.total_requests),
    ("counter", "ridgeline:key_tokens_total", "Tokens of prompts and answers of an API key.",
     lambda use: use.total_tokens),
    ("counter", "ridgeline:key_refused_total", "Number of requests of an API key that its rate limits refused.",
     lambda use: use.total_refused),
)  # fmt: skip


def _keys(page: Page, service: Service) -> None:
    uses = service.keys.uses
    if not uses or service.shares is None:
        return
    for kind, metric, text, value in KEYS:
        page.values(kind, metric, text, [({"key": use.key.name}, float(value(use))) for use in uses.values()])
    waiting = [({"key": use.key.name}, float(service.shares.waiting(digest))) for digest, use in uses.items()]
    page.values("gauge", "ridgeline:key_waiting", "Number of requests of an API key that wait for a turn.", waiting)


def _cache(page: Page, config: EngineConfig) -> None:
    page.value("gauge", "vllm:cache_config_info", "Settings of the KV cache, as labels. The value is always 1.", 1.0,
               block_size=str(config.block_size), cache_dtype=config.kv_cache_dtype,
               num_gpu_blocks=str(sum(config.num_pages)))  # fmt: skip


def _memory(page: Page, service: Service, report: Report) -> None:
    config = service.ready.config
    page.values("gauge", "ridgeline:resident_bytes", "Memory that a process of the server has in RAM, in bytes.",
                [({"process": "http"}, float(resident_bytes())),
                 ({"process": "engine"}, float(report.meters.resident_bytes))])  # fmt: skip
    if report.stats is not None:
        page.value("gauge", "ridgeline:state_resident_bytes",
                   "Memory of the pages of state that were used or touched ahead, in bytes.",
                   config.bytes_of(report.stats.resident_pages))  # fmt: skip
        page.value(
            "gauge",
            "ridgeline:state_bytes",
            "Memory of all pages of state, in bytes.",
            config.state_bytes * service.client.engines,
        )


def _connections(page: Page, connections: Connections) -> None:
    page.value("gauge", "ridgeline:connections_open", "Number of open connections.", len(connections))
    page.value("gauge", "ridgeline:connections_capacity", "Largest number of open connections.", connections.limit)
    page.value("counter", "ridgeline:connections_total", "Number of accepted connections.", connections.accepted)
    page.value("counter", "ridgeline:connections_refused_total",
               "Number of connections closed at once because all slots were in use.", connections.refused)  # fmt: skip
    page.values("counter", "ridgeline:connections_ended_total", "Number of connections ended by the server, by reason.",
                [({"reason": reason}, float(connections.ended[reason])) for reason in REASONS])  # fmt: skip
    page.value("counter", "ridgeline:accept_errors_total", "Number of system errors while accepting a connection.",
               connections.accept_errors)  # fmt: skip


def _requests(page: Page, report: Report) -> None:
    m = report.meters
    page.value("counter", "vllm:prompt_tokens_total", "Number of prompt tokens of finished requests.", m.prompt_tokens)
    page.value("counter", "vllm:generation_tokens_total", "Number of generated tokens.", m.generation_tokens)
    sources = [("local_compute", m.prompt_tokens - m.cached_tokens), ("local_cache_hit", m.cached_tokens)]
    page.values("counter", "vllm:prompt_tokens_by_source_total",
                "Number of prompt tokens of finished requests, computed or from the prefix cache.",
                [({"source": source}, n) for source, n in sources])  # fmt: skip
    page.values("counter", "vllm:request_success_total", "Number of finished sequences, by finish reason.",
                [({"finished_reason": reason}, n) for reason, n in sorted(m.finished.items())])  # fmt: skip
    page.value("counter", "ridgeline:block_passes_total",
               "Number of passes over blocks of finished answers; 0 if the model is no diffusion model.",
               m.block_passes)  # fmt: skip
    for name, text, histogram in _histograms(report):
        page.histogram(name, text, histogram)


def _histograms(report: Report) -> Iterator[tuple[str, str, Histogram]]:
    m = report.meters
    yield "vllm:time_to_first_token_seconds", "Time from arrival to first token, in seconds.", m.ttft
    yield "vllm:inter_token_latency_seconds", "Time between two tokens of a sequence, in seconds.", m.inter_token
    yield (
        "vllm:request_time_per_output_token_seconds",
        "Mean time per output token of a request after its first token, in seconds.", m.per_token,
    )  # fmt: skip
    yield "vllm:e2e_request_latency_seconds", "Time from arrival to last token, in seconds.", m.e2e
    yield "vllm:request_queue_time_seconds", "Time from arrival to first step, in seconds.", m.queue
    yield "vllm:request_inference_time_seconds", "Time from first step to last token, in seconds.", m.inference
    yield "vllm:request_prefill_time_seconds", "Time from first step to first token, in seconds.", m.prefill
    yield "vllm:request_decode_time_seconds", "Time from first token to last token, in seconds.", m.decode
    yield "vllm:request_prompt_tokens", "Number of prompt tokens of a request.", m.request_prompt_tokens
    yield "vllm:request_generation_tokens", "Number of generated tokens of a request.", m.request_generation_tokens
    yield "vllm:request_num_preemptions", "Number of preemptions of a request.", m.request_preemptions
    if report.stats is not None and (times := report.stats.page_times) is not None:
        yield (
            "vllm:kv_block_lifetime_seconds", "Time from caching to eviction of a page, in seconds.", times.lifetime,
        )  # fmt: skip
        yield (
            "vllm:kv_block_idle_before_evict_seconds",
            "Time from the last use to the eviction of a page, in seconds.", times.idle,
        )  # fmt: skip
        yield "vllm:kv_block_reuse_gap_seconds", "Time between two uses of a page, in seconds.", times.reuse_gap
    yield "vllm:iteration_tokens_total", "Number of generated tokens per step.", m.step_tokens
    yield "ridgeline:step_seconds", "Time of a step, in seconds.", m.step_s


def _drafts(page: Page, stats: Stats) -> None:
    """Add the counts of drafts, and what they gain."""
    page.value(
        "counter", "vllm:spec_decode_num_drafts_total", "Number of verifications of drafts.", stats.drafts.verifications
    )
    page.value("counter", "vllm:spec_decode_num_draft_tokens_total", "Number of verified draft tokens.",
               stats.draft_tokens)  # fmt: skip
    page.value("counter", "vllm:spec_decode_num_accepted_tokens_total", "Number of accepted draft tokens.",
               stats.accepted_tokens)  # fmt: skip
    page.values("counter", "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                "Number of accepted draft tokens, by their position in the draft.",
                [({"position": str(i)}, float(n)) for i, n in enumerate(stats.drafts.accepted_at)])  # fmt: skip
    page.values("counter", "ridgeline:draft_tried_tokens_per_pos_total",
                "Number of verified draft tokens whose predecessors were all accepted, by position.",
                [({"position": str(i)}, float(n)) for i, n in enumerate(stats.drafts.tried_at)])  # fmt: skip
    if (speed := stats.draft_speed) is not None:
        page.values("counter", "ridgeline:draft_depth_total", "Number of steps of sequences, by number of drafts.",
                    [({"depth": str(depth)}, float(n)) for depth, n in enumerate(speed.depths)])  # fmt: skip
        for name, factor in (("measured", speed.factor), ("expected", speed.expected_factor)):
            page.value("gauge", f"ridgeline:draft_speedup_{name}",
                       f"Speed of decoding over the speed without drafts, {name}.", factor or 1.0)  # fmt: skip


def _engine(page: Page, report: Report) -> None:
    m, stats = report.meters, report.stats
    page.value("counter", "ridgeline:steps_total", "Number of steps of the engine.", m.steps)
    page.value("counter", "ridgeline:steps_failed_total", "Number of steps that failed.", m.failed_steps)
    page.values("counter", "ridgeline:page_checks_total",
                "Number of checks of the page tables, made once the engine has been idle for a second, by result.",
                [({"found": found}, float(m.page_checks[found])) for found in ("agreed", "wrong")])  # fmt: skip
    page.value("counter", "ridgeline:engine_busy_seconds_total", "Time that the engine spent in steps, in seconds.",
               m.busy_s)  # fmt: skip
    page.value("counter", "ridgeline:engine_alive_seconds_total", "Age of the engine process, in seconds.", m.alive_s)
    page.value("counter", "ridgeline:step_bytes_total", "Bytes moved by all steps, counted by the cost model.",
               m.step_bytes)  # fmt: skip
    page.value("counter", "ridgeline:step_flops_total",
               "Floating-point operations of all steps, counted by the cost model.", m.step_flops)  # fmt: skip
    page.value("counter", "ridgeline:predicted_step_seconds_total",
               "Predicted time of all steps, in seconds; 0 if the machine is not calibrated.",
               m.predicted_s)  # fmt: skip
    page.value("gauge", "ridgeline:step_drift",
               "Measured time of the last seconds of steps, divided by their predicted time; 0 if it is not known.",
               m.drift)  # fmt: skip
    page.value("gauge", "ridgeline:roof_fraction",
               "Least time of all steps by the roofline, divided by their measured time, 0 to 1.",
               m.roof_s / m.busy_s if m.busy_s else 0.0)  # fmt: skip
    page.value("counter", "ridgeline:embedded_texts_total",
               "Number of texts from which embeddings or scores were computed.", m.embedded_texts)  # fmt: skip
    page.value("counter", "ridgeline:embedded_tokens_total",
               "Number of tokens of the texts from which embeddings or scores were computed.",
               m.embedded_tokens)  # fmt: skip
    page.value("counter", "llamacpp:n_decode_total", "Number of forward passes.", m.forwards)
    page.value("gauge", "llamacpp:n_busy_slots_per_decode", "Mean number of sequences per forward pass.",
               m.sequences / m.forwards if m.forwards else 0.0)  # fmt: skip
    if stats is None:
        return
    pages, used = sum(g.num_pages for g in stats.groups), sum(g.used_pages for g in stats.groups)
    page.value("gauge", "vllm:num_requests_running", "Number of running sequences.", stats.running)
    page.value("gauge", "vllm:num_requests_waiting", "Number of waiting sequences.", stats.waiting)
    page.value("gauge", "vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1.", used / pages if pages else 0.0)
    page.value("counter", "vllm:prefix_cache_queries_total", "Number of prompt tokens looked up in the prefix cache.",
               stats.queried_tokens)  # fmt: skip
    page.value("counter", "vllm:prefix_cache_hits_total", "Number of prompt tokens found in the prefix cache.",
               stats.hit_tokens)  # fmt: skip
    page.value("counter", "vllm:num_preemptions_total", "Number of preemptions of sequences.",
               stats.preempted_recompute + stats.preempted_swap)  # fmt: skip
    _drafts(page, stats)
    page.values("gauge", "ridgeline:pages_used", "Number of pages that sequences use, by group of layers.",
                [({"group": g.name}, float(g.used_pages)) for g in stats.groups])  # fmt: skip
    page.values("gauge", "ridgeline:pages", "Number of pages, by group of layers.",
                [({"group": g.name}, float(g.num_pages)) for g in stats.groups])  # fmt: skip
    page.value("counter", "llamacpp:prompt_tokens_total", "Number of computed prompt tokens of finished requests.",
               m.prompt_tokens - m.cached_tokens)  # fmt: skip
    page.value("counter", "llamacpp:tokens_predicted_total", "Number of generated tokens.", m.generation_tokens)
    page.value("gauge", "llamacpp:requests_processing", "Number of running sequences.", stats.running)
    page.value("gauge", "llamacpp:requests_deferred", "Number of waiting sequences.", stats.waiting)
