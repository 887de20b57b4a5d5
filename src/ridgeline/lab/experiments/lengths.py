"""A state of constant size against keys and values that grow with the context."""

from __future__ import annotations

from typing import Any

from ridgeline.archs import OUR_MODEL_TYPE, spec_from_config
from ridgeline.catalog.models import published_config
from ridgeline.cost.footprint import formula_bytes
from ridgeline.cost.precision import Precision
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least
from ridgeline.lab.scratch import losses, told
from ridgeline.lab.timing import SMALL, middle, random_model, token_s
from ridgeline.plan.rewrite import with_recurrent
from ridgeline.spec import from_json, to_json

LAYERS, TOKENS = 4, 9  # layers of the model, so that attention takes most of the time; timed tokens
CONTEXTS, QUICK = (256, 1024, 4096, 16384), (256, 1024, 4096)
FORMS = ("4 key heads", "Mamba-2, 1 attention")  # of small models that are trained
GROWTH = 1.5  # least factor of the attention's growth over that of the constant state


def _configs(longest: int) -> dict[str, dict[str, Any]]:
    """Return the configs of a model with attention, and of one with Mamba-2 in its place."""
    config = published_config(SMALL)
    assert config is not None
    config |= {
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": longest,
        "num_key_value_heads": 9,
        "vocab_size": 2048,
    }
    spec = spec_from_config(config)
    own = {"model_type": OUR_MODEL_TYPE, "spec": to_json(with_recurrent(spec, "mamba2", None)), "eos_token_id": 0}
    return {"attention": config, "mamba2": own}


def _contexts(*, quick: bool) -> tuple[int, ...]:
    return QUICK if quick else CONTEXTS


def predict(setup: Setup) -> Facts:
    """Count the bytes that a token reads: all weights, and the state."""
    contexts, reads = _contexts(quick=setup.quick), {}
    for name, config in _configs(max(contexts) + TOKENS).items():
        spec = from_json(config["spec"]) if "spec" in config else spec_from_config(config)
        weights = 4 * (spec.num_params() - spec.vocab_size * spec.hidden_size)
        states = (formula_bytes(spec, Precision(state="float32"), n) for n in contexts)
        reads[name] = {str(n): weights + size for n, size in zip(contexts, states, strict=True)}
    return {"reads": reads}


def measure(setup: Setup) -> Facts:
    """Time a token of both models, with random weights, after several contexts."""
    contexts, repetitions = _contexts(quick=setup.quick), 3 if setup.quick else 5
    found: dict[str, dict[str, list[float]]] = {}
    for name, config in _configs(max(contexts) + TOKENS).items():
        with random_model(config, setup.threads, 1, max(contexts) + TOKENS, dtype="float32") as llm:
            token_s(llm, (setup.seed,), 1, 32, 2)
            found[name] = {}
            for n in contexts:
                setup.on_part(f"lengths: {name}, {n:,} tokens")
                found[name][str(n)] = [token_s(llm, (setup.seed, n, i), 1, n, TOKENS) for i in range(repetitions)]
    return {"seconds": found, "trained": losses(setup, FORMS)}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge how much more the time of a token grows with keys and values."""
    grown, counted = {}, {}
    for name, times in measured["seconds"].items():
        first, *_, last = times
        grown[name] = [b / a for a, b in zip(times[first], times[last], strict=True)]
        counted[name] = predicted["reads"][name][last] / predicted["reads"][name][first]
    times = measured["seconds"]
    at = next(
        (int(n) for n in times["mamba2"] if middle(times["mamba2"][n])[0] < middle(times["attention"][n])[0]), None
    )
    more, spread = middle([a / b for a, b in zip(grown["attention"], grown["mamba2"], strict=True)])
    seen = f"from {at:,} tokens on" if at else "at none of these contexts"
    return (
        at_least(
            22, more, GROWTH,
            f"from {int(first):,} to {int(last):,} tokens a token takes {middle(grown['attention'])[0]:.2f} times as "
            f"long with attention (bytes: {counted['attention']:.2f}) and {middle(grown['mamba2'])[0]:.2f} times with "
            f"Mamba-2 ({counted['mamba2']:.2f}), which is faster {seen}; {told(measured['trained'])}",
            spread,
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the time of a token over the context."""
    curves = tuple(
        Series(name, [(float(n), middle(t)[0] * 1e3) for n, t in times.items()], measured=True)
        for name, times in measured["seconds"].items()
    )
    return (Figure("Time of a token", "tokens of context", "ms", curves),)


EXPERIMENT = Experiment(
    "lengths", "A constant state against a growing one", (22,), predict, measure, judge,
    "With attention a token reads the keys and values of all tokens before it. A recurrent layer reads its state, "
    "which has one size. Short contexts are no gain: there the state is larger than the keys and values.", figures,
)  # fmt: skip
