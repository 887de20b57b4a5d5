"""`ridgeline verify` on block diffusion models: its axes apply, each takes effect, and wrong engines are found."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from oracle.case import VOCAB
from oracle.ours import FULL, LENGTH, MLP, NORM, WIDTH, write
from ridgeline import LLM
from ridgeline.cli.main import main
from ridgeline.diffusion import denoiser
from ridgeline.ops.reference import paged
from ridgeline.runtime.load import LoadedModel
from ridgeline.sched.blocks import BlockScheduler
from ridgeline.spec import Blocks, Layer, MaskedDiffusion, ModelSpec, Sight
from ridgeline.verify import Report, verify
from ridgeline.verify.baseline import Baseline
from ridgeline.verify.matrix import Scale, cases
from ridgeline.verify.requests import Prompts
from ridgeline.verify.run import run_case, scale_of

MASK = 2
SIZES = [1, 4, 7, 16, 64]


def model(sight: Sight, predicts_next: bool = False) -> ModelSpec:
    layer = Layer(replace(FULL, sight=sight), MLP, NORM)
    return ModelSpec("ours", VOCAB, WIDTH, LENGTH, (layer, layer), NORM, diffusion=MaskedDiffusion(MASK, predicts_next))


@cache
def loaded(sight: Sight, predicts_next: bool = False, device: str = "cpu") -> LoadedModel:
    with TemporaryDirectory() as folder:
        write(model(sight, predicts_next), folder)
        return LLM(folder, cache="off", device=device).loaded


@pytest.mark.parametrize("size", SIZES)
def test_the_matrix_of_blocks(size: int) -> None:
    """Chunks hold at least a block and pages whole blocks, and what a diffusion model does not have is not run."""
    found = cases(Scale(512, 16, block=size), 0)
    assert all(case.page % size == 0 and (case.chunk or size) >= size for case in found)
    assert {case.axis for case in found if case.impossible} == {"drafts", "in flight", "window"}
    assert not any(case.drafts or case.steps_in_flight > 1 for case in found)
    assert {case.preempt for case in found} == {None, "recompute", "swap"}
    assert sum(case.axis == "combined" for case in found) == 8


@pytest.mark.parametrize("predicts_next", [False, True], ids=["own", "next"])
@pytest.mark.parametrize("size", [1, 4, 7, 16])
def test_every_answer_is_equal(size: int, predicts_next: bool) -> None:
    check(verify(loaded(Blocks(size), predicts_next), quick=True))


@pytest.mark.slow
@pytest.mark.parametrize("predicts_next", [False, True], ids=["own", "next"])
def test_every_answer_is_equal_in_the_whole_matrix(predicts_next: bool) -> None:
    check(verify(loaded(Blocks(4), predicts_next)))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("predicts_next", [False, True], ids=["own", "next"])
@pytest.mark.parametrize("size", [16, 64])
def test_every_answer_of_long_blocks_is_equal(size: int, predicts_next: bool) -> None:
    check(verify(loaded(Blocks(size), predicts_next)))


def check(report: Report) -> None:
    """Fail with the list of all results that are not equal."""
    wrong = [
        f"{r.case.axis} {r.case.value}: {r.verdict} {r.error} {r.missing} {[d.describe() for d in r.differences]}"
        for r in report.results
        if r.verdict not in ("equal", "not run")
    ]
    assert not wrong, "\n".join(wrong)
    assert report.equal
    assert report.complete


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    write(model(Blocks(4)), tmp_path)
    monkeypatch.setattr("sys.argv", ["ridgeline", "verify", str(tmp_path), "--quick", "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    assert json.loads(capsys.readouterr().out)["complete"]


# ---- planted bugs ----------------------------------------------------------------------------------------------


def next_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paged attention sees blocks of twice the size, so that every second block sees the next one."""
    sees = paged.sees
    monkeypatch.setattr(paged, "sees", lambda case, *at: sees(replace(case, sight=Blocks(2 * case.sight.block)), *at))


def noisy_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    accept = BlockScheduler._accept

    def keep(self: Any, seq: Any, work: Any, result: Any) -> Any:
        update = accept(self, seq, work, result)
        if update.tokens and not update.finished:
            seq.computed = seq.planned = seq.replay_from = seq.settled
        return update

    monkeypatch.setattr(BlockScheduler, "_accept", keep)


def noise_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    take = denoiser.Denoiser.take

    def by_row(self: Any, logits: Any, work: Any) -> Any:
        self._row.noise = replace(self._row.noise, choice=work.row)
        return take(self, logits, work)

    monkeypatch.setattr(denoiser.Denoiser, "take", by_row)


@pytest.mark.parametrize("bug", [next_block, noisy_rows, noise_by_row])
def test_wrong_engines_are_found(bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is computed by the same filling of blocks, but with dense attention and without an engine."""
    model = loaded(Blocks(4), device="reference")
    scale = scale_of(model, None, quick=True, new_tokens=None)
    case = next(case for case in cases(scale, 0) if case.axis == "batch")
    prompts, baseline = Prompts(VOCAB, {MASK}, 0), Baseline(model)
    assert run_case(model, case, scale, prompts, baseline).verdict == "equal"
    bug(monkeypatch)
    assert run_case(model, case, scale, prompts, baseline).verdict == "DIFFERENT"
