"""Time decode steps of small models with random weights, which differ only in how their layers mix tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.measure.steps import Steps, load_random
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope
from ridgeline.spec.groups import state_groups
from ridgeline.spec.mixers import TokenMixer

WIDTH, LAYERS, VOCAB, HEADS, HEAD_DIM, LONGEST = 512, 4, 512, 32, 32, 16_384
DECODES, PAGE = 7, 16


def attention(kv_heads: int, window: int | None = None) -> Attention:
    """Return attention of 32 heads of 32 numbers."""
    return Attention(HEADS, kv_heads, HEAD_DIM, HEAD_DIM**-0.5, Rope(HEAD_DIM), window=window)


def model(mixers: Sequence[TokenMixer]) -> ModelSpec:
    """Return a model of four layers, which take the mixers in turn."""
    norm = RMSNorm(1e-5)
    layers = tuple(Layer(mixers[i % len(mixers)], GatedMLP(2 * WIDTH), norm) for i in range(LAYERS))
    return ModelSpec("lab", VOCAB, WIDTH, LONGEST, layers, norm)


def page_bytes(spec: ModelSpec, tokens: int) -> int:
    """Return the bytes of the pages that the scheduler gives to a sequence, in float32."""
    groups = state_groups(spec, page_tokens=PAGE)
    return sum(group.most_pages(tokens) * group.page_bytes for group in groups)


def decode_s(specs: Mapping[str, ModelSpec], context: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a token of each model at a context, the best of some steps of each round.

    The models take turns, so that other programs disturb all of them alike.
    """
    steps = {name: Steps(load_random(spec, device="cpu"), 1, context + DECODES + 4) for name, spec in specs.items()}
    found: dict[str, list[float]] = {name: [] for name in specs}
    for _ in range(rounds):
        for name, own in steps.items():
            found[name].append(min(step.seconds for step in own.decodes(1, context, DECODES)))
    return found
