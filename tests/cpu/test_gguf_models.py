"""GGUF models: written, read by us and by transformers, cut into parts, and used by the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from oracle.build import oracle_logits
from oracle.case import Case, prompts
from oracle.gguf_models import LLAMA3, case_of, weights_of, write
from ridgeline import LLM, SamplingParams
from ridgeline.errors import CheckpointError, ConfigError
from ridgeline.load.checkpoint import open_checkpoint, read_config
from ridgeline.load.gguf.blocks import TYPES
from ridgeline.load.gguf.layout import read_layout
from ridgeline.load.gguf.stored import format_of_block
from ridgeline.load.gguf.write import choose_types, write_gguf
from ridgeline.load.hub import find_model
from ridgeline.load.packed import open_tensors
from ridgeline.load.weights import StoredWeights
from ridgeline.nn import Model
from ridgeline.ops.api import QuantizedMatrix
from ridgeline.ops.host.quant import rows
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.quant import has_layout

FAMILIES = (
    "llama_gqa", "llama_head_dim", "llama_biases", "llama_tied", "llama_linear", "llama_yarn", "mistral", "mixtral",
    "qwen2_tied", "qwen3", "qwen3_moe", "smollm3", "gemma2_tied", "gemma3", "phi3", "phi3_partial", "phi3_longrope",
    "olmo2", "olmo3", "granite", "granitemoe", "granitemoeshared", "glm4", "gpt_oss", "gpt2_tied", "mamba_tied",
)  # fmt: skip
# Cases that transformers reads from GGUF as they are: it ignores biases, windows and scalings of positions there.
READ_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama_gqa": {}, "llama_tied": {}, "mistral_full": {}, "qwen2_tied": {}, "mamba_tied": {},
    "qwen3": {"head_dim": 128}, "qwen3_moe": {"head_dim": 128, "moe_intermediate_size": 768},
    "gemma2_tied": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_comes_back_from_its_file(name: str, tmp_path: Path) -> None:
    write(case_of(name), tmp_path)
    before, after = open_checkpoint(tmp_path / "original"), open_checkpoint(tmp_path / "model.gguf")
    ours, theirs = weights_of(before), weights_of(after)
    assert set(ours) == set(theirs)
    for key, value in ours.items():
        # Adding 1 to a norm and taking the logarithm of a decay are rounded.
        close = 3e-7 if name.startswith(("gemma", "mamba")) else 0
        np.testing.assert_allclose(theirs[key].data, value.data, rtol=close, atol=close, err_msg=key)
    assert (after.spec.layers, after.config["dtype"]) == (before.spec.layers, "float32") or name in ROUNDED


# The numbers of these models are not all float32 numbers, so that their specs differ in the last digits.
ROUNDED = {"granite", "granitemoe", "granitemoeshared", "llama_yarn", "olmo3", "phi3_longrope"}


@pytest.mark.parametrize("name", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    case = case_of(name, **READ_BY_TRANSFORMERS[name])
    write(case, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    ours = LLM(str(tmp_path / "model.gguf"), max_model_len=case.max_model_len, kv_cache_dtype="float32").logits(
        prompts(case)
    )
    for got, wanted in zip(ours, oracle_logits(theirs, prompts(case)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_a_tied_matrix_of_codes_is_in_memory_once(kind: str, tmp_path: Path) -> None:
    """Rows of the embedding are read from the packed head, with the bits of numpy's, and steps are recorded."""
    case = case_of("llama_tied", hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
    write(case, tmp_path, types={"embed.weight": kind})
    llm = LLM(str(tmp_path / "model.gguf"), max_model_len=64, device="cpu", skip_tokenizer_init=True)
    model, size = llm.loaded.model, llm.loaded.spec.vocab_size
    ids = np.random.default_rng(0).integers(0, size, 257)
    coded = model.weights["embed.weight"]
    assert isinstance(coded, QuantizedMatrix)
    np.testing.assert_array_equal(model.lookup(ids), rows(coded, ids))
    assert not [a.shape for a in model.constants() if a.size >= size], "an array has all rows of the embedding"
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    stats = llm.stats()
    assert stats is not None and stats.unrecorded is None


def test_llama_3_scaling_is_recognized(tmp_path: Path) -> None:
    write(case_of("llama_llama3", rope_parameters=LLAMA3), tmp_path)
    before, after = open_checkpoint(tmp_path / "original"), open_checkpoint(tmp_path / "model.gguf")
    assert after.spec.layers == before.spec.layers
    assert after.config["rope_parameters"] == LLAMA3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama_llama3", "rope.scaling is Llama3Scaling"),  # another trained length than that of published models
        ("llama_yarn_mscale", "truncate is False, but would be True"),
        ("qwen2_window", "sliding_window"),
        ("olmo2_bias", "qkv_bias is True, but would be False"),
        ("gpt2_scaled", "mixer.scale"),
        ("glm", "cannot hold a glm model; it can hold: gemma2"),
        ("gpt_oss_plain", "without biases of attention"),
        ("gemma2", "output head of its own"),
    ],
)
def test_a_model_that_the_format_cannot_hold(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        write(case_of(name), tmp_path)
    assert "\n" not in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["original"]  # no partial file is left


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    write(
        case_of("llama_gqa", hidden_size=256, num_attention_heads=4, num_key_value_heads=2, intermediate_size=512),
        tmp_path,
        "Q4_K",
    )
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    layout = read_layout(tmp_path / "model.gguf")
    assert reader.get_field("general.architecture").contents() == "llama"
    assert reader.get_field("llama.attention.head_count_kv").contents() == 2
    assert [t.name for t in reader.tensors] == list(layout.tensors)
    for tensor in reader.tensors:
        ours = layout.tensors[tensor.name]
        assert ours.type.name == tensor.tensor_type.name and ours.shape == tuple(tensor.shape[::-1])
        assert (ours.start, ours.stop) == (tensor.data_offset, tensor.data_offset + tensor.n_bytes)
    kinds = {t.type.name for t in layout.tensors.values()}
    assert kinds == {"F32", "Q4_K", "Q6_K"} or kinds == {"F32", "Q4_K"}


def save(path: Path, tensors: dict[str, tuple[np.ndarray, str]], **options: Any) -> Path:
    """Write a tiny llama model with the `gguf` package. tensors: values and type; others are taken from a seed."""
    r = np.random.default_rng(3)
    writer = gguf.GGUFWriter(None if options else path, "llama", **options)
    for name, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 256), ("head_count", 4),
                        ("head_count_kv", 2), ("feed_forward_length", 256), ("vocab_size", 40)):  # fmt: skip
        getattr(writer, f"add_{name}")(value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("none")
    shapes = {"token_embd": (40, 256), "output_norm": (256,), "blk.0.attn_norm": (256,), "blk.0.ffn_norm": (256,),
              "blk.0.attn_q": (256, 256), "blk.0.attn_k": (128, 256), "blk.0.attn_v": (128, 256),
              "blk.0.attn_output": (256, 256), "blk.0.ffn_gate": (256, 256), "blk.0.ffn_up": (256, 256),
              "blk.0.ffn_down": (256, 256)}  # fmt: skip
    for name, shape in shapes.items():
        values, kind = tensors.get(name, (r.normal(size=shape).astype(np.float32) / 16, "F32"))
        given = {} if kind == "F32" else {"raw_dtype": gguf.GGMLQuantizationType[kind]}
        writer.add_tensor(f"{name}.weight", values, **given)
    if options:
        writer.write_header_to_file(path)
    else:
        writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [t.name for t in TYPES.values() if not t.is_float])
def test_quantized_rows_of_q_in_our_order(kind: str, tmp_path: Path) -> None:
    heads, half, columns = 4, 32, 256
    blocks = np.random.default_rng(5).integers(0, 100, (heads * 2 * half, TYPES[kind].row_bytes(columns)), np.uint8)
    path = save(tmp_path / "m.gguf", {"blk.0.attn_q": (blocks, kind)})
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    wanted = np.empty_like(values)
    for head in range(heads):  # llama.cpp's conversion has put row i and row i + half of a head next to each other
        at = head * 2 * half
        wanted[at : at + half] = values[at : at + 2 * half : 2]
        wanted[at + half : at + 2 * half] = values[at + 1 : at + 2 * half : 2]
    files = open_tensors(open_checkpoint(path))
    np.testing.assert_array_equal(files.read("blk.0.attn_q.weight").data, wanted)
    codes = files.codes("blk.0.attn_q.weight")
    np.testing.assert_array_equal(codes.values(), wanted)
    mapped = files.num_bytes() - wanted.nbytes - 128 * 256 * 4  # k is F32, but copied in another order of rows
    assert files.mapped_bytes() == mapped


def test_a_model_in_parts(tmp_path: Path) -> None:
    save(tmp_path / "part.gguf", {}, split_max_tensors=4)
    parts = sorted(p.name for p in tmp_path.iterdir())
    assert parts == ["part-00001-of-00003.gguf", "part-00002-of-00003.gguf", "part-00003-of-00003.gguf"]
    found = find_model(str(tmp_path))
    assert found.name == parts[0]
    whole = save(tmp_path.parent / f"{tmp_path.name}-whole.gguf", {})
    layout, other = read_layout(found), read_layout(whole)
    assert set(layout.tensors) == set(other.tensors) and len(layout.files) == 3
    ours, theirs = weights_of(open_checkpoint(found)), weights_of(open_checkpoint(whole))
    assert all(np.array_equal(ours[name].data, theirs[name].data) for name in theirs)
    with pytest.raises(CheckpointError, match="give the first part"):
        read_layout(tmp_path / parts[1])
    (tmp_path / parts[2]).rename(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match=r"part-00003-of-00003.gguf is missing"):
        read_layout(found)
    (tmp_path / parts[1]).rename(tmp_path / parts[2])
    (tmp_path / "other.gguf").rename(tmp_path / parts[1])
    with pytest.raises(CheckpointError, match="says that it is part 3, not part 2 of 3"):
        read_layout(found)


def test_which_file_a_folder_means(tmp_path: Path) -> None:
    save(tmp_path / "a.gguf", {})
    assert find_model(str(tmp_path)) == find_model(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    (tmp_path / "config.json").write_text("{}")  # as in folders on the hub
    assert find_model(str(tmp_path)) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"several GGUF files; give the path of one of them: a.gguf, b.gguf$"):
        find_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert find_model(str(tmp_path)) == tmp_path


def test_exact_values_in_16_bits_give_the_same_logits(tmp_path: Path) -> None:
    folder = find_model("pocket")
    checkpoint = open_checkpoint(folder)
    types, notes = choose_types(checkpoint.config, "BF16")
    assert not notes
    written = write_gguf(tmp_path / "p.gguf", checkpoint.config, weights_of(checkpoint), None, types,
                         checkpoint.sampling_defaults)  # fmt: skip
    assert written == ("the file has no tokenizer",)
    tokens = [[5, 17, 300, 4000, 23]]
    ours, theirs = LLM(str(tmp_path / "p.gguf")), LLM(str(folder))
    np.testing.assert_array_equal(ours.logits(tokens)[0], theirs.logits(tokens)[0])
    assert ours.checkpoint.sampling_defaults == theirs.checkpoint.sampling_defaults
    assert ours.checkpoint.eos_token_ids == theirs.checkpoint.eos_token_ids == (0,)
    assert read_config(tmp_path / "p.gguf")["dtype"] == "bfloat16"
    files = open_tensors(ours.checkpoint)
    assert files.mapped_bytes() == files.num_bytes()  # nothing is copied


CODES = {"Q8_0": "int8-32", "Q4_0": "int4", "Q4_K": "int4-32of256-min", "Q6_K": "int6-16of256"}


@pytest.mark.parametrize("kind", CODES)
def test_codes_are_multiplied_where_a_kernel_reads_them(kind: str, tmp_path: Path) -> None:
    """Logits are those of the dequantized matrices, and close to them where activations are rounded."""
    checkpoint = open_checkpoint(find_model("pocket"))
    types, _ = choose_types(checkpoint.config, kind)
    write_gguf(tmp_path / "p.gguf", checkpoint.config, weights_of(checkpoint), None, types)
    tokens = [[5, 17, 300, 4000, 23]]
    ours = LLM(str(tmp_path / "p.gguf"), device="cpu", kv_cache_dtype="float32")
    formats = {format.name for format in ours.loaded.model.formats.formats}
    assert f"{CODES[kind]}-exact" in formats and not any("are dequantized" in note for note in ours.loaded.notes)
    opened, table = ours.checkpoint, ours.loaded.table
    names, files = opened.family.names, open_tensors(opened)
    wide = StoredWeights(opened.spec, names, files, table.memory, None, lambda done: None, keeps=lambda format: False)
    wanted: Any = Model(opened.spec, wide, table, 64)(DenseStep.build(tokens, table.memory))
    np.testing.assert_allclose(ours.logits(tokens)[0], wanted, rtol=0, atol=1e-4)
    rounded = LLM(str(tmp_path / "p.gguf"), device="cpu", activations="int8", kv_cache_dtype="float32").logits(tokens)[
        0
    ]
    assert 0 < np.abs(rounded - wanted).max() < 0.2 * np.std(wanted)


def test_types_that_kernels_read() -> None:
    types = [t for t in TYPES.values() if not t.is_float]
    read = {t.name for t in types if has_layout(format_of_block(t))}
    assert {t.name for t in types} - read == {"Q2_K", "Q3_K", "IQ4_XS", "MXFP4"}


def test_rows_that_blocks_do_not_divide_take_other_types() -> None:
    config = json.loads((find_model("pocket") / "config.json").read_text())
    types, notes = choose_types(config, "Q4_K")
    assert types["embed.weight"] == "Q6_K" and types["layers.0.mlp.up.weight"] == "Q4_K"
    assert types["layers.0.mlp.down.weight"] == "Q5_0"
    assert notes == ("layers.0.mlp.down.weight and 3 more are stored as Q5_0, because Q4_K cannot hold rows of 704",)
    assert choose_types(config, "Q6_K")[0]["layers.0.mlp.down.weight"] == "Q8_0"
    odd = {**config, "intermediate_size": 700}
    assert choose_types(odd, "Q8_0")[0]["layers.0.mlp.down.weight"] == "F16"
    with pytest.raises(ConfigError, match="'Q3_K' is not a type that can be written; take one of F32, F16"):
        choose_types(config, "Q3_K")


def test_windows_that_llama_cpp_ignores_are_named(tmp_path: Path) -> None:
    case: Case = case_of("mistral")
    write(case, tmp_path)
    checkpoint = open_checkpoint(tmp_path / "original")
    notes = write_gguf(tmp_path / "x.gguf", checkpoint.config, weights_of(checkpoint), None, {})
    assert notes[1] == "llama.cpp ignores the sliding window of 24 tokens, so that its answers to longer texts differ"
