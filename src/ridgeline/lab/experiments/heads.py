"""Fewer key heads: bytes of state, time of a token, and what pooled heads and trained models lose."""

from __future__ import annotations

from statistics import median

from ridgeline.catalog.models import find_model
from ridgeline.lab.changed import Changer
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.mixing import HEADS, attention, decode_s, model, page_bytes
from ridgeline.lab.scratch import losses, more, told
from ridgeline.plan.planner import Deployment, Planner

KV_HEADS = (32, 8, 1)  # MHA, 8 groups, MQA
FORMS = ("4 key heads", "2 key heads", "1 key head", "latents")  # of small models that are trained
LITTLE = 0.05  # nats a byte that a trained model with one key head may lose more than one with four
FASTER = 1.5  # times that 8 groups must be faster: they read a quarter of the keys, and as many weights


def _context(setup: Setup) -> int:
    return 4096 if setup.quick else 16_000


def predict(setup: Setup) -> Facts:
    """Compute bytes in proportion to key heads, and times by the planner."""
    context = _context(setup)
    times = {n: Planner(Deployment(model([attention(n)]), setup.machine)).decode(1, context).seconds for n in KV_HEADS}
    return {
        "smaller": {str(n): HEADS / n for n in KV_HEADS},
        "faster": {str(n): times[HEADS] / s for n, s in times.items()},
    }


def measure(setup: Setup) -> Facts:
    """Count pages, time tokens of models with random weights, and pool the key heads of the measured model."""
    context, specs = _context(setup), {str(n): model([attention(n)]) for n in KV_HEADS}
    setup.on_part("heads: time of a token")
    seconds = decode_s(specs, context, 3 if setup.quick else 5)
    pages = {name: page_bytes(spec, context) for name, spec in specs.items()}
    setup.on_part("heads: pooled heads")
    spec = find_model(setup.model).spec
    counts = {own.num_kv_heads for own in spec.attentions(shared=False)}
    lost = {}
    if len(counts) == 1 and (most := counts.pop()) > 1:
        changer = Changer.open(setup, sequences=1, length=128)
        halves = {str(n): changer.with_heads(n) for n in (most // 2, 1) if most % n == 0}
        lost = changer.losses(halves)
    trained = losses(setup, FORMS)
    return {"context": context, "seconds": seconds, "pages": pages, "losses": lost, "trained": trained}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the time of a token with 8 groups, where bytes are exactly as many times fewer as heads, and trained models
    lose little.
    """
    trained = measured["trained"]
    seconds, pages = measured["seconds"], measured["pages"]
    whole, grouped, one = (str(n) for n in KV_HEADS)
    gains = [a / b for a, b in zip(seconds[whole], seconds[grouped], strict=True)]
    exact = all(pages[whole] == pages[name] * times for name, times in predicted["smaller"].items())
    lost = ", ".join(f"{loss:.2f} with {name}" for name, (loss, _) in measured["losses"].items()) or "not measured"
    return (
        only_if(
            at_least(
                13, median(gains), FASTER,
                f"8 of {HEADS} key heads have {pages[whole] / pages[grouped]:g} times fewer bytes of state, and a "
                f"token at {measured['context']:,} takes {median(seconds[whole]) * 1e3:.1f} ms with {whole}, "
                f"{median(seconds[grouped]) * 1e3:.1f} ms with {grouped}, {median(seconds[one]) * 1e3:.1f} ms with 1; "
                f"pooled heads of the model lose (KL, nats a token) before any repair: {lost}; {told(trained)}",
                (min(gains), max(gains)),
            ),
            exact and all(lost <= LITTLE for lost in more(trained, FORMS[2], FORMS[0])),
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the gain over the key heads."""
    seconds = {name: median(found) for name, found in measured["seconds"].items()}
    curves = {
        "planner": sorted((float(n), g) for n, g in predicted["faster"].items()),
        "measured": sorted((float(n), seconds[str(HEADS)] / s) for n, s in seconds.items()),
    }
    series = tuple(Series(name, points, name == "measured") for name, points in curves.items())
    return (Figure("Speed of a token against 32 key heads", "key heads", "times", series),)


EXPERIMENT = Experiment(
    "heads",
    "Fewer key heads (GQA, MQA)",
    (13,),
    predict,
    measure,
    judge,
    "The number is the time of a token with 32 key heads over that with 8, in models of four layers with random "
    "weights, whose pages are filled with random numbers. Weights take as long to read in all of them.",
    figures,
)
