"""Several engines answer as one, also when engines are killed, and prompts go where they were computed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu.serving import Server, serving, until
from ridgeline import LLM, SamplingParams
from ridgeline.dist.fleet import MAX_ENGINES, Fleet
from ridgeline.dist.local import options_of_replicas
from ridgeline.dist.prefixes import MOST_BLOCKS, PrefixIndex, block_keys
from ridgeline.dist.resume import Sent
from ridgeline.dist.totals import total
from ridgeline.errors import RequestError
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sched.stats import DraftCounts, GroupStats, Stats
from ridgeline.serve.engine.client import Answers, EngineClient, EngineDown
from ridgeline.serve.engine.messages import Report
from ridgeline.serve.engine.meters import EngineMeters
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput, Timing

TEXTS = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(st.tuples(TEXTS, st.integers(0, 3), st.sampled_from("ab")), max_size=12), TEXTS)
@settings(deadline=None, max_examples=60)
def test_the_index_finds_what_each_replica_computed(
    routed: list[tuple[list[int], int, str]], prompt: list[int]
) -> None:
    """The depth is the longest common prefix in whole blocks, by comparing all prompts of a replica."""
    block, index = 2, PrefixIndex()
    for tokens, replica, salt in routed:
        index.add(block_keys(tokens, block, salt), replica)
    common = {}
    for tokens, replica, salt in routed:
        if salt == "a":
            whole = [i for i in range(min(len(tokens), len(prompt)) // block + 1)
                     if tokens[: i * block] == prompt[: i * block]]  # fmt: skip
            common[replica] = max(common.get(replica, 0), max(whole))
    assert index.depths(block_keys(prompt, block, "a")) == {r: n for r, n in common.items() if n}
    index.forget(0)
    assert 0 not in index.depths(block_keys(prompt, block, "a"))


def test_the_index_is_bounded() -> None:
    """Beginnings that many prompts share stay longest, and a long prompt has no more keys than others."""
    assert len(block_keys(range(50_000), 2, "")) == MOST_BLOCKS
    index = PrefixIndex(capacity=100)
    shared = list(range(32))
    for i in range(500):
        index.add(block_keys([*shared, *range(1000 + i, 1064 + i)], 16, ""), i % 4)
    assert len(index) == 100
    assert set(index.depths(block_keys(shared, 16, "")).values()) == {2}


@given(st.data())
@settings(deadline=None, max_examples=80)
def test_a_stream_that_begins_again_continues(data: st.DataObject) -> None:
    """Chunks are cut anew at each beginning; what is passed on adds up to the answers."""
    answers = [data.draw(st.lists(st.text("xyz", max_size=3), min_size=1, max_size=8)) for _ in range(2)]
    sent, got, ended = Sent(), [([], "") for _ in answers], [0, 0]
    cuts = [data.draw(st.integers(0, 20)) for _ in range(3)] + [10_000]
    for cut in cuts:
        for chunk in list(_chunks(answers, data))[:cut]:
            if (rest := sent.rest(chunk)) is not None:
                tokens, text = got[rest.index]
                got[rest.index] = ([*tokens, *rest.token_ids], text + rest.text)
                ended[rest.index] += rest.finish_reason is not None
                assert len(rest.logprobs) == len(rest.token_ids)
        sent.again()
    assert got == [(list(range(len(pieces))), "".join(pieces)) for pieces in answers] and ended == [1, 1]


def _chunks(answers: Sequence[Sequence[str]], data: st.DataObject) -> Iterator[OutputChunk]:
    for index, pieces in enumerate(answers):
        start = 0
        while start < len(pieces):
            end = data.draw(st.integers(start + 1, len(pieces)))
            ids = tuple(range(start, end))
            reason = "length" if end == len(pieces) else None
            yield OutputChunk(index, "".join(pieces[start:end]), ids, ids, reason)  # type: ignore[arg-type]
            start = end


class Engine:
    """An engine client without a process, whose engine the test ends and starts."""

    def __init__(self) -> None:
        self.up, self.restarts, self.silent_s, self.health, self.state = True, 0, 0.0, "ready", "ready"
        self.open: list[tuple[GenerationRequest, Answers]] = []

    def submit(self, requests: Sequence[GenerationRequest], arrived: float, *, stream: bool, on_done: Any) -> Answers:
        if not self.up:
            raise EngineDown("down")
        answers = Answers([0], lambda ids: None, on_done)
        self.open.append((requests[0], answers))
        return answers

    def end(self) -> None:
        """End the engine and its requests."""
        self.up, self.restarts, lost, self.open = False, self.restarts + 1, self.open, []
        for _, answers in lost:
            answers.fail(EngineDown("the engine process ended"))

    def finish(self) -> None:
        """Answer all requests with one token."""
        done, self.open = self.open, []
        for request, answers in done:
            output = RequestOutput(
                "", list(request.prompt_token_ids), [CompletionOutput(0, [7])], Timing(0.0, None, 0.0, 0.0)
            )
            answers.put(0, OutputChunk(0, "a", (7,), (), "length", None, None, output), 1.0)
            answers.notify()


def fleet_of(count: int) -> tuple[Fleet, list[Engine]]:
    engines = [Engine() for _ in range(count)]
    fleet = Fleet(cast(list[EngineClient], engines))
    fleet._block = 4
    return fleet, engines


def ask(fleet: Fleet, *prompts: Sequence[int]) -> Answers:
    requests = [GenerationRequest(p, SamplingParams(max_tokens=1), ()) for p in prompts]
    return fleet.submit(requests, 0.0, stream=True, on_done=lambda: None)


def test_prompts_go_where_they_were_computed_and_spread_otherwise() -> None:
    async def run() -> None:
        fleet, engines = fleet_of(3)
        for i in range(6):
            ask(fleet, [i] * 40)
        assert [len(e.open) for e in engines] == [2, 2, 2]
        for engine in engines:
            engine.finish()
        for i in (0, 0, 0, 5):
            before = [r.routed for r in fleet._replicas]
            ask(fleet, [*([i] * 40), 9, 9, 9])
            (moved,) = [k for k, r in enumerate(fleet._replicas) if r.routed > before[k]]
            assert moved == i % 3
            engines[moved].finish()
        engines[0].end()
        engines[0].up = True  # a new process, which has computed nothing
        ask(fleet, [1] * 40)
        assert [len(e.open) for e in engines] == [0, 1, 0]

    asyncio.run(run())


def test_a_request_that_ends_engines_does_not_end_all() -> None:
    async def run() -> None:
        fleet, engines = fleet_of(MAX_ENGINES + 2)
        bad = ask(fleet, [1] * 9)
        for _ in range(MAX_ENGINES):
            assert bad.waiting
            next(e for e in engines if e.open).end()
        with pytest.raises(EngineDown, match="ended"):
            bad.take()
        assert sum(e.up for e in engines) == 2 and not fleet._runs
        assert all(r.live == r.pending_tokens == 0 for r in fleet._replicas)

    asyncio.run(run())


def test_requests_wait_while_no_engine_is_ready() -> None:
    async def run() -> None:
        fleet, engines = fleet_of(2)
        first, dropped = ask(fleet, [1] * 9, [2] * 9), ask(fleet, [3] * 9)
        for engine in engines:
            engine.end()
        with pytest.raises(EngineDown, match="no engine is ready"):
            ask(fleet, [4])
        dropped.close()
        assert first.waiting and not any(e.open for e in engines)
        engines[1].up = True
        async with asyncio.timeout(10):
            while len(engines[1].open) < 2:
                await asyncio.sleep(0.01)
        engines[1].finish()
        assert {index for index, _ in first.take()} == {0, 1} and first.take() == [] and not fleet._runs
        await fleet_idle(fleet)

    asyncio.run(run())


async def fleet_idle(fleet: Fleet) -> None:
    async with asyncio.timeout(10):
        while fleet._moving:
            await asyncio.sleep(0.01)


def test_reports_add_up() -> None:
    one, other = EngineMeters(prompt_tokens=3, alive_s=9.0), EngineMeters(prompt_tokens=4, alive_s=2.0)
    for meters, value in ((one, 0.1), (other, 0.3), (other, 0.5)):
        meters.ttft.observe(value)
        meters.finished["stop"] += 1
    group = GroupStats("all", 10, 3, 4, 0, 48, 5, 1)
    stats = Stats(1, 2, (group,), 100, 50, 0, 0, 0, 0, 0, DraftCounts(), resident_pages=(4,))
    found = total([Report(0, stats, one), Report(1, stats, other)])
    meters = found.meters
    assert (meters.prompt_tokens, meters.alive_s, meters.finished["stop"]) == (7, 9.0, 3)
    assert sum(meters.ttft.counts) == 3 and meters.ttft.sum == pytest.approx(0.9) and one.ttft.sum == 0.1
    assert found.stats is not None
    assert (found.stats.running, found.stats.hit_rate, found.stats.groups[0].num_pages) == (2, 0.5, 20)


def test_replicas_that_do_not_fit_are_refused() -> None:
    for replicas in (0, 300):
        with pytest.raises(RequestError, match=f"--replicas is {replicas}; it must be 1 to 256"):
            options_of_replicas({"device": "cpu"}, replicas)
    assert options_of_replicas({"device": "cpu", "seed": 3}, 1) == [{"device": "cpu", "seed": 3}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("pocket", "--replicas", "2", "--max-num-seqs", "16") as server:
        yield server


CASES: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5, "n": 2},
    {"temperature": 0.7, "seed": 6, "logprobs": 2},
    {"temperature": 0, "stop": ["return x9"], "repetition_penalty": 1.1},
    {"temperature": 0.8, "seed": 7, "frequency_penalty": 0.5, "min_p": 0.05},
)


def stream_of(client: httpx.Client, number: int) -> list[Any]:
    """Return the text, the tokens' log probabilities and the reason of each answer."""
    body = {"prompt": f"def f{number}(", "max_tokens": 300, "ignore_eos": True, "stream": True}
    found: list[Any] = [["", [], None] for _ in range(2)]
    with client.stream("POST", "completions", json=body | CASES[number % len(CASES)]) as r:
        assert r.status_code == 200
        for line in r.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    answer = found[choice["index"]]
                    answer[0] += choice["text"]
                    answer[1] += (choice.get("logprobs") or {}).get("token_logprobs", [])
                    answer[2] = choice["finish_reason"] or answer[2]
    return found


@pytest.mark.slow
def test_nobody_notices_that_an_engine_is_killed(server: Server) -> None:
    """kill -9 of each engine in turn while ten streams run: no error, and the bits of a run without."""
    with ThreadPoolExecutor(10) as pool, httpx.Client(base_url=server.url, timeout=120) as client:
        wanted = list(pool.map(lambda i: stream_of(client, i), range(10)))
        for _ in range(2):
            running = [pool.submit(stream_of, client, i) for i in range(10)]
            moved = server.metric("ridgeline:replica_moved_total")
            until(lambda: server.metric("vllm:num_requests_running") >= 4)
            os.kill(server.engine_pids()[0], signal.SIGKILL)  # the oldest: the new one may have no prompts yet
            assert [r.result() for r in running] == wanted
            assert server.metric("ridgeline:replica_moved_total") > moved
            until(lambda: all(each["state"] == "ready" for each in server.ask("GET", "/live")[1]["replicas"]))
    (output,) = LLM("pocket").generate(
        "def f0(", SamplingParams(max_tokens=300, temperature=0, ignore_eos=True, repetition_penalty=1.1)
    )
    assert wanted[0][0][0] == output.outputs[0].text
    assert server.ask("GET", "/live")[1]["engine"]["restarts"] == 2


@pytest.mark.nightly
def test_conversations_stay_at_their_replica(server: Server) -> None:
    """A second turn finds the first one in the prefix cache, and /metrics says where."""
    texts = ["".join(f"x{i} = {i * k}\n" for i in range(40)) for k in range(1, 5)]
    before = server.metric("ridgeline:replica_cached_tokens_total")
    for text in texts:
        server.post("/v1/completions", prompt=text, max_tokens=4)
    for text in texts:
        answer = server.post("/v1/completions", prompt=text + "y", max_tokens=4)[1]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0.8 * answer["usage"]["prompt_tokens"]
    assert server.metric("ridgeline:replica_cached_tokens_total") > before
    status, vectors = server.post("/v1/embeddings", input=["def f", "import os"], pooling="mean")
    assert status == 200 and len(vectors["data"]) == 2
