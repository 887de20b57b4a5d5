"""Latent attention: both forms against a float64 definition, dense and paged, and the choice between them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from torch import Tensor

from ridgeline import LLM, SamplingParams
from ridgeline.cost.operations import Operation, Slice, operations
from ridgeline.cost.precision import Precision
from ridgeline.ops import api, open_table
from ridgeline.ops.api import DenseRows, PagedRows
from ridgeline.ops.reference import paged
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.settings import EngineOptions
from ridgeline.spec import ALL, Attention, GatedMLP, LatentAttention, Layer, ModelSpec, MoE, RMSNorm, Rope, to_json
from ridgeline.spec.groups import state_groups
from ridgeline.train.cost import flops_per_token
from ridgeline.train.module import LanguageModel

TABLE = open_table("reference")
NAN = float("nan")
NORM = RMSNorm()
SMALL = LatentAttention(3, 12, 5, 4, 7, 0.3, NORM)
CASES = [SMALL, LatentAttention(4, 32, 16, 8, 20, 0.2, NORM), LatentAttention(1, 3, 8, 2, 9, 0.5, NORM)]
V3 = LatentAttention(128, 512, 128, 64, 128, 192**-0.5, NORM)
FORMS = ("absorbed", "rebuilt", "cheaper")


def force(form: str, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Make every step use one form. Returns a list of whether the engine would have chosen the absorbed one."""
    chosen: list[bool] = []
    absorbs = LatentAttention.absorbs

    def choose(case: LatentAttention, tokens: int, context: int) -> bool:
        chosen.append(absorbs(case, tokens, context))
        return chosen[-1] if form == "cheaper" else form == "absorbed"

    monkeypatch.setattr(LatentAttention, "absorbs", choose)
    return chosen


def problem(case: LatentAttention, lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, the stored rows, and kv_b in float64. Scores have a spread of about 2, so that a wrong score changes
    much.
    """
    rng = np.random.default_rng([seed, case.num_heads, *lengths])
    total = sum(lengths)
    q = rng.normal(0, 2 / case.scale / case.qk_head_dim**0.5, (total, case.num_heads, case.qk_head_dim))
    rows = rng.normal(0, 1, (total, 1, case.row))
    kv_b = rng.normal(0, case.kv_lora_rank**-0.5, (case.num_heads, case.qk_nope_head_dim + case.v_head_dim, 1))
    kv_b = kv_b * rng.normal(0, 1, (1, 1, case.kv_lora_rank)) + rng.normal(0, 0.2, (*kv_b.shape[:2], case.kv_lora_rank))
    return torch.from_numpy(q), torch.from_numpy(rows), torch.from_numpy(kv_b)


def attend(case: LatentAttention, q: Tensor, rows: Tensor, kv_b: Tensor, lengths: tuple[int, ...]) -> np.ndarray:
    """Compute each query and each head separately, with all keys and values."""
    out, start = np.zeros((len(q), case.num_heads, case.v_head_dim)), 0
    queries, kept, up = (x.double().numpy() for x in (q, rows, kv_b))
    for n in lengths:
        for i in range(start, start + n):
            latents, shared = np.split(kept[start : i + 1, 0], [case.kv_lora_rank], axis=1)
            for h in range(case.num_heads):
                keys, values = np.split(latents @ up[h].T, [case.qk_nope_head_dim], axis=1)
                scores = np.concatenate([keys, shared], 1) @ queries[i, h] * case.scale
                weights = np.exp(scores - scores.max())
                out[i, h] = weights / weights.sum() @ values
        start += n
    return out.reshape(len(q), -1)


@pytest.mark.parametrize("lengths", [(1,), (63,), (40, 1, 20)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_dense(form: str, case: LatentAttention, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = force(form, monkeypatch)
    q, rows, kv_b = problem(case, lengths)
    wanted = attend(case, q, rows, kv_b, lengths)
    kernel = TABLE.primitive(api.LATENT_ATTENTION, case)
    exact = kernel(q, DenseRows((rows,), lengths), kv_b)
    np.testing.assert_allclose(exact.numpy(), wanted, rtol=0, atol=1e-10)
    single = kernel(q.float(), DenseRows((rows.float(),), lengths), kv_b.float())
    np.testing.assert_allclose(single.numpy(), wanted, rtol=0, atol=2e-5)
    assert len(chosen) == 2 * len(lengths)


@pytest.mark.parametrize("form", FORMS)
def test_sequences_are_separate(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(form, monkeypatch)
    lengths = (33, 20, 40)
    q, rows, kv_b = problem(SMALL, lengths)
    kernel = TABLE.primitive(api.LATENT_ATTENTION, SMALL)
    clean = kernel(q, DenseRows((rows,), lengths), kv_b)
    q[33:53] = rows[33:53] = NAN
    dirty = kernel(q, DenseRows((rows,), lengths), kv_b)
    assert torch.equal(dirty[:33], clean[:33])
    assert torch.equal(dirty[53:], clean[53:])
    assert dirty[33:53].isnan().all()


def run_chunks(case: LatentAttention, page_tokens: int, lengths: list[int], seed: int, dtype: torch.dtype) -> Any:
    """Return results over random chunks of all sequences, in pages that hold NaN except for written rows."""
    rng = np.random.default_rng(seed)
    q, rows, kv_b = (x.to(dtype) for x in problem(case, tuple(lengths), seed))
    attend_pages, write = TABLE.primitive(api.PAGED_LATENT_ATTENTION, case), TABLE.primitive(api.WRITE_PAGES, case)
    pages = torch.full((500, page_tokens, 1, case.row), NAN, dtype=dtype)
    free = rng.permutation(np.arange(1, 500)).tolist()
    tables = np.zeros((len(lengths), 130), np.int64)
    offsets, done = np.cumsum(lengths) - lengths, np.zeros(len(lengths), np.int64)
    out = torch.full((len(q), case.num_heads * case.v_head_dim), NAN, dtype=dtype)
    at = rng.permutation(len(lengths))
    while (done < lengths).any():
        chosen = [i for i, n in enumerate(lengths) if done[i] < n and rng.random() < 0.7]
        if not chosen:
            continue
        counts = np.array([min(lengths[i] - done[i], rng.integers(1, 40)) for i in chosen])
        for i, count in zip(chosen, counts, strict=True):
            for index in range(done[i] // page_tokens, (done[i] + count - 1) // page_tokens + 1):
                tables[at[i], index] = tables[at[i], index] or free.pop()
        layout = build_layout(Slices.plain(at[chosen], done[chosen], counts), tables, page_tokens, ALL, TABLE.memory)
        tokens = np.concatenate([offsets[i] + done[i] + np.arange(c) for i, c in zip(chosen, counts, strict=True)])
        write((pages,), (rows[tokens],), layout.write_pages, layout.write_slots)
        out[tokens] = attend_pages(q[tokens], PagedRows((pages,), layout), kv_b)
        done[chosen] += counts
    return out, TABLE.primitive(api.LATENT_ATTENTION, case)(q, DenseRows((rows,), tuple(lengths)), kv_b)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    case=st.sampled_from(CASES),
    form=st.sampled_from(FORMS),
    page_tokens=st.sampled_from([1, 3, 16, 64]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_paged_equals_dense(case: LatentAttention, form: str, page_tokens: int, lengths: list[int], seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        force(form, patch)
        out, dense = run_chunks(case, page_tokens, lengths, seed, torch.float64)
        torch.testing.assert_close(out, dense, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
def test_paged_in_float32(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(form, monkeypatch)
    out, dense = run_chunks(CASES[1], 16, [90, 40, 3], 1, torch.float32)
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block", [1, 100, 700, 3000])
def test_blocks_change_nothing(block: int, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over latents works in blocks of heads, queries and sequences that bound the memory, at least one of
    each.
    """
    force(form, monkeypatch)
    monkeypatch.setattr(paged, "CPU_BLOCK", block)
    out, dense = run_chunks(SMALL, 4, [60, 30, 3], 1, torch.float64)
    monkeypatch.undo()
    torch.testing.assert_close(out, dense, rtol=0, atol=1e-10)
    again, _ = run_chunks(SMALL, 4, [60, 30, 3], 1, torch.float64)
    torch.testing.assert_close(out, again, rtol=0, atol=1e-10)


def test_a_narrow_matrix_is_widened() -> None:
    q, rows, kv_b = (x.float() for x in problem(SMALL, (30,)))
    kernel = TABLE.primitive(api.LATENT_ATTENTION, SMALL)
    narrow = kv_b.bfloat16()
    got, wanted = (kernel(q, DenseRows((rows,), (30,)), up) for up in (narrow, narrow.float()))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("form", ["absorbed", "rebuilt"])
def test_gradients(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force(form, monkeypatch)
    lengths = (3, 1, 4)
    inputs = tuple(x.requires_grad_() for x in problem(SMALL, lengths))
    kernel = TABLE.primitive(api.LATENT_ATTENTION, SMALL)
    assert torch.autograd.gradcheck(lambda q, rows, up: kernel(q, DenseRows((rows,), lengths), up), inputs)


# ---- the choice ----------------------------------------------------------------------------------------------


def counted(form: str, case: LatentAttention, tokens: int, context: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the multiply-accumulates of one sequence's attention, as torch counts those that run."""
    from torch.utils.flop_counter import FlopCounterMode

    force(form, monkeypatch)
    q, kv_b = torch.zeros(tokens, case.num_heads, case.qk_head_dim), torch.zeros(problem(case, (1,))[2].shape)
    pages = torch.zeros(1 + context, 1, 1, case.row)
    slices = Slices.plain(np.array([0]), np.array([context - tokens]), np.array([tokens]))
    layout = build_layout(slices, np.arange(1, 1 + context)[None], 1, ALL, TABLE.memory)
    with FlopCounterMode(display=False) as counter:
        TABLE.primitive(api.PAGED_LATENT_ATTENTION, case)(q, PagedRows((pages,), layout), kv_b)
    monkeypatch.undo()
    return counter.get_total_flops() // 2


@pytest.mark.parametrize(("tokens", "context"), [(1, 2), (1, 100), (17, 100), (100, 100)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_count_equals_the_operations_that_run(
    case: LatentAttention, tokens: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    absorbed, rebuilt = (counted(form, case, tokens, context, monkeypatch) for form in ("absorbed", "rebuilt"))
    assert (absorbed, rebuilt) == (case.absorbed_work(tokens, context), case.rebuilt_work(tokens, context))
    assert case.absorbs(tokens, context) == (absorbed <= rebuilt)
    assert counted("cheaper", case, tokens, context, monkeypatch) == min(absorbed, rebuilt)


def test_decoding_absorbs_and_a_long_prefill_rebuilds() -> None:
    """In DeepSeek-V3, an absorbed key costs 3.4 times as much as a rebuilt one, and rebuilding a key costs as much as
    170 queries.
    """
    assert [n for n in (1, 8, 128, 170, 171, 256, 512, 4096) if V3.absorbs(n, 10**6)] == [1, 8, 128, 170]
    assert not V3.absorbs(100, 100)
    assert V3.absorbs(100, 4096)
    per_key = [V3.absorbed_work(1, n + 1) - V3.absorbed_work(1, n) for n in (5, 5000)]
    assert per_key == [128 * (576 + 512)] * 2
    assert V3.rebuilt_work(100, 100) - 100 * 128 * 256 * 512 == 100 * 100 * 128 * (192 + 128)


def test_work_besides_the_weights() -> None:
    """The product of kv_b and the latent of each new token counts as work of the weights, in either form."""
    assert V3.work(1, 1000) == 1000 * 128 * (576 + 512)
    assert V3.work(1000, 1000) == sum(range(1001)) * 128 * (192 + 128)
    assert V3.work(1000, 1500) == sum(range(501, 1501)) * 128 * (192 + 128) + 500 * 128 * 256 * 512


def test_both_forms_are_among_a_models_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among the chunks of a small model's prompts in pages, some are absorbed and others rebuilt."""
    chosen = force("cheaper", monkeypatch)
    run_chunks(CASES[1], 16, [90, 40, 3], 1, torch.float32)
    assert {True, False} == set(chosen)


# ---- work of a step, training ---------------------------------------------------------------------------------

LAYER = Layer(
    replace(CASES[1], rope=Rope(8, interleaved=True), q_lora_rank=12),
    MoE(4, 2, 16, scores="sigmoid", choice_bias=True, shared=GatedMLP(16)),
    NORM,
)
SPEC = ModelSpec("latent", 50, 24, 64, (LAYER,) * 2, NORM)


def test_the_work_of_a_step() -> None:
    """The tokens of a prompt, which come together, cost as much as with rebuilt keys; a single token costs as much as
    with absorbed keys.
    """
    mixer, precision = CASES[1], Precision("float32", "float32", "float32")
    heads, rebuilt, absorbed = mixer.num_heads, mixer.qk_head_dim + mixer.v_head_dim, mixer.row + mixer.kv_lora_rank
    body = SPEC.num_active_params() - 2 * 50 * 24
    pairs = 40 * 41 // 2

    def attention(step: Slice) -> Operation:
        return next(op for op in operations(SPEC, [step], precision) if op.name == "LatentAttention")

    assert attention(Slice(1, 40, 40)).flops == 2 * pairs * heads * rebuilt
    assert attention(Slice(1, 1, 40)).flops == 2 * 40 * heads * absorbed
    assert attention(Slice(1, 1, 40)).state_bytes == 4 * 40 * mixer.row
    assert flops_per_token(SPEC, 41) == 6 * (body + 50 * 24 + 2 * 21 * heads * rebuilt)


def test_training_goes_through_it() -> None:
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 50, 40))
    batch = (tokens[:-1], torch.arange(39), (39,), tokens[1:])
    losses = {}
    for checkpointing in (False, True):
        model = LanguageModel(SPEC, TABLE, 64, checkpointing=checkpointing)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses[checkpointing] = []
        for _ in range(40):
            loss = model(*batch) / 39
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None and p.grad.isfinite().all() for p in trained)
            optimizer.step()
            losses[checkpointing].append(float(loss.detach()))
        fixed = {name for name, p in model.weights().items() if not p.requires_grad}
        assert fixed == {"layers.0.mlp.choice.bias", "layers.1.mlp.choice.bias"}
    assert losses[False][-1] < 0.3 * losses[False][0]
    assert losses[True] == pytest.approx(losses[False], rel=1e-3)


def test_beside_other_mixers(tmp_path: Path) -> None:
    """In a hybrid from JSON, latents and full keys share a group of pages, and windowed keys have another group."""
    full, local = Attention(4, 2, 8, 0.4, Rope(8)), Attention(4, 1, 8, 0.4, Rope(8), window=10)
    layers = (LAYER, replace(LAYER, mixer=local), replace(LAYER, mixer=full), LAYER)
    spec = replace(SPEC, layers=layers, vocab_size=257, max_position_embeddings=256)
    rng = np.random.default_rng(0)
    weights = {
        w.name: rng.normal(0.0 if w.is_matrix else 1.0, 1.5 * w.shape[-1] ** -0.5 if w.is_matrix else 0.2, w.shape)
        for w in spec.weights()
    }
    save_file({name: w.astype(np.float32) for name, w in weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ridgeline", "spec": to_json(spec)}))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    shared = rng.integers(3, 257, 33).tolist()
    prompts = [[*shared, *rng.integers(3, 257, n).tolist()] for n in (1, 5, 40)]
    naive = LLM(str(tmp_path), cache="off").generate(prompts, params)
    llm = LLM(str(tmp_path), engine=EngineOptions(block_size=4, max_num_batched_tokens=16))
    for _ in range(2):  # the second run gets prefix hits
        found = llm.generate(prompts, params)
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in naive]
    stats = llm.stats()
    assert stats is not None and stats.hit_tokens > 100 and len(stats.groups) == 2
    groups = state_groups(spec, page_tokens=4)
    assert [g.page_bytes for g in groups] == [4 * 4 * (40 + 32 + 40), 4 * 4 * 16]
