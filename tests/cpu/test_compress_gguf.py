"""`ridgeline quantize` to GGUF files: types of llama.cpp, codes of other schemes, importance, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner

from oracle.build import make_model, redraw
from oracle.families import CASES
from oracle.gguf_models import case_of
from ridgeline import LLM
from ridgeline.cli.main import app
from ridgeline.compress import Options, quantize
from ridgeline.errors import RequestError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.gguf.blocks import TYPES
from ridgeline.load.gguf.codes import dequantize, unpack
from ridgeline.load.gguf.encode import quantize as encode
from ridgeline.load.gguf.layout import read_layout
from ridgeline.load.gguf.pack import pack_matrix
from ridgeline.load.gguf.stored import matrix_of
from ridgeline.load.packed import open_tensors
from ridgeline.load.stored import dequantized

TOKENS = [[5, 17, 30, 4, 23, 99]]
FEW = Options(sequences=8, length=48)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model with one token for each byte, of whose rows 256 divides all but those of `down`."""
    folder = tmp_path_factory.mktemp("model")
    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(alphabet[:3])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = make_model(
        CASES["llama_gqa"],
        vocab_size=len(alphabet),
        num_hidden_layers=2,
        intermediate_size=96,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    redraw(made, 3)
    made.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"line {i}: {i * i} steps and {i % 7} more." for i in range(60)), encoding="utf-8")
    return path


KINDS = {
    "q4_k": {"Q4_K", "Q5_0", "Q6_K", "F32"}, "q6_k": {"Q6_K", "Q8_0", "F32"}, "q8_0": {"Q8_0", "F32"},
    "q4_0": {"Q4_0", "F32"}, "f16": {"F16", "F32"}, "bf16": {"BF16", "F32"},
}  # fmt: skip


@pytest.mark.parametrize("scheme", KINDS)
def test_a_file_of_each_type(scheme: str, model: Path, tmp_path: Path) -> None:
    """The file has the numbers of `gguf`'s own dequantizer, and opens with its tokenizer and without any flag."""
    report = quantize(str(model), scheme, out=tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model.gguf", "quantization_report.json"]
    layout = read_layout(tmp_path / "out" / "model.gguf")
    assert {t.type.name for t in layout.tensors.values()} == KINDS[scheme]
    short = "layers.0.mlp.down.weight and 1 more are stored as"
    assert any(note.startswith(short) for note in report.notes) == (scheme in ("q4_k", "q6_k"))
    files = open_tensors(open_checkpoint(tmp_path / "out" / "model.gguf"))
    for tensor in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors:
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:  # rows are in another order there
            continue
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = files.read(tensor.name)
        wide = (found.data.astype(np.uint32) << 16).view(np.float32) if found.dtype == "bfloat16" else found.data
        np.testing.assert_array_equal(wide.astype(np.float32), wanted)
    llm = LLM(str(tmp_path / "out"), device="cpu")
    assert llm.generate("line 7")[0].outputs[0].token_ids
    off = np.abs(llm.logits(TOKENS)[0] - LLM(str(model), device="cpu").logits(TOKENS)[0]).max()
    assert 0 < off < {"f16": 1e-2, "bf16": 0.1, "q8_0": 0.3}.get(scheme, 4.0)


def test_codes_of_gptq_become_a_file(model: Path, text: Path, tmp_path: Path) -> None:
    """Symmetric codes in groups of 32 are Q4_0. All other matrices keep their type."""
    report = quantize(
        str(model), "gptq-int4", out=tmp_path / "out", data=[text], symmetric=True, format="gguf", options=FEW
    )
    assert report.comparison is not None and report.format == "int4-exact"
    layout = read_layout(tmp_path / "out" / "model.gguf")
    assert layout.tensors["blk.1.ffn_down.weight"].type.name == "Q4_0"
    assert layout.tensors["output.weight"].type.name == "F32"


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("qwen3_moe", "q4_0"), ("phi3", "q8_0"), ("gemma2_tied", "q8_0"), ("mamba_tied", "q4_0"), ("gpt2_tied", "bf16"),
     ("gpt_oss", "q8_0")],
)  # fmt: skip
def test_other_layouts_are_read_back(name: str, scheme: str, tmp_path: Path) -> None:
    """Stacks of experts, fused matrices, added norms, biases: the logits of what was written are compared each time.
    These models have no tokenizer, and a note says so."""
    case = case_of(name)
    made = make_model(case, **case.kwargs)
    redraw(made, 1)
    made.save_pretrained(tmp_path / "model")
    report = quantize(str(tmp_path / "model"), scheme, out=tmp_path / "out")
    assert "the file has no tokenizer" in report.notes
    kinds = {t.type.name for t in read_layout(tmp_path / "out" / "model.gguf").tensors.values()}
    assert scheme.upper() in kinds


def test_importance_lowers_the_weighted_error(model: Path, text: Path, tmp_path: Path) -> None:
    r = np.random.default_rng(0)
    rows = r.normal(size=(64, 256)).astype(np.float32)
    importance = (r.uniform(0.05, 1, 256) ** 4).astype(np.float32)
    for name in ("Q4_K", "Q6_K"):
        errors = []
        for given in (None, importance):
            off = dequantize(TYPES[name], encode(TYPES[name], rows, given)) - rows
            errors.append(float((np.square(off) * importance).sum()))
        assert errors[1] < 0.95 * errors[0]
    made = [
        (quantize(str(model), "q4_k", out=tmp_path / str(i), data=data, options=FEW), tmp_path / str(i) / "model.gguf")
        for i, data in enumerate(([], [text]))
    ]
    assert made[0][0].comparison is None and made[1][0].comparison is not None
    assert made[0][1].read_bytes() != made[1][1].read_bytes()


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q6_K"])
def test_codes_are_packed_as_they_were_read(name: str) -> None:
    kind = TYPES[name]
    rows = encode(kind, np.random.default_rng(1).normal(size=(6, 512)).astype(np.float32))
    matrix = matrix_of(kind, unpack(kind, rows))
    np.testing.assert_array_equal(pack_matrix(matrix), rows)
    np.testing.assert_array_equal(dequantized(matrix), dequantize(kind, rows))


def test_a_gguf_file_becomes_another_one(model: Path, tmp_path: Path) -> None:
    quantize(str(model), "f16", out=tmp_path / "wide")
    quantize(str(tmp_path / "wide"), "q8_0", out=tmp_path / "narrow")
    assert read_layout(tmp_path / "narrow" / "model.gguf").tensors["output.weight"].type.name == "Q8_0"
    refused: dict[str, dict[str, Any]] = {
        "is quantized already": {"model": "narrow", "scheme": "q4_k"},
        "the model is a GGUF file, and is written as gguf only": {"scheme": "rtn-int8", "format": "gptq"},
        "gguf cannot hold layers.0.mixer.q.weight in int8-exact": {"scheme": "rtn-int8"},
    }
    for text, given in refused.items():
        opened = str(tmp_path / given.pop("model", "wide"))
        with pytest.raises(RequestError, match=text):
            quantize(opened, out=tmp_path / "out", **given)


def test_commands_plan_for_a_file(model: Path, tmp_path: Path) -> None:
    """`plan` and `explain` take the types from the file; so does `inspect`."""
    quantize(str(model), "q8_0", out=tmp_path / "out")
    file = str(tmp_path / "out" / "model.gguf")
    plan = CliRunner().invoke(app, ["plan", file, "--prompt", "64", "--output", "16", "--json"])
    assert plan.exit_code == 0 and "int8-32-exact" in plan.stdout
    sizes = []
    for name in (file, str(model)):
        found = CliRunner().invoke(app, ["explain", name, "--json", "--max-model-len", "64"])
        sizes.append(json.loads(found.stdout)["memory"]["weights"])
    assert sizes[0] < 0.5 * sizes[1]
    shown = CliRunner().invoke(app, ["inspect", file]).stdout
    assert "int8-32-exact" in shown


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("q4_k", "--format", "gptq"), "gptq: q4_k is a type of GGUF files, and is written as gguf only"),
        (("q4_k", "--group", "64"), "q4_k is a type of GGUF files, which decides this; leave out --group"),
        (("rtn-int4", "--format", "gguf"), "awq"),
        (("rtn-int3", "--symmetric", "--format", "gguf"), "floats can"),
        (("rtn-int8", "--group", "32", "--activations", "int8", "--format", "gguf"), "exact activations only"),
        (("q4_1",), "is not known; schemes are such as awq-int4"),
    ],
)  # fmt: skip
def test_schemes_that_a_file_cannot_hold(arguments: tuple[str, ...], text: str, model: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["quantize", str(model), "--scheme", *arguments, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, RequestError) and text in str(result.exception)
    assert "\n" not in str(result.exception) and not list(tmp_path.iterdir())
