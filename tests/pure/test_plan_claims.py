"""Claims of lectures and papers that a plan or a simulation repeats, each against a closed form or a published one."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.footprint import Memory
from ridgeline.cost.precision import Precision
from ridgeline.cost.shard import Scheme
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.plan.speculation import Draft, speculation_of
from ridgeline.sim import LinearCost, Request, Workload, settings, simulate
from ridgeline.spec import Attention, GatedMLP, RMSNorm
from ridgeline.spec.heads import EagleSpec, MedusaSpec
from ridgeline.spec.quant import NUMBERS

H100 = hardware("h100")
LLAMA_7B = find_model("llama-2-7b").spec


def test_an_answer_without_a_cache_costs_the_cube_of_its_length() -> None:
    """Token t computes t tokens, each with all before it: the pairs of an answer are T (T + 1) (T + 2) / 6, and with a
    cache T (T + 1) / 2. A pair takes 4 operations for each number of the queries.
    """
    planner, numbers = Planner(Deployment(LLAMA_7B, H100)), 32 * 4096

    def pairs(tokens: int, *, cached: bool) -> float:
        work = planner.decode if cached else planner.naive
        steps = [work(1, t) for t in range(1, tokens + 1)]
        ops = [t.operation for step in steps for t in step.operations if t.operation.name == "Attention"]
        return sum(op.flops * op.layers for op in ops) / (4 * numbers)

    for tokens in (16, 48):
        assert pairs(tokens, cached=True) == tokens * (tokens + 1) / 2
        assert pairs(tokens, cached=False) == tokens * (tokens + 1) * (tokens + 2) / 6
    # Matrices take 2 operations for each weight and token; so at short lengths the whole grows with the square only.
    short, long = (planner.naive(1, n).flops for n in (64, 128))
    assert long / short == pytest.approx(2, rel=0.02)


def test_continuous_batching_gains_the_harmonic_number_over_static_batches() -> None:
    """With geometric lengths, the longest of B answers is H(B) times the mean, and a static batch waits for it."""
    batch, mean, count = 8, 64, 4000
    lengths = np.random.default_rng(0).geometric(1 / mean, count)
    static = sum(int(part.max()) for part in lengths.reshape(-1, batch))
    deployment = Deployment(find_model("pocket").spec, H100)
    requests = [Request(0, 1, int(n)) for n in lengths]
    found = simulate(
        Workload(requests, clients=batch), settings(deployment, max_num_seqs=batch), LinearCost((1,), (1.0,))
    )
    harmonic = sum(1 / k for k in range(1, batch + 1))
    assert static / found.report.steps == pytest.approx(harmonic, rel=0.04)
    assert found.report.mean_batch == pytest.approx(batch, rel=0.02)


def test_reserved_caches_waste_most_memory_and_pages_waste_little() -> None:
    """A reserved cache wastes all that a sequence does not use of the longest context. Pages of 16 tokens waste half a
    page of each sequence: under 4 % of long answers, but a fifth of answers of 30 tokens.
    """
    rng = np.random.default_rng(1)
    memory = Memory(LLAMA_7B, Precision(), H100, Scheme(), page_tokens=16, chunk=512)
    (group,) = memory.groups

    def paged(mean: int) -> float:
        used = rng.geometric(1 / mean, 4000).clip(max=4096)
        held = 16 * sum(group.most_pages(int(n)) for n in used)
        assert held / used.sum() - 1 == pytest.approx(7.5 / used.mean(), rel=0.1)
        return 1 - used.sum() / held

    assert paged(500) < 0.04
    assert paged(30) == pytest.approx(0.2, abs=0.02)
    # vLLM's paper (arXiv:2309.06180, figure 2): reserved caches held 20.4 to 38.2 % of tokens. At a mean of 500:
    assert 1 - 500 / 4096 > 0.6


def test_the_range_of_fp8() -> None:
    """e4m3fn, of the H100 and of OCP, reaches 448; the 240 of some lectures is that of e4m3fnuz, of the MI300X."""
    largest = {kind: float(ml_dtypes.finfo(kind).max) for kind in
               (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2)}  # fmt: skip
    assert list(largest.values()) == [448, 240, 57344]
    numbers = NUMBERS["fp8"]
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert numbers.steps == 448
    assert np.array_equal(np.array(numbers.levels), codes, equal_nan=True)


def eagle(model: str) -> EagleSpec:
    """Return an EAGLE head as its authors made it: the target's own layer behind a matrix of two hidden sizes."""
    spec = find_model(model).spec
    layer = spec.layers[0]
    assert isinstance(layer.mixer, Attention) and isinstance(layer.mlp, GatedMLP)
    return EagleSpec(
        hidden_size=spec.hidden_size, vocab_size=spec.vocab_size, draft_vocab_size=spec.vocab_size,
        attention=layer.mixer, mlp=layer.mlp, norm=RMSNorm(), max_position_embeddings=2048, own_embedding=False,
    )  # fmt: skip


@pytest.mark.parametrize(("model", "billions"), [("llama-2-7b", 0.24), ("llama-2-13b", 0.37), ("llama-2-70b", 0.99)])
def test_the_size_of_eagle_heads(model: str, billions: float) -> None:
    """arXiv:2401.15077, section 4.1: 0.24, 0.37 and 0.99 billion trained parameters for these three targets."""
    assert round(eagle(model).num_params() / 1e9, 2) == billions


def test_the_cost_of_medusa_and_of_eagle() -> None:
    """At batch 1 a step takes the time to read its weights. Medusa reads a square and an output matrix for each head,
    once; EAGLE reads its layer and the target's head for each draft. So Medusa's four drafts cost 0.09 of a step of a
    Llama 2 7B, and EAGLE's 0.22.
    """
    width, vocab = LLAMA_7B.hidden_size, LLAMA_7B.vocab_size
    medusa = MedusaSpec(hidden_size=width, vocab_size=vocab, draft_vocab_size=vocab, num_heads=4)
    assert medusa.num_params() == 4 * (width * width + width + width * vocab)
    read = {"medusa": medusa.num_params(), "eagle": 4 * (eagle("llama-2-7b").num_params() + width * vocab)}
    for name, head in (("medusa", medusa), ("eagle", eagle("llama-2-7b"))):
        planner = Planner(Deployment(LLAMA_7B, H100, speculation=speculation_of(Draft(name, head), 4, (0.7,))))
        drafting = planner.drafting_s(1, 128)
        assert drafting == pytest.approx(2 * read[name] / 3.35e12, rel=0.02)
        plain = planner.decode(1, 128).seconds
        assert drafting / plain == pytest.approx({"medusa": 0.089, "eagle": 0.222}[name], abs=0.005)
        gained = (1 - 0.7**5) / (1 - 0.7)
        speedup = plain / planner.token_s(1, 128)
        assert speedup == pytest.approx(gained / (planner.verification_s(1, 128) / plain + drafting / plain))
