"""Every field of a loaded ModelSpec matters: change one, keep the weights, and the logits move far.

The comparison with transformers proves a field only where misreading it would have shown. Here each field of each
part, alone, in the first and the last layer of its kind, has to move some logit by 100 times that comparison's
tolerance. What cannot be changed under the same weights, or changes nothing by its nature, is listed with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ridgeline.spec
from oracle.build import build
from oracle.families import CASES, WINDOW, prompts
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.safetensors import TensorFiles
from ridgeline.load.weights import load_weights
from ridgeline.nn import Model
from ridgeline.ops import OpsTable, open_table
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import AnyLayer, Layer, LinearScaling, ModelSpec, ParallelLayer, Rope, YarnScaling

NAMES = [
    "gemma2", "gemma3", "granite", "phi3_partial", "olmo3", "glm4", "gpt_neox", "qwen3_moe_mixed", "smollm3_window",
    "llama_biases", "llama_llama3", "llama_yarn", "llama_yarn_mscale",
]  # fmt: skip
FAR = 100 * 1e-4

# Fields that weights of the same shapes cannot have otherwise.
SHAPED = {
    "Attention.num_heads": "rows of q",
    "Attention.num_kv_heads": "rows of k and v",
    "Attention.head_dim": "rows of q, k and v",
    "Attention.qk_norm_over": "length of the norm's weight",
    "MLP.intermediate_size": "rows of up",
    "GatedMLP.intermediate_size": "rows of gate and up",
    "MoE.intermediate_size": "rows of gate and up",
    "MoE.num_experts": "rows of the router",
    "ModelSpec.vocab_size": "rows of the embedding",
    "ModelSpec.hidden_size": "columns of everything",
    "ModelSpec.num_position_embeddings": "a table that the model does not have",
}
# Fields that are off in a case and bring weights along when they are switched on.
ABSENT = {"qkv_bias", "out_bias", "bias", "qk_norm", "pre_norm", "post_norm"}
# Yarn rounds what follows from these to whole pairs of a head, of which there are few: one of several values must move.
ROUNDED = {"beta_fast", "beta_slow", "original_max_position_embeddings"}
# Fields that change no logit, and why.
SILENT = {
    "ModelSpec.family": "a name in messages",
    "ModelSpec.max_position_embeddings": "a limit that is enforced before the model runs",
}


def changed(part: Any, field: str) -> Any:
    """Another value for a field: the double of a number, the opposite of a flag, or what a reader would confuse."""
    value = getattr(part, field)
    if value is None and field == "rope":
        return Rope(part.head_dim)
    if value is None:  # switched on, at a size that the sequences can feel
        return {"window": WINDOW, "softcap": 2.0, "logit_softcap": 2.0, "scaling": LinearScaling(2.0)}[field]
    match field:
        case "eps":
            return 100 * value  # to 1: the stream's own mean square is some units in the last layers
        case "offset":
            return 1.0 - value
        case "activation":
            return "relu" if value == "silu" else "silu"  # the two gelus differ by less than what is asked here
        case "dim":
            return value - 2
        case "window":
            return value + 1  # the mistake that is made
        case "num_experts_per_tok":
            return value - 1
        case "family":
            return value + "?"
        case "num_kv_heads":
            return 1 if value > 1 else part.num_heads
        case "num_position_embeddings":
            return value + 256
        case "qk_norm_over":
            return "all_heads" if value == "head" else "head"
    return not value if isinstance(value, bool) else value * 2


def flips(part: Any) -> Iterator[tuple[str, Any]]:
    """(Type.field, the part with that field changed), through all parts within."""
    for f in fields(part):
        name, value = f"{type(part).__name__}.{f.name}", getattr(part, f.name)
        if f.name == "layers" or (f.name in ABSENT and not value):
            continue
        if f.name == "qk_norm_over" and not part.qk_norm:
            continue  # over what there is none of
        if is_dataclass(value):
            for inner, other in flips(value):
                yield f"{f.name}.{inner}", replace(part, **{f.name: other})
            if f.name in ("qk_norm", "post_norm", "rope", "scaling") or (
                f.name == "pre_norm" and getattr(part, "post_norm", None)
            ):
                yield name, replace(part, **{f.name: None})
        elif isinstance(part, YarnScaling) and part.truncate and f.name in ROUNDED:
            yield from ((name, replace(part, **{f.name: type(value)(value * x)})) for x in (2, 1 / 2, 1 / 16))
        else:
            yield name, replace(part, **{f.name: changed(part, f.name)})


def reordered(layer: AnyLayer) -> Iterator[tuple[str, AnyLayer]]:
    """The other arrangement of the two branches, which has the same weights."""
    if isinstance(layer, ParallelLayer):
        yield "ParallelLayer", Layer(layer.mixer, layer.mlp, layer.pre_norm)
    elif layer.pre_norm and not layer.post_norm:
        yield "Layer", ParallelLayer(layer.mixer, layer.mlp, layer.pre_norm)


def model_flips(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    yield from flips(spec)
    layers = spec.layers
    chosen = sorted({i for x in set(layers) for i in (layers.index(x), len(layers) - 1 - layers[::-1].index(x))})
    for i in chosen:
        for name, other in (*flips(layers[i]), *reordered(layers[i])):
            yield f"layers[{i}].{name}", replace(spec, layers=(*layers[:i], other, *layers[i + 1 :]))
    for i in range(len(layers) - 1):
        if layers[i] != layers[i + 1]:
            order = (*layers[:i], layers[i + 1], layers[i], *layers[i + 2 :])
            yield f"layers[{i}] and [{i + 1}] exchanged", replace(spec, layers=order)


class Subject:
    """A case's model, loaded; runs other specs over the same weights."""

    def __init__(self, name: str, folder: Path) -> None:
        case = CASES[name]
        build(case, folder)
        checkpoint = open_checkpoint(folder)
        self.spec, self.table = checkpoint.spec, open_table("cpu")
        self._length, self._step = case.max_model_len, DenseStep.build(prompts(case), self.table.memory)
        self._weights = load_weights(
            self.spec, checkpoint.family.names, TensorFiles(folder), self.table.memory, "float32", lambda done: None
        )
        self._base = self._run(self.spec, self.table)

    def fits(self, spec: ModelSpec) -> bool:
        """Do the weights serve this spec too?"""
        return all(w.name in self._weights and self._weights[w.name].shape == w.shape for w in spec.weights())

    def movement(self, spec: ModelSpec) -> float:
        return float(np.abs(self._run(spec, open_table("cpu")) - self._base).max())

    def _run(self, spec: ModelSpec, table: OpsTable) -> np.ndarray:
        used = {w.name: self._weights[w.name] for w in spec.weights()}
        return table.memory.get(Model(spec, used, table, self._length)(self._step))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_every_field_moves_the_logits(name: str, tmp_path: Path) -> None:
    subject = Subject(name, tmp_path)
    movement: dict[str, float] = {}
    for label, spec in model_flips(subject.spec):
        assert spec != subject.spec, label
        if subject.fits(spec):
            movement[label] = max(subject.movement(spec), movement.get(label, 0.0))
        else:
            assert field_of(label) in SHAPED or "exchanged" in label, f"{label} needs other weights"
    silent = {label: moved for label, moved in movement.items() if field_of(label) in SILENT}
    assert set(silent.values()) == {0.0}
    assert len(movement) > 30
    weak = [f"{label}: {moved:.1e}" for label, moved in movement.items() if label not in silent and moved <= FAR]
    assert not weak, "\n".join(weak)


def field_of(label: str) -> str:
    """Type.field, the end of a label."""
    return ".".join(label.split(".")[-2:])


def test_the_lists_of_exceptions_are_no_longer_than_needed() -> None:
    """Each entry is a field that there is."""
    for entry in SHAPED | SILENT:
        type_name, field = entry.split(".")
        assert field in {f.name for f in fields(getattr(ridgeline.spec, type_name))}
