"""Calibration through models: the inputs that matrices see, folds that change nothing, and every method."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oracle.build import make_model, redraw
from oracle.families import CASES
from ridgeline.compress import layers
from ridgeline.compress.calibrate import Quantizer, rounded
from ridgeline.compress.choose import Chosen, lost_power, matrix_of
from ridgeline.compress.folds import apply_fold, folds
from ridgeline.compress.inputs import Inputs, MatrixKey, Observer
from ridgeline.compress.layers import Calibration, keys_of, parts
from ridgeline.compress.scheme import parse_scheme
from ridgeline.load.stored import dequantized
from ridgeline.nn import Capture
from ridgeline.nn.step import Stream
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model

FAMILIES = ("llama_gqa", "gpt2", "gemma2", "gpt_neox", "qwen3_moe", "deepseek_v3", "falcon_h1", "olmo2", "qwen3_next")
SEQUENCES = [[(7 * i * i + 3 * j + i * j) % 90 + 3 for i in range(40)] for j in range(8)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function that writes the model of a case once."""
    found: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in found:
            found[name] = tmp_path_factory.mktemp(name)
            model = make_model(CASES[name])
            redraw(model, 1)
            model.save_pretrained(found[name])
        return found[name]

    return folder


def opened(folder: Path) -> LoadedModel:
    return pass_model(str(folder), LoadOptions(device="cpu"))


def stored(loaded: LoadedModel, part: Any) -> dict[str, Any]:
    return {w.name: loaded.model.weights[w.name] for w in part.weights}


def inputs_of(loaded: LoadedModel, calibration: Calibration, part: Any) -> dict[MatrixKey, Inputs]:
    observer = Observer([key for w in part.matrices for key in keys_of(w)], with_products=True)
    capture = Capture(part.spec, observer.names, observer.receive)
    list(calibration.run(part, stored(loaded, part), loaded.table, capture=capture))
    return observer.inputs


def test_streams_are_in_memory_once(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream of a batch is released when the stream behind the part replaces it."""
    monkeypatch.setattr(layers, "BATCH_TOKENS", 40)
    loaded = opened(folders("llama_gqa"))
    calibration = Calibration(loaded, SEQUENCES)
    part = next(parts(loaded.spec))
    before = [weakref.ref(stream.residual) for stream in calibration.streams]
    for i, stream in enumerate(calibration.run(part, stored(loaded, part), loaded.table)):
        calibration.streams[i] = stream
        assert sum(ref() is not None for ref in before) <= len(before) - i
    assert len(before) == 8


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pass_may_end_at_its_last_input(name: str, folders: Any) -> None:
    """The sums over inputs are those of whole passes, and every matrix has some."""
    loaded = opened(folders(name))
    calibration = Calibration(loaded, SEQUENCES)
    for part in parts(loaded.spec):
        keys = [key for w in part.matrices for key in keys_of(w)]
        observer = Observer(keys, with_products=True)
        capture = Capture(part.spec, observer.names, observer.receive)
        calibration.observe(part, stored(loaded, part), loaded.table, capture, observer)
        whole = inputs_of(loaded, calibration, part)
        assert set(observer.inputs) == set(whole)
        for key, seen in whole.items():
            assert observer.inputs[key].num_tokens == seen.num_tokens
            np.testing.assert_array_equal(observer.inputs[key].hessian, seen.hessian)
        calibration.advance(part, stored(loaded, part), loaded.table)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_parts_are_the_model(name: str, folders: Any) -> None:
    """Part by part, the logits are those of the whole model, and every matrix is in one part."""
    loaded = opened(folders(name))
    calibration = Calibration(loaded, SEQUENCES)
    every = list(parts(loaded.spec))
    named = [w.name for part in every for w in part.weights]
    assert len(named) == len(set(named))
    assert set(named) == {w.name for w in loaded.spec.weights() if w.name.startswith("layers.")}
    for part in every:
        calibration.advance(part, stored(loaded, part), loaded.table)
    expected = loaded.model(loaded.dense_step(SEQUENCES))
    found = loaded.model.logits(Stream(np.concatenate([s.residual for s in calibration.streams]), None))
    np.testing.assert_allclose(found, expected, atol=2e-4 * np.abs(expected).max())


def test_inputs_are_those_of_transformers_modules(folders: Any) -> None:
    """Each matrix of a layer has its own input: a Hessian of another one would still give valid codes."""
    folder = folders("llama_gqa")
    loaded, model = opened(folder), make_model(CASES["llama_gqa"])
    redraw(model, 1)
    seen: dict[str, list[Any]] = {}
    theirs = {"mixer.q": "self_attn.q_proj", "mixer.o": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj",
              "mlp.down": "mlp.down_proj"}  # fmt: skip
    for ours, module in theirs.items():
        found = model.get_submodule(f"model.layers.1.{module}")
        found.register_forward_pre_hook(lambda _, args, ours=ours: seen.setdefault(ours, []).append(args[0]))
    with torch.no_grad():
        for sequence in SEQUENCES:
            model(torch.tensor([sequence]))
    calibration, inputs = Calibration(loaded, SEQUENCES), {}
    for part in parts(loaded.spec):
        if part.index == 1:
            inputs |= inputs_of(loaded, calibration, part)
        calibration.advance(part, stored(loaded, part), loaded.table)
    for ours in theirs:
        x = torch.cat([a.reshape(-1, a.shape[-1]) for a in seen[ours]]).numpy().astype(np.float64)
        mine = inputs[MatrixKey(f"layers.1.{ours}.weight")]
        assert mine.num_tokens == len(x)
        scale = float(np.abs(x.T @ x).max()) / len(x)
        np.testing.assert_allclose(mine.hessian, x.T @ x / len(x), atol=1e-4 * scale)
        np.testing.assert_allclose(mine.mean_abs, np.abs(x).mean(0), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(mine.mean_square, np.square(x).mean(0), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(mine.max_abs, np.abs(x).max(0), rtol=1e-3, atol=1e-4)
    shared = [inputs[MatrixKey(f"layers.1.mixer.{n}.weight")] for n in "qkv"]
    assert shared[0] is shared[1] is shared[2], "one sum for matrices that read one input"


def test_experts_see_the_tokens_that_are_routed_to_them(folders: Any) -> None:
    loaded = opened(folders("qwen3_moe"))
    calibration = Calibration(loaded, SEQUENCES)
    num_tokens = sum(map(len, SEQUENCES))
    for part in parts(loaded.spec):
        if part.branch == "mlp":
            mlp, inputs = part.spec.layers[part.index].mlp, inputs_of(loaded, calibration, part)
            counts = [
                inputs[key].num_tokens if (key := MatrixKey(f"{part.name}.experts.down.weight", e)) in inputs else 0
                for e in range(mlp.num_experts)
            ]
            assert sum(counts) == num_tokens * mlp.num_experts_per_tok
            assert len(set(counts)) > 1
        calibration.advance(part, stored(loaded, part), loaded.table)


@pytest.mark.parametrize("name", FAMILIES)
def test_folds_change_nothing(name: str, folders: Any) -> None:
    """Any scales can move: the output of a part is what it was."""
    loaded, rng = opened(folders(name)), np.random.default_rng(0)
    calibration, count = Calibration(loaded, SEQUENCES), 0
    for part in parts(loaded.spec):
        weights = stored(loaded, part)
        before = [s.residual for s in calibration.run(part, weights, loaded.table)]
        for fold in folds(part):
            columns = matrix_of(weights, MatrixKey(*fold.readers[0])).shape[1]
            heads = rng.lognormal(size=columns // (fold.repeat * fold.size) * fold.size).astype(np.float32)
            scales = np.repeat(heads.reshape(-1, 1, fold.size), fold.repeat, 1).reshape(-1)
            changed = apply_fold(fold, scales, weights, "float32")
            assert any(np.any(changed[n] != np.asarray(weights[n], np.float32)) for n in changed)
            weights |= changed
            count += 1
        after = [s.residual for s in calibration.run(part, weights, loaded.table)]
        for a, b in zip(before, after, strict=True):
            np.testing.assert_allclose(b, a, atol=5e-5 * np.abs(a).max())
        calibration.advance(part, stored(loaded, part), loaded.table)
    expected = {"llama_gqa": 4, "gpt2": 3, "gpt_neox": 0, "olmo2": 0}
    assert count == expected.get(name, 0) * len(loaded.spec.layers) or name not in expected


def test_a_norm_in_16_bits_is_rounded_before_its_matrices(folders: Any) -> None:
    loaded = opened(folders("llama_gqa"))
    part = next(iter(parts(loaded.spec)))
    fold, weights = next(folds(part)), stored(loaded, part)
    scales = np.exp(np.linspace(-2, 2, loaded.spec.hidden_size)).astype(np.float32)
    changed = apply_fold(fold, scales, weights, "bfloat16")
    norm = changed["layers.0.mixer_norm.weight"]
    assert np.all(norm.view(np.uint32) << 16 == 0), "bfloat16 holds each number"
    product = changed["layers.0.mixer.q.weight"] * norm
    expected = weights["layers.0.mixer.q.weight"] * weights["layers.0.mixer_norm.weight"]
    np.testing.assert_allclose(product, expected, rtol=1e-5)


def run(loaded: LoadedModel, scheme: str, count: int = len(SEQUENCES)) -> tuple[list[Chosen], float]:
    """Quantize a model. Return the results of its parts, and the squared error of the stream behind the last one."""
    own = parse_scheme(scheme)
    calibration, exact = Calibration(loaded, SEQUENCES[:count]), Calibration(loaded, SEQUENCES[:count])
    quantizer = Quantizer(calibration, loaded.table, own, "float32", lambda name: own.format)
    found = []
    for part in parts(loaded.spec):
        found.append(quantizer.quantize(part, stored(loaded, part)))
        exact.advance(part, stored(loaded, part), loaded.table)
    pairs = zip(exact.streams, calibration.streams, strict=True)
    return found, sum(float(np.square(a.residual - b.residual).sum()) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *((name, "gptq-int4") for name in FAMILIES),
        *((name, scheme) for name in ("llama_gqa", "qwen3_moe") for scheme in ("awq-int4", "smooth-int8")),
        *(("gpt2", scheme) for scheme in ("awq-int4", "clip-int3", "llm.int8", "rtn-fp8")),
    ],
)
def test_every_method_serves_every_family(name: str, scheme: str, folders: Any) -> None:
    loaded = opened(folders(name))
    results, error = run(loaded, scheme, 4)
    codes = {key for found in results for key in found.codes}
    rounded = {key for part in parts(loaded.spec) for w in part.matrices for key in keys_of(w)}
    assert codes == rounded and np.isfinite(error)
    assert all(np.isfinite(list(found.lost.values())).all() for found in results)


def test_methods_with_data_lose_less(folders: Any) -> None:
    loaded = opened(folders("llama_gqa"))
    gptq, awq = (run(loaded, f"{method}-int3")[1] for method in ("gptq", "awq"))
    with pytest.MonkeyPatch.context() as patch:
        plant_no_data(patch)
        rtn = run(loaded, "gptq-int3")[1]
    assert gptq < 0.8 * rtn and awq < rtn


def test_experts_with_few_tokens_are_named_and_rounded_to_nearest(folders: Any) -> None:
    loaded = opened(folders("qwen3_moe"))
    results, _ = run(loaded, "gptq-int4", 3)
    unseen = {key: tokens for found in results for key, tokens in found.unseen.items()}
    assert unseen and all(key.expert is not None for key in unseen)
    for key, tokens in unseen.items():
        assert tokens < matrix_of(loaded.model.weights, key).shape[1]


def plant_other_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Observer.receive
    monkeypatch.setattr(Observer, "receive", lambda self, name, x: real(self, name, np.roll(x, 5, -1)))


def plant_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quantizer, "_observe", lambda self, part, weights, keys: {})


@pytest.mark.parametrize("plant", [plant_other_inputs, plant_no_data])
def test_planted_bugs_are_seen(plant: Any, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration that never ran is rounding to nearest, and the result says so; wrong inputs are worse than right."""
    loaded = opened(folders("llama_gqa"))
    good, error = run(loaded, "gptq-int3")
    assert not any(found.unseen for found in good)
    plant(monkeypatch)
    bad, other = run(loaded, "gptq-int3")
    assert other > 1.2 * error
    if plant is plant_no_data:
        assert all(found.unseen.keys() == found.codes.keys() for found in bad)


def test_later_layers_read_the_outputs_of_quantized_ones(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = opened(folders("llama_gqa"))
    _, error = run(loaded, "gptq-int3")
    monkeypatch.setattr("ridgeline.compress.calibrate.rounded", lambda part, found: {})
    own = parse_scheme("gptq-int3")
    calibration = Calibration(loaded, SEQUENCES)
    quantizer = Quantizer(calibration, loaded.table, own, "float32", lambda name: own.format)
    weights: dict[str, Any] = {}
    every = list(parts(loaded.spec))
    for part in every:
        found = quantizer.quantize(part, stored(loaded, part))
        weights[part.name] = {**stored(loaded, part), **{k.name: dequantized(m) for k, m in found.codes.items()}}
    exact, other = Calibration(loaded, SEQUENCES), Calibration(loaded, SEQUENCES)
    for part in every:
        exact.advance(part, stored(loaded, part), loaded.table)
        other.advance(part, weights[part.name], loaded.table)
    pairs = zip(exact.streams, other.streams, strict=True)
    alone = sum(float(np.square(a.residual - b.residual).sum()) for a, b in pairs)
    assert alone != error, "the inputs of later layers are others"


def test_lost_power_is_that_of_the_outputs() -> None:
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((200, 32)).astype(np.float32), rng.standard_normal((8, 32)).astype(np.float32)
    other, seen = weight + 0.1 * rng.standard_normal((8, 32)).astype(np.float32), Inputs(32, with_products=True)
    seen.add(x[:120])
    seen.add(x[120:])
    expected = np.square(x @ (other - weight).T).sum() / np.square(x @ weight.T).sum()
    assert lost_power(weight, other, seen) == pytest.approx(expected, rel=1e-3)
    assert lost_power(weight, other, None) == pytest.approx(
        np.square(other - weight).sum() / np.square(weight).sum(), rel=1e-3
    )
    assert lost_power(0 * weight, 0 * weight, seen) == 0


CHANNELS = (5, 20, 41)


def with_outliers(weights: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return weights with the same function, in which some channels of each norm are 50 times larger."""
    out = dict(weights)
    for i in range(layers):
        for norm, readers in (("mixer", "qkv"), ("mlp", ("gate", "up"))):
            name = f"layers.{i}.{norm}_norm.weight"
            out[name] = np.array(out[name])
            out[name][list(CHANNELS)] *= 50
            for reader in readers:
                key = f"layers.{i}.{norm}.{reader}.weight"
                out[key] = np.array(out[key])
                out[key][:, CHANNELS] /= 50
    return out


def error_of(loaded: LoadedModel, scheme: str, weights: dict[str, Any], **more: Any) -> tuple[float, set[Any]]:
    """Return the squared error behind the last layer, and the columns that are reported as outliers."""
    own = parse_scheme(scheme, **more)
    calibration, exact = Calibration(loaded, SEQUENCES), Calibration(loaded, SEQUENCES)
    after = Calibration(loaded, SEQUENCES)
    quantizer = Quantizer(calibration, loaded.table, own, "float32", lambda name: own.format)
    named = set()
    for part in parts(loaded.spec):
        before = {w.name: weights[w.name] for w in part.weights}
        found = quantizer.quantize(part, before)
        named |= {(str(key), c) for key, o in found.outliers.items() for c in o.columns}
        exact.advance(part, stored(loaded, part), loaded.table)
        after.advance(part, {**before, **found.changed, **rounded(part, found)}, loaded.table)
    pairs = zip(exact.streams, after.streams, strict=True)
    return sum(float(np.square(a.residual - b.residual).sum()) for a, b in pairs), named


def test_injected_outliers_break_int8_and_are_named(folders: Any) -> None:
    """Three schemes lose what they lose without outliers; the report names the injected columns alone."""
    loaded = opened(folders("llama_gqa"))
    plain = dict(loaded.model.weights)
    layers = len(loaded.spec.layers)
    injected = with_outliers(plain, layers)
    absmax = [error_of(loaded, "rtn-int8", w, activations="int8")[0] for w in (plain, injected)]
    assert absmax[1] > 10 * absmax[0]
    for scheme, more in (("smooth-int8", {}), ("awq-int8", {"activations": "int8"}), ("llm.int8", {})):
        errors = [error_of(loaded, scheme, w, **more)[0] for w in (plain, injected)]
        assert errors[1] < 1.5 * errors[0]
    named = [error_of(loaded, "llm.int8", w)[1] for w in (plain, injected)]
    readers = [f"mixer.{n}" for n in "qkv"] + ["mlp.gate", "mlp.up"]
    wanted = {(f"layers.{i}.{n}.weight", c) for i in range(layers) for n in readers for c in CHANNELS}
    assert wanted <= named[1] and named[1] - wanted <= named[0]
