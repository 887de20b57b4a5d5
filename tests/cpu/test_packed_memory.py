"""The bytes that are predicted for quantized checkpoints against those that are allocated, for every format."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from oracle.gguf_models import case_of
from oracle.gguf_models import write as write_gguf
from oracle.packed import packed_folder, plain_model
from oracle.packers import RECIPES, write
from ridgeline.catalog.machines import hardware
from ridgeline.cli.flags.known import find_known, precision_of
from ridgeline.cli.main import app
from ridgeline.compress import Options, quantize
from ridgeline.ops.arrays import QuantizedMatrix
from ridgeline.plan.changes import change
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.quant import FORMATS
from shares import daily

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1]]
GGUF = ("F16", "BF16", "Q4_0", "Q8_0", "Q4_K", "Q6_K")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the matrices that kernels pack during a test."""
    kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
    from ridgeline.ops.cpu import coded, matrices

    found: list[Any] = []

    def record(*args: Any, **options: Any) -> Any:
        found.append(kernels.Matrix(*args, **options))
        return found[-1]

    for module in (coded, matrices):
        monkeypatch.setattr(module, "Matrix", record)
    return found


def allocated(loaded: LoadedModel, made: list[Any]) -> int:
    """Return the bytes of the kernels' matrices and of all arrays that the model keeps beside them."""
    loaded.model(DenseStep.build(PROMPTS, loaded.table.memory))  # some matrices are made at their first use
    arrays = {id(a): a for name in loaded.model.weights for a in kept(loaded, name)}
    return sum(matrix.nbytes for matrix in made) + sum(a.nbytes for a in arrays.values())


def kept(loaded: LoadedModel, name: str) -> list[Any]:
    """Return the arrays of a weight that no kernel packs: vectors, tables, and matrices of each head."""
    weight = next(w for w in loaded.spec.weights() if w.name == name)
    is_table = "embed" in name
    if weight.is_matrix and not is_table and (len(weight.shape) == 2 or ".experts." in name):
        return []
    found: Any = loaded.model.weights[name]
    return list(found.arrays) if isinstance(found, QuantizedMatrix) else [np.asarray(found)]


def predicted(model: str) -> tuple[float, int, int]:
    """Return the bytes of the weights that `plan` prints, those of `inspect`, and the sum over its matrices."""
    machine = hardware("cpu-laptop")
    known = find_known(model)
    planner = Planner(Deployment(known.spec, machine, precision_of(known, machine)))
    said = json.loads(CliRunner().invoke(app, ["inspect", model, "--json"]).output)
    vectors = sum(4 * w.num_params for w in known.spec.weights() if not w.is_matrix)
    return planner.memory.weight_bytes, said["weight_bytes"], vectors + sum(m["num_bytes"] for m in said["matrices"])


DAILY = {"awq", "gptq-order", "gptq-8", "packed-3-asym", "packed-6", "int8", "fp8-channel", "nvfp4", "bnb-int8", "nf4"}


@pytest.mark.parametrize("name", daily(RECIPES, DAILY, slow=False))
def test_packed_checkpoints(name: str, made: list[Any], tmp_path: Path) -> None:
    folder = str(packed_folder(name, tmp_path))
    loaded = load_model(folder, LoadOptions(device="cpu"))
    assert loaded.weight_bytes == allocated(loaded, made)
    assert predicted(folder) == (loaded.weight_bytes,) * 3


@pytest.mark.parametrize(
    ("name", "family"),
    [("nf4", "llama_tied"), ("packed-2", "llama_gqa"), ("awq", "llama_tied"), ("fp8-block", "deepseek_v3"),
     ("packed-4-asym", "mixtral")],
)  # fmt: skip
def test_tables_and_heads_of_16_bits_beside_matrices_of_float32(
    name: str, family: str, made: list[Any], tmp_path: Path
) -> None:
    """Matrices without a kernel become float32, while the embedding and the head keep the type of the file."""
    folder = packed_folder(name, tmp_path, family)
    tensors = load_file(folder / "model.safetensors")
    for key in tensors:
        is_table = key.endswith(("embed_tokens.weight", "lm_head.weight", "norm.weight", "gate.weight"))
        if is_table and tensors[key].dtype == torch.float32:
            tensors[key] = tensors[key].bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    loaded = load_model(str(folder), LoadOptions(device="cpu"))
    assert loaded.weight_bytes == allocated(loaded, made)
    assert predicted(str(folder))[:2] == (loaded.weight_bytes,) * 2


# Matrices of bfloat16 among those of float32 that kernels pack as one: attention, gates, experts, latents, mixers.
MIXED = [
    ("llama_gqa", r"k_proj|gate_proj"), ("qwen3_next", r"in_proj_ba|v_proj|gate_proj|shared_expert_gate"),
    ("deepseek_v2", r"kv_a_proj|up_proj"), ("mixtral", r"v_proj|w3"), ("lfm2_moe", r"v_proj|w1"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "pattern"), MIXED)
def test_matrices_of_two_types_that_are_packed_as_one(
    family: str, pattern: str, made: list[Any], tmp_path: Path
) -> None:
    _, source = plain_model(family)
    kept = re.compile(r"^(?!.*(o_proj|down_proj|out_proj))")
    write(replace(RECIPES["packed-4"], kept=kept), source, tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    for key, value in tensors.items():
        if re.search(pattern, key) and value.ndim >= 2 and value.dtype == torch.float32:
            tensors[key] = value.bfloat16()
    save_file(tensors, tmp_path / "m" / "model.safetensors", {"format": "pt"})
    loaded = load_model(str(tmp_path / "m"), LoadOptions(device="cpu"))
    assert {"float32", "bfloat16"} == {loaded.dtype, *loaded.dtypes.values()}
    assert loaded.weight_bytes == allocated(loaded, made)
    said = predicted(str(tmp_path / "m"))
    assert set(said[:2]) == {loaded.weight_bytes}
    assert said[2] == loaded.weight_bytes or family == "deepseek_v2"  # which has a second form of kv_b


@pytest.mark.parametrize("weights", ["float32", *(name for name in FORMATS if name != "auto"), "int4-128-asym-exact"])
def test_rounding_at_load(weights: str, made: list[Any], tmp_path: Path) -> None:
    _, source = plain_model("llama_gqa")
    loaded = load_model(str(source), LoadOptions(device="cpu", weights="auto" if weights == "float32" else weights))
    assert loaded.weight_bytes == allocated(loaded, made)
    machine, known = hardware("cpu-laptop"), find_known(str(source))
    planner = Planner(Deployment(known.spec, machine, precision_of(known, machine, weights=weights)))
    assert planner.memory.weight_bytes == loaded.weight_bytes


def test_a_scheme_costs_what_its_quantized_folder_costs(tmp_path: Path) -> None:
    """`plan MODEL weights=gptq-int3` counts the bytes of the folder that `quantize` writes."""
    _, source = plain_model("llama_gqa", (("intermediate_size", 96),))
    quantize(str(source), "rtn-int3", out=tmp_path / "out", options=Options(speed=False))
    loaded = load_model(str(tmp_path / "out"), LoadOptions(device="cpu"))
    machine, known = hardware("cpu-laptop"), find_known(str(source))
    before = Deployment(known.spec, machine, precision_of(known, machine))
    for name in ("gptq-int3", "awq-int3-32"):
        after = change(before, f"weights={name}").deployment
        assert Planner(after).memory.weight_bytes == loaded.weight_bytes


@pytest.mark.parametrize("kind", GGUF)
def test_gguf_files(kind: str, made: list[Any], tmp_path: Path) -> None:
    write_gguf(case_of("llama_gqa"), tmp_path, kind)
    file = str(tmp_path / "model.gguf")
    loaded = load_model(file, LoadOptions(device="cpu"))
    assert loaded.weight_bytes == allocated(loaded, made)
    assert predicted(file) == (loaded.weight_bytes,) * 3
