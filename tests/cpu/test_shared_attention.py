"""Layers that attend to another layer's keys and values (CLA, arXiv:2405.12981): parameters, state and errors.

Logits, tokens and gradients are compared in test_ours.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.ours import (
    FULL,
    LENGTH,
    LOCAL,
    MLP,
    MQA,
    NORM,
    SPECS,
    WIDTH,
    cla,
    model,
    random_weights,
    sequences,
    shared,
    write,
)
from ridgeline import LLM
from ridgeline.archs import spec_from_config
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.nn import Model
from ridgeline.ops import open_table
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import (
    Attention,
    FirstTokens,
    Layer,
    ModelSpec,
    Rope,
    SharedAttention,
    to_json,
)
from ridgeline.spec.groups import state_groups
from ridgeline.spec.storage import STORAGES
from ridgeline.train.module import LanguageModel

TOLERANCE = 1e-4


# ---- training ----------------------------------------------------------------------------------------------


def test_training_with_activation_checkpoints_changes_nothing() -> None:
    """If a layer is recomputed, the keys and values that a later layer needs are still available."""
    spec, tokens = SPECS["cla_character"], torch.tensor(sequences()[2])
    targets = tokens.roll(-1)
    found = []
    for checkpointing in (False, True):
        module = LanguageModel(spec, open_table("reference"), LENGTH, checkpointing=checkpointing)
        loss = module(tokens, torch.arange(len(tokens)), (len(tokens),), targets)
        loss.backward()
        found.append((loss.item(), {n: w.grad for n, w in module.weights().items()}))
    (loss, gradients), (again, recomputed) = found
    assert loss == again
    assert all(torch.equal(gradients[name], recomputed[name]) for name in gradients)
    assert all(float(g.abs().max()) > 0 for g in gradients.values())


# ---- every field matters ------------------------------------------------------------------------------------

OTHER: dict[str, Callable[[Any], Any]] = {
    "scale": lambda v: 2 * v, "window": lambda v: v - 1, "softcap": lambda v: None if v else 2.0,
    "qkv_bias": lambda v: False, "out_bias": lambda v: False, "sinks": lambda v: False, "qk_norm": lambda v: None,
}  # fmt: skip


def flips(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """Yield models with one changed field of one sharing layer, which use the same weights or fewer of them."""
    for i, layer in enumerate(spec.layers):
        if not isinstance(mixer := layer.mixer, SharedAttention):
            continue
        for f in fields(Attention):
            value = getattr(mixer.attention, f.name)
            if f.name in OTHER and (value or f.name == "softcap"):
                changed = replace(mixer, attention=replace(mixer.attention, **{f.name: OTHER[f.name](value)}))
                yield f"layers[{i}] {f.name}", with_mixer(spec, i, changed)
        owners = [j for j in range(i) if j != mixer.source and isinstance(spec.layers[j].mixer, Attention)]
        for j in owners:
            if mixer.misfit(spec.layers[j].mixer) is None:
                yield f"layers[{i}] source", with_mixer(spec, i, replace(mixer, source=j))


def with_mixer(spec: ModelSpec, index: int, mixer: Attention | SharedAttention) -> ModelSpec:
    layers = list(spec.layers)
    layers[index] = replace(layers[index], mixer=mixer)
    return replace(spec, layers=tuple(layers))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cla3_mqa", {"scale", "softcap", "source"}), ("cla_mixed", {*OTHER, "source"})],
)
def test_every_field_moves_the_logits(name: str, expected: set[str]) -> None:
    spec, table = SPECS[name], open_table("reference")
    weights: Any = {name: torch.from_numpy(x) for name, x in random_weights(spec).items()}
    step = DenseStep.build(sequences(), table.memory)

    def run(other: ModelSpec) -> np.ndarray:
        used = {w.name: weights[w.name] for w in other.weights()}
        return table.memory.get(Model(other, used, table, LENGTH)(step))

    base, seen = run(spec), set()
    for label, other in flips(spec):
        moved = float(np.abs(run(other) - base).max())
        assert moved > 100 * TOLERANCE, f"{label}: {moved:.1e}"
        seen.add(label.split()[1])
    assert seen >= expected


# ---- parameters and state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 2, 3, 4])
def test_parameters_and_state_by_formula(factor: int) -> None:
    """Each owner stores 2 * kv heads * head_dim numbers per token, and only owners have key and value matrices."""
    layers, a = 12, MQA
    spec, dense = cla(a, layers, factor), cla(a, layers, 1)
    owners = -(-layers // factor)
    per_layer = 2 * a.num_kv_heads * a.head_dim
    assert spec.state_elements(100) == 100 * owners * per_layer
    assert dense.num_params() - spec.num_params() == (layers - owners) * per_layer * WIDTH
    (group,) = state_groups(spec, page_tokens=16, storage=STORAGES["bfloat16"])
    assert group.page_bytes == 16 * 2 * owners * per_layer
    assert [slot.layer for slot in group.slots] == list(range(0, layers, factor))
    # The work is not reduced, because every layer reads all keys.
    assert sum(x.mixer.work(1, 100) for x in spec.layers) == sum(x.mixer.work(1, 100) for x in dense.layers)


# arXiv:2405.12981, table 1: 20 layers, bytes of keys and values per token in 16 bits.
TABLE = [("H128-MQA", 128, 1, 10240), ("H128-MQA-CLA2", 128, 2, 5120), ("H90-MQA-CLA2", 90, 2, 3600)]
TABLE += [("H64-MQA-CLA2", 64, 2, 2560), ("H128-MQA-CLA3", 128, 3, 3584), ("H128-MQA-CLA4", 128, 4, 2560)]


@pytest.mark.parametrize(("name", "head_dim", "factor", "num_bytes"), TABLE, ids=[t[0] for t in TABLE])
def test_state_bytes_of_the_paper(name: str, head_dim: int, factor: int, num_bytes: int) -> None:
    spec = cla(Attention(16, 1, head_dim, head_dim**-0.5, Rope(head_dim)), 20, factor)
    assert 2 * spec.state_elements(1) == num_bytes


def test_groups_hold_the_state_of_owners() -> None:
    """With one global layer in six, all global layers share one owner, and each six layers have three local owners."""
    spec = SPECS["cla_character"]
    local, full = state_groups(spec, page_tokens=16)
    assert (local.lookback, [s.layer for s in local.slots]) == (19, [0, 2, 4, 6, 8, 10])
    assert [s.layer for s in full.slots] == [5]
    assert [spec.state_layer(i) for i in range(12)] == [0, 0, 2, 2, 4, 5, 6, 6, 8, 8, 10, 5]


# ---- errors ------------------------------------------------------------------------------


OWN = Layer(FULL, MLP, NORM)
BAD: list[tuple[list[Layer], str]] = [
    ([shared(0), OWN], "layers[0].mixer: it shares the keys and values of layer 0, which does not come before it"),
    ([OWN, shared(2), OWN], "layers[1].mixer: it shares the keys and values of layer 2, which does not come before it"),
    ([OWN, shared(9)], "layers[1].mixer: it shares the keys and values of layer 9, which does not come before it"),
    (
        [OWN, shared(0), shared(1)],
        "layers[2].mixer: it shares the keys and values of layer 1, which has none of its own: "
        "it shares those of layer 0",
    ),
    ([OWN, shared(0, num_kv_heads=4)], "layers[1].mixer: {}, which do not fit: num_kv_heads is 4 here and 2 there"),
    ([OWN, shared(0, MQA)], "layers[1].mixer: {}, which do not fit: num_kv_heads is 1 here and 2 there"),
    ([OWN, shared(0, head_dim=32)], "layers[1].mixer: {}, which do not fit: head_dim is 32 here and 24 there"),
    ([OWN, shared(0, rope=None)], "layers[1].mixer: {}, which do not fit: its queries must be rotated as the keys are"),
    ([OWN, shared(0, rope=Rope(24))], "layers[1].mixer: {}, which do not fit: its queries must be rotated as the keys"),
    (
        [Layer(LOCAL, MLP, NORM), shared(0)],
        "layers[1].mixer: {}, which do not fit: it looks back at all tokens, and 23 are kept there",
    ),
    (
        [Layer(LOCAL, MLP, NORM), shared(0, window=25)],
        "layers[1].mixer: {}, which do not fit: it looks back at 24 tokens, and 23 are kept there",
    ),
    (
        [Layer(LOCAL, MLP, NORM), shared(0, window=9, pattern=FirstTokens(4))],
        "layers[1].mixer: {}, which do not fit: it sees the first 4 tokens at any distance, and 0 are kept there",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("layers", "message"), BAD, ids=[m for _, m in BAD])
def test_layers_that_cannot_share_fail_at_load(layers: list[Layer], message: str, tmp_path: Path) -> None:
    forged = model([OWN])
    object.__setattr__(forged, "layers", tuple(layers))  # bypasses the check, as in a file that was written by hand
    config = {"model_type": "ridgeline", "spec": to_json(forged)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as caught:
        LLM(str(tmp_path), load_format="dummy")
    assert str(caught.value).startswith("spec: " + message.format("it shares the keys and values of layer 0"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be positive, not 0"),
        ({"num_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"kind": "KeyAttention"}, "type 'KeyAttention' is none of Attention, SharedAttention"),
    ],
    ids=lambda x: str(x),
)
def test_invalid_shared_layers_are_named_with_their_path(change: dict[str, Any], message: str) -> None:
    value = to_json(model([OWN, shared(0)]))
    mixer = value["layers"][1]["layer"]["mixer"]
    if "kind" in change:
        mixer["type"] = change["kind"]
    else:
        mixer["attention"].update(change)
    with pytest.raises(ConfigError) as caught:
        spec_from_config({"model_type": "ridgeline", "spec": value})
    assert str(caught.value).startswith("spec.layers[1].mixer")
    assert message in str(caught.value)


def test_missing_and_extra_weights_are_named(tmp_path: Path) -> None:
    """A sharing layer has no key projection; a key projection in the file is an error and is not ignored."""
    from safetensors.numpy import load_file, save_file

    write(SPECS["cla2"], tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    for change, message in (
        (
            {"layers.1.mixer.k.weight": weights["layers.0.mixer.k.weight"]},
            "has layers.1.mixer.k.weight, which a cla2",
        ),
        ({"layers.2.mixer.v.weight": None}, "lacks layers.2.mixer.v.weight"),
    ):
        save_file({k: v for k, v in {**weights, **change}.items() if v is not None}, path)
        with pytest.raises(CheckpointError, match=message):
            LLM(str(tmp_path))
