"""The commands that describe a model, on quantized folders and files of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from oracle.gguf_models import case_of
from oracle.gguf_models import write as write_gguf
from oracle.packed import packed_folder, plain_model
from ridgeline.cli.main import app
from ridgeline.spec.quant import format_of, has_layout
from shares import daily

# A kind of checkpoint -> the scheme of layer 1's q, and the format that the file has if no kernel multiplies with it.
SCHEMES = {
    "awq": ("int4-asym-exact", ""), "gptq-order": ("int4-asym-exact", ""), "packed-4": ("int4-exact", ""),
    "packed-6": ("float32", "int6-24-asym-exact"), "bnb-int8": ("float32", "int8-outliers"),
    "nf4": ("float32", "nf4-32"), "fp8-channel": ("float32", "fp8-fp8"),
    # Rows of 96 numbers are no multiple of 256, so that the file of Q4_K has Q5_0.
    "Q8_0": ("int8-32-exact", ""), "Q4_K": ("int5-exact", ""),
}  # fmt: skip


def run(*args: str) -> str:
    found = CliRunner().invoke(app, args)
    assert found.exit_code == 0, found.output
    return found.stdout  # notes are on stderr


def model_of(kind: str, folder: Path) -> str:
    """Write a tiny model of a kind, and return what users pass to a command."""
    if kind.startswith("Q"):
        write_gguf(case_of("llama_gqa"), folder, kind)
        return str(folder / "model.gguf")
    return str(packed_folder(kind, folder))


@pytest.mark.parametrize("kind", daily(SCHEMES, {"awq", "bnb-int8", "nf4", "Q8_0"}, slow=False))
def test_each_command_names_the_schemes(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(kind, tmp_path)
    found = {m["name"]: m for m in json.loads(run("inspect", model, "--json"))["matrices"]}
    one = found["layers.1.mixer.q.weight"]
    scheme, stored = SCHEMES[kind]
    assert (one["scheme"], one["stored"]) == (scheme, stored)
    assert one["num_bytes"] > 0 and one["bits"] == pytest.approx(8 * one["num_bytes"] / (96 * 96), rel=0.1)
    assert one["kernel"] == ("cpu" if scheme == "float32" or has_layout(format_of(scheme)) else "numpy")
    assert found["embed.weight"]["kernel"] == "rows"
    explained = json.loads(run("explain", model, "--json"))
    assert {m["name"]: m for m in explained["matrices"]} == found
    plan = json.loads(run("plan", model, "--hardware", "cpu-laptop", "--json"))
    total = sum(m["num_bytes"] for m in found.values())
    assert total < plan["memory"]["weight_bytes"] < total + 10_000
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("inspect", "explain"):
        lines = run(command, model).splitlines()
        assert any(scheme in line and "mixer.q" in line for line in lines)
        assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    assert "weights" in run("plan", model, "--hardware", "cpu-laptop")


def test_rounding_while_loading_is_described_too(tmp_path: Path) -> None:
    _, source = plain_model("llama_gqa")
    for command in ("inspect", "explain"):
        found = {m["name"]: m for m in json.loads(run(command, str(source), "--weights", "int4", "--json"))["matrices"]}
        assert found["layers.0.mlp.up.weight"]["scheme"] == found["head.weight"]["scheme"] == "int4"
        assert found["embed.weight"]["scheme"] == "float32"
    assert json.loads(run("inspect", str(source), "--json"))["matrices"] == []


def test_plan_takes_schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme costs what its format costs, the head stays as it is, and a line says how to get the folder."""
    monkeypatch.setenv("COLUMNS", "80")
    at = ("llama-3.1-8b", "--hardware", "h100", "--json")
    size = {
        name: json.loads(run("plan", *at, "--weights", name))["memory"]["weight_bytes"]
        for name in ("gptq-int3", "int3-asym-exact", "bf16", "awq-int4-128", "int4-128-asym-exact", "int4-128-asym")
    }
    head = 128_256 * 4096
    assert size["gptq-int3"] - size["int3-asym-exact"] == pytest.approx(head * (2 - (3 + 19 / 32) / 8))
    assert size["awq-int4-128"] > size["int4-128-asym-exact"] == size["int4-128-asym"]
    changed = json.loads(run("plan", *at[:3], "weights=gptq-int3", "--json"))
    assert changed["memory"]["weight_bytes"] == size["gptq-int3"]
    said = " ".join(run("plan", *at[:3], "--weights", "gptq-int3").split())
    assert "gptq-int3 needs a quantized folder: write one with `ridgeline quantize MODEL --scheme gptq-int3" in said
    assert "quantized folder" not in run("plan", *at[:3], "--weights", "int3")
    compared = " ".join(run("plan", *at[:3], "--compare", "weights=gptq-int3-128", "weights=gptq-int2").split())
    assert "6.43" in compared and "ridgeline quantize --scheme gptq-int2" in compared
    told = CliRunner().invoke(app, ["inspect", "llama-3.1-8b", "--weights", "gptq-int3"])
    assert "`ridgeline quantize MODEL --scheme gptq-int3 --out DIR`" in str(told.exception)
    wrong = CliRunner().invoke(app, ["plan", *at, "--weights", "gptq-int9"])
    assert wrong.exit_code and "gptq-int9" in str(wrong.exception or wrong.output)


def test_doctor_says_which_schemes_have_a_kernel() -> None:
    found: dict[str, Any] = json.loads(run("doctor", "--device", "cpu", "--json"))
    rows = {row["scheme"]: row for row in found["schemes"]["cpu"]}
    for row in rows.values():
        is_served = row["served by"] == "cpu"
        assert is_served == has_layout(format_of(row["format"]))
        assert is_served or (row["served by"] == "dequantized" and "kernels have no layout" in row["refused by"])
    assert rows["gptq-int3"]["served by"] == "cpu" and rows["nf4"]["served by"] == "dequantized"
    assert "schemes on cpu" in run("doctor", "--device", "cpu")


@pytest.mark.parametrize("kind", daily(SCHEMES, {"awq"}))
def test_every_setting_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    """`ridgeline verify` finds no difference on quantized folders and files."""
    report = json.loads(run("verify", model_of(kind, tmp_path), "--quick", "--json", "--device", "cpu"))
    assert report["equal"]
