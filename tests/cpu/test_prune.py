"""Pruning: a part that gives nothing ranks last and can be removed, in families of all kinds; the others stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oracle.build import make_model, redraw
from oracle.families import CASES
from ridgeline.compress.data import Samples
from ridgeline.compress.folder import changed_model, stored_types
from ridgeline.compress.prune.aims import Aims, parse_keep
from ridgeline.compress.prune.axes import width_axes
from ridgeline.compress.prune.cut import Cut, CutWeights
from ridgeline.compress.prune.measure import Measured
from ridgeline.compress.prune.options import PruneOptions
from ridgeline.compress.prune.rank import best, by_activation, by_chance, by_weights, strongest
from ridgeline.compress.prune.removal import losses_without
from ridgeline.compress.prune.run import make_cut, measure
from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.nn import Capture, Model, PassingModel
from ridgeline.plan.rewrite import with_layers
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model
from ridgeline.spec import Mamba2, MoE
from ridgeline.spec.axes import Unit
from ridgeline.spec.parts import size_of

# GQA; learned positions and transposed matrices; post norms; parallel branches; experts; shared experts, latents; norms
# after branches; state spaces beside attention.
FAMILIES = ("llama_gqa", "gpt2", "gemma2", "gpt_neox", "qwen3_moe", "deepseek_v3", "olmo2", "bamba", "jamba")
SEQUENCES = [[(7 * i * i + 3 * j + i * j) % 90 + 3 for i in range(40)] for j in range(6)]
SAMPLES = Samples(SEQUENCES[:4], [Document(ids) for ids in SEQUENCES[4:]])
Weights = dict[str, Any]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[LoadedModel, Weights]]:
    """Return a function that returns a case's model, opened once, and its weights in float32.

    eps: the epsilon of its RMS norms; None: that of the case, which is 0.01.
    """
    found: dict[tuple[str, float | None], tuple[LoadedModel, Weights]] = {}

    def get(name: str, eps: float | None = None) -> tuple[LoadedModel, Weights]:
        if (name, eps) not in found:
            folder = tmp_path_factory.mktemp(name)
            model = make_model(CASES[name])
            redraw(model, 1)
            if eps is not None and hasattr(model.config, "rms_norm_eps"):
                model.config.rms_norm_eps = eps
            model.save_pretrained(folder)
            loaded = pass_model(str(folder), LoadOptions(device="cpu"))
            found[name, eps] = loaded, {key: np.array(x, np.float32) for key, x in loaded.model.weights.items()}
        loaded, weights = found[name, eps]
        return loaded, {key: x.copy() for key, x in weights.items()}

    return get


def with_weights(loaded: LoadedModel, weights: Weights) -> LoadedModel:
    return replace(loaded, model=PassingModel(loaded.spec, weights, loaded.table, loaded.max_model_len))


def logits(loaded: LoadedModel) -> np.ndarray:
    found: np.ndarray = np.asarray(loaded.model(loaded.dense_step(SEQUENCES[4:])))
    return found


def pruned(loaded: LoadedModel, keep: str, **options: Any) -> tuple[Cut, LoadedModel]:
    cut = make_cut(loaded, parse_keep(keep), None, SAMPLES, PruneOptions(**options))
    types: Mapping[str, Any] = dict.fromkeys(loaded.model.weights, "float32")
    return cut, changed_model(loaded, CutWeights(cut, loaded.model.weights, types, loaded.table.memory.get))


def measured(loaded: LoadedModel) -> Measured:
    return measure(loaded, SAMPLES, False)


def silence(weights: Weights, index: int) -> None:
    """Let a layer give nothing."""
    for name, x in weights.items():
        end = name.removeprefix(f"layers.{index}.")
        if end != name and (end.split(".")[-2] in ("o", "out", "down") or "post_norm" in end):
            x[:] = 0.0


# ---- importance ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_that_gives_nothing_ranks_last_and_can_go(name: str, opened: Any) -> None:
    loaded, weights = opened(name)
    index = 1
    silence(weights, index)
    if name == "gemma2":  # its post norms are 1 + weight
        for key in weights:
            if key.startswith(f"layers.{index}.") and "post_norm" in key:
                weights[key][:] = -1.0
    model = with_weights(loaded, weights)
    assert int(strongest(measured(model).layers)[-1]) == index
    keep = f"layers={len(loaded.spec.layers) - 1}"
    cut, small = pruned(model, keep, layer_score="cosine")
    assert [layer.index for layer in cut.layers] == [i for i in range(len(loaded.spec.layers)) if i != index]
    np.testing.assert_allclose(logits(small), logits(model), atol=1e-4)


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_neox", "bamba"])
def test_a_layer_that_gives_nothing_changes_no_perplexity(name: str, opened: Any) -> None:
    """On text that the model writes itself, each other layer is missed: its own words are the likeliest."""
    loaded, weights = opened(name)
    silence(weights, 2)
    model = with_weights(loaded, weights)
    rng, texts = np.random.default_rng(0), [[5], [9], [30], [70]]
    for _ in range(30):
        rows = np.asarray(model.model(model.dense_step(texts)), np.float64)
        for text, row in zip(texts, rows[np.cumsum([len(t) for t in texts]) - 1], strict=True):
            text.append(int(np.argmax(row + rng.gumbel(size=row.size))))
    losses = losses_without(model, texts, lambda *_: None)
    assert int(strongest(losses)[-1]) == 2


@pytest.mark.parametrize("name", ["llama_gqa", "gpt_neox", "bamba", "granite"])
def test_losses_without_a_layer_are_those_of_the_shorter_model(name: str, opened: Any) -> None:
    """Granite scales its branches. Each shorter model is built and run as a whole."""
    loaded, weights = opened(name)
    count, losses = len(loaded.spec.layers), losses_without(loaded, SEQUENCES[:4], lambda *_: None)
    for removed in range(count):
        kept = [i for i in range(count) if i != removed]
        names = {f"layers.{old}.": f"layers.{new}." for new, old in enumerate(kept)}
        own = {key: x for key, x in weights.items() if not key.startswith(f"layers.{removed}.")}
        for old, new in names.items():
            own = {key.replace(old, new) if key.startswith(old) else key: x for key, x in own.items()}
        model = Model(with_layers(loaded.spec, kept), own, loaded.table, loaded.max_model_len)
        found = []
        for ids in SEQUENCES[:4]:
            rows = np.asarray(model(loaded.dense_step([ids])), np.float64)[:-1]
            found.append(np.log(np.exp(rows).sum(axis=1)) - rows[range(len(ids) - 1), ids[1:]])
        assert losses[removed] == pytest.approx(np.mean(found), rel=1e-5), removed


@pytest.mark.parametrize("name", FAMILIES)
def test_a_dead_neuron_ranks_last(name: str, opened: Any) -> None:
    loaded, weights = opened(name)
    wanted: dict[tuple[int, Unit], int] = {}
    for i, layer in enumerate(loaded.spec.layers):
        if isinstance(layer.mlp, MoE):
            weights[f"layers.{i}.mlp.experts.up.weight"][:, 7] = 0.0
            wanted[i, "neurons"] = 7
        if layer.mlp is not None and not isinstance(layer.mlp, MoE):
            for kind in ("weight", "bias"):
                if (key := f"layers.{i}.mlp.up.{kind}") in weights:
                    weights[key][5] = 0.0
            wanted[i, "mlp"] = 5
    units = measured(with_weights(loaded, weights)).units
    assert wanted
    for (i, unit), neuron in wanted.items():
        own = units[i][unit]
        assert (own[..., neuron] == 0).all() and own.min() == 0, f"layer {i}"
        used = own[own.any(-1)] if own.ndim > 1 else own  # an expert without tokens gives nothing at all
        assert (strongest(used)[..., -1] == neuron).all(), f"layer {i}"


@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "gemma2", "gpt_neox", "deepseek_v3", "olmo2", "jamba"])
def test_a_copied_head_ranks_last_and_can_go(name: str, opened: Any) -> None:
    """The output matrix of the copy is another one, which the original's takes over."""
    loaded, weights = opened(name)
    scores, heads = {}, {}
    for i in range(len(loaded.spec.layers)):
        layer = loaded.spec.layers[i]
        if (o := weights.get(f"layers.{i}.mixer.o.weight")) is None:
            continue
        assert layer.mixer is not None
        heads[i], group = size_of(layer, "heads"), layer.mixer.query_group
        copy_head(weights, f"layers.{i}.mixer.", heads[i], 0, 1 if group > 1 or heads[i] < 3 else 2)
        assert np.ptp(o) > 0
    model = with_weights(loaded, weights)
    scores = by_activation(loaded.spec, measured(model))
    for i, many in heads.items():
        own = scores.units[i]["queries"]
        assert own.min() < 1e-3 * np.sort(own)[1], f"layer {i}"
        assert int(strongest(own)[-1]) in (0, 1, 2) and len(own) == many


def copy_head(weights: Weights, prefix: str, heads: int, source: int, target: int) -> None:
    """Let query head `target` do what `source` does, with its keys and values if it has its own."""
    for part in ("q", "k", "v", "q_b", "kv_b", "q_norm", "k_norm"):
        for kind in ("weight", "bias"):
            x = weights.get(f"{prefix}{part}.{kind}")
            if x is None or len(x) % heads:
                continue
            own = x if part == "kv_b" else x.reshape(-1, x.shape[0] // heads, *x.shape[1:])
            if len(own) == heads:
                own[target] = own[source]


@pytest.mark.parametrize(
    ("name", "keep"), [("gpt2", "heads=0.75"), ("gpt_neox", "heads=0.75"), ("llama_gqa", "heads=4")]
)
def test_a_copied_head_is_removed_without_a_trace(name: str, keep: str, opened: Any) -> None:
    """In llama_gqa, one of the three query heads of each KV head is a copy."""
    loaded, weights = opened(name)
    for i, layer in enumerate(loaded.spec.layers):
        own = layer.mixer
        group = own.query_group
        for first in range(0, own.num_heads if group > 1 else 1, group):
            copy_head(weights, f"layers.{i}.mixer.", own.num_heads, first, first + (1 if group > 1 else 2))
    model = with_weights(loaded, weights)
    _, small = pruned(model, keep)
    assert small.spec.num_params() < model.spec.num_params()
    np.testing.assert_allclose(logits(small), logits(model), atol=1e-4)
    _, without = pruned(model, keep, residual="none")
    assert float(np.abs(logits(without) - logits(model)).max()) > 0.1


def test_a_copied_kv_head_is_removed_without_a_trace(opened: Any) -> None:
    loaded, weights = opened("llama_gqa")
    for i, layer in enumerate(loaded.spec.layers):
        own = layer.mixer
        for part, many in (("q", own.num_kv_heads), ("k", own.num_kv_heads), ("v", own.num_kv_heads)):
            x = weights[f"layers.{i}.mixer.{part}.weight"]
            parts = x.reshape(many, -1, x.shape[1])
            parts[1] = parts[0]
    model = with_weights(loaded, weights)
    cut, small = pruned(model, "kv_heads=1")
    assert [size_of(layer, "kv_heads") for layer in cut.spec.layers] == [1] * len(cut.spec.layers)
    np.testing.assert_allclose(logits(small), logits(model), atol=1e-4)


def test_experts_are_ranked_by_their_shares_in_tokens(opened: Any) -> None:
    """The shares are computed from the inputs of the router: a softmax over the best three, as in the paper."""
    loaded, weights = opened("qwen3_moe")
    scores, name = measured(loaded).units[1]["experts"], "layers.1.mlp.router.input"
    seen = Capture(loaded.spec, [name])
    Model(loaded.spec, weights, loaded.table, 256, capture=seen).forward(loaded.dense_step(SEQUENCES[:4]), seen)
    x = np.asarray(seen.outputs[name], np.float64) @ weights["layers.1.mlp.router.weight"].T.astype(np.float64)
    chosen = np.argsort(-x, axis=1)[:, : loaded.spec.layers[1].mlp.num_experts_per_tok]
    shares = np.zeros_like(x)
    best_three = np.exp(np.take_along_axis(x, chosen, 1))
    np.put_along_axis(shares, chosen, best_three / best_three.sum(1, keepdims=True), 1)
    means = shares.reshape(4, 40, -1).mean(1)
    np.testing.assert_allclose(scores, np.sqrt(np.square(means).sum(0)), rtol=1e-4)


@pytest.mark.parametrize("name", ["mamba2", "mamba", "bamba"])
def test_a_head_of_a_state_space_that_gives_nothing_can_go(name: str, opened: Any) -> None:
    """In Mamba-2, as many heads stay in each group; the norm is over one group, so that its scale is compared too."""
    loaded, weights = opened(name)
    silent = {}
    for i, layer in enumerate(loaded.spec.layers):
        key = f"layers.{i}.mixer.in.weight"
        if key not in weights:
            continue
        size = layer.mixer.head_dim if isinstance(layer.mixer, Mamba2) else 1
        groups = layer.mixer.num_groups if isinstance(layer.mixer, Mamba2) else 1
        many = weights[f"layers.{i}.mixer.D"].shape[0] // groups
        silent[i] = [g * many + 1 for g in range(groups)]
        gate = 0 if isinstance(layer.mixer, Mamba2) else layer.mixer.inner_size  # where z begins
        for head in silent[i]:
            weights[key][gate + head * size : gate + (head + 1) * size] = 0.0
            for part in ("in.bias",):
                if (bias := weights.get(f"layers.{i}.mixer.{part}")) is not None:
                    bias[gate + head * size : gate + (head + 1) * size] = 0.0
    units = measured(with_weights(loaded, weights)).units
    assert silent
    for i, heads in silent.items():
        assert sorted(strongest(units[i]["state"])[-len(heads) :].tolist()) == heads


# ---- weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("importance", ["activation", "weights", "random"])
def test_everything_kept_is_the_same_model(name: str, importance: str, opened: Any) -> None:
    loaded, weights = opened(name)
    words = "mlp=1.0,width=1.0,layers=1.0"
    _, small = pruned(with_weights(loaded, weights), words, importance=importance)
    assert small.spec == loaded.spec
    np.testing.assert_allclose(logits(small), logits(loaded), atol=1e-4)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "olmo2", "bamba", "gpt2", "gpt_neox"])
def test_channels_that_nothing_writes_can_go(name: str, opened: Any) -> None:
    """RMS norms get the factor with which the other channels stay as they are, but for the epsilon. LayerNorm takes
    the mean of fewer channels, which no factor repairs.
    """
    loaded, weights = opened(name, 1e-12)
    width = loaded.spec.hidden_size
    gone = np.arange(0, width, 4)
    for key, axis in width_axes(loaded.spec).items():
        x = weights.get(key)
        is_read = x is not None and axis == x.ndim - 1 and x.ndim > 1 and "embed" not in key
        if x is None or is_read or "norm.weight" in key or "norm.bias" in key:
            continue
        np.moveaxis(x, axis, 0)[gone] = 0.0
    model = with_weights(loaded, weights)
    cut, small = pruned(model, "width=0.75", channels="importance")
    assert small.spec.hidden_size == width * 3 // 4
    if name in ("gpt2", "gpt_neox"):
        assert not cut.factors
        return
    assert cut.channels is not None and not set(cut.channels.tolist()) & set(gone.tolist())
    types: Any = dict.fromkeys(weights, "float32")
    plain = changed_model(model, CutWeights(replace(cut, factors={}), weights, types, loaded.table.memory.get))
    off, without = (float(np.abs(logits(other) - logits(model)).max()) for other in (small, plain))
    assert off < 1e-4 < without


def test_a_rotated_stream_is_the_same_model_in_another_basis(opened: Any) -> None:
    loaded, weights = opened("llama_gqa", 1e-12)
    inside, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(loaded.spec.hidden_size, 48)))
    into = (inside @ inside.T).astype(np.float32)
    weights["embed.weight"] = weights["embed.weight"] @ into
    for key in weights:
        if key.endswith(("mixer.o.weight", "mlp.down.weight")):
            weights[key] = into @ weights[key]
    model = with_weights(loaded, weights)
    _, small = pruned(model, "width=48", channels="components")
    assert small.spec.hidden_size == 48
    np.testing.assert_allclose(logits(small), logits(model), atol=1e-4)


def test_sizes_differ_by_layer_and_have_the_same_sum(opened: Any) -> None:
    loaded, weights = opened("llama_gqa")
    weights["layers.2.mlp.up.weight"][10:] *= 1e-3  # ten neurons do everything there
    cut, small = pruned(with_weights(loaded, weights), "mlp=0.5", sizes="by-layer")
    sizes = [size_of(layer, "mlp") for layer in cut.spec.layers]
    assert sum(sizes) == 88 * len(sizes) // 2 and sizes[2] < min(s for i, s in enumerate(sizes) if i != 2)
    assert logits(small).shape == logits(loaded).shape


@pytest.mark.parametrize("importance", ["weights", "random"])
def test_baselines_rank_every_unit(importance: str, opened: Any) -> None:
    for name in FAMILIES:
        loaded, weights = opened(name)
        scores = by_weights(loaded.spec, weights, np.asarray) if importance == "weights" else by_chance(loaded.spec, 1)
        for known, own in zip(measured(loaded).units, scores.units, strict=True):
            assert {unit: x.shape for unit, x in known.items()}.items() <= {u: x.shape for u, x in own.items()}.items()


def test_units_of_groups_stay_equally_many() -> None:
    scores = np.array([9.0, 8.0, 7.0, 1.0, 2.0, 3.0])
    assert best(scores, 2).tolist() == [0, 1]
    assert best(scores, 2, groups=2).tolist() == [0, 5]
    assert best(np.array([1.0, 1.0, 1.0]), 2).tolist() == [0, 1]
    assert best(np.array([[1.0, 2.0], [4.0, 3.0]]), 1).tolist() == [[1], [0]]


@pytest.mark.parametrize("target", [80_000, 120_000, 200_000])
def test_a_number_of_parameters_is_met_from_below(target: int, opened: Any) -> None:
    loaded, _ = opened("llama_gqa")
    cut = make_cut(loaded, Aims(), target, SAMPLES, PruneOptions())
    assert 0.7 * target < cut.spec.num_params() <= target
    fewer = make_cut(loaded, parse_keep("layers=2"), target, SAMPLES, PruneOptions())
    assert len(fewer.spec.layers) == 2 and fewer.spec.num_params() <= target


@pytest.mark.parametrize(
    ("name", "keep", "params", "words"),
    [
        (
            "llama_gqa",
            "heads=0.6",
            None,
            "3.6 of the 6 of layer 0 in 2 equal groups.*write heads=0.333333 .2. or 0.666667 .4.",
        ),
        ("llama_gqa", "heads=9", None, "layer 0 has 6; keep 1 to 6"),
        ("llama_gqa", "layers=0.3", None, "which do not divide so; write layers="),
        ("llama_gqa", "experts=2", None, "llama has no experts whose parts are known by name"),
        ("llama_gqa", "state=0.5", None, "its mixers are Attention"),
        ("gpt2", "heads=0.5,kv_heads=0.5", None, "give one of them"),
        ("qwen3_moe", "experts=1", None, "layer 0 cannot have 1 of .*num_experts_per_tok"),
        ("bamba", "state=5", None, "equal groups"),
        ("llama_gqa", "layers=1.0", 10, "--params 10: with an eighth of mlp and width the model still has"),
        ("llama_gqa", "mlp=0.5,width=0.5", 10_000, "--keep gives both"),
    ],
)
def test_impossible_sizes_give_one_line(name: str, keep: str, params: int | None, words: str, opened: Any) -> None:
    loaded, _ = opened(name)
    with pytest.raises(RequestError, match=words) as caught:
        make_cut(loaded, parse_keep(keep), params, SAMPLES, PruneOptions())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "olmo2"])
def test_a_stream_that_cannot_be_rotated_is_refused_by_name(name: str, opened: Any) -> None:
    loaded, _ = opened(name)
    with pytest.raises(RequestError, match="take --channels importance"):
        make_cut(loaded, parse_keep("width=0.5"), None, SAMPLES, PruneOptions(channels="components"))
    assert make_cut(loaded, parse_keep("width=0.5"), None, SAMPLES, PruneOptions()).channels is not None


def test_stored_types_are_those_of_the_file(opened: Any) -> None:
    loaded, _ = opened("qwen3_moe")
    assert set(stored_types(loaded).values()) == {"float32"}
