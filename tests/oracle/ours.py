"""Tiny random models of architectures that no class of transformers has, as specs and folders of our own format.

Like the cases of families.py, their weights reveal mistakes: matrices at 1.5 / sqrt(fan_in); norms, biases and sinks
away from their initial values. The oracle of each kind of layer is a definition in float64, in its own tests.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from oracle import ours_linear
from oracle.case import VOCAB
from ridgeline.archs import OUR_MODEL_TYPE
from ridgeline.spec import (
    AnyLayer,
    Attention,
    Dilated,
    FirstTokens,
    GatedMLP,
    Layer,
    LayerNorm,
    LinearScaling,
    ModelSpec,
    MoE,
    ParallelLayer,
    Pattern,
    RMSNorm,
    Rope,
    SharedAttention,
    Strided,
    to_json,
)

GAIN = 1.5
LENGTH = 256  # longest context of every model
WIDTH = 64
NORM, MLP = RMSNorm(1e-2), GatedMLP(88)
FULL = Attention(4, 2, 24, 24**-0.5, Rope(24, 3000.0))
LOCAL = replace(FULL, window=24)
MQA = Attention(6, 1, 16, 0.3, Rope(16, 700.0, scaling=LinearScaling(2.0)))


def model(layers: Sequence[AnyLayer], name: str = "ours") -> ModelSpec:
    return ModelSpec(name, VOCAB, WIDTH, LENGTH, tuple(layers), NORM)


def shared(source: int, attention: Attention = FULL, **changes: object) -> Layer:
    return Layer(SharedAttention(source, replace(attention, **changes)), MLP, NORM)


def cla(attention: Attention, layers: int, factor: int) -> ModelSpec:
    """Return the paper's pattern: the first of `factor` neighbors has the keys and values."""
    own = Layer(attention, MLP, NORM)
    return model([shared(i - i % factor, attention) if i % factor else own for i in range(layers)], f"cla{factor}")


def _mixed() -> ModelSpec:
    """Return a model with sharing out of order, across other owners, through windows, and with all features
    of queries.
    """
    rich = replace(FULL, qkv_bias=True, out_bias=True, qk_norm=RMSNorm(0.1), sinks=True, softcap=3.0, num_heads=6)
    return model(
        [
            Layer(rich, MLP, NORM),
            Layer(replace(LOCAL, sinks=True), MLP, NORM, NORM),
            shared(0, rich, num_heads=2, scale=0.4, qk_norm_over="all_heads"),
            shared(1, LOCAL, window=9, num_heads=8),
            ParallelLayer(SharedAttention(0, replace(FULL, window=30, softcap=2.0)), MoE(5, 2, 20), LayerNorm(1e-2)),
            Layer(SharedAttention(1, replace(LOCAL, sinks=True, out_bias=True)), MLP, None, NORM, 0.7),
        ],
        "mixed",
    )


def _character() -> ModelSpec:
    """Return one global layer in six, one KV head; neighbors share keys and values, and so do all global layers."""
    local = replace(MQA, window=20)
    layers: list[AnyLayer] = []
    for i in range(12):
        if i % 6 == 5:
            layers.append(Layer(MQA, MLP, NORM) if i == 5 else shared(5, MQA))
        elif i % 6 % 2 == 1:
            layers.append(shared(i - 1, local))
        else:
            layers.append(Layer(local, MLP, NORM))
    return model(layers, "character")


def _patterns(name: str, window: int, *patterns: Pattern) -> ModelSpec:
    """Return a layer of each pattern, a full one, and one that shares the first one's keys with its own pattern."""
    layers = [Layer(replace(FULL, window=window, pattern=p), MLP, NORM) for p in patterns]
    within = FirstTokens(3) if isinstance(patterns[0], FirstTokens) else None
    full = Layer(replace(FULL, sinks=True), MLP, NORM)
    return model([*layers, full, shared(0, FULL, window=6, pattern=within)], name)


SPECS: dict[str, ModelSpec] = {
    "cla2": cla(FULL, 6, 2),
    "cla3_mqa": cla(MQA, 6, 3),
    "cla_mixed": _mixed(),
    "cla_character": _character(),
    "first_tokens": _patterns("first_tokens", 24, FirstTokens(5), FirstTokens(20)),
    "patterns": _patterns("patterns", 9, Dilated(3), Strided(7), FirstTokens(17)),
    **ours_linear.specs(model, FULL, MLP, NORM),
}


def random_weights(spec: ModelSpec, seed: int = 1) -> dict[str, np.ndarray]:
    """Return all weights of a spec, in float32."""
    return {w.name: _draw(w.name, w.shape, seed) for w in spec.weights()}


def _draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name.endswith(".log_dt"):  # steps from 1/50 to a half
        found = rng.uniform(-4.0, -0.7, shape)
    elif name.endswith(".A_imag"):
        found = rng.uniform(0.0, 9.0, shape)
    elif name.endswith(".bias"):
        found = rng.normal(0.0, 0.5, shape)
    elif name.endswith("norm.weight"):
        found = rng.uniform(0.5, 1.5, shape)
    elif name == "embed.weight" or len(shape) < 2:
        found = rng.normal(0.0, 1.0, shape)
    else:
        found = rng.normal(0.0, GAIN * shape[-1] ** -0.5, shape)
    return found.astype(np.float32)


def write(spec: ModelSpec, folder: Path | str, seed: int = 1) -> dict[str, np.ndarray]:
    """Write a folder of our own format, and return its weights."""
    from safetensors.numpy import save_file

    weights = random_weights(spec, seed)
    save_file(weights, Path(folder) / "model.safetensors")
    (Path(folder) / "config.json").write_text(json.dumps({"model_type": OUR_MODEL_TYPE, "spec": to_json(spec)}))
    return weights


def sequences(seed: int = 1, lengths: Sequence[int] = (1, 7, 33, 100)) -> list[list[int]]:
    rng = np.random.default_rng([seed, 3])
    return [rng.integers(3, VOCAB, n).tolist() for n in lengths]
