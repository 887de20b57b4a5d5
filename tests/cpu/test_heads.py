"""Folders of heads that are damaged or belong to another model are refused in one line; others load beside a target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oracle import heads
from oracle.heads import AUX, CASES
from oracle.ours import SPECS, random_weights, write
from ridgeline.errors import CheckpointError, ConfigError, DeviceError
from ridgeline.load.heads import is_head, open_head, read_head
from ridgeline.nn import Model
from ridgeline.nn.heads import Eagle3Head, EagleHead, build_head
from ridgeline.ops import api, open_table
from ridgeline.ops.api import PagedLayout
from ridgeline.runtime.arena import Arena
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.graphs import _no_buckets
from ridgeline.runtime.heads import load_head
from ridgeline.runtime.layout import Slices
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.runtime.step import PagedStep
from ridgeline.spec.footprint import footprint
from ridgeline.spec.groups import state_groups
from ridgeline.spec.heads import default_aux
from ridgeline.spec.quant import AS_STORED

TARGET = SPECS["cla2"]
Arrays = dict[str, np.ndarray]


def without(name: str) -> Any:
    return lambda tensors: {key: x for key, x in tensors.items() if key != name}


def with_(name: str, change: Any) -> Any:
    return lambda tensors: {**tensors, name: change(tensors.get(name))}


def swapped(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x[::-1])


SPEC_CONFIG = CASES["speculators"].config
LAYER_CONFIG = SPEC_CONFIG["transformer_layer_config"]
# Each: the case, a change of its tensors, fields of its config (None: removed), and what the error names.
BAD: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "missing tensor": ("eagle", without("layers.0.mlp.up_proj.weight"), {}, r"lacks layers\.0\.mlp\.up_proj\.weight"),
    "missing block": ("medusa", without("1.0.linear.bias"), {}, r"lacks 1\.0\.linear\.bias"),
    "unknown tensor": ("eagle3", with_("midlayer.self_attn.k_norm.weight", lambda x: np.ones(24, np.float32)), {},
                       r"has midlayer\.self_attn\.k_norm\.weight"),
    "a bias that the config denies": ("eagle", None, {"bias": False}, r"has fc\.bias"),
    "a bias that is not there": ("eagle_plain", None, {"bias": None}, r"lacks fc\.bias"),
    "another head": ("medusa", with_("3.0.linear.weight", lambda x: np.ones((64, 64), np.float32)), {},
                     r"has 3\.0\.linear\.weight"),
    "wrong shape": ("eagle", with_("fc.weight", lambda x: x[:, 1:].copy()), {}, r"fc\.weight has shape \[64, 127\]"),
    "wrong type": ("eagle3", with_("norm.weight", lambda x: x.astype(np.float64)), {}, r"norm\.weight has type F64"),
    "d2t out of range": ("eagle3", with_("d2t", lambda x: x + 200), {}, r"token \d+; the vocabulary has 257"),
    "d2t below zero": ("eagle3", with_("d2t", lambda x: x - 90), {}, r"token -\d+"),
    "d2t twice": ("eagle3", with_("d2t", lambda x: -np.arange(97)), {}, r"t2d marks other|names a token twice"),
    "d2t of floats": ("eagle3", with_("d2t", lambda x: x.astype(np.float32)), {}, r"d2t has type F32"),
    "d2t missing": ("eagle3", without("d2t"), {}, r"lacks d2t"),
    "t2d of another table": ("speculators", with_("t2d", swapped), {}, r"t2d marks other tokens"),
    "token_map twice": ("vllm_medusa", with_("medusa_heads.token_map", lambda x: np.zeros(97, np.int64)), {}, r"twice"),
    "token_map missing": ("vllm_medusa", without("medusa_heads.token_map"), {}, r"lacks token_map"),
    "unknown field": ("eagle3", None, {"use_bottleneck": 3}, r"use_bottleneck: not understood"),
    "unknown field of a layer": ("speculators", None, {"transformer_layer_config": {**LAYER_CONFIG, "moe": 1}}, r"moe"),
    "unknown fusion": ("eagle3", None, {"eagle_config": {"use_mtp_layernorm": True}}, r"use_mtp_layernorm is True"),
    "two layers": ("eagle", None, {"num_hidden_layers": 2}, r"num_hidden_layers is 2; a head has one layer"),
    "another family": ("eagle", None, {"model_type": "gpt2"}, r"model_type is 'gpt2'"),
    "norm_before_residual missing": ("speculators", None, {"norm_before_residual": None}, r"norm_before_residual is m"),
    "another speculator": ("speculators", None, {"speculators_model_type": "dflash"}, r"'dflash'; only eagle3"),
    "two fusions": ("speculators", None, {"norm_before_fc": True}, r"norm_before_fc and fc_norm exclude each other"),
    "two lists of layers": ("eagle3", None, {AUX: [0, 1, 5]}, r"the same numbers less one"),
    "no list of numbers": ("eagle3", None, {AUX: ["1"], "eagle_config": None}, r"list of whole numbers"),
    "draft vocabulary too large": ("eagle3", None, {"draft_vocab_size": 300}, r"draft_vocab_size 300 is not in 1"),
    "too many heads": ("medusa", None, {"medusa_num_heads": 10**9}, r"medusa_num_heads is 1000000000; .*from 1 to 64"),
    "scaled logits": ("vllm_medusa_shared", None, {"logit_scale": 0.5}, r"logit_scale is 0\.5"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_a_damaged_head_is_refused(fault: str, tmp_path: Path) -> None:
    name, change, config, wanted = BAD[fault]
    tensors = heads.draw(CASES[name])
    heads.write(CASES[name], tmp_path, change(tensors) if change else tensors, **config)
    with pytest.raises((CheckpointError, ConfigError), match=wanted) as caught:
        read_head(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert "\n" not in str(caught.value)


def test_a_head_of_another_model_is_refused(tmp_path: Path) -> None:
    for name in CASES:
        heads.write(CASES[name], tmp_path / name)

    def refused(name: str, wanted: str, **changes: Any) -> None:
        with pytest.raises(CheckpointError, match=wanted) as caught:
            open_head(tmp_path / name, replace(TARGET, **changes))
        assert "\n" not in str(caught.value)

    for name in ("medusa", "eagle", "eagle3", "speculators"):
        assert open_head(tmp_path / name, TARGET).spec.misfit(TARGET) is None
        refused(name, "vocabulary of 257, and cla2 has 300", vocab_size=300)
        refused(name, "hidden size 64, and cla2 has 80", hidden_size=80)
    short = TARGET.layers[:4]
    refused("eagle_plain", "a model of 6 layers, and cla2 has 4", layers=short)
    refused("eagle3", r"layers \[1, 2, 6\] are not different ids from 0 to 4", layers=short)
    heads.write(CASES["eagle3"], tmp_path / "default", eagle_config=None)
    assert read_head(tmp_path / "default").spec.aux(32) == default_aux(32) == (2, 16, 29)
    refused("default", r"layers \[2, 3, 3\] are not different")


def test_pickled_heads_and_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(
        CheckpointError, match=r"pickled \(medusa_lm_head\.pt\).*save_file.*model\.safetensors"
    ) as caught:
        read_head(tmp_path)
    assert "\n" not in str(caught.value)
    write(SPECS["s4"], tmp_path / "..")
    with pytest.raises(
        CheckpointError, match="no head for speculative decoding; known formats are speculators, medusa"
    ):
        read_head(tmp_path / "..")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_head(tmp_path / "nothing")
    assert is_head(tmp_path) is False
    assert is_head(tmp_path / "..") is False
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    assert is_head(tmp_path) is True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a target and a head of each format."""
    path = tmp_path_factory.mktemp("heads")
    (path / "target").mkdir()
    write(TARGET, path / "target")
    for name, case in CASES.items():
        heads.write(case, path / name)
    return path


def test_a_head_is_loaded_beside_its_target(folder: Path, tmp_path: Path) -> None:
    loaded = load_model(str(folder / "target"), LoadOptions(device="cpu"))
    for name in CASES:
        assert is_head(folder / name)
        found = load_head(folder / name, loaded)
        packs = loaded.table.driver is not None
        assert found.weight_bytes == footprint(found.file.spec, AS_STORED, "float32", packs=packs).total
        quantized = load_head(folder / name, loaded, weights="int8")
        assert quantized.weight_bytes < found.weight_bytes
    loaded.table.memory.free_bytes = lambda: 10_000  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="the weights take"):
        load_head(folder / "eagle", loaded)


def test_an_embedding_of_the_target_is_not_loaded_again(folder: Path, tmp_path: Path) -> None:
    loaded = load_model(str(folder / "target"), LoadOptions(device="cpu"))
    tensors = heads.draw(CASES["eagle"])
    heads.write(CASES["eagle"], tmp_path, {**tensors, "embed_tokens.weight": random_weights(TARGET)["embed.weight"]})
    assert load_head(folder / "eagle", loaded).file.spec.own_embedding  # type: ignore[union-attr]
    shared = load_head(tmp_path, loaded)
    assert not shared.file.spec.own_embedding  # type: ignore[union-attr]
    assert "embed.weight" not in shared.file.weights


def test_costs_follow_from_the_spec(folder: Path) -> None:
    """Multiply-accumulates and pages are those of the written tensors, counted by hand."""
    spec = read_head(folder / "eagle3").spec
    matrices = [s for name, s in CASES["eagle3"].sizes.items() if len(s) == 2 and not name.startswith("embed")]
    assert spec.work(1, 10) == sum(a * b for a, b in matrices) + 2 * 10 * 4 * 24
    assert spec.num_params() == sum(int(np.prod(s)) for s in CASES["eagle3"].sizes.values())
    (group,) = state_groups(spec, page_tokens=16)
    assert group.page_bytes == 2 * 16 * 2 * 24 * 4
    medusa = read_head(folder / "vllm_medusa_shared").spec
    assert state_groups(medusa, page_tokens=16) == ()
    assert medusa.work(1, 10) == 2 * (64 * 64 + 64 * 257)  # both heads multiply with the same matrix
    eagle = read_head(folder / "eagle_plain").spec
    assert sum(w.num_params for w in eagle.products()) == eagle.work(1, 1) - 2 * 4 * 24
    assert ("head.weight", (257, 64)) in [(w.name, w.shape) for w in eagle.products()]


@pytest.mark.parametrize("name", ["eagle", "eagle3", "speculators", "speculators_qwen3", "medusa"])
def test_draft_steps_run_from_a_recording(name: str, folder: Path) -> None:
    """A recorded draft step gives the bits of a step that is not, for other tokens, positions and features."""
    table, file = open_table("cpu"), read_head(folder / name)
    if table.driver is None:
        pytest.skip("the kernels are not built")
    target = Model(TARGET, random_weights(TARGET), table, 64)
    head: Any = build_head(file.spec, {n: w.data for n, w in file.weights.items()}, target, table, 64, file.vocabulary)
    memory, groups = table.memory, state_groups(file.spec, page_tokens=4)
    arena, pages = Arena(groups, [8] * len(groups), [0] * len(groups), memory), np.array([[3, 1], [5, 2]])
    tokens, positions = np.array([7, 9]), np.array([0, 0])
    ones, rows = np.ones(2, np.int64), np.arange(2)
    rng = np.random.default_rng(0)
    features = rng.standard_normal((2, 64)).astype(np.float32)
    streams = [rng.standard_normal((2, 64)).astype(np.float32) for _ in range(3)]
    layout = table.primitive(api.DECODE_LAYOUT)

    def step() -> list[Any]:
        if name == "medusa":
            return list(head.logits(features))
        layouts = [PagedLayout(*layout(pages, rows, positions, rows[:1], 4)[:2], positions, ones, pages, _no_buckets)]
        slices = Slices.plain(rows, positions, ones)
        paged = PagedStep(tokens, positions, slices, layouts, arena, DraftInputs(2, 0, table), table)
        used = [head.fuse(streams)] if isinstance(head, Eagle3Head) else []
        next_features = head.feature(head.forward(paged, features))
        logits = head.logits(next_features)
        return [*used, next_features, logits, head.to_target(table.primitive(api.BEST)(logits)[0])]

    known = [
        *arena.pages,
        pages,
        features,
        *streams,
        tokens,
        positions,
        ones,
        rows,
        *head.constants(),
        *target.constants(),
    ]
    recorded = table.driver.recorder().record(step, known)
    assert not isinstance(recorded, str), recorded
    assert isinstance(head, EagleHead | Eagle3Head) or name == "medusa"
    for position in (1, 2):
        tokens += 3
        positions[:] = position
        features[:] = rng.standard_normal(features.shape)
        recorded.run()
        found = [np.array(x) for x in recorded.results]
        assert all(np.array_equal(x, y) for x, y in zip(found, step(), strict=True))
