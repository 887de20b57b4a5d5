"""The engine on a device that records: recorded steps give the tokens and the bits of unrecorded ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from interpreted import engines
from interpreted.engines import Answers, on_host, on_tape, request, serve
from interpreted.guarded import nightly
from interpreted.steps import llama
from interpreted.tape import Memory, Tape, taped
from ridgeline.engine import Engine
from ridgeline.ops.driver import GPU_SIZES
from ridgeline.ops.triton.record import GpuDriver
from ridgeline.propose import Drafts
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.graphs import DecodeGraphs
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.padding import Tokens
from ridgeline.runtime.sampling import Sampling
from ridgeline.sample.rejection import Distribution
from ridgeline.sched.work import LAST, StepPlan
from ridgeline.spec import Attention, GatedMLP, Layer, Mamba2, ModelSpec, RMSNorm, Rope
from ridgeline.spec.request import BeamSearchParams, Params, SamplingParams

VOCABULARY = 200
LAYER = llama(width=32, layers=1, heads=2, kv_heads=1, head_dim=16, inner=48, vocabulary=VOCABULARY)


def windowed() -> ModelSpec:
    """Return a model with two groups of layers: one of them keeps the last 24 tokens."""
    attention = Attention(2, 1, 16, 0.25, rope=Rope(16))
    layers = [Layer(a, GatedMLP(48), RMSNorm()) for a in (attention, replace(attention, window=24))]
    return replace(LAYER, layers=tuple(layers))


def recurrent() -> ModelSpec:
    """Return a model with a recurrent layer before its attention."""
    return replace(LAYER, layers=(Layer(Mamba2(2, 16, 8, 1, 3, RMSNorm()), GatedMLP(48), RMSNorm()), *LAYER.layers))


SPECS = {"full": LAYER, "windowed": windowed(), "recurrent": recurrent()}


@cache
def loaded(name: str) -> tuple[LoadedModel, Tape]:
    return on_tape(SPECS[name], 96)


def engine(name: str, **options: Any) -> Engine:
    return engines.engine(loaded(name)[0], **options)


@cache
def unrecorded(name: str) -> dict[tuple[int, int], list[int]]:
    """Return the tokens of `several()`, in steps that are not recorded."""
    return serve(engine(name, recorded=False), several())


def shortened(said: dict[tuple[int, int], list[int]], most: int) -> dict[tuple[int, int], list[int]]:
    """Return the first tokens of each answer: those of `several(most)`."""
    return {answer: tokens[:most] for answer, tokens in said.items()}


def several(most: int = 6) -> list[GenerationRequest]:
    greedy = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
    drawn = replace(greedy, temperature=1.0, seed=3)
    return [request(5, greedy), request(13, replace(drawn, n=2)), request(9, greedy), request(3, drawn)]


def ways_to_draw(most: int) -> list[GenerationRequest]:
    """Return a greedy request, a drawn one, and one with all filters that a device has."""
    greedy = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
    drawn = replace(greedy, temperature=0.9, seed=5)
    filtered = replace(drawn, temperature=1.5, top_k=50, top_p=0.9, min_p=0.01)
    return [request(5, greedy), request(18, drawn), request(7, filtered)]


@cache
def drawn_on_host() -> Answers:
    """Return the tokens of `ways_to_draw(6)` that the host samples, in steps that are not recorded."""
    return serve(on_host(engine("full", recorded=False, steps_in_flight=1)), ways_to_draw(6), every=1)


@pytest.mark.parametrize("name", ["recurrent", *nightly(("windowed",))])
def test_recorded_steps_give_the_tokens_of_unrecorded_ones(name: str) -> None:
    """Sequences are forked and preempted, and the tokens of a step in flight come late or are lost."""
    running = engine(name, max_num_seqs=6, steps_in_flight=2, tight=True)
    assert serve(running, several()) == unrecorded(name)
    assert running.stats().unrecorded is None
    assert running.stats().preempted_recompute
    sizes = {n for n, _, _ in running._runner.graphs._graphs}
    assert sizes and sizes <= {1, 2, 4, 7}, "six sequences and a spare one are the largest recorded step"


def test_steps_read_no_logits_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and decode steps are sampled on the device: with two steps in flight the host gets tokens a step late.

    The tokens are those that the host samples in unrecorded steps.
    """
    requests, wanted = ways_to_draw(6), drawn_on_host()
    running = engine("full", steps_in_flight=2)
    late, submit = [], running._runner.submit
    monkeypatch.setattr(Memory, "get", lambda self, array: pytest.fail("the host waits for logits"))

    def watched(plan: StepPlan, sampling: Sampling) -> Any:
        late.append([t for work in plan.works for t in work.tokens].count(LAST))
        return submit(plan, sampling)

    monkeypatch.setattr(running._runner, "submit", watched)
    assert serve(running, requests, every=1) == wanted
    assert max(late) == 3


@pytest.mark.parametrize("tight", [True, *nightly((False,))])
def test_rows_that_the_device_samples_do_not_wait_for_those_of_the_host(
    tight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with log probabilities, edits, another filter or beams have their tokens, and the rows beside them theirs.

    The step after one with such rows is submitted before the host waits for their logits, and they are not in it.
    """
    drawn = SamplingParams(max_tokens=4, temperature=1.2, seed=3, ignore_eos=True)
    ways: list[Params] = [
        replace(drawn, max_tokens=10), replace(drawn, logprobs=2), replace(drawn, typical_p=0.9),
        replace(drawn, n=2, presence_penalty=1.0), BeamSearchParams(beam_width=2, max_tokens=3),
    ]  # fmt: skip
    requests = [request(4 + i, params) for i, params in enumerate(ways)]
    wanted = serve(on_host(engine("full", recorded=False, steps_in_flight=1)), requests, every=1)
    running = engine("full", steps_in_flight=2, max_num_seqs=8, tight=tight)
    watched = Watched(running, monkeypatch)
    monkeypatch.setattr(Memory, "get", lambda self, array: pytest.fail("the host waits for logits in a step"))
    assert serve(running, requests, every=1) == wanted
    assert bool(running.stats().preempted_recompute) == tight
    assert watched.late >= 3 and watched.is_apart


TREE = -1, -1, 1, 1
FLAT = Distribution(np.arange(VOCABULARY), np.full(VOCABULARY, 1 / VOCABULARY))


@pytest.mark.parametrize(
    ("acceptance", "parents", "has_q"),
    [
        ("same", (), False), ("rejection", TREE, False), ("typical", (), False),
        *nightly(("same", TREE, False), ("rejection", (), False), ("typical", TREE, True), ("rejection", (), True)),
    ],
)  # fmt: skip
def test_drafts_are_verified_on_the_device(
    acceptance: str, parents: tuple[int, ...], has_q: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded steps draw a token after each draft, chain or tree, and the host compares them with the drafts.

    The tokens are those that the host accepts. Only rejection sampling of drafts with distributions needs the logits of
    drawn rows on the host.
    """
    requests, plain = ways_to_draw(6), drawn_on_host()

    def drafts(answer: tuple[int, int], known: int) -> Drafts:
        right, other = [*plain[answer][known:], 0, 0, 0], (plain[answer][0] + known) % VOCABULARY
        chain = [right[0], right[1], other, other]
        q = [FLAT] * 4 if has_q else None
        return Drafts([other, right[0], other, right[1]] if parents else chain, q, parents)

    def run(running: Engine) -> Answers:
        return serve(running, requests, every=1, drafts=drafts)

    options: dict[str, Any] = {"num_speculative_tokens": 4, "steps_in_flight": 2, "draft_acceptance": acceptance}
    wanted = plain if acceptance == "same" else run(on_host(engine("full", recorded=False, **options)))
    running, read, fetch = engine("full", **options), list[int](), GpuDriver.fetch

    def watched(driver: GpuDriver, arrays: Sequence[Any]) -> Any:
        read.extend(array.shape[-1] for array in arrays)
        return fetch(driver, arrays)

    monkeypatch.setattr(GpuDriver, "fetch", watched)
    monkeypatch.setattr(Memory, "get", lambda self, array: pytest.fail("the host waits for logits in a step"))
    assert run(running) == wanted
    assert (VOCABULARY in read) == (has_q and acceptance == "rejection")
    assert running.stats().accepted_tokens > (5 if acceptance == "same" else 1)
    assert running.stats().unrecorded is None
    assert any(tokens > n for n, tokens, _ in running._runner.graphs._graphs)


def test_drafts_of_recurrent_layers_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with drafts, and those that run accepted drafts again, give the tokens of steps without drafts.

    The first step with drafts runs unrecorded: it allocates the arrays that keep their inputs.
    """
    requests = [ways_to_draw(9)[i] for i in (0, 2)]
    plain = serve(engine("recurrent", recorded=False), requests, every=1)

    def drafts(answer: tuple[int, int], known: int) -> Drafts:
        rounds.extend([known] * (answer == (0, 0)))  # the first answer is asked in every step
        right = plain[answer][known : known + (known + answer[0]) % 3]
        wrong = (plain[answer][0] + known) % VOCABULARY
        return Drafts([*right, wrong][: (known * 2 + answer[0]) % 3] if len(rounds) % 3 else [])

    rounds, kinds, run = list[int](), list[str](), DecodeGraphs.run
    running = engine("recurrent", max_num_seqs=2, num_speculative_tokens=2)

    def watched(graphs: DecodeGraphs, given: Tokens, *args: Any) -> Any:
        found, replays = run(graphs, given, *args), args[3]
        ways = "drafts" if len(given.tokens) > len(given.rows) else "", "again" if any(replays) else ""
        kinds.append(" ".join((*ways, "unrecorded" if found is None else "")).strip())
        return found

    monkeypatch.setattr(DecodeGraphs, "run", watched)
    assert serve(running, requests, every=1, drafts=drafts) == plain
    assert running.stats().accepted_tokens > 3 and running.stats().unrecorded is None
    assert sum("unrecorded" in kind for kind in kinds) <= 1
    assert {"drafts", "drafts again", "again"} <= set(kinds)


class Watched:
    """Watches the steps of an engine.

    late: how many steps began with a token that only the device knew, while a step with rows of the host was in
    flight. is_apart: whether no step had a sequence of which the host had yet to sample a token.
    """

    def __init__(self, running: Engine, patch: pytest.MonkeyPatch) -> None:
        self.late, self.is_apart = 0, True
        self._in_flight: list[set[int]] = []  # for each step, its works that wait for the host, by sequence
        self._submit, self._collect = running._runner.submit, running._runner.collect
        self._answers = running._answers
        patch.setattr(running._runner, "submit", self.submit)
        patch.setattr(running._runner, "collect", self.collect)

    def submit(self, plan: StepPlan, sampling: Sampling) -> Any:
        for_host = set().union(*self._in_flight)
        self.is_apart &= for_host.isdisjoint(work.sequence for work in plan.works)
        self.late += bool(for_host) and any(LAST in work.tokens for work in plan.works)
        sampled = [work.sequence for work in plan.works if work.sample]
        self._in_flight.append({s for s in sampled if s not in self._answers or self._answers[s].sequence.waits})
        return self._submit(plan, sampling)

    def collect(self, handle: Any) -> Any:
        del self._in_flight[0]
        return self._collect(handle)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns
def test_a_row_with_broken_logits_ends_with_an_error() -> None:
    running = engine("full", steps_in_flight=2)
    running.add(0, several()[0])
    running.step(), running.step()
    events = []
    keys: Any = running._runner.arena.layer(0)[1][0]
    keys.fill_(float("nan"))
    while len(running):
        events += running.step()
    assert events[-1].error is not None and "NaN" in str(events[-1].error)


def test_beams_fork_recorded_sequences() -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=4)
    found = [serve(engine("full", recorded=recorded), [request(7, params)]) for recorded in (True, False)]
    assert found[0] == found[1]


def test_few_recordings_are_kept_and_larger_steps_run_unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuDriver, "sizes", GPU_SIZES._replace(sequences=(1, 2, 3), rows=4))
    running = engine("full")
    assert serve(running, several(3)) == shortened(unrecorded("full"), 3)
    assert sum(tokens for _, tokens, _ in running._runner.graphs._graphs) <= 4


def test_what_cannot_be_recorded_runs_unrecorded_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = shortened(unrecorded("full"), 2)
    monkeypatch.setattr(loaded("full")[1], "refusal", "the GPU has too little memory")
    running = engine("full")
    assert serve(running, several(2)) == wanted
    assert str(running.stats().unrecorded).startswith("the GPU has too little memory; served beside")


def test_work_that_reads_on_the_host_is_not_recorded() -> None:
    table, _ = taped()
    assert table.driver is not None
    recorder = table.driver.recorder()
    numbers = recorder.input(5)
    found = recorder.record(lambda: [torch.as_tensor(numbers).nonzero()], [])
    assert found == "a step reads a value on the host (nonzero)"
    found = recorder.record(lambda: [table.memory.integers(np.arange(3))], [])
    assert found == "a step copies numbers from the host"


def test_recorded_work_reads_its_inputs_again() -> None:
    """Inputs of both widths, and views of them, lie at addresses that are multiples of 16."""
    table, _ = taped()
    assert table.driver is not None
    recorder = table.driver.recorder()
    short, wide = recorder.input(3), recorder.words(5)
    few: Any = recorder.first(wide, 2)
    assert all(torch.as_tensor(x).data_ptr() % 16 == 0 for x in (short, wide))
    found = recorder.record(lambda: [torch.as_tensor(short) * 2, few + 1], [])
    assert not isinstance(found, str)
    for begin in range(9):  # more often than there are blocks for copies
        recorder.assign(short, [begin, -1, 7])
        recorder.assign(few, [2**40 + begin, -(2**40)])
        found.run()
        fetched = table.driver.fetch(found.results)
        recorder.assign(short, [0, 0, 0])
        found.run()
        assert [x.tolist() for x in fetched()] == [[2 * begin, -2, 14], [2**40 + begin + 1, 1 - 2**40]]
