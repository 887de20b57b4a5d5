"""Training: exact resumption, falling losses, gradients for any partition, complete checkpoints."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.errors import DataError
from ridgeline.ops import open_table
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope
from ridgeline.train.cost import cost_of
from ridgeline.train.data.batches import Batches
from ridgeline.train.data.shards import Shard
from ridgeline.train.loop import Progress, Trainer, TrainOptions
from ridgeline.train.module import LanguageModel
from ridgeline.train.optimizer import learning_rate
from ridgeline.train.ranks import Ranks
from ridgeline.train.saves import Saves

VOCAB, CONTEXT = 40, 16
NORM = RMSNorm(1e-5)
MIXER = Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, rope=Rope(8, 1e4))
SPEC = ModelSpec("tiny", VOCAB, 32, 64, (Layer(MIXER, GatedMLP(48), NORM),) * 2, NORM, tie_word_embeddings=True)
OPTIONS = TrainOptions(
    steps=24, batch_tokens=64, micro_tokens=32, context=CONTEXT, learning_rate=1e-2, warmup_steps=4, eval_every=6,
    save_every=6, dropout=0.1, optimizer="adamw",
)  # fmt: skip


def shard() -> Shard:
    """Return documents in which the difference of neighboring tokens is constant and depends on the document."""
    rng = np.random.default_rng(0)
    texts = [(rng.integers(0, 30) + step * np.arange(n)) % 38 + 1 for step, n in rng.integers(1, 60, (60, 2))]
    documents = [np.concatenate([[0], t, [0]]).astype(np.uint16) for t in texts]
    offsets = np.cumsum([0, *(len(d) for d in documents)]).astype(np.int64)
    made: Any = object.__new__(Shard)
    object.__setattr__(made, "tokens", np.concatenate(documents))
    object.__setattr__(made, "offsets", offsets)
    return made


def trainer(folder: Path, options: TrainOptions = OPTIONS, **model: Any) -> Trainer:
    batches = Batches(shard(), CONTEXT, options.batch_tokens, seed=1)
    held_out = [Batches(shard(), CONTEXT, 64, seed=2).batch(i) for i in range(2)]
    module = LanguageModel(SPEC, open_table("reference"), 64, seed=3, dropout=options.dropout, **model)
    return Trainer(module, batches, held_out, options, folder, {"spec": "tiny"}, Ranks("reference"))


def run(folder: Path, options: TrainOptions = OPTIONS, until: int | None = None, **model: Any) -> list[Progress]:
    """Train. until: the step after whose log line the run is killed."""
    seen: list[Progress] = []

    def on_step(progress: Progress) -> None:
        seen.append(progress)
        if progress.step == until:
            raise KeyboardInterrupt

    if until is None:
        trainer(folder, options, **model).run(on_step)
    else:
        with pytest.raises(KeyboardInterrupt):
            trainer(folder, options, **model).run(on_step)
    return seen


def losses(steps: list[Progress]) -> dict[int, tuple[float, float | None]]:
    return {p.step: (p.loss, p.held_out) for p in steps}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_learns_and_resumes_to_the_bit(tmp_path: Path, optimizer: str) -> None:
    options = replace(OPTIONS, optimizer=optimizer)
    whole = run(tmp_path / "whole", options)
    assert whole[0].loss == pytest.approx(np.log(VOCAB), rel=0.05)
    assert whole[-1].loss < 0.985 * whole[0].loss
    for kill in (3, 6, 13):
        folder = tmp_path / f"killed {kill}"
        before = run(folder, options, until=kill)
        after = run(folder, options)
        assert after[0].step == (kill - 1) // 6 * 6 + 1
        assert losses(before) | losses(after) == losses(whole)
        log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        assert [line["step"] for line in log] == list(range(1, 25))
    assert run(tmp_path / "whole", options) == []


def test_parts_and_recomputation_give_the_same_gradients(tmp_path: Path) -> None:
    options = replace(OPTIONS, steps=4, dropout=0.0)
    plain = run(tmp_path / "a", options)
    for name, other, model in (
        ("b", replace(options, micro_tokens=64), {}), ("c", replace(options, micro_tokens=16), {}),
        ("d", options, {"checkpointing": True}),
    ):  # fmt: skip
        found = run(tmp_path / name, other, **model)
        assert [p.loss for p in found] == pytest.approx([p.loss for p in plain], rel=1e-5)
        assert [p.gradient_norm for p in found] == pytest.approx([p.gradient_norm for p in plain], rel=1e-4)


def test_blocks_of_the_loss_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = LanguageModel(SPEC, open_table("reference"), 64, seed=3)
    batch = Batches(shard(), CONTEXT, 64, seed=1).batch(0)
    inputs = [torch.from_numpy(x) for x in (batch.token_ids, batch.positions, batch.targets)]

    def gradients() -> tuple[float, list[torch.Tensor]]:
        module.zero_grad()
        loss = module(inputs[0], inputs[1], batch.lengths, inputs[2])
        loss.backward()
        return float(loss.detach()), [p.grad for p in module.parameters() if p.grad is not None]

    loss, wanted = gradients()
    monkeypatch.setattr("ridgeline.train.module.LOSS_ELEMENTS", 10 * VOCAB)
    again, found = gradients()
    assert again == pytest.approx(loss, rel=1e-6)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_attention_and_loss_stay_inside_documents() -> None:
    """The loss of a batch is the sum of the losses of its segments, each computed alone."""
    module = LanguageModel(SPEC, open_table("reference"), 64, seed=3)
    batch = Batches(shard(), CONTEXT, 64, seed=1).batch(0)
    ids, positions, targets = (torch.from_numpy(x) for x in (batch.token_ids, batch.positions, batch.targets))
    together = float(module(ids, positions, batch.lengths, targets).detach())
    at, alone = 0, 0.0
    for n in batch.lengths:
        part = slice(at, at + n)
        alone += float(module(ids[part], torch.arange(n), (n,), targets[part]).detach())
        at += n
    assert len(batch.lengths) > 4
    assert together == pytest.approx(alone, rel=1e-5)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    t = trainer(tmp_path, replace(OPTIONS, steps=12))
    t.run()
    bad = trainer(tmp_path)
    with torch.no_grad():
        forward = bad._model.forward
    bad._model.forward = lambda *args: forward(*args) * float("nan")  # type: ignore[method-assign]
    with pytest.raises(DataError, match=r"the loss of step 13 is nan.*the last good checkpoint is of step 12"):
        bad.run()
    assert all(torch.isfinite(w).all() for w in bad.weights_of(12).values())


def test_early_stopping_keeps_the_best(tmp_path: Path) -> None:
    options = replace(OPTIONS, steps=200, learning_rate=0.3, warmup_steps=1, patience=2, eval_every=3)
    t = trainer(tmp_path, options)
    seen: list[Progress] = []
    best = t.run(seen.append)
    measured = {p.step: p.held_out for p in seen if p.held_out is not None}
    assert seen[-1].step < 200
    assert best == min(measured, key=lambda step: measured[step] or 0.0)
    assert t.weights_of(best)


def test_another_run_is_refused_with_the_difference(tmp_path: Path) -> None:
    run(tmp_path, replace(OPTIONS, steps=6))
    with pytest.raises(DataError, match=r"options\.learning_rate was 0\.01, is 0\.02"):
        run(tmp_path, replace(OPTIONS, learning_rate=0.02))
    assert len(run(tmp_path, replace(OPTIONS, steps=8))) == 2  # a longer run continues the shorter one


def test_a_failed_save_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = Saves(tmp_path, {"a": 1})
    saves.write(1, {"w": torch.ones(3)}, {}, best=-1)

    def full(*args: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("ridgeline.train.saves._write_json", full)
    with pytest.raises(DataError, match="no space left on device; the newest is of step 1"):
        saves.write(2, {"w": torch.zeros(3)}, {}, best=-1)
    assert saves.steps() == [1]
    assert saves.read(1)[0]["w"].tolist() == [1, 1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["step-0000001"]
    shutil.rmtree(tmp_path / "step-0000001" / "x", ignore_errors=True)


def test_the_rate_rises_holds_and_falls() -> None:
    rates = [learning_rate(step, 100, 1.0, 10, 30, 0.1) for step in range(100)]
    assert rates[0] == 0.1
    assert rates[9:70] == [1.0] * 61
    assert rates[-1] == pytest.approx(0.1 + 0.9 / 30)
    assert all(a > b for a, b in pairwise(rates[70:]))


def test_a_run_that_went_on_elsewhere_has_no_utilization() -> None:
    here, there, unknown = (Progress(1, 2.0, 1.0, 0.1, 50.0, machine=name) for name in ("A", "B", ""))
    cost = cost_of([here, here], 100, 3.0, 7.0, "A")
    assert (cost.seconds, cost.machine) == (4.0, "A") and cost.utilization == pytest.approx(600 / (4 * 7))
    for log, machines in (([here, there], "A; B"), ([unknown, here], "an unrecorded machine; A"), ([there], "B")):
        cost = cost_of(log, 100, 3.0, 7.0, "A")
        assert cost.machine == machines and cost.peak_flops_per_s is cost.utilization is None
