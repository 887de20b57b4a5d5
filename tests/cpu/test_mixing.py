"""Weights of attention and linear attention are those of their definitions, and stage matrices brings them closer."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cpu.test_convert_recurrent import SAMPLES, SEQUENCES, TEXTS, folder_of
from cpu.test_distill import OPTIONS
from cpu.test_recurrent import quadratic
from ridgeline.compress.convert import ConvertOptions
from ridgeline.compress.convert.run import parse_change, write_converted
from ridgeline.compress.folder import open_original
from ridgeline.errors import DataError, RequestError
from ridgeline.nn import Capture
from ridgeline.ops import open_table
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import TaylorAttention
from ridgeline.train.distill import parse_stages
from ridgeline.train.mixing import MixingDivergence, SoftmaxWeights, check_mixing, linear_weights, mixing_names
from ridgeline.train.module import LanguageModel
from ridgeline.train.objectives import freeze, stream_name

pytestmark = pytest.mark.usefixtures("short_rates")
REFERENCE = LoadOptions(device="reference", dtype="float32")


@pytest.mark.parametrize("name", ["llama_gqa", "qwen3", "gemma2", "gpt_oss"])
def test_weights_of_attention_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With norms of q and k, windows, softcaps and sinks, whose shares transformers leaves out of the weights."""
    source, model = folder_of(name, tmp_path / "source")
    model.set_attn_implementation("eager")
    ours = load_model(str(source), REFERENCE)
    step = DenseStep.build(SEQUENCES, ours.table.memory)
    names = [stream_name(i) for i in range(len(ours.spec.layers))]
    capture = Capture(ours.spec, names)
    ours.model.forward(step, capture)
    with torch.no_grad():
        wanted = [model(torch.tensor([ids]), output_attentions=True).attentions for ids in SEQUENCES]
    for i, stream in enumerate(names):
        found = SoftmaxWeights(ours.model, i, ours.table)(capture.outputs[stream], ours.model.rotaries(step), step)
        for j, weights in enumerate(found):
            exact = wanted[j][i][0].double()
            torch.testing.assert_close(weights.double(), exact / exact.sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)


def student_of(folder: Path, to: str = "hybrid=hedgehog:1") -> tuple[Path, Path]:
    """Write a model of transformers, and the same with linear attention."""
    source, _ = folder_of("llama_gqa", folder / "source")
    original = open_original(str(source), None)
    write_converted(
        "M", original, parse_change(to), SAMPLES, "texts", folder / "student", ConvertOptions(keep="pattern")
    )
    return source, folder / "student"


@pytest.mark.parametrize("kind", ["hedgehog", "taylor"])
def test_learning_the_weights_brings_linear_attention_closer(kind: str, tmp_path: Path) -> None:
    """Only queries and keys of linear layers change. Their weights times the values are what the layer computes."""
    source, folder = student_of(tmp_path, f"hybrid={kind}:1")
    teacher, loaded = (load_model(str(path), REFERENCE) for path in (source, folder))
    student = LanguageModel(loaded.spec, open_table("reference"), 64)
    weights: Any = loaded.model.weights
    student.load({w.name: torch.as_tensor(weights[w.name]) for w in loaded.spec.weights()})
    freeze(student, mixing_names(student.spec))
    before = {name: p.detach().clone() for name, p in student.weights().items()}
    objective = MixingDivergence(student, teacher.model)
    step = DenseStep.build(TEXTS, teacher.table.memory)
    batch: Any = (step.token_ids, step.positions, step.lengths, torch.ones_like(torch.as_tensor(step.token_ids)))
    optimizer = torch.optim.Adam([p for p in student.parameters() if p.requires_grad], 3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = objective(*batch) / step.token_ids.shape[0]
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0], losses
    changed = {name for name, p in student.weights().items() if not torch.equal(p, before[name])}
    assert changed == set(mixing_names(student.spec))


def test_weights_of_linear_attention_are_its_definition(tmp_path: Path) -> None:
    _, folder = student_of(tmp_path)
    loaded = load_model(str(folder), REFERENCE)
    student = LanguageModel(loaded.spec, open_table("reference"), 64)
    weights: Any = loaded.model.weights
    student.load({w.name: torch.as_tensor(weights[w.name]) for w in loaded.spec.weights()})
    layer = next(i for i, one in enumerate(loaded.spec.layers) if isinstance(one.mixer, TaylorAttention))
    own: Any = loaded.spec.layers[layer].mixer
    x = torch.randn((9, loaded.spec.hidden_size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        (found,) = linear_weights(student, layer, x, (9,))
    eps = loaded.spec.layers[layer].pre_norm.eps
    x = (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weights[f"layers.{layer}.mixer_norm.weight"]).double()
    q, k = (x @ torch.as_tensor(weights[f"layers.{layer}.mixer.{n}.weight"]).double().T for n in "qk")
    heads = [t.unflatten(-1, (own.num_heads, -1)) for t in (q, k)]
    for head in range(own.num_heads):
        pair = [torch.cat([t[:, head]] * 2, -1)[None] for t in heads]  # `quadratic` has two heads
        values = torch.eye(9, dtype=torch.float64).repeat(1, 2)[None]
        wanted = quadratic(*pair, values, "hedgehog")[0, :, :9]
        torch.testing.assert_close(found[head].double(), wanted, rtol=1e-4, atol=1e-6)


def test_students_without_such_layers_are_refused_by_name(tmp_path: Path) -> None:
    source, folder = student_of(tmp_path)
    teacher, student = (open_original(str(path), None).spec for path in (source, folder))
    check_mixing(student, teacher)
    with pytest.raises(DataError, match="is for students with linear attention"):
        check_mixing(teacher, teacher)
    with pytest.raises(DataError, match=re.escape("compares layers one by one")):
        check_mixing(student, replace(teacher, layers=teacher.layers[:2]))
    with pytest.raises(DataError, match=r"layer \d of the teacher has no attention with 6 heads"):
        check_mixing(student, student)
    for patterns in (("layers.*.mlp.*",), ("layers.*.mixer.v.*", "layers.*.mixer.o.*")):
        with pytest.raises(DataError, match=re.escape("add layers.*.mixer.[qk].weight, or leave the stage out")):
            check_mixing(student, teacher, patterns)
    check_mixing(student, teacher, ("layers.*.mlp.*", "layers.*.mixer.[qk].weight"))
    with pytest.raises(RequestError, match=r"lora \(--lora\) is not for stage matrices"):
        replace(OPTIONS, stages=parse_stages("layers,matrices"), lora=2)
