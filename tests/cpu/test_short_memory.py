"""A device with too little memory: the plan or its steps become smaller, and a line says so."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle.ours import SPECS, write
from ridgeline import LLM, SamplingParams
from ridgeline.errors import DeviceError, DeviceMemoryError
from ridgeline.ops.reference.backend import TorchMemory
from ridgeline.ops.reference.failures import said_in_one_line
from ridgeline.runtime.runner import DeviceRunner
from ridgeline.sched.work import StepPlan
from ridgeline.settings import EngineOptions

NAME = "s4"  # recurrent layers beside attention: states in pages, too
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (5, 23, 1, 14)]
DRAWN = SamplingParams(max_tokens=7, temperature=0.8, seed=3, n=2, ignore_eos=True, logprobs=1)
TORCHS_LINE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.20 GiB is free."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    write(SPECS[NAME], str(found))
    return found


def opened(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="reference", skip_tokenizer_init=True, max_model_len=64, **options)


def tokens(llm: LLM, params: SamplingParams = DRAWN) -> list[list[int]]:
    return [list(o.token_ids) for answer in llm.generate(PROMPTS, params) for o in answer.outputs]


class Short:
    """Fails in steps of more tokens than there is memory for. after: so many steps have run before, of any size."""

    def __init__(self, patch: pytest.MonkeyPatch, most: int, after: int = 0) -> None:
        self.sizes, self._most, self._after = list[int](), most, after
        run = DeviceRunner._run

        def short(runner: DeviceRunner, plan: StepPlan, sampling: Any) -> Any:
            size = sum(len(work.tokens) for work in plan.works)
            self.sizes.append(size)
            found = run(runner, plan, sampling)  # it has written into pages, and fails at its end
            if size > self._most and len(self.sizes) > self._after:
                raise torch.OutOfMemoryError(TORCHS_LINE)
            return found

        patch.setattr(DeviceRunner, "_run", short)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guard the memory of the CPU as that of a GPU, where `submit` begins all steps in the caller's thread."""
    monkeypatch.setattr(TorchMemory, "guard", lambda self: said_in_one_line())
    monkeypatch.setattr(DeviceRunner, "thread_works", 99)


@pytest.mark.parametrize(("most", "after", "flight"), [(9, 0, 1), (3, 4, 2)])
@pytest.mark.usefixtures("guarded")
def test_steps_become_smaller_and_no_token_changes(
    folder: Path, most: int, after: int, flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts fail at first, or decode steps while another one is in flight; what they wrote is computed again."""
    options = EngineOptions(steps_in_flight=flight, max_num_batched_tokens=40, max_num_seqs=8)
    wanted = tokens(opened(folder, engine=options))
    llm, short = opened(folder, engine=options), Short(monkeypatch, most, after)
    assert tokens(llm) == wanted
    stats = llm.stats()
    assert stats is not None and stats.shrunk.startswith("the GPU has too little memory (CUDA out of memory; Tried to")
    assert f"steps have at most {max(short.sizes[-9:])} since then" in stats.shrunk or max(short.sizes[-9:]) <= most
    count = len(short.sizes)
    assert tokens(llm) == wanted and max(short.sizes[count:]) <= most, "later requests begin with small steps"
    llm.session.check()


@pytest.mark.usefixtures("guarded")
def test_a_step_that_cannot_be_smaller_ends_requests_with_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = opened(folder)
    with monkeypatch.context() as patch:
        Short(patch, 0)
        with pytest.raises(DeviceMemoryError, match=r"^the GPU has too little memory \(CUDA out of memory; Tried"):
            tokens(llm)
    greedy = dataclasses.replace(DRAWN, temperature=0, n=1)
    assert tokens(llm, greedy) == tokens(opened(folder), greedy), "the engine serves on"


@pytest.mark.usefixtures("guarded")
def test_other_failures_end_requests_with_a_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA.")

    llm = opened(folder)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceRunner, "_run", broken)
        with pytest.raises(DeviceError, match=r"^the GPU failed: CUDA error: an illegal .* encountered; start"):
            tokens(llm)


@pytest.mark.usefixtures("guarded")
def test_a_plan_that_does_not_fit_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the planned pages fit."""
    monkeypatch.setattr(TorchMemory, "free_bytes", lambda self: 2**28)
    first, room = opened(folder), TorchMemory.pages
    assert first.config is not None
    wanted, plan = tokens(first), zip(first.config.num_pages, first.config.groups, strict=True)
    sizes = [n * group.page_bytes for n, group in plan]
    most = [max(sizes) // 2]

    def pages(memory: TorchMemory, num_pages: int, num_bytes: int) -> torch.Tensor:
        if num_pages * num_bytes > most[0]:
            raise torch.OutOfMemoryError(TORCHS_LINE)
        return room(memory, num_pages, num_bytes)

    monkeypatch.setattr(TorchMemory, "pages", pages)
    llm = opened(folder)
    (note,) = (note for note in llm.loaded.notes if "first plan" in note)
    assert note.startswith("the GPU has too little memory (CUDA") and "% of the memory that is free" in note
    assert llm.config is not None and sum(llm.config.num_pages) < sum(first.config.num_pages)
    assert tokens(llm) == wanted
    most[0] = 0
    for engine, remedy in ((None, "--max-model-len"), (EngineOptions(kv_cache_memory_bytes=2**22), "--kv-cache-mem")):
        with pytest.raises(DeviceMemoryError, match=rf"too little memory .* take a smaller {remedy}"):
            opened(folder, engine=engine)
