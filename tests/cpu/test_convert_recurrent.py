"""Conversion of attention to recurrent layers: fitted by least squares, exact where attention gives nothing, refused by
name.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from oracle.build import make_model, redraw
from oracle.families import CASES
from oracle.ours import SPECS
from ridgeline import LLM, SamplingParams
from ridgeline.cli.main import app
from ridgeline.compress.convert import ConvertOptions, convert
from ridgeline.compress.convert.options import read_options
from ridgeline.compress.convert.recurrent import keep
from ridgeline.compress.convert.recurrent.fit import DAMPING, Fitting
from ridgeline.compress.convert.recurrent.start import KINDS, RATES, projections
from ridgeline.compress.convert.recurrent.taylor import reduced
from ridgeline.compress.convert.recurrent.weights import RecurrentWeights, check_model
from ridgeline.compress.convert.run import parse_change, write_converted
from ridgeline.compress.data import Samples
from ridgeline.compress.folder import open_original, stored_types
from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.nn import Capture, Model
from ridgeline.plan import rewrite
from ridgeline.spec import Attention, Rope, TaylorAttention

pytestmark = pytest.mark.usefixtures("short_rates")

SEQUENCES = [[(7 * i * i + 3 * j + i * j) % 90 + 3 for i in range(40)] for j in range(2)]
TEXTS = np.random.default_rng(0).integers(3, 90, (12, 40)).tolist()
SAMPLES = Samples(TEXTS, [Document(ids) for ids in SEQUENCES])
NAMED: list[rewrite.Recurrent] = ["mamba2", "delta", "lightning", "taylor", "hedgehog"]
# Norms of q and k, biases, outer norms and softcaps, sinks and windows, gates.
NAMES = ["llama_gqa", "qwen3", "qwen2_window", "gemma2", "gpt_oss"]


def folder_of(name: str, folder: Path, silent: int | None = None) -> tuple[Path, Any]:
    """Write a case's model. silent: a layer whose attention gives nothing."""
    model = make_model(CASES[name])
    redraw(model, 3)
    if silent is not None:
        for x in model.model.layers[silent].self_attn.o_proj.parameters():
            x.data.zero_()
    model.save_pretrained(folder)
    return folder, model


def converted(source: Path, out: Path, to: str, **options: Any) -> Any:
    options = {"keep": "pattern", **options}
    original = open_original(str(source), None)
    return write_converted("M", original, parse_change(to), SAMPLES, "texts", out, ConvertOptions(**options))


@pytest.mark.parametrize(("name", "kind"), [("llama_gqa", kind) for kind in NAMED] + [(n, "mamba2") for n in NAMES[1:]])
def test_a_layer_that_adds_nothing_becomes_one_exactly(name: str, kind: str, tmp_path: Path) -> None:
    source, _ = folder_of(name, tmp_path / "source", silent=1)
    count = len(open_original(str(source), None).spec.layers)
    others = ",".join(str(i) for i in range(count) if i != 1)
    report = converted(source, tmp_path / "out", f"hybrid={kind}", keep=others)
    assert report.comparison.others["converted"].kl.value < 1e-6
    before, after = (LLM(str(path), skip_tokenizer_init=True) for path in (source, tmp_path / "out"))
    assert [i for i in range(count) if after.loaded.spec.layers[i].mixer.is_recurrent] == [1]
    for a, b in zip(before.logits(SEQUENCES), after.logits(SEQUENCES), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)
    greedy = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    a, b = (llm.generate([SEQUENCES[0][:8]], greedy)[0].outputs[0].token_ids for llm in (before, after))
    assert a == b


@pytest.mark.parametrize("kind", NAMED)
def test_the_last_matrix_is_that_of_least_squares(kind: rewrite.Recurrent, tmp_path: Path) -> None:
    """The streams before each layer and the results of its attention are those of transformers."""
    source, model = folder_of("llama_gqa", tmp_path / "source")
    given: dict[int, list[torch.Tensor]] = {}
    for i, layer in enumerate(model.model.layers):
        layer.self_attn.o_proj.register_forward_hook(lambda _, __, y, i=i: given.setdefault(i, []).append(y[0]))
    with torch.no_grad():
        seen = [model(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in TEXTS]
    original = open_original(str(source), None)
    spec = rewrite.with_recurrent(original.spec, kind, None)
    types, widen = stored_types(original), original.table.memory.get

    def changed(made: Any, weights: Any) -> RecurrentWeights:
        return RecurrentWeights(made, original.model.weights, types, widen, weights)

    fitted = Fitting(original, spec, KINDS[kind], TEXTS, changed, _silent).fit()
    last = KINDS[kind].out
    names = [f"layers.{i}.mixer.{last}.input" for i in fitted]
    capture = Capture(spec, names)
    ours = Model(spec, changed(spec, fitted), original.table, original.max_model_len, capture=capture)
    streams = [torch.cat([s[i][0] for s in seen]).numpy() for i in range(len(spec.layers))]
    list(ours.run_apart(original.dense_step(TEXTS), streams))
    for i, weights in fitted.items():
        x = np.asarray(capture.outputs[f"layers.{i}.mixer.{last}.input"], np.float64)
        y = torch.cat(given[i]).numpy().astype(np.float64)
        ridge = DAMPING * (x * x).sum() / x.shape[1]
        wide = np.concatenate([x, np.sqrt(ridge) * np.eye(x.shape[1])])
        best = np.linalg.lstsq(wide, np.concatenate([y, np.zeros((x.shape[1], y.shape[1]))]), rcond=None)[0]
        np.testing.assert_allclose(weights[f"{last}.weight"], best.T, atol=2e-3 * np.abs(best).max())


def test_a_head_gets_the_decay_of_its_attention(tmp_path: Path) -> None:
    """Attention to the token itself alone needs the fastest decay; attention to all tokens a slower one."""
    source, _ = folder_of("llama_gqa", tmp_path / "source")
    original = open_original(str(source), None)
    given = original.model.weights, stored_types(original), original.table.memory.get
    found = {}
    for window in (1, original.max_model_len):
        spec = rewrite.with_windows(original.spec, window, None)
        model = Model(spec, original.model.weights, original.table, original.max_model_len)
        every = rewrite.with_recurrent(spec, "mamba2", None)
        fitting = Fitting(
            replace(original, model=model),
            every,
            KINDS["mamba2"],
            TEXTS,
            lambda made, w: RecurrentWeights(made, *given, w),
            _silent,
        )
        found[window] = np.concatenate([np.exp(w["A_log"]) for w in fitting.fit().values()])
    near, far = found.values()
    assert np.median(near) == max(RATES), near
    assert far.mean() < 0.7 * near.mean(), far


def _silent(what: str, done: int, total: int) -> None:
    """Show no progress."""


@pytest.mark.parametrize("kind", NAMED)
def test_sizes_are_those_that_plan_prices(kind: rewrite.Recurrent, tmp_path: Path) -> None:
    source, _ = folder_of("llama_gqa", tmp_path / "source")
    report = converted(source, tmp_path / "out", f"hybrid={kind}:1")
    planned = rewrite.with_recurrent(open_original(str(source), None).spec, kind, 1)
    assert open_original(str(tmp_path / "out"), None).spec.layers == planned.layers
    assert report.prices["converted"].params == planned.num_params()


def test_the_layers_that_matter_keep_their_attention(tmp_path: Path) -> None:
    """A layer whose attention gives nothing is converted, wherever it is; patterns are among the choices."""
    source, _ = folder_of("llama_gqa", tmp_path / "source", silent=1)
    original = open_original(str(source), None)
    layers = list(range(len(original.spec.layers)))
    judge = keep._Judge(original, SAMPLES, (), 0.0, {})
    every = rewrite.with_recurrent(original.spec, "mamba2", None)
    given = original.model.weights, stored_types(original), original.table.memory.get
    fitted = Fitting(
        original, every, KINDS["mamba2"], TEXTS, lambda made, w: RecurrentWeights(made, *given, w), _silent
    ).fit()

    def without(kept: Any) -> RecurrentWeights:
        made = rewrite.with_recurrent(original.spec, "mamba2", None, set(kept))
        return RecurrentWeights(made, *given, {i: w for i, w in fitted.items() if i not in kept})

    losses = [judge.loss(without, [j for j in layers if j != i]) for i in layers]
    assert losses[1] < 1e-6 < min(losses[:1] + losses[2:])
    assert keep.patterns(range(8), 4, 2) == [(0, 4), (1, 5), (2, 6), (3, 7)]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", NAMED)
def test_attention_is_a_better_start_than_random_matrices(kind: str, tmp_path: Path) -> None:
    """On the built-in model, before any repair; half of its layers keep their attention. `verify` passes."""
    text = tmp_path / "text.py"
    text.write_text("".join(p.read_text() for p in sorted(Path(__file__).parents[2].glob("src/ridgeline/spec/*.py"))))
    kl = {}
    for start in ("attention", "random"):
        options = read_options(start=start, length=128, held_out_tokens=1024)
        report = convert("pocket", f"hybrid={kind}:1", out=tmp_path / start, data=[text], options=options)
        assert report.comparison is not None
        quality = report.comparison.others["converted"].kl
        kl[start] = quality.value if quality else 0.0
    assert kl["attention"] < 0.3 * kl["random"], kl
    run = CliRunner().invoke(app, ["verify", str(tmp_path / "attention"), "--quick"])
    assert run.exit_code == 0, run.output


@pytest.mark.parametrize(
    ("to", "options", "error"),
    [
        ("hybrid=mamba", {}, "cannot begin as attention; use mamba2, lightning, delta, taylor, hedgehog"),
        ("hybrid=rwkv:3", {}, "is not a recurrent mixer that is known"),
        ("hybrid=mamba2:0", {}, "write hybrid=mamba2:3"),
        ("hybrid=:3", {}, "write hybrid=mamba2:3"),
        ("hybrid=mamba2:" + "9" * 30, {}, "write hybrid=mamba2:3"),
        ("linear=8", {}, "write linear=64:1"),
        ("linear=0:1", {}, "write linear=64:1"),
        ("linear=hedgehog:8", {}, "write linear=64:1"),
        ("linear=fourier:8:1", {}, "write linear=64:1"),
        ("linear=40:1", {}, "sequences of 40 tokens show nothing of such a window"),
        ("hybrid=mamba2:1", {"keep": "0,9"}, "layer 9 has no attention"),
        ("hybrid=mamba2:1", {"keep": "first"}, "use search, pattern, or layers such as 1,3"),
        ("hybrid=mamba2", {"keep": "0,1,2,3"}, "names all layers with attention"),
    ],
)
def test_bad_input_is_one_line(to: str, options: dict[str, str], error: str, tmp_path: Path) -> None:
    source, _ = folder_of("llama_gqa", tmp_path / "source")
    if options.get("keep") == "0,1,2,3":
        options = {"keep": ",".join(map(str, range(len(open_original(str(source), None).spec.layers))))}
    with pytest.raises(RequestError, match=re.escape(error)) as found:
        converted(source, tmp_path / "out", to, **options)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_converted_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="shares keys and values with another one"):
        check_model(SPECS["cla2"], "mamba2", "hybrid=mamba2")
    with pytest.raises(RequestError, match="name some with --calibrate"):
        convert("pocket", "hybrid=mamba2:1", out=tmp_path / "out")
    with pytest.raises(RequestError, match="--start is 'zeros'; use attention, random"):
        read_options(start="zeros")


def _layer(rope: Rope | None, seed: int = 0) -> tuple[Attention, Any, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return attention with random weights, their reader, inputs [tokens, width] with a constant 1, and its vector."""
    own, width = Attention(4, 2, 6, scale=0.4, rope=rope), 12
    rng = np.random.default_rng(seed)
    weights = {f"{name}.weight": rng.normal(0, 0.3, shape) for name, shape in (
        ("q", (24, width)), ("k", (12, width)), ("v", (12, width)), ("o", (width, 24)),
    )}  # fmt: skip
    x = rng.normal(0.3, 1, (40, width))
    x[:, 0] = 1.0
    return own, weights.get, x, np.eye(width)[0]


def _projected(own: Attention, read: Any, x: Any) -> Any:
    return projections(own, read, x.mean(axis=0), x.T @ x / len(x), 64, damping=0.0)


@pytest.mark.parametrize("size", [6, 3, 1])
@pytest.mark.parametrize("rope", [None, Rope(4), Rope(6, interleaved=True)])
def test_scores_of_linear_attention_are_the_closest_of_their_rank(rope: Rope | None, size: int) -> None:
    """The scores over all pairs of tokens, by the definition in float64, and their truncated singular values."""
    own, read, x, constant = _layer(rope)
    rates = np.array([0.5, 0.125, 1 / 32, 2.0])
    found = _projected(own, read, x)
    q, k = reduced(found.q, found.k, found.scores, constant, rates, size)
    for head, rate in enumerate(rates):
        queries = x @ read("q.weight")[6 * head :][:6].T
        keys = (x - x.mean(axis=0)) @ read("k.weight")[6 * (head // 2) :][:6].T
        shares = np.exp(-rate * np.arange(600))
        scores = sum(
            share * own.scale * queries @ rotated(keys, rope, -distance).T
            for distance, share in enumerate(shares / shares.sum())
        )
        ours = (x @ q[head].T) @ (x @ k[head].T).T / np.sqrt(size)
        tail = np.linalg.svd(scores)[1][size:]
        np.testing.assert_allclose(np.linalg.norm(scores - ours), np.linalg.norm(tail), rtol=1e-6, atol=2e-6)


def rotated(x: Any, rope: Rope | None, position: int) -> Any:
    """Rotate rows by a position, by the definition of RoPE."""
    if rope is None:
        return x
    half, y = rope.dim // 2, x.copy()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        angle = position * rope.theta ** (-2 * i / rope.dim)
        y[:, a] = x[:, a] * np.cos(angle) - x[:, b] * np.sin(angle)
        y[:, b] = x[:, a] * np.sin(angle) + x[:, b] * np.cos(angle)
    return y


def test_linear_attention_is_softmax_attention_to_the_second_order() -> None:
    """Half of the scores leave an eighth of the error, without rotation and with all numbers of a head."""
    own, read, x, constant = _layer(None)
    errors = []
    for scale in (0.02, 0.01):
        found = _projected(replace(own, scale=scale), read, x)
        q, k = reduced(found.q, found.k, found.scores, constant, np.ones(4), 6)
        worst = 0.0
        for head in range(4):
            exact = scale * (x @ read("q.weight")[6 * head :][:6].T) @ (x @ read("k.weight")[6 * (head // 2) :][:6].T).T
            ours = (x @ q[head].T) @ (x @ k[head].T).T / 6**0.5
            values = x @ read("v.weight")[6 * (head // 2) :][:6].T
            both = (np.tril(w) for w in (np.exp(exact), 1 + ours + ours**2 / 2))
            a, b = (w / w.sum(axis=1, keepdims=True) @ values for w in both)
            worst = max(worst, float(np.abs(a - b).max()))
        errors.append(worst)
    assert errors[1] < 2e-4, errors
    assert 6.5 < errors[0] / errors[1] < 9.5, errors


def test_hedgehog_begins_as_the_first_order_of_softmax() -> None:
    """Half of the scores leave a quarter of the error, in features of one number more than a head has."""
    own, read, x, _ = _layer(None)
    errors = []
    for scale in (0.02, 0.01):
        mixer = TaylorAttention(4, 6, 7, "hedgehog")
        weights = KINDS["hedgehog"].weights(mixer, _projected(replace(own, scale=scale), read, x), np.ones(4))
        worst = 0.0
        for head in range(4):
            q, k = (x @ weights[f"{name}.weight"][7 * head :][:7].T for name in "qk")
            parts = [[np.exp(s * y) / np.exp(s * y).sum(axis=1, keepdims=True) for s in (1, -1)] for y in (q, k)]
            ours = sum(a @ b.T for a, b in zip(*parts, strict=True))
            exact = np.exp(scale * (x @ read("q.weight")[6 * head :][:6].T)
                           @ (x @ read("k.weight")[6 * (head // 2) :][:6].T).T)  # fmt: skip
            both = (np.tril(w) for w in (exact, ours))
            a, b = (w / w.sum(axis=1, keepdims=True) for w in both)
            worst = max(worst, float(np.abs(a - b).max()))
        errors.append(worst)
    assert errors[1] < 2e-3, errors
    assert 3.5 < errors[0] / errors[1] < 4.6, errors


@pytest.mark.parametrize(("to", "features"), [("linear=8:1", "taylor"), ("linear=hedgehog:8:1", "hedgehog")])
def test_linear_layers_leave_windows_in_the_others(to: str, features: str, tmp_path: Path) -> None:
    source, _ = folder_of("llama_gqa", tmp_path / "source")
    report = converted(source, tmp_path / "out", to)
    spec = open_original(str(tmp_path / "out"), None).spec
    made = [m for layer in spec.layers if isinstance(m := layer.mixer, TaylorAttention)]
    assert {m.features for m in made} == {features}
    kept = [own for i in range(len(spec.layers)) if (own := spec.attention(i))]
    assert len(kept) == len(spec.layers) // 2 and {own.window for own in kept} == {8}
    assert 2 * report.prices["converted"].state_bytes == report.prices["original"].state_bytes
