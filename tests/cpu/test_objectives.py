"""Objectives: values and gradients equal torch's in float64 and closed forms; layers learn apart from each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.errors import DataError
from ridgeline.nn import Capture, Model
from ridgeline.ops import open_table
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope
from ridgeline.train.distill.stored import StoredTeacher
from ridgeline.train.module import DOWN, UP, LanguageModel
from ridgeline.train.objectives import (
    LogitDivergence,
    ModelTeacher,
    Objective,
    StreamDistance,
    TopPredictions,
    bounds,
    freeze,
)

VOCAB, CONTEXT = 40, 12
NORM = RMSNorm(1e-5)
MIXER = Attention(num_heads=4, num_kv_heads=2, head_dim=8, scale=8**-0.5, rope=Rope(8, 1e4))
LAYER = Layer(MIXER, GatedMLP(48), NORM)
SPEC = ModelSpec("tiny", VOCAB, 32, 64, (LAYER,) * 2, NORM, tie_word_embeddings=True)
TABLE = open_table("reference")
LENGTHS = (12, 5, 7)
Batch = tuple[Tensor, Tensor, tuple[int, ...], Tensor]


def batch(seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB, sum(LENGTHS))
    targets = np.concatenate(
        [[*ids[end - n + 1 : end], -1] for n, end in zip(LENGTHS, np.cumsum(LENGTHS), strict=True)]
    )
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    return torch.from_numpy(ids), torch.from_numpy(positions), LENGTHS, torch.from_numpy(targets)


def student(spec: ModelSpec = SPEC, seed: int = 1, **options: Any) -> LanguageModel:
    """Return a model whose weights are far from zero."""
    model = LanguageModel(spec, TABLE, 64, seed=seed, **options)
    with torch.no_grad():
        for name, parameter in model.weights().items():
            parameter.mul_(8.0 if parameter.dim() > 1 and not name.endswith((DOWN, UP)) else 1.0)
    return model


def teacher(spec: ModelSpec = SPEC, seed: int = 2) -> Model:
    weights: Any = {name: p.detach() for name, p in student(spec, seed).weights().items()}
    return Model(spec, weights, TABLE, 64)


def logits_of(model: LanguageModel) -> Tensor:
    ids, positions, lengths, targets = batch()
    return model.logits(ids, positions, lengths, (targets >= 0).nonzero().squeeze(1))


def teacher_logits(model: Model) -> Tensor:
    ids, positions, lengths, targets = batch()
    found: Any = model(DenseStep(ids, positions, lengths, TABLE.memory))
    return found[targets >= 0]


def gradients(loss: Tensor, model: LanguageModel) -> dict[str, Tensor]:
    named = {name: p for name, p in model.weights().items() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def same(objective: Objective, model: LanguageModel, closed: Callable[[], Tensor]) -> None:
    """Compare an objective, and its gradients, with a closed form of the same model."""
    loss, wanted = objective(*batch()), closed()
    torch.testing.assert_close(loss.double(), wanted.double(), rtol=1e-5, atol=1e-5)
    found, expected = gradients(loss, model), gradients(wanted, model)
    assert found.keys() == expected.keys() and found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def kl_float64(logits: Tensor, wanted: Tensor) -> Tensor:
    p, q = (F.log_softmax(x.double(), -1) for x in (wanted, logits))
    return F.kl_div(q, p, log_target=True, reduction="sum")


@pytest.mark.parametrize("block", [2**26, 5 * VOCAB])
def test_the_divergence_is_that_of_torch_in_float64(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.train.module.LOSS_ELEMENTS", block)
    model, original = student(), teacher()
    same(
        LogitDivergence(model, ModelTeacher(original)), model,
        lambda: kl_float64(logits_of(model), teacher_logits(original)),
    )  # fmt: skip


def test_without_a_teacher_the_objective_is_the_cross_entropy() -> None:
    model, targets = student(), batch()[3]
    same(
        Objective(model), model,
        lambda: F.cross_entropy(logits_of(model).double(), targets[targets >= 0], reduction="sum"),
    )  # fmt: skip


def top(wanted: Tensor, k: int) -> TopPredictions:
    found = F.log_softmax(wanted, -1).topk(k, -1)
    return TopPredictions(found.indices, found.values)


def test_the_most_likely_tokens_bound_the_divergence() -> None:
    """The loss of events that are merged is the mass of the rest times the divergence within it (the chain rule)."""
    rng = torch.Generator().manual_seed(3)
    wanted, logits = (3 * torch.randn((50, VOCAB), generator=rng, dtype=torch.float64) for _ in range(2))
    rows, whole = torch.arange(50), float(kl_float64(logits, wanted))
    before = 0.0
    for k in (1, 2, 5, 20, VOCAB - 1, VOCAB):
        found = float(top(wanted, k).divergence(logits, rows))
        p, q = (F.softmax(x, -1) for x in (wanted, logits))
        inside = torch.zeros_like(p).scatter(-1, p.topk(k, -1).indices, 1.0).bool()
        rest = [x.masked_fill(inside, 0.0) for x in (p, q)]
        mass = rest[0].sum(-1, keepdim=True)
        a, b = [x / x.sum(-1, keepdim=True).clamp(min=1e-300) for x in rest]
        lost = float((mass * (torch.xlogy(a, a) - torch.xlogy(a, b))).sum()) if k < VOCAB else 0.0
        assert before - 1e-4 <= found <= whole + 1e-4  # logits are taken in float32
        assert found + lost == pytest.approx(whole, abs=1e-3)
        before = found
    assert before == pytest.approx(whole, abs=1e-4)


def test_gradients_through_the_most_likely_tokens() -> None:
    """The gradient with respect to the logits is q - p, where p spreads the rest's mass as the student does."""
    rng = torch.Generator().manual_seed(4)
    wanted, logits = (torch.randn((9, VOCAB), generator=rng) for _ in range(2))
    logits.requires_grad_()
    some = top(wanted, 6)
    (found,) = torch.autograd.grad(some.divergence(logits, torch.arange(9)), logits)
    with torch.no_grad():
        q, p = F.softmax(logits.double(), -1), F.softmax(wanted.double(), -1)
        inside = torch.zeros_like(p).scatter(-1, p.topk(6, -1).indices, 1.0).bool()
        rest = p.masked_fill(inside, 0.0).sum(-1, keepdim=True)
        others = q.masked_fill(inside, 0.0)
        spread = torch.where(inside, p, rest * others / others.sum(-1, keepdim=True))
    torch.testing.assert_close(found.double(), q - spread, rtol=1e-4, atol=1e-6)


def streams(model: Any, own: bool) -> list[Tensor]:
    """Return the stream before the first layer and after each one."""
    ids, positions, lengths, _ = batch()
    step, spec = DenseStep(ids, positions, lengths, TABLE.memory), model.spec
    capture = Capture(spec, ["embed", *(f"layers.{i}" for i in range(len(spec.layers)))])
    (model.stream if own else model.forward)(step, capture)
    found: Any = list(capture.outputs.values())
    return found


def distance(found: list[Tensor], wanted: list[Tensor]) -> Tensor:
    rows = batch()[3] >= 0
    parts = [((a - b)[rows] ** 2).sum(-1) / (b[rows] ** 2).sum(-1) for a, b in zip(found, wanted, strict=True)]
    return torch.stack([part.double().sum() for part in parts]).mean()


def test_the_distance_of_streams_is_the_closed_form() -> None:
    model, original = student(), teacher()
    wanted = [x.detach() for x in streams(original, False)]
    same(
        StreamDistance(model, original, apart=False), model, lambda: distance(streams(model, True)[1:], wanted[1:])
    )  # fmt: skip


def test_layers_apart_read_the_teachers_stream_and_learn_from_their_own_output_only() -> None:
    """The loss and the gradient of a layer are those of a model that has only this layer."""
    model, original = student(), teacher()
    wanted = [x.detach() for x in streams(original, False)]
    for i in range(2):
        alone = student(replace(SPEC, layers=SPEC.layers[:1]))
        alone.load({w.name: model.weights()[w.name.replace("layers.0", f"layers.{i}")] for w in alone.spec.weights()})
        ids, positions, lengths, _ = batch()
        step = alone.step(ids, positions, lengths)
        loss = distance(alone.run_apart(step, [wanted[i]]), [wanted[i + 1]]) / 2
        found = gradients(StreamDistance(model, original, apart=True)(*batch()), model)
        expected = gradients(loss, alone)
        assert {name for name in found if f"layers.{i}." in name} == {
            name.replace("layers.0", f"layers.{i}") for name in expected
        }
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name.replace("layers.0", f"layers.{i}")], gradient, rtol=1e-4, atol=1e-6)


def test_a_student_equal_to_its_teacher_has_no_loss_in_any_objective() -> None:
    model, original = student(seed=2), teacher()
    shallow = student(replace(SPEC, layers=SPEC.layers[:1]), seed=2)
    objectives = [LogitDivergence(model, ModelTeacher(original))]
    objectives += [StreamDistance(model, original, apart=apart) for apart in (True, False)]
    assert [float(o(*batch()).detach()) for o in objectives] == pytest.approx([0.0] * 3, abs=1e-6)
    assert float(StreamDistance(shallow, original, apart=True)(*batch()).detach()) > 0.01


def test_a_student_of_fewer_layers_imitates_groups_of_the_teachers() -> None:
    assert bounds(2, 2) == [0, 1, 2] and bounds(2, 4) == [0, 2, 4] and bounds(3, 4) == [0, 1, 3, 4]
    narrow = student(replace(SPEC, hidden_size=16))
    with pytest.raises(DataError, match="the student's hidden size is 16 and the teacher's 32"):
        StreamDistance(narrow, teacher(), apart=True)


def test_only_the_chosen_weights_train() -> None:
    model = student()
    freeze(model, ["layers.*.mixer.*", "norm.*"])
    trained = {name for name, p in model.weights().items() if p.requires_grad}
    assert trained == {n for n in model.weights() if ".mixer." in n} | {"norm.weight"}
    with pytest.raises(DataError, match=r"no weight that can train matches the pattern 'layers\.9\.\*'"):
        freeze(model, ["layers.9.*"])


def test_adapters_change_nothing_at_first_and_merge_into_their_matrices() -> None:
    plain, model = student(), student(adapters=3)
    model.load(plain.weights())
    torch.testing.assert_close(logits_of(model), logits_of(plain))
    trained = [name for name, p in model.weights().items() if p.requires_grad]
    assert trained and all(name.endswith((DOWN, UP)) for name in trained)
    assert gradients(LogitDivergence(model, ModelTeacher(teacher()))(*batch()), model)
    with torch.no_grad():
        for name in trained:
            model.weights()[name].add_(0.1 * torch.randn(model.weights()[name].shape))
    plain.load(model.merged({name: p.detach() for name, p in model.weights().items()}))
    torch.testing.assert_close(logits_of(model), logits_of(plain), rtol=1e-4, atol=1e-4)


def test_stored_predictions_are_those_of_the_teacher_and_are_read_again(tmp_path: Path) -> None:
    model, original, opened = student(), teacher(), list[int]()

    def open_teacher() -> Model:
        opened.append(1)
        return original

    def loss() -> float:
        return float(LogitDivergence(model, StoredTeacher(tmp_path, CONTEXT, 10, open_teacher))(*batch()).detach())

    first = loss()
    rows = torch.arange(int((batch()[3] >= 0).sum()))
    wanted = float(top(teacher_logits(original), 10).divergence(logits_of(model).detach(), rows))
    assert first == pytest.approx(wanted, rel=1e-5)
    assert loss() == first and len(opened) == 1
    files = sorted(tmp_path.rglob("*.npz"))
    assert len(files) == 2  # rows of 12 tokens: one sequence, and two
    files[0].write_bytes(b"no arrays")
    with pytest.raises(DataError, match=r"npz is damaged .*; remove it to compute these predictions again"):
        loss()
    files[0].unlink()
    assert loss() == first
