"""`ridgeline explain --device cuda` on a machine without a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from ridgeline.catalog.machines import hardware
from ridgeline.cli.explain_gpu import SERVED
from ridgeline.cli.main import app
from ridgeline.ops.arithmetic import arithmetic
from ridgeline.spec.quant import format_of


def explain(*args: str) -> Any:
    found = CliRunner().invoke(app, ["explain", *args, "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.output)


def test_settings_and_memory_are_those_of_a_gpu() -> None:
    found = explain("llama-3-8b", "--device", "cuda", "--hardware", "h200")
    settings = {setting["name"]: setting for setting in found["settings"]}
    assert settings["steps_in_flight"]["value"] == "2" and settings["speculative"]["value"] == "off"
    assert all(setting["reason"] for setting in settings.values())
    memory = found["memory"]
    assert memory["weights"] == pytest.approx(2 * 8.03e9, rel=0.01)  # the published number of parameters, in bfloat16
    on_gpu = sum(memory[use] for use in ("weights", "state pages", "workspace", "left free"))
    assert on_gpu == hardware("h200").memory_bytes
    assert 0 < found["workspace"]["recorded steps"] < memory["workspace"]
    assert found["workspace"]["partial sums of attention"] > 0
    assert "two slices of bfloat16" in found["arithmetic"][0] and "nothing of this was run" in found["machine"]


def test_the_default_is_a_gpu_of_the_catalog_that_is_named() -> None:
    found = explain("llama-3-8b", "--device", "cuda", "--activations", "bf16", "--max-num-seqs", "8")
    assert found["hardware"] == "h100" and found["machine"].startswith("this machine has no GPU, so this is h100")
    assert "one slice of bfloat16" in found["arithmetic"][0]
    assert {s["reason"] for s in found["settings"] if s["name"] == "max_num_seqs"} == {"as given"}
    fewer = found["workspace"]["recorded steps"]
    assert fewer < explain("llama-3-8b", "--device", "cuda")["workspace"]["recorded steps"]


def test_latents_have_queries_of_their_length() -> None:
    found = explain("deepseek-v2-lite", "--device", "cuda")["workspace"]
    assert found["queries and results as long as latents"] == 4 * 512 * 16 * (512 + 64 + 512)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("llama-3-8b", "--hardware", "h100"), "needs --device cuda"),
        (("llama-3-8b", "--device", "cuda", "--hardware", "m4-max"), "no kernels for GPUs; take one of a100, h100"),
        (("llama-3-8b", "--device", "cuda", "--hardware", "l4", "--dtype", "float32"), "use --weights int8 or int4"),
        (("llama-3-8b", "--device", "cuda", "--draft-acceptance-rate", "0.5"), "needs --device cpu"),
    ],
)
def test_what_cannot_be_explained_is_said_in_one_line(args: tuple[str, ...], said: str) -> None:
    found = CliRunner().invoke(app, ["explain", *args])
    assert found.exit_code and said in str(found.exception)


def test_gpus_with_kernels_are_in_the_catalog() -> None:
    assert [hardware(name).name for name in SERVED] == list(SERVED)


@pytest.mark.parametrize(
    ("name", "activations", "backend", "said"),
    [
        ("auto", None, "triton", "two slices"), ("auto", "bf16", "torchlib", "one slice"),
        ("int8", None, "triton", "rounded to int8"), ("auto", None, "cpu", "a matrix unit"),
        ("fp8", "fp8", "composed", "rounded to fp8"), ("auto", "bf16", "cpu", "rounded to bfloat16"),
    ],
)  # fmt: skip
def test_the_arithmetic_of_products_is_said(name: str, activations: str | None, backend: str, said: str) -> None:
    assert said in arithmetic(format_of(name, activations), backend)
