"""Decode steps that are recorded give the same bits as steps that are not, whatever happens between them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oracle.build import build
from oracle.case import VOCAB
from oracle.families import CASES
from oracle.ours import SPECS, write
from ridgeline import LLM
from ridgeline.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.ops import api, open_table
from ridgeline.ops.driver import CPU_SIZES
from ridgeline.runtime import graphs
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.spec import RMSNorm
from ridgeline.spec.request import BeamSearchParams, Params, SamplingParams
from shares import daily

_kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")

from ridgeline.ops.cpu.state import Location, StatesAside  # noqa: E402

FREE = 1 << 30
DENSE = [
    "llama_gqa", "gemma3", "qwen2_window", "gpt2", "gpt_neox", "olmo2", "llama_biases", "cla3_mqa",
    "gemma4", "gemma4_keys",
]  # fmt: skip
RECURRENT = [
    "mamba", "falcon_mamba", "mamba2_biases", "jamba_biases", "lfm2", "qwen3_5_text", "bamba", "nemotron_h",
    "falcon_h1", "recurrent_gemma", "lightning", "based", "taylor", "s4", "s4d_alone",
]  # fmt: skip
EXPERTS = ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "qwen3_next", "gemma4_experts"]
LATENTS = ["deepseek_v2", "deepseek_v3"]
DAILY = [*DENSE, *RECURRENT, *EXPERTS, *LATENTS]


@cache
def loaded(name: str) -> LLM:
    with TemporaryDirectory() as folder:
        write(SPECS[name], folder) if name in SPECS else build(CASES[name], folder)
        return LLM(folder, max_model_len=context(name), cache="off", device="cpu")


def context(name: str) -> int:
    return SPECS[name].max_position_embeddings if name in SPECS else CASES[name].max_model_len


def config(name: str, *, tight: bool = False, **options: int) -> EngineConfig:
    spec, length = loaded(name).loaded.spec, context(name)
    chosen = resolve(spec, length, EngineOptions(**options), free_bytes=FREE, fixed_len=True)
    if tight:  # little more than the longest request needs alone, so that the others are preempted
        chosen = replace(chosen, num_pages=tuple(g.most_pages(101) + 3 for g in chosen.groups))
    return chosen


def driver() -> type:
    return type(loaded("llama_gqa").loaded.table.driver)


class Run:
    """An engine, and the logits of every step. recorded: whether its steps may be recorded. propose: returns drafts for
    an answer from the numbers of its request, its choice and its tokens.
    """

    def __init__(
        self,
        name: str,
        chosen: EngineConfig,
        *,
        recorded: bool,
        propose: Callable[[int, int, int], list[int]] | None = None,
    ) -> None:
        self.engine, self.logits, self.tokens = Engine(loaded(name).loaded, chosen), [], []
        self.said: dict[tuple[int, int], list[int]] = {}
        self.propose = propose
        self.graphs = self.engine._runner.graphs
        self.num_recorded = self.num_filled = 0
        if not recorded:
            self.graphs._passes.refusal = "not in this test"
        run = self.engine._runner.forward

        def watched(plan: Any, ahead: Any) -> Any:
            forward = run(plan, ahead)
            if forward is not None:
                self.num_recorded += forward.decoded is not None
                total = sum(len(work.tokens) for work in plan.works)  # a recorded step may have more
                self.num_filled += len(forward.logits()) > total
                self.logits.append(forward.logits()[:total].tobytes())
            return forward

        self.engine._runner.forward = watched  # type: ignore[method-assign]

    def step(self) -> None:
        for event in self.engine.step():
            self.tokens.append((event.request, event.choice, event.tokens))
            said = self.said.setdefault((event.request, event.choice), [])
            said.extend(event.tokens)
            if self.propose is not None:
                self.engine.propose(event.request, event.choice, self.propose(event.request, event.choice, len(said)))
        self.engine.check()


def request(prompt: list[int], params: Params) -> GenerationRequest:
    keys = params.n if isinstance(params, SamplingParams) else 0
    return GenerationRequest(prompt, params, tuple(NoiseKey(7, choice) for choice in range(keys)))


def drive(run: Run, actions: list[tuple[int, int, int, int]]) -> None:
    """Run actions: each adds a request of some kind or aborts one, and then makes a number of steps."""
    rng = np.random.default_rng(5)
    for i, (kind, length, new, steps) in enumerate(actions):
        if kind == 0:
            run.engine.abort(int(rng.integers(0, i + 1)))
        else:
            params: Params = SamplingParams(
                max_tokens=new, temperature=float(kind == 2), n=3 if kind == 3 else 1, ignore_eos=True
            )
            if kind == 4:
                params = BeamSearchParams(beam_width=3, max_tokens=new)
            with suppress(RequestError):  # raised for a search that can never fit
                run.engine.add(i, request(rng.integers(3, VOCAB, length).tolist(), params))
        for _ in range(steps):
            if len(run.engine):
                run.step()
    while len(run.engine):
        run.step()


ACTIONS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, 60), st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=8
)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3", "bamba"])
@settings(max_examples=15, deadline=None)
@given(actions=ACTIONS, tight=st.booleans(), depth=st.integers(1, 2))
def test_recorded_steps_are_the_unrecorded_ones(
    name: str, actions: list[tuple[int, int, int, int]], tight: bool, depth: int
) -> None:
    """Random requests are added, forked, preempted, run as beam searches and aborted."""
    chosen = config(name, tight=tight, max_num_seqs=6, max_num_batched_tokens=16, block_size=4, steps_in_flight=depth)
    runs = [Run(name, chosen, recorded=recorded) for recorded in (True, False)]
    for run in runs:
        drive(run, actions)
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].logits == runs[1].logits
    assert runs[0].graphs.refusal is None
    assert runs[1].num_recorded == 0


@pytest.mark.parametrize("name", daily([*CASES, *SPECS], DAILY, slow=False))
def test_models_are_recorded(name: str) -> None:
    chosen = config(name, max_num_seqs=4, block_size=4)
    runs = [Run(name, chosen, recorded=recorded) for recorded in (True, False)]
    for run in runs:
        drive(run, [(1, 5, 20, 3), (3, 30, 30, 5)])
    assert runs[0].logits == runs[1].logits
    assert runs[0].graphs.refusal is None
    assert runs[0].num_recorded > 30


def test_attention_that_gathers_pages_runs_unrecorded() -> None:
    """Such attention builds new buckets in each step; a recording reads only the page tables."""
    params = SamplingParams(max_tokens=12, temperature=0)
    llm = LLM("pocket", device="cpu", ops={"paged_attention": "numpy"})
    (found,), (wanted,) = (one.generate("def add(a, b):", params) for one in (llm, LLM("pocket", device="cpu")))
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    stats = llm.stats()
    assert stats is not None and "paged_attention" in (stats.unrecorded or "")


def drafting(name: str, *, tight: bool, recorded: tuple[bool, ...] = (True, False)) -> list[Run]:
    """Return runs of the same requests. Sequences have different numbers of drafts, of which some are right, beside
    beams, prompts and preemptions.
    """
    options = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "block_size": 4, "num_speculative_tokens": 8}
    chosen = config(name, tight=tight, **options)
    actions = [(1, 5, 40, 6), (3, 30, 30, 5), (1, 9, 25, 4), (4, 8, 12, 3), (0, 0, 0, 4), (2, 20, 30, 2)]
    plain = Run(name, chosen, recorded=False)
    drive(plain, actions)

    def propose(number: int, choice: int, count: int) -> list[int]:
        rng = np.random.default_rng([number, choice, count])
        drafts = plain.said[number, choice][count:][: rng.integers(0, 9)]
        return [(token + int(rng.random() < 0.2)) % VOCAB for token in drafts]

    runs = [Run(name, chosen, recorded=each, propose=propose) for each in recorded]
    for run in runs:
        drive(run, actions)
    return [plain, *runs]


WITH_DRAFTS = ["llama_gqa", "gemma3", "qwen3_moe", "deepseek_v3", "bamba", "kimi_linear", "minimax", "recurrent_gemma"]


@pytest.mark.parametrize("name", WITH_DRAFTS)
@pytest.mark.parametrize("tight", [False, True])
def test_recorded_steps_with_drafts_are_the_unrecorded_ones(name: str, tight: bool) -> None:
    _, *runs = drafting(name, tight=tight)
    stats = runs[0].engine.stats()
    assert runs[0].said == runs[1].said
    assert runs[0].logits == runs[1].logits
    assert runs[0].graphs.refusal is None
    assert stats.accepted_tokens > 20
    assert runs[0].num_recorded > 0.5 * len(runs[0].logits)
    assert {tokens > n for n, tokens, _ in runs[0].graphs._graphs} == {False, True}
    assert 0 < runs[0].num_filled < runs[0].num_recorded and not runs[1].num_filled


def nothing_runs_again(patch: pytest.MonkeyPatch) -> None:
    numbers = graphs.numbers
    patch.setattr(graphs, "numbers", lambda given, replays, most: numbers(given, [0] * len(replays), most))


def drafts_stay_in_the_state(patch: pytest.MonkeyPatch) -> None:
    def locate(aside: Any) -> Location:
        return Location(aside._pages, aside._pages, aside._read, aside._read)

    patch.setattr(StatesAside, "locate", locate)


@pytest.mark.parametrize("bug", [nothing_runs_again, drafts_stay_in_the_state])
def test_bugs_of_recorded_drafts_are_seen(bug: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    plain, run = drafting("bamba", tight=False, recorded=(True,))
    assert run.said != plain.said


def test_few_recordings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording that was dropped is made again."""
    monkeypatch.setattr(driver(), "sizes", CPU_SIZES._replace(graphs=2))
    chosen = config("llama_gqa", max_num_seqs=4, num_speculative_tokens=3)
    runs = [
        Run("llama_gqa", chosen, recorded=recorded, propose=lambda number, choice, count: [7] * (count % 4))
        for recorded in (True, False)
    ]
    for run in runs:
        drive(run, [(1, 5, 30, 2), (1, 9, 12, 2), (1, 7, 9, 0)])
    assert runs[0].logits == runs[1].logits
    assert len(runs[0].graphs._graphs) == 2


def test_the_page_table_grows_to_the_longest_context() -> None:
    name = "llama_gqa"
    length = context(name)
    chosen = config(name, max_num_seqs=2, block_size=1)
    runs = [Run(name, chosen, recorded=recorded) for recorded in (True, False)]
    for run in runs:
        drive(run, [(1, 2, length - 2, 0), (1, length // 2, 30, 0)])
    assert runs[0].logits == runs[1].logits


def test_larger_batches_run_unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver(), "sizes", CPU_SIZES._replace(sequences=(1, 2)))
    runs = [Run("llama_gqa", config("llama_gqa", max_num_seqs=4), recorded=recorded) for recorded in (True, False)]
    for run in runs:
        drive(run, [(1, 5, 30, 2), (1, 9, 12, 2), (1, 7, 9, 0)])
    assert runs[0].logits == runs[1].logits
    assert 0 < runs[0].num_recorded < len(runs[0].logits)


def test_two_engines_on_the_same_threads() -> None:
    """Two engines run one after the other, and then each in its own thread."""
    chosen, actions = config("llama_gqa", max_num_seqs=4, block_size=4), [(1, 5, 30, 2), (3, 40, 25, 4), (2, 9, 20, 0)]
    wanted = Run("llama_gqa", chosen, recorded=False)
    drive(wanted, actions)
    runs = [Run("llama_gqa", chosen, recorded=True) for _ in range(4)]
    for run in runs[:2]:
        for i in range(3):
            run.engine.add(i, request([4, 5 + i], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)))
    while len(runs[0].engine):
        for run in runs[:2]:
            run.step()
    assert runs[0].logits == runs[1].logits
    threads = [threading.Thread(target=drive, args=(run, actions)) for run in runs[2:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [run.logits for run in runs[2:]] == [wanted.logits] * 2


# ---- the recorder ----------------------------------------------------------------------------------------------------


WEIGHT = np.arange(8, dtype=np.float32)


def recorded(work: Callable[..., Any]) -> tuple[Any, Any]:
    """Return an array of ones [2, 8], and the recording of `work`, which gets the array and the kernels `add` and
    `norm`.
    """
    table = open_table("cpu")
    assert table.driver is not None
    recorder = table.driver.recorder()
    add, norm = table.primitive(api.ADD), table.primitive(api.NORM, RMSNorm(1e-5))
    x = np.ones((2, 8), np.float32)
    return x, recorder.record(lambda: [work(x, add, norm)], [x, WEIGHT])


def test_a_recording_runs_again_over_new_inputs() -> None:
    x, found = recorded(lambda x, add, norm: norm(add(x, add(x, x, 2.0), 0.5), WEIGHT, None))
    assert np.allclose(found.results[0], np.arange(8), rtol=1e-5)
    x[:] = np.arange(16).reshape(2, 8) - 3
    found.run()
    assert np.allclose(found.results[0], x / np.sqrt((x**2).mean(1, keepdims=True)) * np.arange(8), rtol=1e-5)


def test_later_arrays_reuse_the_memory_of_freed_ones() -> None:
    seen = []

    def work(x: Any, add: Any, norm: Any) -> Any:
        for _ in range(10):
            x = add(x, x, 1.0)
            seen.append(x.ctypes.data)
        return x

    _, found = recorded(work)
    assert len(set(seen)) == 2
    found.run()
    assert (found.results[0] == 1024).all()


def _in_place(x: np.ndarray) -> np.ndarray:
    x += 1
    return x


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda x, add, norm: add(x * 2, x, 1.0), "neither registered nor a kernel's result"),
        (lambda x, add, norm: _in_place(add(x, x, 1.0)), "something besides calling kernels"),
    ],
)
def test_work_besides_the_kernels_is_measured(work: Callable[..., Any], reason: str) -> None:
    _, found = recorded(work)
    assert isinstance(found, str)
    assert reason in found


def test_a_refused_program_does_not_run() -> None:
    pool = _kernels.Pool(1)
    program = _kernels.Program(pool, _kernels.Rooms())
    x = np.ones((1, 4), np.float32)
    program.record(lambda: _kernels.scale(pool, x, 2.0, x.copy()))
    with pytest.raises(ValueError, match="must not run"):
        program()
    with pytest.raises(ValueError, match="only while calls are recorded"):
        pool.room((1,))
