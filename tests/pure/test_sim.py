"""The simulator against closed forms; workloads, traces, metrics and routing."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

from ridgeline.errors import RequestError
from ridgeline.sched import Scheduler
from ridgeline.sched.routing import ROUTES
from ridgeline.sim import LinearCost, Percentiles, Request, Settings, Simulated, Slo, Workload, simulate
from ridgeline.sim.book import Book
from ridgeline.sim.costs import CostTable
from ridgeline.sim.metrics import SECOND, Answered, Usage, report
from ridgeline.sim.replica import SteppingReplica, make_scheduler
from ridgeline.sim.sequence import counted_sequence
from ridgeline.sim.traces import read_trace
from ridgeline.sim.workload import arrive, cut, gamma, lengths, on_off, parse_arrivals, poisson, repeated, scale_rate
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.state import ALL

KV = StateGroup("kv", 16, ALL, 1000)
TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"


def pool(pages: int = 10_000, seqs: int = 64, tokens: int = 4096) -> Settings:
    return Settings((KV,), (pages,), seqs, tokens, 1 << 17)


def each(seconds: float) -> LinearCost:
    """Return a cost with which every step takes the same time."""
    return LinearCost((1,), (seconds,))


# ---- closed forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_queue_with_one_server(load: float) -> None:
    """Simulate M/D/1: requests of one step with a constant time.

    Each request waits as Lindley's recursion says (1952), to the nanosecond. The mean is close to Pollaczek and
    Khinchine's load / (2 (1 - load)) steps, within the error of this number of requests.
    """
    service, count = 0.01, 8000
    times = [*islice(poisson(load / service, 3), count)]
    found = simulate(Workload(arrive([Request(0, 1, 1)] * count, times)), pool(seqs=1), each(service))
    answered, free, waits = found.book.answered(), 0, []
    for time in times:
        waits.append(max(0, free - time))
        free = max(free, time) + round(service * SECOND)
    assert (answered.first - answered.arrival - round(service * SECOND)).tolist() == waits
    assert sum(waits) / count / SECOND == pytest.approx(service * load / (2 * (1 - load)), rel=0.15)
    assert found.report.utilization == pytest.approx(load, rel=0.05)


def test_littles_law() -> None:
    """The mean number of requests in the system is the arrivals per second times the mean time of a request, to the
    nanosecond.

    The steps count the requests in the system (they never pause here); the requests record their own times.
    """
    requests = arrive([Request(0, 40, 30)] * 300, [n // 3 * 1000 for n in range(300)])
    found = simulate(Workload(requests), pool(seqs=7), each(0.01))
    report, answered = found.report, found.book.answered()
    inside = int((answered.last - answered.arrival).sum())
    log = found.book.logs[0]
    # A request that arrives during a step is first counted in the next step.
    late = sum(int(np.asarray(log.ends)[np.searchsorted(log.ends, t)] - t) for t in answered.arrival.tolist() if t)
    assert log.batch + log.waiting == inside - late
    assert report.mean_batch + report.mean_waiting == pytest.approx(
        report.requests_per_s * answered_mean(answered), rel=3e-3
    )


def answered_mean(answered: Answered) -> float:
    return float((answered.last - answered.arrival).mean()) / SECOND


def test_saturation_is_batch_over_step_time() -> None:
    """With a client for each slot, every step gives each a token; a prompt delays its answer by one step."""
    cost = LinearCost((1, 1000), (0.004, 0.014), 1e-7)
    requests = [Request(0, 2, 499)] * 400
    found = simulate(Workload(requests, clients=32), pool(seqs=32), cost).report
    context = 2 + 500 / 2  # mean of 2 to 500
    step = cost.seconds(32, 32, [int(32 * context)])
    # some slots are free during the last answers
    assert found.output_tokens_per_s == pytest.approx(32 / step, rel=0.05)


def test_one_request_alone_by_hand() -> None:
    """Compute by hand: chunks of 100 tokens, then a step for each token give a TTFT of 3 steps and a TPOT of one."""
    found = simulate(Workload([Request(5, 250, 11)]), pool(tokens=100), each(0.5))
    r = found.report
    assert (r.steps, r.output_tokens, r.prompt_tokens, r.duration_s) == (13, 11, 250, 6.5)
    assert r.ttft_s is not None and r.tpot_s is not None and r.e2e_s is not None
    assert (r.ttft_s.mean, r.tpot_s.mean, r.e2e_s.mean) == (1.5, 0.5, 6.5)
    assert found.book.token_times() == [[5 + (3 + i) * SECOND // 2 for i in range(11)]]
    assert r.peak_bytes == 17 * 1000  # pages for 260 tokens


# ---- determinism, conservation, refusal --------------------------------------------------------------------


def some(seed: int, **more: object) -> Simulated:
    requests = arrive(islice(lengths(200, 40, 1.0, seed), 200), poisson(20, seed))
    return simulate(Workload(requests), pool(400), LinearCost((1, 500), (0.01, 0.05)), **more)  # type: ignore[arg-type]


def test_the_seed_says_all() -> None:
    first, again, other = some(1), some(1), some(2)
    assert first.report == again.report and first.book.token_times() == again.book.token_times()
    assert first.report != other.report


def test_tokens_add_up() -> None:
    requests = arrive(islice(lengths(200, 40, 1.0, 4), 300), poisson(20, 4))
    found = simulate(Workload(requests), pool(120), LinearCost((1, 500), (0.01, 0.05)), replicas=2)
    times = found.book.token_times()
    assert found.report.preemptions > 0
    assert found.report.requests + found.report.refused == 300
    answered = [requests[i] for i in found.book.column("index").tolist()]
    assert [len(t) for t in times] == [r.output_tokens for r in answered]
    assert all(a < b for t in times for a, b in pairwise(t))
    assert all(t[0] > r.arrival_ns for t, r in zip(times, answered, strict=True))


def test_requests_that_cannot_fit_are_refused_and_the_rest_runs() -> None:
    found = simulate(Workload([Request(0, 5000, 1), Request(0, 50, 2)]), pool(100), each(0.01))
    assert (found.report.requests, found.report.refused) == (1, 1)
    assert found.first_refusal is not None and "need 313 pages" in found.first_refusal
    long = Workload([Request(0, 1 << 17, 1), Request(0, (1 << 17) - 1, 1)])
    found = simulate(long, pool(), each(0.01))
    assert found.report.refused == 1 and "exceed the context of 131072" in str(found.first_refusal)
    with pytest.raises(RequestError, match="no request fits"):
        simulate(Workload([Request(0, 5000, 1)]), pool(100), each(0.01))
    with pytest.raises(RequestError, match="at least 1"):
        simulate(Workload([]), pool(), each(0.01), replicas=0)


def test_an_empty_workload() -> None:
    r = simulate(Workload([]), pool(), each(0.01), slo=Slo(ttft_s=1.0)).report
    assert (r.requests, r.steps, r.ttft_s, r.requests_per_s, r.goodput) == (0, 0, None, 0.0, None)


# ---- prefixes ----------------------------------------------------------------------------------------------


def test_page_keys_come_from_the_workload() -> None:
    """With blocks of 512 tokens and pages of 16, two prompts share 2 blocks, so the second one begins at 1,024."""
    first, second = Request(0, 1500, 4, (7, 8, 9), 512), Request(10 * SECOND, 1400, 4, (7, 8, 3), 512)
    found = simulate(Workload([first, second]), pool(), each(0.01))
    assert found.book.column("cached").tolist() == [0, 1024]
    assert found.report.hit_rate == 1024 / 2900
    same = simulate(Workload([first, first._replace(arrival_ns=SECOND)]), pool(), each(0.01))
    assert same.book.column("cached").tolist() == [0, 1488]  # only the page with the last token is computed
    apart = [counted_sequence(n, Request(0, 100, 4)).prefix_hash(64, 16) for n in (1, 2)]
    assert apart[0] != apart[1]


def test_keys_of_pages_are_those_of_their_ends() -> None:
    for request in (Request(0, 700, 4, (5, 6), 512), Request(0, 700, 4)):
        sequence = counted_sequence(3, request)
        wanted = [sequence.prefix_hash((i + 1) * 16, 16) for i in range(60)]
        assert list(sequence.page_keys(0, 60, 16, 16)) == wanted
        assert list(sequence.page_keys(50, 60, 16, 16)) == wanted[50:]
        assert len(set(wanted)) == 60


# ---- routing -----------------------------------------------------------------------------------------------


class Fixed:
    def __init__(self, live: int, pending: int, cached: int = 0) -> None:
        self.live, self.pending_tokens, self._cached = live, pending, cached

    def cached_tokens(self, request: Request) -> int:
        return self._cached


def test_routes() -> None:
    request, chance = Request(0, 1000, 1), Random(0)
    fleet: Sequence[Fixed] = [Fixed(3, 0), Fixed(1, 500, cached=400), Fixed(1, 100), Fixed(9, 0, cached=992)]
    assert [ROUTES["round-robin"](request, fleet, n, chance) for n in range(5)] == [0, 1, 2, 3, 0]
    assert ROUTES["least-loaded"](request, fleet, 0, chance) == 2
    assert ROUTES["prefix"](request, fleet, 0, chance) == 3
    picks = [ROUTES["power-of-two"](request, fleet, 0, chance) for _ in range(400)]
    assert 3 not in picks  # the worst replica loses every comparison
    assert picks.count(2) > picks.count(1) > picks.count(0) > 0


def test_better_routing_waits_less_and_hits_more() -> None:
    """Nine of ten answers are short and the fleet is nearly full: round-robin and random routing choose replicas on
    which requests wait.
    """
    rng = Random(1)
    families = [tuple(range(f * 100, f * 100 + 8)) for f in range(40)]
    drawn = [Request(0, 600, 20 if rng.random() < 0.9 else 400, rng.choice(families), 64) for _ in range(700)]
    workload, cost = Workload(arrive(drawn, poisson(90, 5))), LinearCost((1, 600), (0.005, 0.06))
    found = {n: simulate(workload, pool(900, seqs=8), cost, replicas=8, route=r).report for n, r in ROUTES.items()}
    mean = {name: r.ttft_s.mean for name, r in found.items() if r.ttft_s}
    assert mean["prefix"] < mean["least-loaded"] < mean["power-of-two"] < mean["round-robin"]
    assert found["prefix"].hit_rate > 1.5 * found["round-robin"].hit_rate
    assert all(r.requests == 700 and r.replicas == 8 for r in found.values())


# ---- metrics -----------------------------------------------------------------------------------------------


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.integers(0, 10**9, 57), rng.integers(0, 5, 57)
    found = Percentiles.of(values, weights)
    whole = np.repeat(values, weights) / SECOND
    assert found is not None
    wanted = [whole.mean(), *np.percentile(whole, [50, 90, 95, 99]), whole.max()]
    assert [found.mean, found.p50, found.p90, found.p95, found.p99, found.max] == pytest.approx(wanted)
    assert Percentiles.of(values[:0]) is None


def test_gaps_between_tokens_are_those_of_the_tokens() -> None:
    """Compare the intervals that the report counts by steps with all token times one by one, including preempted
    sequences.
    """
    requests = arrive(islice(lengths(200, 60, 1.0, 4), 100), poisson(40, 4))
    found = simulate(Workload(requests), pool(90), LinearCost((1, 500), (0.01, 0.05)))
    gaps = [b - a for t in found.book.token_times() for a, b in pairwise(t)]
    answered = found.book.answered()
    assert sorted(np.repeat(answered.gaps, answered.gap_counts).tolist()) == sorted(gaps)
    assert found.report.preemptions > 0 and max(gaps) > 2 * min(gaps)


def test_goodput() -> None:
    one = np.ones(4, np.int64)
    answered = Answered(
        0 * one, np.array([1, 2, 3, 4]) * SECOND, np.array([5, 5, 5, 4]) * SECOND, one, np.array([5, 4, 3, 1]), one[:0],
        one[:0],
    )  # fmt: skip
    assert answered.tpot[:3].tolist() == [1.0, 1.0, 1.0] and np.isnan(answered.tpot[3])
    r = report(answered, Usage(), Slo.parse("ttft=3s,tpot=1000ms"))
    assert (r.goodput, r.attainment) == (3 / 5, 3 / 4)
    assert report(answered, Usage(), Slo(ttft_s=3.5, tpot_s=0.9)).attainment == 0.0
    for bad in ("ttft", "ttft=x", "speed=3s", "ttft=-1s", "ttft=200ms;tpot=3"):
        with pytest.raises(RequestError, match="--slo"):
            Slo.parse(bad)


def test_no_other_request_gets_the_first_requests_pages() -> None:
    """A request without blocks has no prefix hit, even if the pages of an earlier request with the number 0 still
    exist.
    """
    replica = SteppingReplica(0, make_scheduler(Scheduler, pool()), CostTable(each(1.0)), Book(1))
    replica.add(0, Request(0, 64, 1), 0)
    replica.begin(0)
    assert replica.complete() and not replica.cached_tokens(Request(0, 64, 1))


# ---- workloads ---------------------------------------------------------------------------------------------


def test_arrivals_have_their_rate_and_their_bursts() -> None:
    for times, cv in ((poisson(50, 0), 1.0), (gamma(50, 3.0, 0), 3.0), (gamma(50, 0.5, 0), 0.5)):
        gaps = np.diff([0, *islice(times, 40_000)])
        assert gaps.mean() / SECOND == pytest.approx(1 / 50, rel=0.06)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.06)
    found = np.array([*islice(on_off(50, 2.0, 6.0, 0), 40_000)])
    assert found[-1] / SECOND == pytest.approx(800, rel=0.05)
    assert (found % (8 * SECOND) < 2 * SECOND).all()


def test_lengths() -> None:
    drawn = [*islice(lengths(1000, 100, 0.7, 0), 20_000)]
    for column, mean in ((1, 1000), (2, 100)):
        values = np.array([r[column] for r in drawn])
        assert values.mean() == pytest.approx(mean, rel=0.03)
        assert values.std() / values.mean() == pytest.approx(0.7, rel=0.05)
    assert all(r.prompt_tokens + r.output_tokens <= 900 for r in islice(lengths(1000, 100, 0.7, 0, 900), 999))
    assert cut(Workload([Request(0, 500, 90)]), 300).requests == [Request(0, 299, 1)]


def test_scaled_and_repeated() -> None:
    trace = [Request(0, 5, 5, (1, 2), 4), Request(1000, 5, 5, (1, 3), 4)]
    assert [r.arrival_ns for r in scale_rate(trace, 4)] == [0, 250]
    three = repeated(trace, 3)
    assert three[2].arrival_ns > 1000
    assert three[2].blocks == (5, 6)  # different rounds share no blocks


def test_closed_loop() -> None:
    """Two clients that pause for a second each send one request in every 1.5 s."""
    workload = parse_arrivals("closed:2,think=1")([Request(0, 10, 5)] * 6, 0)
    found = simulate(workload, pool(), each(0.1))
    assert found.book.column("arrival").tolist() == [0, 0, 1.5 * SECOND, 1.5 * SECOND, 3 * SECOND, 3 * SECOND]


@pytest.mark.parametrize(
    "text",
    ["", "poisson", "poisson:0", "poisson:-1", "poisson:8,cv=2", "gamma:8", "closed:1.5", "uniform:8", "gamma:8,cv="],
)
def test_arrivals_that_are_none(text: str) -> None:
    with pytest.raises(RequestError, match="--arrivals"):
        parse_arrivals(text)([Request(0, 1, 1)], 0)


# ---- traces ------------------------------------------------------------------------------------------------

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_reads_both_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text(AZURE + "2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799601,4808,10\n")
    assert read_trace(path) == [Request(0, 4808, 10), Request(51999900, 3180, 8)]
    path.write_text('{"timestamp": 27, "input_length": 700, "output_length": 5, "hash_ids": [46, 47]}\n')
    assert read_trace(path) == [Request(0, 700, 5, (46, 47), 512)]


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("", "", "is empty"),
        ("a,b\n", ":1:1:", "neither"),
        (AZURE, "", "has no request"),
        (AZURE + "2023-11-16 18:17:04,1,1\n2023-11-16 18:17:04,12,x\n", ":3:24:", "GeneratedTokens is 'x'"),
        (AZURE + "2023-11-16 18:17:04,-4,1\n", ":2:21:", "ContextTokens is '-4'"),
        (AZURE + "yesterday,1,1\n", ":2:1:", "no time"),
        (AZURE + "2023-11-16 18:17:04,1\n", ":2:22:", "2 fields"),
        ('{"timestamp": 1, \n', ":1:18:", "no JSON"),
        pytest.param('{"timestamp": 1, "input_length": ' + "9" * 5000 + "}", ":1:34:", "too many digits", id="digits"),
        ('{"timestamp": ' + "9" * 99 + ', "input_length": 1, "output_length": 1}\n', ":1:2:", "timestamp is 999"),
        pytest.param('{"timestamp": ' + "[" * 100_000, ":1:1:", "nested", id="deep"),
        pytest.param(AZURE + "2023-11-16 18:17:03," + "9" * 5000 + ",1", ":2:21:", "ContextTokens", id="count"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 2, "hash_ids": []}', ":1:18:", "input_length is 0"),
        ('{"timestamp": 1, "input_length": 4, "output_length": 2, "hash_ids": [1, 2]}', ":1:57:", "2 hash_ids for 4"),
        ('{"timestamp": 1, "input_length": 4, "output_length": 2, "hash_ids": [-1]}', ":1:57:", "from 0"),
    ],
)
def test_a_malformed_trace_names_line_and_column(tmp_path: Path, text: str, where: str, what: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(RequestError) as e:
        read_trace(path)
    assert f"{path}{where}" in str(e.value) and what in str(e.value)


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs ../shared/data/traces")
def test_published_traces() -> None:
    """Compare rows and means with shared/data; 36.6 % of the blocks of Mooncake's conversations occurred before."""
    conversations = read_trace(TRACES / "AzureLLMInferenceTrace_conv.csv")
    means = np.array([(r.prompt_tokens, r.output_tokens) for r in conversations]).mean(0).round().astype(int).tolist()
    assert (len(conversations), means) == (19_366, [1155, 211])
    mooncake = read_trace(TRACES / "mooncake_conversation_trace.jsonl")
    blocks = [b for r in mooncake for b in r.blocks]
    assert len(mooncake) == 12_031
    assert 1 - len(set(blocks)) / len(blocks) == pytest.approx(0.366, abs=0.001)


@pytest.mark.skipif(not TRACES.is_dir(), reason="needs ../shared/data/traces")
def test_prefix_hits_are_those_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all pages, and a pool that keeps all of them, the hits of the index equal those computed from the
    numbers of the blocks alone.
    """
    monkeypatch.setattr("ridgeline.spec.groups.KEPT_TOKENS", 2_000_000 * 16)
    trace = [
        r._replace(arrival_ns=i * 100 * SECOND)
        for i, r in enumerate(read_trace(TRACES / "mooncake_conversation_trace.jsonl", 300))
    ]
    found = simulate(Workload(trace), pool(2_000_000), each(0.001))
    seen: set[tuple[int, int]] = set()
    wanted = []
    for r in trace:
        ends = [((i + 1) * 16, r.blocks[i * 16 // 512]) for i in range((r.prompt_tokens - 1) // 16)]
        hit = next((i for i, (end, block) in enumerate(ends) if (block, end % 512) not in seen), len(ends))
        wanted.append(hit * 16)
        seen |= {(r.blocks[i * 16 // 512], (i + 1) * 16 % 512) for i in range(r.prompt_tokens // 16)}
    assert found.book.column("cached").tolist() == wanted
    assert found.report.hit_rate > 0.05


# ---- deliberate bugs ---------------------------------------------------------------------------------------


def test_a_lost_request_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Scheduler._accept

    def accept(scheduler: Scheduler, *args: object) -> object:
        update = real(scheduler, *args)  # type: ignore[arg-type]
        return update._replace(finished=False)

    monkeypatch.setattr(Scheduler, "_accept", accept)
    with pytest.raises(AssertionError):
        simulate(Workload([Request(0, 5, 1)]), pool(), each(0.01), every_step=True)


def test_a_lost_page_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.sim.runs.RunCache.release", lambda cache, seq: None)
    with pytest.raises(AssertionError):
        simulate(Workload([Request(0, 5, 1)]), pool(), each(0.01))
