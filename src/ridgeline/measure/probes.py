"""Fit the terms of a step, its costs besides passes over weights and keys, with small models of each kind of layer.

The seconds of the terms are fitted by least squares to the step times without their passes, relative to the step time,
and none is below zero (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.cost.calibrated import Counts, facts_of, far_share, passes_s, terms_of
from ridgeline.cost.operations import Forward
from ridgeline.cost.precision import Precision
from ridgeline.measure.steps import Steps, TimedStep, load_random
from ridgeline.spec import (
    S4,
    S4D,
    Attention,
    GatedConvolution,
    GatedDelta,
    GatedLRU,
    GatedMLP,
    KimiDelta,
    LatentAttention,
    Layer,
    LightningAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    MoE,
    RMSNorm,
    Rope,
    ShortConvolution,
    TaylorAttention,
)
from ridgeline.spec.mixers import ChannelMixer, TokenMixer
from ridgeline.spec.rates import Rates

Floats = np.ndarray[Any, np.dtype[np.float64]]
NORM, LENGTH, DECODES, ROUNDS = RMSNorm(), 1024, 9, 6
EXACT = Precision("float32", "float32", "float32")


@dataclass(frozen=True, slots=True)
class Probe:
    """A model, the numbers of sequences that decode together, and the lengths of prompts that start together."""

    spec: ModelSpec
    batches: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]


def _spec(mixer: TokenMixer, mlp: ChannelMixer | None, width: int, layers: int, vocab: int) -> ModelSpec:
    return ModelSpec("probe", vocab, width, LENGTH, (Layer(mixer, mlp, NORM),) * layers, NORM)


def _attention(heads: int, kv_heads: int) -> Attention:
    return Attention(heads, kv_heads, 64, 0.125, Rope(64))


WIDE, SMALL = 512, 256
RECURRENT: Mapping[str, TokenMixer] = {
    "Mamba": Mamba(2 * SMALL, 16, 4, SMALL // 16),
    "Mamba2": Mamba2(2 * SMALL // 64, 64, 64, 1, 4, NORM),
    "TaylorAttention": TaylorAttention(SMALL // 64, 64, 16),
    "GatedConvolution": GatedConvolution(2 * SMALL, 3),
    "ShortConvolution": ShortConvolution(SMALL, 3),
    "LightningAttention": LightningAttention(SMALL // 64, 64, NORM),
    "S4": S4(SMALL, 64),
    "S4D": S4D(SMALL, 64),
    "GatedDelta": GatedDelta(SMALL // 64, SMALL // 128, 64, 128, 4, NORM),
    "KimiDelta": KimiDelta(SMALL // 64, 64, 4, 64, NORM),
    "GatedLRU": GatedLRU(2 * SMALL, 4, 4),
}
# In chunks of 512 tokens the many are uneven: parts of some stand beside others that are whole.
MANY, ONE_LONG = (90,) * 8, (512,)
PROBES: Mapping[str, Probe] = {
    "dense": Probe(_spec(_attention(8, 4), GatedMLP(3 * SMALL), WIDE, 8, 24_000), (1, 8, 32, 48), (ONE_LONG, MANY)),
    "few layers": Probe(_spec(_attention(8, 2), GatedMLP(3 * WIDE), WIDE, 2, 48_000), (1, 16, 48), (ONE_LONG, (32,))),
    "small": Probe(_spec(_attention(4, 4), GatedMLP(2 * SMALL), SMALL, 6, 512), (1, 8, 32), (ONE_LONG, MANY)),
    "experts": Probe(_spec(_attention(4, 2), MoE(16, 2, SMALL), SMALL, 6, 16_000), (1, 8, 32), (ONE_LONG, MANY)),
    "latents": Probe(
        _spec(LatentAttention(4, 64, 32, 16, 32, 48**-0.5, NORM, rope=Rope(16)), GatedMLP(SMALL), SMALL, 6, 4_000),
        (1, 8), (ONE_LONG,),
    ),
    "large states": Probe(_spec(Mamba2(16, 64, 128, 1, 4, NORM), None, SMALL, 4, 4_000), (1, 12, 40), (MANY,)),
    # Like others of their kind but with more layers, to separate the cost of a step from that of each layer.
    "deep": Probe(_spec(RECURRENT["Mamba2"], GatedMLP(SMALL), SMALL, 16, 4_000), (1, 8), ()),
    "deep, gated": Probe(_spec(RECURRENT["GatedDelta"], GatedMLP(SMALL), SMALL, 12, 4_000), (1, 8), ()),
    **{name: Probe(_spec(m, GatedMLP(SMALL), SMALL, 4, 8_000), (1, 8, 32), (ONE_LONG, MANY))
       for name, m in RECURRENT.items()},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sample:
    """A step of a probe: its amount of each term, and its seconds, with those of its passes apart."""

    probe: str
    terms: Mapping[str, float]
    passes_s: float
    seconds: float


def run_probe(name: str, probe: Probe, rates: Rates, device: str) -> list[Sample]:
    """Return the measured steps of one probe."""
    loaded, found = load_random(probe.spec, device=device), []
    steps = Steps(loaded, max(*probe.batches, 8), LENGTH)
    forward, facts = Forward(probe.spec, EXACT), facts_of(probe.spec)

    def add(timed: Sequence[TimedStep]) -> None:
        ops = forward.operations(timed[0].batch)
        far = far_share(ops, rates)
        passes = sum(passes_s(op, rates, far) for op in ops)
        seconds = sorted(t.seconds for t in timed)[len(timed) // 4]  # other programs only make a step longer
        found.append(Sample(name, terms_of(facts, Counts.of(ops, timed[0].batch), far), passes, seconds))

    for prompts in probe.prompts:
        steps.run(prompts, 1)
        runs = [steps.run(prompts, 1) for _ in range(3)]
        for step in zip(*runs, strict=True):
            add([min(step, key=lambda t: t.seconds)])
    for batch in probe.batches:
        timed = [t for t in steps.run((16,) * batch, DECODES + 2) if t.is_decode]
        add([t for t in timed if sum(s.count for s in t.batch) == batch][1:])
    return found


def fit_terms(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the fitted seconds of each term."""
    names = sorted({name for s in samples for name in s.terms})
    amounts = np.array([[s.terms.get(name, 0.0) / s.seconds for name in names] for s in samples])
    wanted = np.array([(s.seconds - s.passes_s) / s.seconds for s in samples])
    scale = np.maximum(np.abs(amounts).max(0), 1e-30)
    weights = np.ones(len(samples))
    for _ in range(ROUNDS):  # disturbed steps count for less (Huber 1964)
        found = nonnegative(amounts / scale * weights[:, None], wanted * weights)
        off = np.abs(amounts / scale @ found - wanted)
        weights = np.sqrt(1 / np.maximum(off / max(2 * float(np.median(off)), 0.02), 1.0))
    return dict(zip(names, (found / scale).tolist(), strict=True))


def nonnegative(a: Floats, b: Floats) -> Floats:
    """Return x >= 0 with the least |a x - b|."""
    n = a.shape[1]
    x, free = np.zeros(n), np.zeros(n, bool)
    for _ in range(10 * n):
        gradient = a.T @ (b - a @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10:
            break
        free[best] = True
        while True:
            z = np.zeros(n)
            z[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if z[free].min() > 0:
                break
            down = free & (z <= 0)
            share = (x[down] / np.maximum(x[down] - z[down], 1e-300)).min()
            x = x + share * (z - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = z
    return x


def fit(rates: Rates, device: str, rounds: int, on_probe: Callable[[], None]) -> tuple[dict[str, float], list[Sample]]:
    """Return the seconds of all terms, and the samples: each step is the best of some rounds."""
    samples: list[Sample] = []
    for number in range(rounds):
        found = []
        for name, probe in PROBES.items():
            found += run_probe(name, probe, rates, device)
            on_probe()
        best = zip(samples, found, strict=True)
        samples = [min(pair, key=lambda s: s.seconds) for pair in best] if number else found
    return fit_terms(samples), samples
