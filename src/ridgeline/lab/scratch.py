"""Small models that are trained from random weights on bytes of text, and differ only in how their layers mix them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import cycle, islice
from statistics import fmean
from typing import Any, NamedTuple

from ridgeline.lab.experiment import Setup
from ridgeline.lab.kept import kept
from ridgeline.lab.texts import FEW, texts
from ridgeline.ops.devices import require_torch
from ridgeline.plan.rewrite import with_shared_keys
from ridgeline.spec import (
    Attention,
    GatedConvolution,
    GatedMLP,
    LatentAttention,
    Layer,
    Mamba2,
    ModelSpec,
    RMSNorm,
    Rope,
    to_json,
)
from ridgeline.spec.mixers import TokenMixer

WIDTH, LAYERS, HEADS, DIM = 128, 4, 4, 32
NORM, LONGEST = RMSNorm(1e-5), 1 << 20
WINDOW = 4  # bytes that a local layer sees
UPDATES, SEEDS = 400, 3


class Form(NamedTuple):
    """A model and its learning rate: the best of the sweep in docs/log/training.md, which had another seed."""

    spec: ModelSpec
    rate: float


def _attention(kv_heads: int, window: int | None = None) -> Attention:
    return Attention(HEADS, kv_heads, DIM, DIM**-0.5, Rope(DIM), window=window)


def _model(mixers: Sequence[TokenMixer]) -> ModelSpec:
    first = GatedConvolution(WIDTH, 3)  # without it, attention over the whole text takes long to find what is near
    layers = tuple(Layer(mixer, GatedMLP(2 * WIDTH), NORM) for mixer in (first, *islice(cycle(mixers), LAYERS)))
    return ModelSpec("bytes", 256, WIDTH, LONGEST, layers, NORM)


LATENT = LatentAttention(HEADS, 48, DIM - 16, 16, DIM, DIM**-0.5, NORM, rope=Rope(16))  # the state of one key head
MAMBA = Mamba2(HEADS, 2 * DIM, 16, 1, 4, NORM)
FORMS = {
    "4 key heads": Form(_model([_attention(4)]), 3e-3),
    "2 key heads": Form(_model([_attention(2)]), 1e-2),
    "1 key head": Form(_model([_attention(1)]), 3e-3),
    "latents": Form(_model([LATENT]), 3e-3),
    "pairs of layers": Form(with_shared_keys(_model([_attention(4)]), 2), 1e-2),
    "windows": Form(_model([_attention(4, WINDOW)]), 3e-3),
    "windows, 1 global": Form(_model([_attention(4, WINDOW)] * 3 + [_attention(4)]), 3e-3),
    "Mamba-2, 1 attention": Form(_model([MAMBA] * 3 + [_attention(4)]), 3e-3),
}


def losses(setup: Setup, names: Iterable[str]) -> dict[str, list[float]]:
    """Return the losses of these forms on held-out text in nats a byte, one for each seed.

    With `--quick`, nothing is trained, and there is no loss. Raises RequestError without torch.
    """
    seeds = range(setup.seed, setup.seed + SEEDS * (not setup.quick))
    found: dict[str, list[float]] = {name: [] for name in names}
    for seed in seeds:
        for name, own in found.items():
            setup.on_part(f"a small model with {name}, seed {seed}")
            own.append(loss_of(name, seed))
    return found


def told(trained: Mapping[str, Sequence[float]]) -> str:
    """Return a text with the mean loss of each form."""
    if not any(trained.values()):
        return "models trained from random weights, whose loss the claim means, need a run without --quick"
    means = ", ".join(f"{fmean(found):.3f} with {name}" for name, found in trained.items())
    return f"models trained from random weights on bytes of text lose (nats a byte) {means}"


def more(trained: Mapping[str, Sequence[float]], first: str, second: str) -> list[float]:
    """Return how much more the first form loses than the second one, for each seed."""
    return [a - b for a, b in zip(trained[first], trained[second], strict=True)]


def loss_of(name: str, seed: int, *, rate: float | None = None, updates: int = UPDATES) -> float:
    """Train one of FORMS, and return its loss on held-out text in nats a byte. A result is kept by its content.

    rate: the learning rate; None: that of the form. Raises RequestError without torch.
    """
    require_torch("a model that is trained in the lab")
    from ridgeline.train.text_bytes import CHOICES, train_bytes

    form, (text, held_out) = FORMS[name], _texts()
    rate = rate or form.rate
    facts = {
        "spec": to_json(form.spec), "text": blake2b(text + held_out, digest_size=16).hexdigest(), "rate": rate,
        "updates": updates, "seed": seed, **CHOICES,
    }  # fmt: skip

    def make() -> dict[str, Any]:
        return {"loss": train_bytes(form.spec, text, held_out, rate, updates, seed)}

    return float(kept(None, facts, make)["loss"])


def _texts() -> tuple[bytes, bytes]:
    """Return the bytes of the texts to train on, and those of two files that are held out."""
    own, other = bytearray(), bytearray()
    for path in texts(False):
        (other if path.name in FEW else own).extend(path.read_bytes())
    return bytes(own), bytes(other)
