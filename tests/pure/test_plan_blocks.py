"""Plans of block diffusion models: passes, their cost, and the batch from which on AR models are faster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.operations import Slice
from ridgeline.errors import RequestError
from ridgeline.plan.blocks import BlockPasses
from ridgeline.plan.changes import change
from ridgeline.plan.compare import BASE, compare
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.plan.report import deployment_json
from ridgeline.plan.rewrite import autoregressive
from ridgeline.spec import Blocks

H100 = hardware("h100")
LLAMA = Deployment(find_model("llama-3.1-8b").spec, H100)
SDAR = Deployment(find_model("JetLM/SDAR-1.7B-Chat").spec, H100)
LOAD = Load(1, 768, 256)


def test_a_block_is_its_passes_and_the_block_before_it_once_more() -> None:
    planner = Planner(change(LLAMA, "diffusion=16:4").deployment)
    one, first = (planner.step([Slice(3, n, 1024, 16)]).seconds for n in (16, 32))
    assert planner.token_s(3, 1024) == pytest.approx((first + 3 * one) / 16)
    assert planner.decode(3, 1024).seconds == one
    figures = planner.figures(LOAD)
    assert figures.ttft_s > Planner(LLAMA).figures(LOAD).ttft_s  # nothing is streamed before the first block
    assert figures.latency_s == pytest.approx(figures.ttft_s + 240 * figures.tpot_s)


def test_a_block_diffusion_model_is_planned_at_one_token_a_pass() -> None:
    assert SDAR.blocks == BlockPasses(4, 1.0)
    plain = replace(SDAR, spec=autoregressive(SDAR.spec))
    assert plain.blocks is None
    one, other = (Planner(d).token_s(1, 1024) for d in (SDAR, plain))
    assert one > other  # each pass has four rows and gives one token
    assert deployment_json(SDAR)["blocks"] == {"size": 4, "tokens_per_pass": 1.0}


def test_more_tokens_a_pass_are_faster_and_pay_at_larger_batches() -> None:
    kept = (1.0, 2.0, 4.0, 8.0)
    rows = {r.text: r for r in compare(LLAMA, LOAD, [f"diffusion=16:{n:g}" for n in kept])}
    speeds = [rows[f"diffusion=16:{n:g}"].figures.tokens_per_s for n in kept]
    assert speeds == sorted(speeds)
    assert speeds[0] < rows[BASE].figures.tokens_per_s < speeds[1]
    limits = [rows[f"diffusion=16:{n:g}"].pays_below for n in kept]
    assert limits[0] == 1
    assert limits[3] is None  # keys are read once for 16 tokens, which is what a large batch costs
    assert 1 < (limits[1] or 0) < (limits[2] or 0)
    for n, limit in zip(kept[1:3], limits[1:3], strict=True):
        assert limit is not None
        planner, plain = Planner(change(LLAMA, f"diffusion=16:{n:g}").deployment), Planner(LLAMA)
        assert planner.token_s(limit, LOAD.context) >= plain.token_s(limit, LOAD.context)
        assert planner.token_s(max(1, limit // 2), LOAD.context) < plain.token_s(max(1, limit // 2), LOAD.context)
    assert any(f"faster below a batch of {limits[1]}" in note for note in rows["diffusion=16:2"].notes)


def test_logits_of_a_block_are_counted_by_pieces() -> None:
    """A pass holds a piece of its logits, of 2^24 numbers, and not those of all blocks."""
    deployments = LLAMA, change(LLAMA, "diffusion=64:4").deployment
    plain, blocks = (Planner(d).footprint(Load(32, 768, 256)) for d in deployments)
    assert 2**24 * 4 <= blocks.logits_bytes < 32 * 64 * LLAMA.spec.vocab_size * 4 / 2
    assert 32 * LLAMA.spec.vocab_size * 4 < plain.logits_bytes


def test_pages_hold_whole_blocks() -> None:
    """A block of 32 tokens makes a page of 32, whose bytes were those of 16: half of the state was missing."""
    deployment = Deployment(find_model("llada2.0-mini").spec, H100)
    found = Planner(deployment).memory.footprint(8, 4096)
    assert found.formula_bytes == 8 * 4096 * 20 * 2 * 4 * 128 * 2  # 20 layers, 4 heads of 128 for keys and values
    assert found.formula_bytes < found.pages_bytes < 1.02 * found.formula_bytes


@pytest.mark.parametrize(("model", "text", "message"), [
    ("llama-3.1-8b", "diffusion=16:40", "from 1 to 16"), ("llama-3.1-8b", "diffusion=16:0.5", "from 1 to 16"),
    ("llama-3.1-8b", "diffusion=0", "below 1"), ("llama-3.1-8b", "diffusion=x", "write diffusion=16:4"),
    ("mamba-2.8b", "diffusion=4:2", "cannot see ahead"), ("gemma-2-2b", "diffusion=4:2", "a window"),
    ("llama-3.1-8b", "speculate=0.8:4,diffusion=4:2", "takes no drafts"),
])  # fmt: skip
def test_what_cannot_be_is_refused(model: str, text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        change(Deployment(find_model(model).spec, H100), text)


def test_blocks_of_the_model_may_be_planned_with_more_tokens_a_pass() -> None:
    after = change(SDAR, "diffusion=4:2").deployment
    assert after.spec.sight == Blocks(4)
    assert Planner(after).token_s(1, 1024) < Planner(SDAR).token_s(1, 1024)
