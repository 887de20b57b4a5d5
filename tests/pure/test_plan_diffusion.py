"""Diffusion language models: LLaDA's parameters, a pass computed by hand, errors, and the command's output."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from ridgeline.catalog.machines import hardware, read_data
from ridgeline.catalog.models import find_model, find_writer, from_config, published
from ridgeline.cli.main import main
from ridgeline.cost.shard import Scheme
from ridgeline.errors import ConfigError, RequestError
from ridgeline.plan.denoise import UNKNOWN, CachedBlocks, denoise
from ridgeline.plan.planner import Deployment, Load, Planner

H100 = hardware("h100")
LLADA = "GSAI-ML/LLaDA-8B-Instruct"


def planner(**changes: Any) -> Planner:
    return Planner(Deployment(find_model("llada-8b").spec, H100, **changes))


HEAD = 126464 * 4096  # numbers of the head


def entry() -> dict[str, Any]:
    (found,) = [e for e in read_data("models.json") if e["name"] == LLADA]
    return dict(found)


def test_its_parameters_are_the_papers() -> None:
    """8.02 B in total, 6.98 B of them outside the two embeddings (arXiv:2502.09992)."""
    spec = find_model("llada-8b").spec
    assert spec.num_params() == entry()["params"]
    assert round(spec.num_params() / 1e9, 2) == 8.02
    assert round((spec.num_params() - 2 * 126464 * 4096) / 1e9, 2) == 6.98


def test_a_pass_by_hand() -> None:
    """Two operations per token and number of a matrix; per pair of tokens two products of 4,096 numbers, in
    32 layers. The head is multiplied for the tokens of the answer.
    """
    tokens, batch = 512, 3
    found = denoise(planner(), Load(batch, 384, 128))
    spec = planner().deployment.spec
    matrices = spec.num_params() - 126464 * 4096 - 65 * 4096
    pairs = 32 * 2 * 2 * tokens * tokens * 4096
    products = 2 * ((matrices - HEAD) * tokens + HEAD * 128)
    assert found.step.flops == pytest.approx(batch * (products + pairs))
    assert found.wanted == 128
    assert found.logits_bytes == 4 * 132 * 126464 <= 4 * 2**24
    assert found.passes == 128 and found.latency_s == 128 * found.step.seconds
    assert found.tokens_per_s == pytest.approx(batch * 128 / found.latency_s)
    assert found.fits and not denoise(planner(), Load(400, 3000, 1000)).fits


def test_a_cached_pass_by_hand() -> None:
    """A pass after the first one over a block computes the block, or half of the blocks after it as well."""
    load = Load(3, 384, 128)
    spec = planner().deployment.spec
    matrices = spec.num_params() - 126464 * 4096 - 65 * 4096
    for text, tokens, passes in (("dual:32", 32, 128), ("prefix:32:2", 80, 64), ("dual:500", 128, 128)):
        cache = CachedBlocks.parse(text)
        found = denoise(planner(), load, cache=cache)
        later, count = found.cached or (found.step, 0)
        pairs = 32 * 2 * 2 * tokens * 512 * 4096
        wanted = min(cache.block, 128)
        assert later.flops == pytest.approx(3 * (2 * ((matrices - HEAD) * tokens + HEAD * wanted) + pairs))
        assert found.wanted == wanted
        assert (found.passes, count) == (passes, passes - max(1, 128 // cache.block))
        assert found.latency_s == pytest.approx((passes - count) * found.step.seconds + count * later.seconds)
        assert found.state_bytes >= 3 * 512 * 2 * 32 * 4096 * 2
    for bad in ("dual", "none:32", "dual:0", "dual:32:64", "dual:x"):
        with pytest.raises(RequestError, match="block"):
            CachedBlocks.parse(bad)


def test_half_the_devices_half_the_arithmetic() -> None:
    one, two = denoise(planner(), Load(1, 600, 400)), denoise(planner(scheme=Scheme(tp=2)), Load(1, 600, 400))
    assert two.step.flops < 0.51 * one.step.flops and two.weight_bytes < 0.51 * one.weight_bytes
    assert two.step.by_cause()["link"] > 0


def test_configs_that_are_refused() -> None:
    assert LLADA in published()
    with pytest.raises(RequestError, match="no decode steps"):
        find_writer("llada-8b")
    assert find_writer("mistral-7b") == find_model("mistral-7b")
    with pytest.raises(RequestError, match="the model has 4,096 positions"):
        denoise(planner(), Load(1, 4096, 1))
    with pytest.raises(RequestError, match="pp 2"):
        denoise(planner(scheme=Scheme(pp=2)), Load(1, 100, 100))
    config = entry()["config"]
    with pytest.raises(ConfigError, match="block_type is 'sequential'"):
        from_config("x", {**config, "block_type": "sequential"})
    with pytest.raises(ConfigError, match="d_model is missing"):
        from_config("x", {k: v for k, v in config.items() if k != "d_model"})


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*args: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["ridgeline", "plan", "llada-8b", "--hardware", "h100", *args])
        with pytest.raises(SystemExit):
            main()
        found = capsys.readouterr()
        return found.out, found.err

    out, _ = run("--context", "1024", "--json")
    report = json.loads(out)
    assert report["time"]["passes"] == 256 and report["memory"]["fits"] and report["unknown"] == UNKNOWN
    shown, _ = run("--context", "1024", "--weights", "int4")
    assert "a diffusion model" in shown and "how many passes an answer" in " ".join(shown.split())
    assert "changes, --slo works with autoregressive models only" in run("--compare", "kv=fp8", "--slo", "tpot=1s")[1]
