"""Conversion to latent attention: exact at full rank, below it as the singular values say, refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from cpu.doc_folder import write_model
from oracle.build import make_model, oracle_greedy, oracle_logits, redraw
from oracle.families import CASES
from oracle.ours import SPECS
from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import app
from ridgeline.compress.convert import ConvertOptions, convert
from ridgeline.compress.convert.latent.choose import check_layers
from ridgeline.compress.convert.latent.factor import components, factored
from ridgeline.compress.convert.latent.moments import Matrices, Moments, matrices_of, moments_of_text
from ridgeline.compress.convert.latent.norms import linear_weights
from ridgeline.compress.convert.run import Change, write_converted
from ridgeline.compress.data import Samples
from ridgeline.compress.folder import open_original
from ridgeline.compress.price import price
from ridgeline.cost.calibration import this_machine
from ridgeline.cost.precision import cpu_precision
from ridgeline.errors import RequestError, RidgelineError
from ridgeline.evals.documents import Document
from ridgeline.nn import Model
from ridgeline.plan.changes import change
from ridgeline.plan.planner import Deployment, Load
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.storage import default_storage
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.distill import DistillOptions, distill
from ridgeline.train.distill.level import Levels
from ridgeline.train.ranks import Ranks

pytestmark = pytest.mark.usefixtures("short_rates")

SEQUENCES = [[(7 * i * i + 3 * j + i * j) % 90 + 3 for i in range(40)] for j in range(2)]
TEXTS = np.random.default_rng(0).integers(3, 90, (12, 40)).tolist()
PROMPT = SEQUENCES[0][:8]
EXACT = [
    "llama", "llama_gqa", "llama_head_dim", "llama_tied", "llama_linear", "llama_llama3", "llama_yarn_mscale",
    "mixtral", "phi3", "glm_no_bias", "granite", "gpt_neox_sequential", "minimax", "bamba",
]  # fmt: skip


def folder_of(name: str, folder: Path) -> tuple[Path, Any]:
    model = make_model(CASES[name])
    redraw(model, 3)
    model.save_pretrained(folder)
    return folder, model


def converted(source: Path, out: Path, latent: int, rotated: int, **options: Any) -> Any:
    """Convert with a short text of ids."""
    samples = Samples(TEXTS, [Document(ids) for ids in SEQUENCES])
    change = Change("mla", latent, rotated=rotated)
    return write_converted(
        "M", open_original(str(source), None), change, samples, "texts", out, ConvertOptions(**options)
    )


def whole_sizes(source: Path) -> tuple[int, int]:
    """Return full rank, and the rotated numbers of all KV heads."""
    spec = open_original(str(source), None).spec
    own = spec.attentions(shared=False)[0]
    assert own.rope is not None
    rotated = own.num_kv_heads * own.rope.dim
    return min(spec.hidden_size, 2 * own.num_kv_heads * own.head_dim - rotated), rotated


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", EXACT)
def test_full_rank_is_exact(name: str, device: str, tmp_path: Path) -> None:
    """transformers' logits of the original are those of the result, where keys are rebuilt (reference) and where they
    are not (cpu); so are greedy tokens, which are decoded one by one.
    """
    source, model = folder_of(name, tmp_path / "source")
    converted(source, tmp_path / "out", *whole_sizes(source))
    llm = LLM(str(tmp_path / "out"), skip_tokenizer_init=True, device=device)
    assert any(layer.mixer is not None and layer.mixer.keeps_latents for layer in llm.loaded.spec.layers)
    for ours, theirs in zip(llm.logits(SEQUENCES), oracle_logits(model, SEQUENCES), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    wanted, lead = oracle_greedy(model, PROMPT, 32)
    greedy = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)
    assert lead > 1e-4 and llm.generate([PROMPT], greedy)[0].outputs[0].token_ids == wanted


def test_full_rank_is_exact_without_a_text(tmp_path: Path) -> None:
    source, model = folder_of("llama_gqa", tmp_path / "source")
    convert(str(source), "mla=32+32", out=tmp_path / "out")
    ours = LLM(str(tmp_path / "out"), skip_tokenizer_init=True).logits(SEQUENCES)
    for own, other in zip(ours, oracle_logits(model, SEQUENCES), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)


@pytest.mark.parametrize("rotate", ["contribution", "uniform"])
def test_equal_heads_need_the_numbers_of_one(rotate: str, tmp_path: Path) -> None:
    source, model = folder_of("llama_gqa", tmp_path / "source")
    for name, x in model.named_parameters():
        if ".k_proj." in name or ".v_proj." in name:
            parts = x.data.view(2, -1, *x.shape[1:])
            parts[:] = parts[:1].clone()
    model.save_pretrained(source)
    converted(source, tmp_path / "out", 16, 16, rotate=rotate)
    ours = LLM(str(tmp_path / "out"), skip_tokenizer_init=True).logits(SEQUENCES)
    for own, other in zip(ours, oracle_logits(model, SEQUENCES), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)


def drawn(seed: int, heads: int = 4, kv: int = 2, size: int = 6, width: int = 20) -> tuple[Matrices, Moments, Any]:
    """Return random matrices of a layer, moments of random inputs of equal weight, and these inputs."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(n, size, width)) for n in (heads, kv, kv))
    own = Matrices(q, k, v, rng.normal(size=(width, heads, size)), np.array([1.0, 0.3, 0.02]), 1.0)
    x = rng.normal(size=(400, width)) @ rng.normal(size=(width, width))
    y = np.concatenate([k, v]).reshape(-1, width) @ x.T
    queries = np.einsum("hdw,tw->hdt", q, x)
    moments = Moments(
        y @ y.T, y.sum(axis=1), len(x), queries @ queries.swapaxes(1, 2), len(x), rng.uniform(size=(heads, 50))
    )
    return own, moments, x


@pytest.mark.parametrize("rank", [1, 5, 12, 17])
def test_the_error_is_the_tail_of_the_singular_values(rank: int) -> None:
    """numpy's singular values of weighted keys and values say what is lost, and no other matrices of the rank lose
    less. Changes are weighted by the queries and the output matrix of each head.
    """
    own, moments, x = drawn(1)
    counts = np.zeros(3, np.int64)
    found = components(own, moments, 0.4)
    factors = factored(own, moments, found, counts, rank, 0.4)
    exact = factored(own, moments, found, counts, 20, 0.4)

    def changes(kv_a: Any, kv_b: Any) -> Any:
        """Return what the heads' scores (weighted) and values add, for each input [T, ...]."""
        made = np.einsum("hir,rw,tw->thi", kv_b, kv_a, x)
        values = np.einsum("whi,thi->thw", own.o, made[:, :, 6:])
        spread = np.einsum("whi,thi->thw", own.o, np.einsum("giw,tw->tgi", own.v, x).repeat(2, axis=1))
        size = np.sqrt(((spread - spread.mean(axis=0)) ** 2).sum(axis=2).mean(axis=0))
        queries = np.einsum("hiw,tw->hit", exact.q[:, :6] / 6**0.5, x)
        root = np.linalg.cholesky(np.einsum("hit,hjt->hij", queries, queries) / len(x))
        scores = np.einsum("hij,thi->thj", root, made[:, :, :6]) * size[:, None]
        return np.concatenate([scores.reshape(len(x), -1), values.reshape(len(x), -1)], axis=1)

    whole = changes(exact.kv_a, exact.kv_b)
    off = np.square(whole - changes(factors.kv_a, factors.kv_b)).sum()
    tail = np.square(np.linalg.svd(whole, compute_uv=False)[rank:]).sum()
    np.testing.assert_allclose(off, tail, rtol=1e-3)
    np.testing.assert_allclose(factors.lost, tail / np.square(whole).sum(), rtol=1e-3)


def test_moments_are_those_of_transformers(tmp_path: Path) -> None:
    """Distances and weights follow the squares of the attention that transformers returns."""
    source, model = folder_of("llama_gqa", tmp_path / "source")
    original = open_original(str(source), None)
    own = original.spec.attention(1)
    assert own is not None
    matrices = matrices_of(own, original.model.weights, "layers.1.mixer", original.table.memory.get, 256)
    found = moments_of_text(original, {1: matrices}, SEQUENCES, lambda what, done, total: None)[1]
    with torch.no_grad():
        shares = model(torch.tensor(SEQUENCES), output_attentions=True).attentions[1].double().square().numpy()
    distances = np.stack([np.trace(shares, -d, axis1=2, axis2=3).sum(axis=0) for d in range(40)], axis=1)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(found.weight, shares.sum(), rtol=1e-4)


# ---- DeepSeek's names, the plan, and repair -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("latent", "rotated", "rotate"), [(32, 32, "contribution"), (20, 12, "contribution"), (16, 8, "uniform")]
)
def test_transformers_computes_the_same_logits_from_deepseek_names(
    latent: int, rotated: int, rotate: str, tmp_path: Path
) -> None:
    source, _ = folder_of("llama_gqa", tmp_path / "source")
    report = converted(source, tmp_path / "out", latent, rotated, rotate=rotate)
    assert any("transformers computes the same logits from the deepseek_v2 config" in note for note in report.notes)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    assert type(theirs).__name__ == "DeepseekV2ForCausalLM"
    ours = LLM(str(tmp_path / "out"), skip_tokenizer_init=True).logits(SEQUENCES)
    for own, other in zip(ours, oracle_logits(theirs, SEQUENCES), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4)


@pytest.mark.parametrize("name", ["llama_gqa", "llama_tied"])
def test_our_own_config_computes_what_deepseek_names_do(name: str, tmp_path: Path) -> None:
    source, _ = folder_of(name, tmp_path / "source")
    for format in ("family", "ridgeline"):
        converted(source, tmp_path / format, 16, 16, format=format)
    one, two = (LLM(str(tmp_path / name), skip_tokenizer_init=True) for name in ("family", "ridgeline"))
    kinds = [
        json.loads((tmp_path / name / "config.json").read_text())["model_type"] for name in ("family", "ridgeline")
    ]
    assert kinds == ["deepseek_v2", "ridgeline"]
    for a, b in zip(one.logits(SEQUENCES), two.logits(SEQUENCES), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_model_that_deepseek_cannot_say_is_refused_in_its_names(tmp_path: Path) -> None:
    source, _ = folder_of("gpt_neox_sequential", tmp_path / "source")
    with pytest.raises(RequestError, match="a gpt_neox config cannot say it"):
        converted(source, tmp_path / "out", 16, 16, format="family")


def test_float16_has_no_room_for_the_latents_of_deepseek_names(tmp_path: Path) -> None:
    source, model = folder_of("llama_gqa", tmp_path / "source")
    model.half().save_pretrained(source)
    converted(source, tmp_path / "out", 32, 32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "ridgeline"


@pytest.mark.parametrize("name", ["llama_gqa", "phi3", "bamba"])
def test_the_plan_counts_the_bytes_of_the_result(name: str, tmp_path: Path) -> None:
    source, _ = folder_of(name, tmp_path / "source")
    report = converted(source, tmp_path / "out", 16, 8)
    original = open_original(str(source), None)
    machine, _ = this_machine()
    planned = change(Deployment(original.spec, machine), "mla=16+8").deployment.spec
    made = open_original(str(tmp_path / "out"), None).spec
    assert [(w.name, w.shape) for w in planned.weights()] == [(w.name, w.shape) for w in made.weights()]
    precision = cpu_precision(original.dtype, default_storage(original.dtype).dtype, machine)
    first, second = (price(Deployment(spec, machine, precision), Load(1, 192, 64)) for spec in (planned, made))
    assert first == second == replace(report.prices["converted"], measured=None)


def test_distillation_repairs_latents_in_deepseek_names(tmp_path: Path) -> None:
    """Matrices that make the latents tiny train as if they were not, and are written as they were."""
    write_model(tmp_path / "teacher")
    (tmp_path / "text.txt").write_text(
        " ".join(np.random.default_rng(0).choice(["one", "two", "three", "while", "(x)", "= 3", "return"], 2000))
    )
    options = ConvertOptions(sequences=4, length=32)
    convert(
        str(tmp_path / "teacher"), "mla=4+2", out=tmp_path / "student", data=[tmp_path / "text.txt"], options=options
    )  # fmt: skip
    run = DistillOptions(tokens=1536, context=32, batch_tokens=64, learning_rate=3e-3)
    found = distill(
        str(tmp_path / "student"), str(tmp_path / "teacher"), Corpus.from_paths([tmp_path / "text.txt"]),
        tmp_path / "out", run, ranks=Ranks("reference"), dtype="float32",
    )  # fmt: skip
    assert found.after.kl.value < 0.7 * found.before.kl.value
    assert set(found.differences) == {"ridgeline", "transformers"}
    before, after = (
        load_model(str(tmp_path / name), LoadOptions(device="reference", dtype="float32"))
        for name in ("student", "out")
    )
    assert before.spec == after.spec and after.checkpoint.config["model_type"] == "deepseek_v2"
    sizes = [float(m.model.weights["layers.0.mixer.kv_a.weight"][:4].abs().max()) for m in (before, after)]
    assert 0.5 < sizes[0] / sizes[1] < 2 and sizes[0] < 1e-6


def test_raised_latents_are_the_same_model(tmp_path: Path) -> None:
    source, _ = folder_of("llama_gqa", tmp_path / "source")
    converted(source, tmp_path / "out", 16, 16)
    loaded = load_model(str(tmp_path / "out"), LoadOptions(device="reference", dtype="float32"))
    given = {w.name: torch.as_tensor(loaded.model.weights[w.name]) for w in loaded.spec.weights()}
    levels = Levels.of(loaded.spec, given)
    raised = levels.raised(given)
    assert set(levels.factors) == {0, 1, 2, 3} and float(raised["layers.0.mixer.kv_a.weight"][:16].abs().max()) > 1e-3
    assert all(torch.equal(x, given[name]) for name, x in levels.lowered(raised).items())
    step = DenseStep.build(SEQUENCES, loaded.table.memory)
    one, two = (
        Model(spec, weights, loaded.table, 256)(step) for spec, weights in ((loaded.spec, given), (levels.spec, raised))
    )
    np.testing.assert_allclose(np.asarray(one), np.asarray(two), atol=1e-5)


# ---- norms of q and k -----------------------------------------------------------------------------------------


def test_norms_of_equal_keys_are_exact(tmp_path: Path) -> None:
    """Orthogonal matrices of normed inputs give queries and keys of one length, so that their norms are linear."""
    model = make_model(
        CASES["qwen3"], hidden_size=16, num_attention_heads=1, num_key_value_heads=1, head_dim=16, rms_norm_eps=1e-9
    )
    redraw(model, 3)
    for name, x in model.named_parameters():
        if ".q_proj." in name or ".k_proj." in name:
            x.data = torch.linalg.qr(x.data)[0]
        elif "input_layernorm" in name:
            x.data.fill_(1.0)
    model.save_pretrained(tmp_path / "source")
    report = converted(tmp_path / "source", tmp_path / "out", 16, 16)
    assert "norms of q and k became parts of their matrices" in report.notes[0]
    ours = LLM(str(tmp_path / "out"), skip_tokenizer_init=True).logits(SEQUENCES)
    for own, other in zip(ours, oracle_logits(model, SEQUENCES), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "gemma3"])
def test_norms_are_fitted_by_least_squares(name: str, tmp_path: Path) -> None:
    """The fit to what transformers' norms give is nearly numpy's, and without a text it is worse."""
    source, model = folder_of(name, tmp_path / "source")
    original = open_original(str(source), None)
    texts = np.random.default_rng(1).integers(3, 90, (60, 40)).tolist()
    seen: dict[str, Any] = {}
    layer = next(m for key, m in model.named_modules() if key.endswith("layers.1.self_attn"))
    layer.k_proj.register_forward_hook(lambda module, given, out: seen.update(x=given[0].flatten(0, 1)))
    layer.k_norm.register_forward_hook(lambda module, given, out: seen.update(y=out))
    with torch.no_grad():
        model(torch.tensor(texts))
    x, y = seen["x"].double().numpy(), seen["y"].double().numpy()
    if y.ndim == 4:  # [batch, heads, tokens, head size] or [batch, tokens, heads, head size]
        y = y.swapaxes(1, 2) if y.shape[2] == 40 and y.shape[1] != 40 else y
    y = y.reshape(len(x), -1)
    own = original.spec.attention(1)
    assert own is not None

    def error(sequences: Any) -> float:
        made = linear_weights(original, {1: own}, lambda i: np.ones(x.shape[1]), sequences, lambda *_: None)
        return float(np.square(x @ made.computed("layers.1.mixer.k.weight").T - y).sum())

    best = np.square(x @ np.linalg.lstsq(x, y, rcond=None)[0] - y).sum()
    assert best <= error(texts) < 1.02 * best < error(())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "mla=64"), "write mla=64+16"),
        (("--to", "mla=64:16"), "write mla=64+16"),
        (("--to", "mla=0+16"), "write mla=64+16"),
        (("--to", "mla=16+7"), "take an even number from 2 to 64"),
        (("--to", "mla=16+66"), "take an even number from 2 to 64"),
        (("--to", "mla=113+16"), "wider than full rank, which is 112 for layer 0 with 16 rotated numbers"),
        (("--to", "mla=16+12", "--rotate", "uniform"), "take --rotate contribution"),
        (("--to", "mla=16+16", "--rotate", "most"), "--rotate is 'most'; use contribution, uniform"),
    ],
)
def test_bad_sizes_give_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=128, intermediate_size=64, num_hidden_layers=1, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "source")
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "source"), *words, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, RidgelineError)
    assert message in str(result.exception)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpt_oss_plain", "sinks"), ("mistral", "a window of"), ("gemma2", "window"), ("gpt2", "biases"),
        ("nemotron_h", "keys without rotation"), ("smollm3", "keys without rotation"), ("qwen3_next", "a gate"),
        ("llama_dynamic", "depends on the length"), ("mamba2", "has no attention layer with KV heads"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_converted_are_refused_by_name(name: str, reason: str, tmp_path: Path) -> None:
    source, _ = folder_of(name, tmp_path / "source")
    with pytest.raises(RequestError, match=reason):
        convert(str(source), "mla=16+2", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shared_keys_and_patterns_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match="layer 0 shares keys and values with another layer"):
        check_layers(SPECS["cla2"], "mla=16+2")
    layer = SPECS["first_tokens"].layers[0]
    with pytest.raises(RequestError, match="layer 0 has a pattern of keys"):
        check_layers(replace(SPECS["first_tokens"], layers=(layer,)), "mla=16+2")
