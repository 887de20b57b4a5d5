"""Published tables to the printed digit, each with its own convention; and measurements, of which none is faster than
the roofline.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.footprint import formula_bytes
from ridgeline.cost.precision import Precision, default_precision
from ridgeline.plan.changes import change
from ridgeline.plan.planner import Deployment, Load, Planner, Speculation
from ridgeline.plan.rewrite import with_kv_heads
from ridgeline.plan.textbook import Textbook

BF16 = Precision()
LLAMA_13B = find_model("llama-2-13b").spec
V5E_8 = 8 * 8.2e11  # bytes per second of eight chips, rounded as in the scaling book


def weight_bytes(model: object) -> int:
    return sum(BF16.weight_bytes(w) for w in model.weights())  # type: ignore[attr-defined]


def significant(value: float, printed: str) -> bool:
    """Return whether a value rounds to the printed figure."""
    decimals = len(printed.partition(".")[2])
    return f"{value:,.{decimals}f}" == printed


# CS336 (2025), lecture 10: LLaMA-2 13B, S = 1,024, bfloat16, an H100 with 3.35e12 bytes/s. Memory and latency count all
# matrices (without norms) and the state of the batch, read once. A GB is 10^9 bytes there. With 8 KV heads there are
# fewer weights.
CS336 = [
    (40, 1, "26.87", "8.02", "124.7"), (40, 64, "79.72", "23.80", "2,689"), (40, 256, "240.8", "71.87", "3,562"),
    (8, 1, "22.84", "6.82", "146.7"), (8, 64, "33.41", "9.97", "6,417"), (8, 256, "65.63", "19.59", "13,068"),
]  # fmt: skip


@pytest.mark.parametrize(("kv_heads", "batch", "memory", "latency", "throughput"), CS336)
def test_cs336_lecture_10(kv_heads: int, batch: int, memory: str, latency: str, throughput: str) -> None:
    spec = LLAMA_13B if kv_heads == 40 else with_kv_heads(LLAMA_13B, kv_heads)
    assert significant(spec.num_params() / 1e9, {40: "13.02", 8: "11.34"}[kv_heads])
    matrices = 2 * sum(w.num_params for w in spec.weights() if w.is_matrix)
    book = Textbook(matrices, formula_bytes(spec, BF16, 1024), 3.35e12)
    assert significant(book.memory_bytes(batch) / 1e9, memory)
    assert significant(book.step_s(batch) * 1e3, latency)
    assert significant(book.tokens_per_s(batch), throughput)
    # Our figure also counts activations, and does not count embedding rows that are not read.
    planner = Planner(Deployment(spec, hardware("h100"), BF16))
    assert planner.decode(batch, 1024).seconds == pytest.approx(book.step_s(batch), rel=0.04)


# "How to Scale Your Model" (2025), inference: LLaMA-2 13B at S = 8,192 on eight v5e. It rounds the weights to 26e9 and
# a sequence's state to 6.7e9 bytes; its GiB are 10^9 bytes. GMQA 1:5 keeps the weights and a fifth of the state.
SCALING_BOOK = [
    (1, "4.98", "200.6"), (8, "12.13", "659"), (16, "20.30", "788"), (32, "36.65", "873"), (64, "69.33", "923"),
    (240, "249.09", "964"),
]  # fmt: skip
SCALING_BOOK_GMQA = [
    (1, "4.17", "240"), (8, "5.60", "1,429"), (16, "7.23", "2,212"), (32, "10.50", "3,048"), (64, "17.04", "3,757"),
    (240, "52.99", "4,529"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("share", "batch", "latency", "throughput"),
    [(1, *row) for row in SCALING_BOOK] + [(5, *row) for row in SCALING_BOOK_GMQA],
)
def test_scaling_book(share: int, batch: int, latency: str, throughput: str) -> None:
    book = Textbook(26e9, 6.7e9 / share, V5E_8)
    assert abs(book.step_s(batch) * 1e3 - float(latency)) <= 0.0051  # printed figures are truncated or rounded
    assert abs(book.tokens_per_s(batch) - float(throughput.replace(",", ""))) <= 1.0
    if share == 1:  # with our own bytes instead of rounded ones
        exact = Textbook(weight_bytes(LLAMA_13B), formula_bytes(LLAMA_13B, BF16, 8192), V5E_8)
        assert exact.step_s(batch) == pytest.approx(book.step_s(batch), rel=3e-3)


def test_scaling_book_pop_quiz() -> None:
    """30e9 int8 weights on 16 v5e, 100 kB per token at 8,192 tokens: 2.5 ms at batch 4; 21 ms at 256, compute-bound."""
    book = Textbook(30e9, 8192 * 100e3, 16 * 8.2e11, params=30e9, flops_per_s=16 * 1.97e14)
    assert significant(book.step_s(4) * 1e3, "2.5")
    assert significant(book.step_s(256) * 1e3, "21")


def test_scaling_book_llama_70b() -> None:
    """Llama 3 70B in int8, batch 32 at 8,192 tokens on eight v5e: 112 GB, 17 ms, and thus 235 tokens/s per chip."""
    book = Textbook(70e9, formula_bytes(find_model("llama-3.1-70b").spec, BF16, 8192) / 2, V5E_8)
    assert book.memory_bytes(32) / 1e9 == pytest.approx(112, abs=1)
    assert significant(book.step_s(32) * 1e3, "17")
    assert significant(32 / 17e-3 / 8, "235")


def test_llama_2_7b() -> None:
    """33.55 MB per layer and 1.07 GB in total at 2,048 tokens; 13.48 GB of weights."""
    spec = find_model("llama-2-7b").spec
    state = formula_bytes(spec, BF16, 2048)
    assert (state, state / 32) == (1_073_741_824, 33_554_432)
    assert significant(state / 1e9, "1.07")
    assert significant(state / 32 / 1e6, "33.55")
    assert significant(weight_bytes(spec) / 1e9, "13.48")


def test_mistral_7b() -> None:
    """At batch 4 and 4,096 tokens, 8 KV heads take 2.15 GB, in pages exactly 2^31 bytes plus a null page; 32 heads
    would take 8.59 GB. With a window of 4,096 the next token reads 4,095 keys.
    """
    deployment = Deployment(find_model("mistral-7b").spec, hardware("h100"), BF16)
    own, often = (Planner(d).memory for d in (deployment, change(deployment, "kv_heads=32").deployment))
    foot, wide = own.footprint(4, 4096), often.footprint(4, 4096)
    page = 16 * 2 * 8 * 128 * 2 * 32
    assert foot.pages_bytes == 2**31 + page
    assert foot.formula_bytes == 4 * 4095 * 2 * 8 * 128 * 2 * 32
    assert significant(foot.formula_bytes / 1e9, "2.15")
    assert significant(wide.formula_bytes / 1e9, "8.59")
    assert own.footprint(4, 32768).pages_bytes < foot.pages_bytes * 1.005  # at most one more page per sequence


def test_deepseek_v2_and_jamba() -> None:
    """576 numbers per token and layer, 1.76 % of separate heads; Jamba's 4 GiB at 256K tokens, other models' 32
    (2403.19887).
    """
    v2 = find_model("deepseek-v2").spec
    assert formula_bytes(v2, BF16, 1) == 576 * 2 * 60
    assert pytest.approx(0.0176, abs=1e-4) == 576 / (2 * 128 * 128)
    jamba, mixtral = find_model("jamba").spec, find_model("mixtral-8x7b").spec
    recurrent = formula_bytes(jamba, BF16, 0)
    assert formula_bytes(jamba, BF16, 2**18) - recurrent == 4 * 2**30
    assert formula_bytes(mixtral, BF16, 2**18) == 32 * 2**30


def test_speculation_table() -> None:
    """Expected tokens and speedups of 2211.17192, where a draft costs 5 % of a step and a verification costs one step:
    the best are 1.92 (a = 0.6, 4 drafts), 2.35 (0.7, 6), 3.09 (0.8, 8), 4.67 (0.9, 13).
    """
    for acceptance, depth, speed in ((0.6, 4, 1.92), (0.7, 6, 2.35), (0.8, 8, 3.09), (0.9, 13, 4.67)):
        at = {n: Speculation(acceptance, n).tokens / (n * 0.05 + 1) for n in range(1, 30)}
        assert max(at, key=lambda n: at[n]) == depth
        assert at[depth] == pytest.approx(speed, abs=0.005)
    assert Speculation(1.0, 4).tokens == 5
    assert Speculation(0.0, 4).tokens == 1


# Published measurements: (model, machine, batch, context, seconds per token, share of the roofline, source).
MEASURED = [
    ("llama-3.1-8b", "h100", 1, 512, 5.1e-3, "CUDA graphs; 8.4 ms without"),
    ("llama-3.1-8b", "h100", 1, 512, 1 / 158, "SGLang without drafts (2503.01840, EAGLE-3)"),
]


@pytest.mark.parametrize(("model", "machine", "batch", "context", "measured", "source"), MEASURED)
def test_no_measurement_is_faster_than_the_roofline(
    model: str, machine: str, batch: int, context: int, measured: float, source: str
) -> None:
    found, device = find_model(model), hardware(machine)
    precision = default_precision(device, found.weights, found.experts)
    roof = Planner(Deployment(found.spec, device, precision)).decode(batch, context).seconds
    assert 0.6 * measured < roof < measured, source


def test_hopper_holds_80_gb_not_79_72() -> None:
    """CS336's batch of 64 takes 79.72 of 80 GB without activations; with the engine's count, 56 fit."""
    planner = Planner(Deployment(LLAMA_13B, hardware("h100"), BF16))
    assert not planner.memory.footprint(64, 1024).fits
    largest = planner.memory.largest_batch(1024)
    assert 50 <= largest < 64
    assert planner.memory.footprint(largest, 1024).fits
    assert not planner.memory.footprint(largest + 1, 1024).fits


def test_a_replica_changes_throughput_alone() -> None:
    base = Deployment(LLAMA_13B, hardware("h100"), BF16)
    one = Planner(base).figures(Load(8, 512, 128))
    four = Planner(replace(base, scheme=replace(base.scheme, replicas=4))).figures(Load(8, 512, 128))
    assert (four.tpot_s, four.ttft_s) == (one.tpot_s, one.ttft_s)
    assert four.tokens_per_s == 4 * one.tokens_per_s
    assert four.served_tokens_per_s == 4 * one.served_tokens_per_s
