"""`ridgeline bench serve` against a server with a known timing, and against our own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from cpu.fake_openai import fake_server
from cpu.serving import serving
from ridgeline.errors import RequestError
from ridgeline.measure.client import Answer, Client
from ridgeline.measure.load import measured
from ridgeline.plan.limits import Slo

MS = 10**6
LATE = 0.06  # seconds by which a busy machine may be late


def bench(url: str, *args: str) -> dict[str, Any]:
    done = run(url, *args, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run(url: str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ridgeline", "bench", "serve", "--base-url", url, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_columns_are_numpys_percentiles() -> None:
    rng = np.random.default_rng(0)
    answers = []
    for i in range(101):
        times = (i * 10 + np.cumsum(rng.integers(1, 90, rng.integers(1, 12)))) * MS
        answers.append(Answer(i * 10 * MS, 7, i * 10 * MS + i, times.tolist(), len(times)))
    failed = [Answer(0, 7, error="status 500: no"), Answer(5, 7, error="status 500: no"), Answer(5, 7, error="gone")]
    found = measured([*answers, *failed], 3, Slo(ttft_s=0.05, tpot_s=0.05))
    ttft = [(a.times_ns[0] - a.arrival_ns) / 1e9 for a in answers]
    tpot = [(a.times_ns[-1] - a.times_ns[0]) / 1e9 / (a.tokens - 1) if a.tokens > 1 else None for a in answers]
    known = [t for t in tpot if t is not None]
    gaps = [(b - a) / 1e9 for answer in answers for a, b in pairwise(answer.times_ns)]
    e2e = [(a.times_ns[-1] - a.arrival_ns) / 1e9 for a in answers]
    r = found.report
    for percentiles, values in ((r.ttft_s, ttft), (r.tpot_s, known), (r.itl_s, gaps), (r.e2e_s, e2e)):
        assert percentiles is not None
        for q in (50, 90, 95, 99):
            assert getattr(percentiles, f"p{q}") == pytest.approx(np.percentile(values, q), abs=1e-8)
    met = sum(a <= 0.05 and (b is None or b <= 0.05) for a, b in zip(ttft, tpot, strict=True))
    assert r.attainment == pytest.approx(met / 104)  # a failed request does not attain its limits either
    assert r.goodput == pytest.approx(met / r.duration_s)
    assert found.failures == {"status 500: no": 2, "gone": 1} and found.lateness_s == 100 / 1e9
    with pytest.raises(RequestError, match="no request was answered: status 500"):
        measured(failed, 3, None)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ('data: {"choices": [{"text": ""}], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n', None),
        ("data: [1]\n\ndata: [DONE]\n\n", "an event that is none"),
        ('data: {"choices": [], "usage": {"completion_tokens": "x"}}\n\n', "an event that is none"),
    ],
)
def test_answers_without_text_have_a_time(events: str, error: str | None) -> None:
    """An answer whose tokens all have empty texts is measured, and its tokens have arrived by its end."""

    async def pieces() -> AsyncIterator[bytes]:
        yield events.encode()

    async def ask() -> Answer:
        client, answer = Client("http://x", None, 9), Answer(time.perf_counter_ns(), 5)
        await client.http.aclose()
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=pieces()))
        client.http = httpx.AsyncClient(transport=transport, base_url="http://x")
        async with client.http:
            await client.complete({}, answer)
        return answer

    answer = asyncio.run(ask())
    if error is not None:
        assert answer.error is not None and error in answer.error
        return
    found = measured([answer], 1, None)
    assert (answer.tokens, len(answer.times_ns), found.failed) == (3, 1, 0)


@pytest.mark.parametrize("usage", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_known_times_are_found(usage: bool) -> None:
    """Half of the requests get their first token after 100 ms, half after 300 ms; then a token every 20 ms."""
    with fake_server(lambda i, body: [0.1 + 0.2 * (i % 2), *[0.02] * (body["max_tokens"] - 1)], usage=usage) as fake:
        found = bench(fake.url, "--concurrency", "4", "--num-requests", "24", "--output-len", "6", "--warmup", "0")
    r = found["measured"]
    assert r["requests"] == 24 and r["output_tokens"] == 144 and not found["failures"] and found["at_once"] == 4
    assert 0.1 <= r["ttft_s"]["p50"] <= 0.3 + LATE and 0.3 <= r["ttft_s"]["p90"] <= 0.3 + LATE
    assert 0.019 <= r["tpot_s"]["mean"] <= 0.02 + LATE / 5 and 0.015 <= r["itl_s"]["p50"] <= 0.02 + LATE / 2
    assert 0.4 <= r["e2e_s"]["p90"] <= 0.4 + 2 * LATE  # the first token and the five after it may be late, as above
    sent = fake.bodies[0]
    assert sent["ignore_eos"] and sent["stream"] and len(sent["prompt"]) == 128 and "return_token_ids" not in sent


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("backend", ["openai-chat", pytest.param("openai-text", marks=pytest.mark.slow)])
def test_texts_instead_of_ids(backend: str, usage: bool) -> None:
    """For servers that accept no ids: the server's token counts are used, and their absence is reported."""
    with fake_server(lambda i, body: [0.01] * (body["max_tokens"] - 1), usage=usage) as fake:
        found = bench(fake.url, "--backend", backend, "--concurrency", "2", "--num-requests", "4", "--input-len", "9",
                      "--output-len", "6", "--warmup", "0")  # fmt: skip
    r = found["measured"]
    assert r["output_tokens"] == 4 * 5 and r["prompt_tokens"] == 4 * (77 if usage else 9)  # one answer stopped early
    assert found["without_usage"] == (0 if usage else 4) and not found["failures"]
    sent = fake.bodies[0]
    text = sent["prompt"] if backend == "openai-text" else sent["messages"][0]["content"]
    assert len(text.split()) == 9 and ("prompt" in sent) == (backend == "openai-text")


@pytest.mark.parametrize(("reason", "tokens"), [("length", 6), ("stop", 3)])
def test_tokens_that_the_server_does_not_count(reason: str, tokens: int) -> None:
    """A stream like llama-cpp-python's has no usage, and no event for a text that is half a character."""
    with fake_server(lambda i, body: [0.02] * 6, usage=False, mute=True, reason=reason) as fake:
        found = bench(fake.url, "--backend", "openai-chat", "--concurrency", "2", "--num-requests", "2",
                      "--output-len", "6", "--warmup", "0")  # fmt: skip
    r = found["measured"]
    assert r["output_tokens"] == 2 * tokens and found["without_usage"] == 2 and not found["failures"]
    assert r["e2e_s"]["p50"] >= (0.12 if reason == "length" else 0.1) - 0.01


@pytest.mark.slow
def test_an_answer_that_is_broken_off_is_none() -> None:
    """llama-cpp-python ends a stream when the next request arrives, with [DONE] and without a reason."""
    with fake_server(lambda i, body: [0.0] * 6, usage=False, reason=None) as fake:
        done = run(fake.url, "--backend", "openai-chat", "--concurrency", "2", "--num-requests", "2", "--warmup", "0")
    assert done.returncode == 2 and "broke the answer off" in done.stderr


@pytest.mark.slow
def test_an_open_loop_does_not_wait_for_answers() -> None:
    """Requests are sent at their times even if the server needs half a second for each."""
    with fake_server(lambda i, body: [0.5, 0.0]) as fake:
        found = bench(fake.url, "--arrivals", "poisson:40", "--num-requests", "40", "--output-len", "2",
                      "--slo", "ttft=400ms", "--warmup", "0")  # fmt: skip
    r = found["measured"]
    assert found["at_once"] > 10 and fake.came[-1] - fake.came[0] < 40 / 40 * 2
    assert r["ttft_s"]["p50"] >= 0.5 and r["attainment"] == 0 and r["goodput"] == 0
    assert found["lateness_s"] < 0.5


@pytest.mark.slow
def test_a_stall_counts_for_all_requests_that_were_due() -> None:
    """With one request at a time of 100 ms, and 50 due each second, the last request waits for all before it."""
    lock, done = threading.Lock(), [0.0]

    def plan(i: int, body: dict[str, Any]) -> list[float]:
        with lock:
            done[0] = max(done[0], time.perf_counter()) + 0.1
            return [done[0] - time.perf_counter()]

    with fake_server(plan) as fake:
        found = bench(
            fake.url, "--arrivals", "poisson:50", "--num-requests", "20", "--output-len", "1", "--warmup", "0"
        )
    r = found["measured"]
    assert r["ttft_s"]["max"] > 1.2 and r["tpot_s"] is None and r["itl_s"] is None
    assert r["ttft_s"]["max"] == pytest.approx(r["e2e_s"]["max"])


@pytest.mark.slow
def test_failures_are_counted_and_named(tmp_path: Path) -> None:
    def plan(i: int, body: dict[str, Any]) -> list[float] | int:
        return 429 if i % 4 == 3 else [0.01, 0.01]

    with fake_server(plan) as fake:
        picture = tmp_path / "out.png"
        done = run(fake.url, "--concurrency", "2", "--num-requests", "12", "--output-len", "2", "--warmup", "0",
                   "--slo", "ttft=10s", "--plot", str(picture))  # fmt: skip
        assert "3 failed: status 429: refused with 429" in done.stdout and "75.0%" in done.stdout
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert "Traceback" not in done.stderr
    gone = run("http://127.0.0.1:9", "--concurrency", "2")
    assert gone.returncode == 2 and "cannot be reached" in gone.stderr and "--base-url" in gone.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "no workload is given"),
        (["--concurrency", "2", "--arrivals", "poisson:1"], "give one of them"),
        (["--concurrency", "2", "--model", "other"], "does not serve other; it serves fake"),
        (["--concurrency", "2", "--slo", "ttfb=1s"], "with ttft, tpot, e2e"),
        (["--concurrency", "2", "--extra-body", "[]"], "must be an object"),
        (["--concurrency", "2", "--backend", "vllm"], "choose one of openai, openai-text, openai-chat"),
        (["--concurrency", "2", "--plot", "out.gif"], "must end in .png or .svg"),
    ],
)
def test_errors_say_what_to_do(args: list[str], said: str) -> None:
    with fake_server(lambda i, body: [0.0]) as fake:
        done = run(fake.url, *args)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_our_own_server_beside_the_prediction(tmp_path: Path) -> None:
    """Every answer is complete, the shared blocks of a trace are shared, and the simulator gets the same workload."""
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 40 * i, "input_length": 520, "output_length": 8, "hash_ids": [0, 1 + i]} for i in range(10)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    times = tmp_path / "times.json"
    times.write_text(json.dumps({"tokens": [1, 512], "step_s": [0.003, 0.2]}))
    with serving("pocket") as server:
        found = bench(server.url, "--trace", str(trace), "--scale", "2", "--slo", "ttft=30s,tpot=1s",
                      "--predict", "src/ridgeline/models/pocket", "--hardware", "cpu-server",
                      "--step-times", str(times))  # fmt: skip
        own = bench(server.url, "--trace", str(trace), "--scale", "2")["predicted"]
        assert server.metric("vllm:prefix_cache_hits_total") >= 9 * 512
    r, p = found["measured"], found["predicted"]
    for column in ("requests", "prompt_tokens", "output_tokens"):
        assert r[column] == p[column] == {"requests": 10, "prompt_tokens": 5200, "output_tokens": 80}[column]
    assert r["attainment"] == 1.0 and r["goodput"] == pytest.approx(r["requests_per_s"])
    assert 0.2 < p["ttft_s"]["max"] < 2
    assert own["requests"] == 10 and 1e-5 < own["ttft_s"]["p50"] < 10  # the server's measurement of this machine
