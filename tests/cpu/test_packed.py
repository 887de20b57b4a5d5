"""Readers of quantized checkpoints, against formats packed number by number, and against transformers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from oracle import packers
from oracle.packed import ROUND, TOLERANCE, error, host_table, ours, plain_model, theirs
from oracle.packers import RECIPES, Tensors, awq_words, compressed, ct_packed, gptq, write
from ridgeline.archs import quantization_of
from ridgeline.errors import CheckpointError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.packed import open_tensors
from ridgeline.load.packed.bits import pack, unpack, words
from ridgeline.load.stored import dequantized
from ridgeline.load.weights import StoredWeights
from ridgeline.ops import open_table
from ridgeline.ops.arrays import QuantizedMatrix, QuantizedStack
from ridgeline.spec.quant import PLAIN, Format, FormatTable

WIDTH = {"hidden_size": 64, "intermediate_size": 88}


@pytest.mark.parametrize("bits", range(1, 9))
def test_numbers_are_packed_into_bits_without_gaps(bits: int) -> None:
    rng = np.random.default_rng(bits)
    for count in (1, 10, 31, 32, 33, 100):
        numbers = rng.integers(0, 1 << bits, (3, count)).astype(np.uint8)
        wanted = np.stack([packers.bit_stream(row, bits) for row in numbers])
        found = pack(numbers, bits)
        assert found.shape == (3, words(count, bits))
        np.testing.assert_array_equal(found, wanted)
        np.testing.assert_array_equal(unpack(found, bits, count), numbers)


def folder_of(tmp_path: Path, recipe: packers.Recipe, columns: int = 96, rows: int = 64) -> tuple[Path, Tensors]:
    """Write a llama with one matrix that is packed, and return its folder and the dequantized tensors."""
    source = tmp_path / "plain"
    source.mkdir()
    weight = torch.randn((rows, columns), generator=torch.Generator().manual_seed(1))
    save_file({"a.up_proj.weight": weight, "norm.weight": torch.ones(3)}, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path / "packed", write(recipe, source, tmp_path / "packed")


def stored(folder: Path) -> Any:
    """Open the tensors of a folder whose config is not that of a model."""
    from ridgeline.load.packed import READERS, PackedFiles
    from ridgeline.load.safetensors import TensorFiles

    scheme = quantization_of(json.loads((folder / "config.json").read_text()))
    assert scheme is not None
    files = TensorFiles(folder)
    return PackedFiles(files, READERS[type(scheme)](scheme, files))


@pytest.mark.parametrize("name", RECIPES)
def test_every_format_gives_the_matrix_that_was_packed(name: str, tmp_path: Path) -> None:
    folder, dense = folder_of(tmp_path, RECIPES[name])
    files = stored(folder)
    assert sorted(files) == ["a.up_proj.weight", "norm.weight"]
    found = files.stored["a.up_proj.weight"]
    assert found.shape == (64, 96)
    matrix = found.read(0)
    assert matrix.format == found.format
    np.testing.assert_array_equal(dequantized(matrix), dense["a.up_proj.weight"].numpy())
    parts = [part.nbytes for part in matrix.arrays if part is not matrix.permutation]
    assert files.num_bytes() == 12 + sum(parts)
    assert files.mapped_bytes() == 12
    assert (matrix.permutation is not None) == ("order" in name)


ODD = {
    "awq": packers.awq(32), "gptq": gptq(4, 32, ordered=True), "gptq-8": gptq(8, 24, ordered=True),
    "packed": ct_packed(4, 32, symmetric=False), "packed-3": ct_packed(3, 0), "int8": packers.ct_int8(),
    "nf4": packers.bnb_nf4(nested=True), "nf4-128": packers.bnb_nf4(block=128), "fp8": packers.ct_fp8("block"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_a_last_group_may_be_shorter(name: str, tmp_path: Path) -> None:
    """Rows of 88 numbers are no multiple of a group. Blocks of nf4 then continue in the next row."""
    folder, dense = folder_of(tmp_path, ODD[name], columns=88)
    found = stored(folder).stored["a.up_proj.weight"].read(0)
    np.testing.assert_array_equal(dequantized(found), dense["a.up_proj.weight"].numpy())


# ---- whole models ------------------------------------------------------------------------------------------------

# A format, a family and its sizes. Between them: biases, tied heads, odd sizes, experts, cuts of fused matrices.
FAST = [
    ("awq", "qwen2_tied", {}), ("gptq-order", "phi3", {}), ("gptq-v1", "gpt2_tied", {}),
    ("packed-3", "gpt_neox", ROUND), ("packed-4-asym", "mixtral", {}), ("fp8-block", "phi3", {}),
    ("bnb-int8", "llama_biases", {}), ("int8", "gemma2_tied", {}),
]  # fmt: skip
LONG = [
    ("fp8-block", "deepseek_v3", {}), ("nf4-nested", "llama_tied", {}), ("nvfp4", "mixtral", ROUND),
    ("packed-8", "qwen3_next", {}), ("packed-order", "kimi_linear", {}), ("awq", "jamba", {}),
    ("bnb-int8", "mamba2", {}),
    ("int8-asym", "lfm2_moe", {}), ("nf4", "minimax", {}), ("gptq-8", "bamba", {}), ("packed-6", "qwen3_5_moe", {}),
    ("packed-4", "granitemoeshared", {}), ("fp8-channel", "nemotron_h", {}), ("fp8-static", "glm4", {}),
    ("modelopt-nvfp4", "llama_gqa", ROUND), ("mxfp4", "qwen3_moe", {**ROUND, "moe_intermediate_size": 64}),
    ("gptq-3-sym-order", "phi3", ROUND),
]  # fmt: skip
EVERY = [*FAST, *(pytest.param(*case, marks=pytest.mark.nightly) for case in LONG)]


@pytest.mark.parametrize(("recipe", "name", "sizes"), EVERY)
def test_the_logits_are_those_of_transformers(recipe: str, name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    largest = error(RECIPES[recipe], name, tmp_path, sizes)
    print(f"{recipe} {name}: largest error {largest:.1e}")
    assert largest < TOLERANCE


def test_numpy_gives_the_same_logits(tmp_path: Path) -> None:
    assert error(RECIPES["gptq-order"], "llama_gqa", tmp_path, {}, host_table()) < TOLERANCE


def nibbles_in_order(tensors: Tensors) -> None:
    """Put AWQ's numbers in plain order, as a reader would that does not know of AutoAWQ's order."""
    for name in [n for n in tensors if n.endswith("qweight")]:
        plain = np.stack([tensors[name].numpy().view(np.uint32) >> np.uint32(4 * i) & 15 for i in range(8)], -1)
        tensors[name] = awq_words(plain.reshape(plain.shape[0], -1))


def one_zero_point(tensors: Tensors) -> None:
    """Change one zero point of one group by one."""
    name = next(n for n in tensors if n.endswith("layers.1.mlp.up_proj.qzeros"))
    tensors[name][0, 0] ^= 1


def swapped_axis(tensors: Tensors) -> None:
    """Swap the axes of a square matrix of codes."""
    name = next(n for n in tensors if n.endswith("layers.1.self_attn.o_proj.weight"))
    tensors[name] = tensors[name].T.contiguous()


@pytest.mark.parametrize(
    ("recipe", "plant"), [("awq", nibbles_in_order), ("awq", one_zero_point), ("int8", swapped_axis)]
)
def test_a_planted_mistake_is_seen(recipe: str, plant: Any, tmp_path: Path) -> None:
    _, source = plain_model("llama")
    dense = write(RECIPES[recipe], source, tmp_path / "packed")
    wanted = theirs("llama", dense, tmp_path / "dense", {})
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    plant(tensors)
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    found = ours("llama", tmp_path / "packed")
    assert max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)) > 10 * TOLERANCE


CODES = re.compile(r"(qweight|weight_packed|weight)$")


def other_order(codes: torch.Tensor) -> torch.Tensor:
    """Swap the halves of each byte, or neighboring columns where a byte holds one number."""
    data = codes.numpy().view(np.uint8)
    return torch.from_numpy((data << 4 | data >> 4).view(codes.numpy().dtype).copy())


def other_axis(codes: torch.Tensor) -> torch.Tensor:
    return codes.reshape(64, -1).T.reshape(codes.shape).contiguous()


def one_more(zeros: torch.Tensor) -> torch.Tensor:
    return zeros + 1


PLANTED = [(CODES, other_order), (CODES, other_axis), (re.compile("qzeros|zero_point$"), one_more)]


@pytest.mark.parametrize("name", RECIPES)
def test_a_mistake_of_each_kind_is_seen_in_every_format(name: str, tmp_path: Path) -> None:
    """Bits in another order, a swapped axis and a zero point off by one change the matrix, or are refused."""
    folder, dense = folder_of(tmp_path, RECIPES[name], columns=96, rows=64)
    tensors = load_file(folder / "model.safetensors")
    for pattern, plant in PLANTED:
        wrong = dict(tensors)
        for key in [k for k in tensors if pattern.search(k) and k != "norm.weight"]:
            raw = tensors[key]
            is_fp8 = raw.dtype == torch.float8_e4m3fn
            planted = plant(raw.view(torch.uint8) if is_fp8 else raw)
            wrong[key] = planted.view(torch.float8_e4m3fn) if is_fp8 else planted
        if all(wrong[k] is tensors[k] for k in tensors):
            continue  # a format without zero points
        save_file(wrong, folder / "model.safetensors")
        try:
            found = dequantized(stored(folder).stored["a.up_proj.weight"].read(0))
        except CheckpointError:
            continue
        assert np.abs(found - dense["a.up_proj.weight"].numpy()).max() > 0.01


# ---- the parts of a model ----------------------------------------------------------------------------------------


def weights_of(folder: Path, activations: Any = None) -> StoredWeights:
    checkpoint = open_checkpoint(folder)
    files, memory = open_tensors(checkpoint), open_table("reference").memory
    return StoredWeights(checkpoint.spec, checkpoint.family.names, files, memory, None, lambda done: None, activations)


def test_formats_are_known_from_headers(tmp_path: Path) -> None:
    """The table names every matrix with codes, by our names; it is that of the matrices themselves."""
    _, source = plain_model("mixtral")
    write(RECIPES["packed-4-asym"], source, tmp_path / "p")
    weights = weights_of(tmp_path / "p")
    four = Format("int4", 32, offsets="zero_points")
    assert weights.formats.of(next(w for w in open_checkpoint(tmp_path / "p").spec.weights() if "q." in w.name)) == four
    for name, format in (weights.formats.by_name or {}).items():
        found: Any = weights[name]
        kinds = (
            {found.format} if isinstance(found, QuantizedMatrix) else {found[e].format for e in range(found.shape[0])}
        )
        assert kinds == {format}, name
    assert weights.formats.default == PLAIN
    assert FormatTable.from_json(weights.formats.to_json()) == weights.formats
    assert isinstance(weights["layers.0.mlp.experts.gate.weight"], QuantizedStack)
    assert not isinstance(weights["layers.0.mlp.router.weight"], QuantizedMatrix)


def test_cuts_of_blocks_that_do_not_follow_them(tmp_path: Path) -> None:
    """Queries of 64 rows end within a block of 24 rows: scales of their rows stay, but are no blocks any more."""
    _, source = plain_model("phi3")
    dense = write(packers.ct_fp8("block", (24, 16)), source, tmp_path / "p")
    weights, found = weights_of(tmp_path / "p"), []
    for part in "qkv":
        matrix: Any = weights[f"layers.0.mixer.{part}.weight"]
        assert matrix.format == (weights.formats.by_name or {})[f"layers.0.mixer.{part}.weight"]
        found.append(dequantized(open_table("cpu").memory.quantized(_on_host(matrix))))
    assert {f.rows for f in weights.formats.formats} >= {1, 24}
    np.testing.assert_array_equal(np.concatenate(found), dense["model.layers.0.self_attn.qkv_proj.weight"].numpy())


def _on_host(matrix: QuantizedMatrix) -> QuantizedMatrix:
    from dataclasses import replace

    return replace(matrix, codes=matrix.codes.numpy(), scales=matrix.scales.numpy())  # type: ignore[attr-defined]


def test_activations_are_the_checkpoints_or_the_users(tmp_path: Path) -> None:
    _, source = plain_model("llama")
    write(RECIPES["int8-static"], source, tmp_path / "p")
    name = "layers.0.mlp.up.weight"
    as_stored: Any = weights_of(tmp_path / "p")[name]
    assert (as_stored.format.name, as_stored.input_scale) == ("int8", pytest.approx(0.05))
    chosen = weights_of(tmp_path / "p", "exact")
    exact: Any = chosen[name]
    assert (exact.format.name, exact.input_scale) == ("int8-exact", None)
    assert (chosen.formats.by_name or {})[name] == exact.format


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def test_scales_of_the_kv_cache_are_kept(tmp_path: Path) -> None:
    _, source = plain_model("llama")
    names = [f"model.layers.{i}.self_attn.{part}_scale" for i in range(4) for part in "kv"]
    extra = {name: torch.tensor([0.5 + i]) for i, name in enumerate(names)}
    config = compressed("pack-quantized", packers.args(4, "int", "group", 32)) | {"kv_cache_scheme": KV}
    write(packers.Recipe(ct_packed().pack, config, extra), source, tmp_path / "p")
    weights = weights_of(tmp_path / "p")
    assert weights.kv_scales == {i: (0.5 + 2 * i, 1.5 + 2 * i) for i in range(4)}


def test_progress_adds_up(tmp_path: Path) -> None:
    _, source = plain_model("mixtral")
    write(RECIPES["awq"], source, tmp_path / "p")
    checkpoint = open_checkpoint(tmp_path / "p")
    files, done = open_tensors(checkpoint), []
    memory = open_table("reference").memory
    dict(StoredWeights(checkpoint.spec, checkpoint.family.names, files, memory, None, done.append))
    assert sum(done) == files.num_bytes()


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_a_config_may_be_in_a_file_beside(name: str, tmp_path: Path) -> None:
    recipe = {"hf_quant_config.json": "modelopt-fp8", "quantize_config.json": "gptq-v1", "quant_config.json": "awq"}[
        name
    ]
    _, source = plain_model("llama")
    write(RECIPES[recipe], source, tmp_path / "p")
    config = json.loads((tmp_path / "p" / "config.json").read_text())
    own = config.pop("quantization_config")
    (tmp_path / "p" / "config.json").write_text(json.dumps(config))
    if name == "hf_quant_config.json":
        own = {"producer": {"name": "modelopt", "version": "0.47"}, "quantization": {"quant_algo": "FP8"}}
    elif name == "quant_config.json":
        own = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (tmp_path / "p" / name).write_text(json.dumps(own))
    checkpoint = open_checkpoint(tmp_path / "p")
    assert checkpoint.quantization == quantization_of({**config, "quantization_config": RECIPES[recipe].config})
    assert len(open_tensors(checkpoint).stored) == 28


@pytest.mark.parametrize(("recipe", "is_noted"), [("fp8-dynamic", True), ("packed-4", False)])
def test_a_note_says_that_activations_are_not_rounded(recipe: str, is_noted: bool, tmp_path: Path) -> None:
    """Kernels multiply with floats where they cannot with codes; activations that the file rounds are exact then."""
    from ridgeline.runtime.load import LoadOptions, pass_model

    _, source = plain_model("llama")
    write(RECIPES[recipe], source, tmp_path / "p")
    notes = pass_model(str(tmp_path / "p"), LoadOptions(device="cpu")).notes
    assert any("activations are exact, which fp8-tensor-fp8 rounds (fp8)" in note for note in notes) == is_noted
