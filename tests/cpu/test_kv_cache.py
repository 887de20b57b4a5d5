"""The type of attention's state as a setting: which type is chosen, the size of pages, and that answers depend on it
alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from oracle.build import build
from oracle.families import CASES
from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import main
from ridgeline.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.runtime.load import LoadedModel
from ridgeline.settings import EngineOptions, choose_storage, resolve
from ridgeline.spec.groups import state_groups
from ridgeline.spec.storage import STORAGES, has_rows, state_bytes
from ridgeline.verify import verify
from ridgeline.verify.report import Report

LOSSY = ("bfloat16", "float16", "int8", "fp8")
MODELS = ("llama", "gpt_oss", "deepseek_v2")  # grouped heads; windows and sinks; latents
GIB = 1 << 30


@cache
def loaded(name: str, device: str = "cpu") -> LoadedModel:
    with TemporaryDirectory() as folder:
        build(CASES[name], folder)
        return LLM(folder, max_model_len=CASES[name].max_model_len, cache="off", device=device).loaded


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def nightly(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.nightly)


def wrong(report: Report) -> list[str]:
    return [f"{r.case.axis} {r.case.value}: {r.verdict} {r.error} {r.missing}" for r in report.results
            if r.verdict not in ("equal", "near tie", "not run")]  # fmt: skip


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "device"),
    [
        ("gpt_oss", "int8", "cpu"), slow("llama", "bfloat16", "cpu"), slow("deepseek_v2", "int8", "cpu"),
        slow("llama", "float16", "cpu"), nightly("llama", "int8", "cpu"), nightly("gpt_oss", "bfloat16", "cpu"),
        nightly("gpt_oss", "float16", "cpu"), nightly("deepseek_v2", "bfloat16", "cpu"),
        nightly("deepseek_v2", "float16", "cpu"), nightly("llama", "int8", "reference"),
        nightly("gpt_oss", "bfloat16", "reference"), nightly("deepseek_v2", "int8", "reference"),
        slow("deepseek_v2", "fp8", "cpu"), nightly("gpt_oss", "fp8", "cpu"), nightly("llama", "fp8", "cpu"),
        nightly("gpt_oss", "fp8", "reference"), nightly("deepseek_v2", "fp8", "reference"),
    ],
)  # fmt: skip
def test_the_matrix_holds_in_every_type(name: str, dtype: str, device: str) -> None:
    model = replace(loaded(name, device), storage=STORAGES[dtype])
    report = verify(model, quick=True, new_tokens=6)
    assert not wrong(report)
    assert report.greedy.total and report.sampled.total


@pytest.mark.parametrize("dtype", LOSSY)
def test_with_and_without_a_cache_the_logits_are_the_same_to_the_bit(dtype: str) -> None:
    """The dense pass rounds keys and values as pages do, with the same kernels."""
    found = []
    with TemporaryDirectory() as folder:
        build(CASES["llama"], folder)
        for kv_cache_dtype, cache_mode in ((dtype, "on"), (dtype, "off"), ("auto", "on")):
            llm = LLM(folder, device="cpu", kv_cache_dtype=kv_cache_dtype, cache=cache_mode)  # type: ignore[arg-type]
            prompt = {"prompt_token_ids": [3 + i % 40 for i in range(50)]}
            params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
            (answer,) = llm.generate([prompt], params)  # type: ignore[list-item]
            found.append([entry.top for entry in answer.outputs[0].logprobs or ()])
    assert found[0] == found[1] != found[2]


def test_a_wrong_page_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels read page tables, so verification must find a table with a wrong page."""
    attention = pytest.importorskip("ridgeline.ops.cpu.attention")
    page_tables = attention.page_tables

    def mistaken(layout: Any) -> Any:
        starts, lengths, tables = page_tables(layout)
        tables = tables.copy()
        tables[:, 1] = tables[:, 0]
        return starts, lengths, tables

    model = replace(loaded("llama"), storage=STORAGES["int8"])
    monkeypatch.setattr(attention, "page_tables", mistaken)
    assert wrong(verify(model, quick=True, new_tokens=2))


# ---- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*MODELS, "jamba", "mamba"])
@pytest.mark.parametrize("page_tokens", [1, 4, 16, 64])
def test_parts_fill_a_page_and_do_not_overlap(name: str, page_tokens: int) -> None:
    spec = loaded(name).spec
    for storage in STORAGES.values():
        for group in state_groups(spec, page_tokens=page_tokens, storage=storage):
            tokens = 1 if group.snapshot else page_tokens
            ends = [0]
            for slot in group.slots:
                for part in slot.parts:
                    assert part.offset % 4 == 0 and part.dtype == ("float32" if group.snapshot else storage.dtype)
                    assert 0 <= part.offset - ends[-1] < 4
                    ends.append(part.offset + tokens * int(np.prod(part.shape)) * STORAGES[part.dtype].element_bytes)
            assert 0 <= group.page_bytes - ends[-1] < 4
            assert all(a.offset + a.bytes == b.offset for a, b in pairwise(group.slots))
            mixers = [spec.layers[slot.layer].mixer for slot in group.slots]
            needed = sum(state_bytes(m.state(), storage, 1) for m in mixers if m)
            assert tokens * needed <= group.page_bytes < tokens * needed + 8 * len(group.slots)


def config(model: LoadedModel, dtype: str, **options: int) -> Any:
    return resolve(
        model.spec, 100, EngineOptions(**options), free_bytes=GIB, fixed_len=True, kv_cache_dtype=dtype,
        float_bytes=model.table.memory.float_bytes,
    )  # fmt: skip


def test_the_chosen_type_and_its_reason() -> None:
    model = loaded("llama")
    assert (config(model, "auto").kv_cache_dtype, config(model, "int8").kv_cache_dtype) == ("float32", "int8")
    assert "stored as computed" in config(model, "auto").reasons["kv_cache_dtype"]
    assert config(model, "int8").reasons["kv_cache_dtype"] == "as given"
    assert "without effect" in config(loaded("mamba"), "int8").reasons["kv_cache_dtype"]
    assert not has_rows(loaded("mamba").spec)
    with pytest.raises(RequestError, match=r"fp4.*known are auto, float32, bfloat16, float16, int8, fp8"):
        choose_storage("fp4", "float32")


@pytest.mark.parametrize(
    ("dtype", "weights", "wanted"),
    [("float32", "auto", "float32"), ("bfloat16", "auto", "float16"), ("float16", "auto", "float16"),
     ("float32", "int8", "float16"), ("bfloat16", "int4", "float16")],
)  # fmt: skip
def test_narrow_weights_have_narrow_state(dtype: str, weights: str, wanted: str, tmp_path: Path, run: Run) -> None:
    """The engine, naive sampling, `explain` and `inspect` choose one type; recurrent state stays in float32."""
    build(CASES["jamba"], tmp_path)
    llm = LLM(str(tmp_path), device="cpu", dtype=dtype, weights=weights, load_format="dummy", skip_tokenizer_init=True)
    assert llm.config is not None and (llm.config.kv_cache_dtype, llm.loaded.storage.dtype) == (wanted, wanted)
    found = {part.dtype for group in llm.config.groups if group.snapshot for slot in group.slots for part in slot.parts}
    assert found == {"float32"}
    flags = ("--dtype", dtype, "--weights", weights)
    settings = {s["name"]: s for s in json.loads(run("explain", str(tmp_path), *flags, "--json")[0])["settings"]}
    assert settings["kv_cache_dtype"]["value"] == wanted
    kind = weights if weights != "auto" else dtype
    assert ("stored as computed" if wanted == "float32" else kind) in settings["kv_cache_dtype"]["reason"]
    assert json.loads(run("inspect", str(tmp_path), *flags, "--json")[0])["state_dtype"] == wanted
    assert not [note for note in llm.loaded.notes if "KL" in note and "state" in note]


def test_narrow_state_makes_more_pages() -> None:
    model, spec = loaded("llama"), loaded("llama").spec
    pages = {dtype: config(model, dtype, kv_cache_memory_bytes=1 << 20).num_pages[0] for dtype in STORAGES}
    size = {d: state_groups(spec, page_tokens=16, storage=s)[0].page_bytes for d, s in STORAGES.items()}
    assert size["float32"] == 2 * size["bfloat16"] == 2 * size["float16"]
    assert size["int8"] < 0.4 * size["float32"] and size["fp8"] == size["float32"] // 4
    assert pages["int8"] > 2.4 * pages["float32"] and pages["bfloat16"] >= 2 * pages["float32"] - 2


def test_too_little_memory_names_narrow_state() -> None:
    spec = loaded("llama").spec
    whole = 100 * sum(state_bytes(layer.mixer.state(), STORAGES["float32"], 1) for layer in spec.layers if layer.mixer)
    with pytest.raises(RequestError, match="--kv-cache-dtype to float16"):
        config(loaded("llama"), "auto", kv_cache_memory_bytes=int(0.7 * whole), block_size=4)


def test_pages_of_one_type_are_no_prefix_of_another() -> None:
    model = loaded("llama")
    roots = {Engine(model, config(model, dtype))._root("salt") for dtype in STORAGES}
    assert len(roots) == len(STORAGES)


# ---- notes -----------------------------------------------------------------------------------------------------------


Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command and return its stdout and stderr."""

    def call(*arguments: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["ridgeline", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        assert not caught.value.code
        captured = capsys.readouterr()
        return captured.out, captured.err

    return call


def test_the_price_is_measured_once_and_printed(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # another test may have measured it
    arguments = ("generate", "--model", "pocket", "--max-tokens", "2", "--kv-cache-dtype", "int8", "-v", "Once")
    said = [run(*arguments)[1] for _ in range(2)]
    assert "measuring the accuracy cost" in said[0] and "measuring the accuracy cost" not in said[1]
    for text in said:
        assert "state in int8: KL to float32 state is" in text and "tokens of a sample text" in text
        assert re.search(r"kv_cache_dtype +int8 +as given", text)


def test_inspect_counts_by_the_type(run: Run, tmp_path: Path) -> None:
    build(CASES["llama"], tmp_path)
    for dtype, name in (("auto", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8"), ("fp8", "fp8")):
        out, _ = run("inspect", str(tmp_path), "--kv-cache-dtype", dtype)
        assert f"per token in {name}" in next(line for line in out.splitlines() if line.startswith("state"))
