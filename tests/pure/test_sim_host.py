"""The host's work in a simulation: the queue of the server's process by a closed form, times of steps and tokens."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.errors import RequestError
from ridgeline.plan.planner import Deployment
from ridgeline.sim import LinearCost, Request, Workload, settings, simulate
from ridgeline.sim.host import HostTimes
from ridgeline.sim.metrics import SECOND
from ridgeline.sim.workload import arrive, poisson

POCKET = settings(Deployment(find_model("pocket").spec, hardware("h100")), max_num_seqs=64)
STEP = LinearCost((1,), (0.01,))


def requests(count: int, rate: float, output: int = 10) -> Workload:
    return Workload(arrive([Request(0, 20, output)] * count, poisson(rate, 0)))


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_the_servers_queue_is_that_of_one_process_with_equal_jobs(load: float) -> None:
    """Pollaczek and Khinchine: in M/D/1 a job waits load / (2 (1 - load)) jobs on average."""
    host = HostTimes(request=0.008, prompt_token=0.0001)  # 10 ms for a prompt of 20 tokens
    waits = host.waits_ns(requests(200_000, load / 0.01))
    assert sum(waits) / len(waits) / SECOND == pytest.approx(0.01 * (1 + load / (2 * (1 - load))), rel=0.06)


def test_sending_takes_its_share_of_the_process() -> None:
    """At 10 requests a second with 10 tokens, 5 ms a token is half of the process, and reading takes twice as long."""
    work = Workload([Request(i * SECOND // 10, 20, 10) for i in range(1001)])
    waits = HostTimes(request=0.01, sent_token=0.005).waits_ns(work)
    assert waits[500] == pytest.approx(0.02 * SECOND, rel=0.01)
    with pytest.raises(RequestError, match=r"sending takes 1\.\d\d s of each second"):
        HostTimes(sent_token=0.01).waits_ns(work)
    with pytest.raises(RequestError, match="needs times of arrival"):
        HostTimes(request=0.01).waits_ns(replace(work, clients=3))


def test_times_of_steps_tokens_and_requests_add_up() -> None:
    """One request alone: TTFT has the request and one step; each further token has a step with its host part."""
    work = Workload([Request(5 * SECOND, 20, 11)])
    host = HostTimes(request=0.003, prompt_token=0.0001, step=0.002, token=0.0005)
    found = simulate(work, POCKET, STEP, host=host).report
    assert found.ttft_s is not None and found.tpot_s is not None
    assert found.ttft_s.mean == pytest.approx(0.003 + 20 * 0.0001 + 0.01 + 0.002 + 0.0005)
    assert found.tpot_s.mean == pytest.approx(0.01 + 0.002 + 0.0005)
    assert found.duration_s == pytest.approx(found.ttft_s.mean + 10 * found.tpot_s.mean)


def test_fast_forward_gives_the_same_and_no_times_change_nothing() -> None:
    work, host = requests(300, 30.0), HostTimes(0.002, 0.00002, 0.0001, 0.001, 0.0002)
    fast, full = (simulate(work, POCKET, STEP, host=host, every_step=every) for every in (False, True))
    assert fast.report == full.report and fast.book.token_times() == full.book.token_times()
    plain = simulate(work, POCKET, STEP)
    assert simulate(work, POCKET, STEP, host=HostTimes()).report == plain.report
    assert fast.report.ttft_s is not None and plain.report.ttft_s is not None
    assert fast.report.ttft_s.mean > plain.report.ttft_s.mean + 0.003


def test_a_server_that_is_too_slow_saturates_before_the_engine() -> None:
    """The engine serves 600 requests a second here, and a process that takes 10 ms for each serves 100."""
    work = requests(2000, 120.0, output=1)
    found = simulate(work, POCKET, STEP, host=HostTimes(request=0.01)).report
    assert found.requests_per_s == pytest.approx(100, rel=0.02)
    alone = simulate(work, POCKET, STEP).report
    assert alone.requests_per_s > 115 and found.ttft_s and alone.ttft_s and found.ttft_s.p99 > 20 * alone.ttft_s.p99


@pytest.mark.parametrize(("text", "message"), [
    ("request=1", "write a time"), ("requests=1ms", "write NAME=TIME"), ("request=1ms,request=1ms", "each once"),
    ("", "write NAME=TIME"), ("step=-1ms", "write a time"), ("step=nans", "write a time"),
])  # fmt: skip
def test_wrong_times_give_one_line(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        HostTimes.parse(text)
    assert "\n" not in str(caught.value)


def test_times_are_parsed() -> None:
    found = HostTimes.parse("request=1ms, prompt_token=2us,sent_token=20us,step=100us,token=0s")
    wanted = HostTimes(1e-3, 2e-6, 2e-5, 1e-4, 0.0)
    assert asdict(found) == pytest.approx(asdict(wanted))
