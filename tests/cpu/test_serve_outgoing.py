"""Which tokens the engine process joins before it sends them, and how long they wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest

from ridgeline.serve.engine.messages import Chunks
from ridgeline.serve.engine.outgoing import HOLD_SECONDS, LATE_SECONDS, MESSAGE_CHUNKS, Outgoing
from ridgeline.spec.request import OutputChunk, TokenLogprobs


class Steps:
    """An Outgoing without its thread, and a clock that only the test moves."""

    def __init__(self) -> None:
        self.now, self.sent = 100.0, list[Chunks]()
        self.outgoing = Outgoing(self.sent.append)  # type: ignore[arg-type]
        self.made: dict[tuple[int, int], list[OutputChunk]] = {}
        self._last: dict[tuple[int, int], float] = {}

    def step(self, seconds: float, *chunks: tuple[int, OutputChunk]) -> list[Chunks]:
        """Run a step with these chunks of requests; return its messages."""
        self.outgoing.begin()
        self.now += seconds
        for request, chunk in chunks:
            key = (request, chunk.index)
            self.outgoing.add(request, chunk, self._last.get(key))
            self._last[key] = self.now
            self.made.setdefault(key, []).append(chunk)
        self.outgoing.end()
        sent, self.sent[:] = list(self.sent), []
        return sent


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    found = Steps()
    monkeypatch.setattr("ridgeline.serve.engine.outgoing.time.perf_counter", lambda: found.now)
    yield found


def token(number: int, *, index: int = 0, last: bool = False) -> OutputChunk:
    entry = TokenLogprobs(number, -0.5, ((number, -0.5),))
    return OutputChunk(index, f"t{number} ", (number,), (entry,), "length" if last else None)


def texts(messages: list[Chunks]) -> list[str]:
    return [values[1] for message in messages for _, values in message.items]


def test_tokens_of_a_fast_model_are_joined_but_not_the_first_and_the_last(steps: Steps) -> None:
    found = [texts(steps.step(0.001, (7, token(i, last=i == 9)))) for i in range(10)]
    assert found == [["t0 "], [], [], [], ["t1 t2 t3 t4 "], [], [], [], ["t5 t6 t7 t8 "], ["t9 "]]


@pytest.mark.parametrize("seconds", [HOLD_SECONDS, 0.02])
def test_every_token_of_a_slow_model_is_sent_at_once(steps: Steps, seconds: float) -> None:
    for i in range(5):
        assert texts(steps.step(seconds, (7, token(i)))) == [f"t{i} "]


def test_tokens_wait_only_for_steps_that_should_end_in_time(steps: Steps) -> None:
    """The next step is expected to take as long as the last one."""
    waited = 0
    for i in range(400):
        seconds = (i * 37 % 50) / 1e4
        steps.step(seconds, (7, token(i)))
        if steps.outgoing._held:
            waited += 1
            assert steps.now + seconds <= steps.outgoing._oldest + HOLD_SECONDS
    assert waited > 50


def test_a_token_that_comes_late_is_sent_at_once(steps: Steps) -> None:
    """A step is short, but the answer had no token in the steps before it."""
    steps.step(0.001, (7, token(0)), (8, token(0)))
    for i in range(1, 1 + int(LATE_SECONDS / 0.001)):
        steps.step(0.001, (8, token(i)))
    assert [item[0] for message in steps.step(0.001, (7, token(1)), (8, token(99))) for item in message.items] == [7]


def test_joined_chunks_have_everything_in_order(steps: Steps) -> None:
    """Two requests, one with two answers: nothing is lost, mixed or sent twice."""
    sent: list[Chunks] = []
    for i in range(50):
        ends = i == 49
        chunks = [(7, token(i, last=ends)), (7, token(100 + i, index=1, last=ends)), (8, token(200 + i, last=ends))]
        sent += steps.step(0.0004, *(chunks if i % 7 or ends else chunks[:2]))
    found: dict[tuple[int, int], list[OutputChunk]] = {}
    for message in sent:
        for request, values in message.items:
            found.setdefault((request, values[0]), []).append(OutputChunk(*values))
    assert found.keys() == steps.made.keys()
    for key, made in steps.made.items():
        for name in ("text", "token_ids", "logprobs"):
            empty: Any = "" if name == "text" else ()
            assert sum_of(found[key], name, empty) == sum_of(made, name, empty)
        assert [c.finish_reason for c in found[key]] == [None] * (len(found[key]) - 1) + ["length"]
        assert len(found[key]) < len(made) / 3


def sum_of(chunks: list[OutputChunk], name: str, empty: Any) -> Any:
    for chunk in chunks:
        empty += getattr(chunk, name)
    return empty


def test_text_that_waits_is_not_lost_with_an_error(steps: Steps) -> None:
    """A client gets only the error of a chunk that has one."""
    steps.step(0.001, (7, token(0)))
    assert steps.step(0.001, (7, token(1))) == []
    sent = steps.step(0.001, (7, OutputChunk(0, finish_reason="error", error="no token")))
    found = [(values[1], values[6]) for message in sent for _, values in message.items]
    assert found == [("t1 ", None), ("", "no token")]
    assert steps.outgoing.undelivered == 2 and steps.step(0.003) == []


def test_a_step_that_sends_says_when_it_is_over(steps: Steps) -> None:
    """Only the last message of a step asks for an answer, and a step whose tokens wait asks for none."""
    streams = range(MESSAGE_CHUNKS + 2)
    first = steps.step(0.001, *((i, token(0)) for i in streams))
    assert [(len(m.items), m.last) for m in first] == [(MESSAGE_CHUNKS, False), (2, True)]
    assert steps.outgoing.undelivered == len(streams)
    assert steps.step(0.001, *((i, token(1)) for i in streams)) == [] and steps.outgoing.undelivered == 0
    late = steps.step(0.003)  # a step without tokens sends what waits
    assert [(len(m.items), m.last) for m in late] == [(len(streams), True)]
    assert steps.step(0.003) == []


def test_a_step_that_takes_longer_than_expected_delays_no_token() -> None:
    sent, arrived = list[Chunks](), Event()

    def send(message: Any) -> None:
        sent.append(message)
        arrived.set()

    outgoing = Outgoing(send)
    outgoing.start()
    try:
        for round in range(3):  # the thread also wakes again after it has had nothing to do
            outgoing.begin()
            outgoing.add(7, token(round), time.perf_counter())
            outgoing.end()
            assert not sent
            assert arrived.wait(20)
            (message,), sent[:] = list(sent), []
            assert not message.last and [values[1] for _, values in message.items] == [f"t{round} "]
            arrived.clear()
            time.sleep(2 * HOLD_SECONDS)
    finally:
        outgoing.stop()
    assert not outgoing._thread.is_alive() and not sent
