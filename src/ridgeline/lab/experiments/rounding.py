"""Rounding after training: smaller groups lose less, and activations say which weights matter."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ridgeline.compress.compare import INTERVAL, Comparison, compare
from ridgeline.compress.data import read_samples
from ridgeline.compress.folder import open_original
from ridgeline.compress.quantize import Options, quantize
from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.texts import texts
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadOptions, pass_model

SHARED = {"matrix": "int4-tensor-exact", "row": "int4-row-exact", "group of 32": "int4-32-exact"}  # by what has a scale
SCHEMES, GROUP = {"awq-int3": None, "gptq-int3": None, "keep-int3": "floats"}, 128  # with formats of their checkpoints
HELD_OUT = 4096  # tokens
SAID_SMALLER = 4.0  # times, of claim 29
ONE = 1.0  # an order of two losses: their ratio, at the ends of both intervals


def predict(setup: Setup) -> Facts:
    """Count the bits of a number in int3: its code, and its share of a scale and of a zero point."""
    return {
        "bits": {"zero points of 3 bits": 3 + (16 + 3) / GROUP, "zero points of 16 bits": 3 + (16 + 16) / GROUP},
        "order": [*SHARED],
    }


def measure(setup: Setup) -> Facts:
    """Round the model's matrices by matrix, row and group, then with data; measure on text that is held out."""
    original = open_original(setup.model, setup.threads)
    paths, (count, length) = texts(setup.quick), (8, 128) if setup.quick else (64, 256)
    samples = read_samples(
        paths, Tokenizer.from_folder(original.checkpoint.folder), length=length, count=count, held_out_tokens=HELD_OUT,
        seed=setup.seed,
    )  # fmt: skip
    setup.on_part("rounding: matrix, row and group")
    others = {
        name: pass_model(setup.model, LoadOptions(device="cpu", weights=kind, threads=setup.threads))
        for name, kind in SHARED.items()
    }
    found = compare(original, others, samples.held_out)
    methods: dict[str, Any] = {}
    options = Options(count, length, setup.seed, threads=setup.threads, speed=False)
    for scheme, form in SCHEMES.items():
        setup.on_part(f"rounding: {scheme}")
        with tempfile.TemporaryDirectory() as folder:
            report = quantize(
                setup.model, scheme, out=Path(folder) / scheme, data=paths, group=GROUP, format=form, options=options
            )  # fmt: skip
        assert report.comparison is not None
        methods[scheme] = {"bits": report.bits[scheme], **_losses(report.comparison)}
    return {"shared": _losses(found), "methods": methods}


def _losses(found: Comparison) -> dict[str, list[float]]:
    """Return the divergence of each model from the original, and half of its 95 % interval."""
    kl = {name: quality.kl for name, quality in found.others.items()}
    return {name: [k.value, INTERVAL * (k.standard_error or 0.0)] for name, k in kl.items() if k is not None}


def _ratio(more: list[float], less: list[float]) -> tuple[float, float, float]:
    """Return how many times one loss is another one, and the least and the most that their intervals allow."""
    (a, da), (b, db) = more, less
    return a / b, (a - da) / (b + db), (a + da) / max(b - db, 1e-9)


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the order by granularity and by method, with intervals."""
    shared, methods = measured["shared"], measured["methods"]
    orders = [_ratio(shared[a], shared[b]) for a, b in zip(predicted["order"], predicted["order"][1:], strict=False)]
    ratio, low, high = min(orders, key=lambda order: order[1])
    awq, gptq, keep = (methods[name] for name in SCHEMES)
    by_data = _ratio(gptq["rtn"], gptq["gptq-int3"])
    gain, least, most = _ratio(awq["rtn"], awq["awq-int3"])
    small = 16 / awq["bits"]
    exact = [16 / bits for bits in predicted["bits"].values()]
    losses = ", ".join(f"{shared[name][0]:.3f} by {name}" for name in predicted["order"])
    rounded = at_least(
        27, ratio, ONE,
        f"int4 without data loses {losses} (KL, nats a token); with data, GPTQ in int3 loses "
        f"{gptq['gptq-int3'][0]:.3f} where rounding to nearest loses {gptq['rtn'][0]:.3f}; QAT trains for minutes, and "
        "bench/qat.py measures it",
        (low, high),
    )  # fmt: skip
    scaled = at_least(
        29, gain, ONE,
        f"int3 loses {awq['rtn'][0]:.3f} rounded to nearest, {awq['awq-int3'][0]:.3f} with AWQ, and "
        f"{keep['keep-int3'][0]:.3f} with the 1 % of columns that have the largest inputs in 16 bits; matrices are "
        f"{small:.2f} times smaller here, and by count {exact[0]:.2f} or {exact[1]:.2f} (a zero point in 3 or in 16 "
        "bits), not 4",
        (least, most),
    )  # fmt: skip
    return only_if(rounded, by_data[1] >= ONE), only_if(scaled, small >= SAID_SMALLER)


EXPERIMENT = Experiment(
    "rounding",
    "Rounding after training",
    (27, 29),
    predict,
    measure,
    judge,
    "Numbers of the verdicts are ratios of two losses, with their intervals: between neighbors in the order of matrix, "
    "row and group for claim 27, between rounding to nearest and AWQ for claim 29. All losses are on text that was not "
    "calibrated on.",
    timed=False,
)
