"""Associative recall against the size of state: small models that are trained on MQAR."""

from __future__ import annotations

from statistics import fmean
from typing import NamedTuple

from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if, untried
from ridgeline.lab.mqar import WIDTH, recalled, remembered, small
from ridgeline.lab.two_forms import largest_error
from ridgeline.spec import S4D, Attention, GatedConvolution, Mamba, ModelSpec, TaylorAttention


class Recipe(NamedTuple):
    """A model and how it is trained. rate: the best of the sweep in docs/log/training.md, which had another seed."""

    spec: ModelSpec
    rate: float
    updates: int


def _attention(window: int | None = None) -> Attention:
    return Attention(2, 2, 32, 32**-0.5, None, window=window)


CONVOLUTION = GatedConvolution(WIDTH, 3)  # a filter of three tokens before mixers that have none of their own
WINDOW = 4
FEATURES = (2, 16)  # of a head of BASED's linear attention: the state grows with their square
PAIRS, VOCAB = 4, 32  # of a sequence: 8 pairs are not learned in a minute by all of them
MODELS = {
    "attention": Recipe(small((CONVOLUTION, _attention()), VOCAB), 3e-3, 500),
    "S4D": Recipe(small((CONVOLUTION, S4D(WIDTH, 64)), VOCAB), 1e-2, 1500),
    "Mamba": Recipe(small((Mamba(WIDTH, 8, 4, 4),), VOCAB), 1e-2, 2000),
    "window": Recipe(small((CONVOLUTION, _attention(WINDOW)), VOCAB), 1e-3, 800),
    **{
        f"BASED {n}": Recipe(small((CONVOLUTION, TaylorAttention(2, 32, n), _attention(WINDOW)), VOCAB), 3e-3, 800)
        for n in FEATURES
    },
}
FIRST, LENGTH, MEMORY = (
    Recipe(small((S4D(WIDTH, 64),), 16), 3e-3, 400),
    256,
    0.9,
)  # tells the first of 256 tokens; least share
SEEDS, LONG = 3, 1024  # of training; tokens at which state is compared
SOLVED = 0.9  # least recall of attention, without which training was too short to say anything
WORSE, MENDS, MORE = 0.5, 0.2, 0.1  # least differences of recall: attention and S4D, Mamba and S4D, more and less state
SAME = 1e-4  # largest difference of S4D's three forms, on inputs of size 1
QUICK = (
    "18 models are trained for 10 to 40 core-seconds each; run it without --quick. A sequence of {:,} tokens has "
    "{:,} numbers of state with attention, and {:,} with {}"
)


def predict(setup: Setup) -> Facts:
    """Count numbers of state by the formulas of the mixers, and what a model reaches that only knows the values."""
    return {"state": {name: recipe.spec.state_elements(LONG) for name, recipe in MODELS.items()}, "values": 1 / PAIRS}


def measure(setup: Setup) -> Facts:
    """Train each model with three seeds, and compute S4D in three ways. With --quick, nothing is trained."""
    found: dict[str, list[float]] = {name: [] for name in MODELS}
    seeds = range(setup.seed, setup.seed + SEEDS * (not setup.quick))
    for seed in seeds:
        for name, (spec, rate, updates) in MODELS.items():
            setup.on_part(f"recall: {name}, seed {seed}")
            found[name].append(recalled(spec, PAIRS, rate, updates, seed))
    first = [remembered(FIRST.spec, LENGTH, FIRST.rate, FIRST.updates, seed) for seed in seeds]
    return {"recall": found, "first": first, "error": largest_error(setup.seed, setup.threads)}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge what S4D knows and lacks, what Mamba mends, and what more state gives BASED; each seed is a difference."""
    state, recall = predicted["state"], measured["recall"]
    if not recall["attention"]:
        named = (17, "S4D"), (18, "Mamba"), (20, f"BASED {FEATURES[-1]}")
        return tuple(untried(n, QUICK.format(LONG, state["attention"], state[name], name)) for n, name in named)
    mean = {name: fmean(found) for name, found in recall.items()}
    most, least = (f"BASED {n}" for n in (FEATURES[-1], FEATURES[0]))
    if mean["attention"] < SOLVED:
        short = f"attention recalls only {mean['attention']:.0%}, so that training was too short to say anything"
        return tuple(untried(number, short) for number in (17, 18, 20))

    def more(claim: int, first: str, second: str, limit: float, text: str) -> Judgement:
        gains = [a - b for a, b in zip(recall[first], recall[second], strict=True)]
        return at_least(claim, fmean(gains), limit, text, (min(gains), max(gains)))

    return (
        only_if(
            more(
                17, "attention", "S4D", WORSE,
                f"of {PAIRS} pairs attention recalls {mean['attention']:.0%} and S4D {mean['S4D']:.0%}, where a model "
                f"that only knows which values there were recalls {predicted['values']:.0%}; S4D tells the "
                f"first of {LENGTH} tokens at {fmean(measured['first']):.0%}; its convolution and its recurrence are "
                f"the closed form within {measured['error']:.1g}",
            ),
            measured["error"] <= SAME and min(measured["first"]) >= MEMORY,
        ),
        more(
            18, "Mamba", "S4D", MENDS,
            f"Mamba recalls {mean['Mamba']:.0%} with {state['Mamba']:,} numbers of state, and S4D {mean['S4D']:.0%} "
            f"with {state['S4D']:,}; models of 1 B parameters cannot be tried here",
        ),
        more(
            20, most, least, MORE,
            f"BASED recalls {mean[least]:.0%} with {state[least]:,} numbers of state and "
            f"{mean[most]:.0%} with {state[most]:,}, its window alone {mean['window']:.0%} with {state['window']:,}, "
            f"and attention {mean['attention']:.0%} with {state['attention']:,} at {LONG:,} tokens",
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the recall of each model over its state; a curve for each number of pairs."""
    if not measured["recall"]["attention"]:
        return ()
    points = [
        Series(name, [(float(predicted["state"][name]), fmean(found))], measured=True)
        for name, found in measured["recall"].items()
    ]
    return (Figure(f"Recall over the state of {LONG:,} tokens", "numbers of state", "share", tuple(points)),)


EXPERIMENT = Experiment(
    "recall", "Recall against the size of state", (17, 18, 20), predict, measure, judge,
    "Small models read pairs of a key and a value, and are asked for the value of each key. Numbers are differences of "
    "recall with the same seed. S4D adds what it reads with weights that do not depend on it, so it knows which values "
    "there were, and not whose.", figures,
    timed=False,
)  # fmt: skip
