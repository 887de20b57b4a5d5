"""Layers that share keys and values: bytes of state, and quality against another way to half the state."""

from __future__ import annotations

from statistics import median
from typing import Any

from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.mixing import LAYERS, attention, model, page_bytes
from ridgeline.lab.repair import repaired
from ridgeline.lab.scratch import losses, more, told
from ridgeline.plan.rewrite import with_shared_keys

SEEDS, QUICK_TOKENS, TOKENS, COMPARED = 3, 8192, 32_768, 4096  # of training; tokens at which pages are compared
FORMS = ("pairs of layers", "2 key heads", "4 key heads")  # of small models that are trained; the first two have half
FRONTIER = 0.0  # nats a byte that half of the key heads must lose more than pairs of layers, if both are trained
BETTER = 1.0  # loss of half of the key heads over that of shared layers: above it, sharing is better


def predict(setup: Setup) -> Facts:
    """Count the numbers of state of a token in pairs of layers, by formula."""
    whole = model([attention(8)])
    return {"state": with_shared_keys(whole, 2).state_elements(COMPARED) / whole.state_elements(COMPARED)}


def measure(setup: Setup) -> Facts:
    """Count pages, and repair the measured model with half of its state, made in two ways, on equal tokens."""
    whole = model([attention(8)])
    pages = [page_bytes(spec, COMPARED) for spec in (whole, with_shared_keys(whole, 2))]
    tokens = QUICK_TOKENS if setup.quick else TOKENS
    found: dict[str, Any] = {"pages": pages, "tokens": tokens, "reads": LAYERS}
    for change in ("layers", "heads"):
        runs = []
        for seed in range(setup.seed, setup.seed + SEEDS):
            setup.on_part(f"layers: half of the {change}, seed {seed}")
            runs.append(repaired(setup, change, tokens, seed, "logits", drawn=False)["kl"])
        found[change] = runs
    return found | {"trained": losses(setup, FORMS)}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the loss at equal state, after training or else after equal repair, where pages are half."""
    (whole, half), layers, heads = measured["pages"], measured["layers"], measured["heads"]
    lost = {name: [median(x) for x in zip(*runs, strict=True)] for name, runs in (("l", layers), ("h", heads))}
    trained = more(measured["trained"], FORMS[1], FORMS[0])
    gains = trained or [other[1] / own[1] for own, other in zip(layers, heads, strict=True)]
    return (
        only_if(
            at_least(
                15, median(gains), FRONTIER if trained else BETTER,
                f"pairs of layers have {half / whole:g} of the state, but a token still reads it {measured['reads']} "
                f"times; pairs of the model's layers lose {lost['l'][0]:.2f} (KL, nats a token) and "
                f"{lost['l'][1]:.2f} after {measured['tokens']:,} tokens of repair, half of the key heads "
                f"{lost['h'][0]:.2f} and {lost['h'][1]:.2f}; {told(measured['trained'])}",
                (min(gains), max(gains)),
            ),
            half == predicted["state"] * whole,
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "layers",
    "Layers that share keys and values (CLA)",
    (15,),
    predict,
    measure,
    judge,
    "Pairs of layers that share keys and values, and half of the key heads, have half of the state. With --quick the "
    "number is the loss with half of the heads over that with pairs, both repaired on the same tokens: below 1, "
    "sharing is the worse way to change a trained model. Otherwise it is how much more half of the heads lose than "
    "pairs, if both are trained from random weights.",
    timed=False,
)
