"""Tiny random heads in every format have the logits of their definitions, on every device, whole and in pages."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle import heads
from oracle.heads import CASES, DRAFT_VOCAB, Case, Given
from oracle.ours import LENGTH, SPECS, random_weights
from oracle.problems import NUMPY
from ridgeline.load.heads import FORMATS, HeadFile, open_head, read_head, write_head
from ridgeline.nn import Model
from ridgeline.nn.heads import AnyHead, MedusaHead, build_head
from ridgeline.ops import OpsTable, open_table
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.runtime.arena import Arena
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.runtime.step import DenseStep, PagedStep
from ridgeline.spec.groups import state_groups

TOLERANCE = 1e-4
TARGET = SPECS["cla2"]  # six layers
DEVICES = ["reference", "host", "cpu"]
ROWS, STEPS = 11, 3


@cache
def table_of(device: str) -> OpsTable:
    return OpsTable(NumpyMemory(), (NUMPY,)) if device == "host" else open_table(device, threads=None)


@cache
def target(device: str) -> Model:
    table = table_of(device)
    put = table.memory.put
    weights = {name: put(x, "float32", "float32") for name, x in random_weights(TARGET).items()}
    return Model(TARGET, weights, table, LENGTH)


def built(file: HeadFile, device: str) -> AnyHead:
    table = table_of(device)
    arrays = {name: table.memory.put(w.data, w.dtype, "float32") for name, w in file.weights.items()}
    return build_head(file.spec, arrays, target(device), table, LENGTH, file.vocabulary)


def given_to(case: Case) -> Given:
    """Return random inputs of a head."""
    rng, weights = np.random.default_rng(5), random_weights(TARGET)
    streams = [torch.from_numpy(rng.normal(0, 1, (ROWS, case.width))).float() for _ in range(case.streams)]
    matrices = [torch.from_numpy(weights[name]).double() for name in ("embed.weight", "head.weight")]
    return Given(rng.integers(3, heads.VOCAB, ROWS + STEPS).tolist(), [x.double() for x in streams], *matrices, STEPS)


def whole(head: Any, given: Given, device: str) -> np.ndarray:
    """Return the logits of the rows with the target's features, in one dense pass."""
    memory = table_of(device).memory
    features = head.fuse([memory.put(x.float().numpy(), "float32", "float32") for x in given.streams])
    stream = head.forward(DenseStep.build([given.tokens[:ROWS]], memory), features)
    return memory.get(head.logits(head.feature(stream)))


def paged(head: Any, given: Given, device: str) -> np.ndarray:
    """Return the logits of all rows: two chunks with the target's features, then draft steps of one row each."""
    table = table_of(device)
    memory, groups = table.memory, state_groups(head.spec, page_tokens=4)
    arena, pages, found = Arena(groups, [8], [0], memory), np.array([[3, 1, 6, 2]]), []
    features, start = None, 0
    for count in (7, ROWS - 7, *(1,) * STEPS):
        slices = Slices.plain(np.array([0]), np.array([start]), np.array([count]))
        layouts = [build_layout(slices, pages, g.page_tokens, g.lookback, memory) for g in groups]
        tokens = memory.integers(np.array(given.tokens[start : start + count]))
        positions = memory.integers(slices.positions())
        step = PagedStep(tokens, positions, slices, layouts, arena, DraftInputs(1, 0, table), table)
        if start < ROWS:
            parts = [x[start : start + count].float().numpy() for x in given.streams]
            features = head.fuse([memory.put(x, "float32", "float32") for x in parts])
        features = head.feature(head.forward(step, features))
        found.append(memory.get(head.logits(features)))
        features = features[-1:]  # type: ignore[index]
        start += count
    return np.concatenate(found)


def medusa_logits(head: MedusaHead, hidden: torch.Tensor, device: str) -> list[np.ndarray]:
    memory = table_of(device).memory
    return [memory.get(x) for x in head.logits(memory.put(hidden.float().numpy(), "float32", "float32"))]


def all_logits(head: AnyHead, given: Given, device: str) -> np.ndarray:
    if isinstance(head, MedusaHead):
        return np.stack(medusa_logits(head, given.streams[0], device))
    return paged(head, given, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_definition(name: str, device: str, tmp_path: Path) -> None:
    case = CASES[name]
    tensors, given = heads.write(case, tmp_path), given_to(case)
    file = open_head(tmp_path, TARGET)
    assert file.format == case.format
    assert file.spec.aux(6) == (case.aux or ())
    head = built(file, device)
    found = all_logits(head, given, device)
    if isinstance(head, MedusaHead):
        wanted = torch.stack(case.define(tensors, case.config, given.streams[0])).numpy()
    else:
        wanted = case.define(tensors, case.config, given).numpy()
        assert np.abs(whole(head, given, device) - wanted[:ROWS]).max() < TOLERANCE
    assert 0.5 < float(wanted.std()) < 5.0
    assert np.abs(found - wanted).max() < TOLERANCE
    ids = np.arange(file.spec.draft_vocab_size)
    theirs = ids if file.vocabulary is None else file.vocabulary
    to_target = table_of(device).memory.get(head.to_target(table_of(device).memory.integers(ids)))
    assert np.array_equal(to_target, theirs)
    if file.vocabulary is not None:
        own = tensors["d2t"].numpy() + ids if "d2t" in tensors else tensors["medusa_heads.token_map"].numpy()
        assert np.array_equal(theirs, own)
        assert len(theirs) == DRAFT_VOCAB


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_every_tensor_matters(name: str, tmp_path: Path) -> None:
    """A tensor that a reader or a module ignored would not change the logits."""
    case = CASES[name]
    tensors, given = heads.draw(case), given_to(case)
    heads.write(case, tmp_path / "0", tensors)
    logits = all_logits if isinstance(built(read_head(tmp_path / "0"), "cpu"), MedusaHead) else whole
    plain = logits(built(read_head(tmp_path / "0"), "cpu"), given, "cpu")
    for i, (key, x) in enumerate(tensors.items(), 1):
        if x.dtype != np.float32:
            continue
        heads.write(case, tmp_path / str(i), {**tensors, key: x * 1.2 + 0.05})
        changed = logits(built(read_head(tmp_path / str(i)), "cpu"), given, "cpu")
        assert np.abs(changed - plain).max() > 10 * TOLERANCE, key


# Formats that hold a head besides the one that it is stored in.
OTHERS = {"medusa": "vllm-medusa", "eagle3": "speculators", "eagle3_whole": "speculators"}


@pytest.mark.parametrize("name", CASES)
def test_a_written_head_is_read_back(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    heads.write(case, tmp_path / "given")
    file, given = read_head(tmp_path / "given"), given_to(case)
    plain = all_logits(built(file, "cpu"), given, "cpu")
    path = tmp_path / "given"
    for format in (case.format, OTHERS.get(name, case.format), case.format):
        path, before = tmp_path / f"{path.name}-{format}", read_head(path)
        write_head(path, before, format)
        found = read_head(path)
        assert found.spec == before.spec
        assert found.format == format
        for weight, tensor in before.weights.items():
            assert np.array_equal(found.weights[weight].data, tensor.data), weight
        assert np.array_equal(all_logits(built(found, "cpu"), given, "cpu"), plain)
    assert not list(path.parent.rglob(".unfinished"))


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3"])
def test_types_of_two_bytes_stay(name: str, tmp_path: Path) -> None:
    heads.write(CASES[name], tmp_path / "wide")
    file = read_head(tmp_path / "wide")
    halves = {n: replace(w, data=(w.data.view(np.uint32) >> 16).astype(np.uint16), dtype="bfloat16")
              for n, w in file.weights.items()}  # fmt: skip
    write_head(tmp_path / "halves", replace(file, weights=halves), file.format)
    found = read_head(tmp_path / "halves")
    assert all(w.dtype == "bfloat16" and np.array_equal(w.data, halves[n].data) for n, w in found.weights.items())


def test_heads_that_a_format_cannot_hold_are_refused(tmp_path: Path) -> None:
    for name, case in CASES.items():
        heads.write(case, tmp_path / name)
    for name, format, why in (
        ("eagle", "eagle3", "this one is eagle"),
        ("eagle3", "medusa", "this one is eagle3"),
        ("speculators", "eagle3", "no head with fc_norm"),
        ("vllm_medusa", "medusa", "no head with a reduced vocabulary"),
        ("vllm_medusa_shared", "medusa", "one output matrix"),
        ("eagle", "gguf", "not known; known are speculators"),
    ):
        with pytest.raises(ValueError, match=why):
            write_head(tmp_path / "out", read_head(tmp_path / name), format)
        assert not (tmp_path / "out").exists()
    assert set(FORMATS) == {case.format for case in CASES.values()}


@pytest.mark.parametrize("name", ["medusa", "eagle", "eagle3", "speculators_qwen3"])
def test_every_weight_has_a_gradient(name: str, tmp_path: Path) -> None:
    """Heads are trained through the modules that serve them, over several draft steps."""
    case, table = CASES[name], table_of("reference")
    heads.write(case, tmp_path)
    file, given = read_head(tmp_path), given_to(case)
    weights = {n: torch.from_numpy(np.array(w.data)).requires_grad_() for n, w in file.weights.items()}
    head: Any = build_head(file.spec, weights, target("reference"), table, LENGTH, file.vocabulary)  # type: ignore[arg-type]
    if isinstance(head, MedusaHead):
        logits: Any = torch.stack(head.logits(given.streams[0].float()))  # type: ignore[arg-type]
    else:
        step = DenseStep.build([given.tokens[:ROWS]], table.memory)
        features = head.feature(head.forward(step, head.fuse([x.float() for x in given.streams])))
        logits = head.logits(head.feature(head.forward(step, features)))
    logits.pow(2).mean().backward()
    assert all(w.grad is not None and float(w.grad.abs().max()) > 0 for w in weights.values())
