"""Claims about models and machines that are not here: by count from published configs."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.footprint import formula_bytes
from ridgeline.cost.precision import Precision
from ridgeline.cost.shard import Scheme
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, within
from ridgeline.lab.judgement import untried as cannot
from ridgeline.plan.planner import Deployment, Planner
from ridgeline.spec import ModelSpec

JAMBA, MINIMAX, SHARED, CONTEXT = "jamba-v0.1", "minimax-text-01", "llama-3.1-70b", 262_144
DEVICES = (1, 2, 4, 8)


def _growing(spec: ModelSpec) -> float:
    """Return the bytes that each token adds to the state of a long sequence."""
    far, near = (formula_bytes(spec, Precision(), n) for n in (CONTEXT, CONTEXT - 1))
    return far - near


def _everywhere(spec: ModelSpec) -> float:
    """Return the same if every layer had the attention of those that have it."""
    count = len(spec.attentions(shared=True))
    return _growing(spec) * len(spec.layers) / count


def predict(setup: Setup) -> Facts:
    """State what the claims say: one layer in eight, and the parameters."""
    return {"jamba_factor": 8, "minimax_factor": 8, "minimax_params": 456e9}


def measure(setup: Setup) -> Facts:
    """Count bytes of state from the configs, and predict a token of a 70B on one H200 and on several."""
    jamba, minimax, large = (find_model(name).spec for name in (JAMBA, MINIMAX, SHARED))
    base = Deployment(large, hardware("h200"))
    planners = {n: Planner(replace(base, scheme=Scheme(tp=n))) for n in DEVICES}
    return {
        "jamba_factor": _everywhere(jamba) / _growing(jamba),
        "minimax_factor": _everywhere(minimax) / _growing(minimax),
        "minimax_params": minimax.num_params(),
        "token_s": {str(n): planner.token_s(1, 2048) for n, planner in planners.items()},
    }


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the counts; speed over devices needs devices."""
    one, most = (measured["token_s"][str(n)] for n in (DEVICES[0], DEVICES[-1]))
    jamba, minimax = measured["jamba_factor"], measured["minimax_factor"]
    params = measured["minimax_params"] / predicted["minimax_params"]
    return (
        cannot(
            10,
            "this needs two devices or more with a link. By the plan a token of a Llama 3.1 70B takes "
            f"{one * 1e3:.1f} ms on one H200 and {most * 1e3:.1f} ms on {DEVICES[-1]}, {one / most:.1f} times less",
        ),
        within(
            19, jamba, 8, 8,
            f"Jamba's published config has attention in one layer of {jamba:g}, so each token adds {jamba:g} times "
            "less state than with attention everywhere; its speed and quality are not measured here",
        ),
        within(
            21, params if minimax == predicted["minimax_factor"] else 0.0, 0.99, 1.01,
            f"by its config MiniMax-01 has {measured['minimax_params'] / 1e9:.1f} B parameters and full attention in "
            f"one layer of {minimax:g}; only counts are checked here",
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the time of a token over the devices."""
    points = [(float(n), seconds * 1e3) for n, seconds in measured["token_s"].items()]
    curve = Series("Llama 3.1 70B on H200, roof", points, measured=False)
    return (Figure("Time of a token over devices that share a model", "devices", "ms", (curve,)),)


EXPERIMENT = Experiment(
    "plans", "Models and machines that are not here", (10, 19, 21), predict, measure, judge,
    "These claims are about models of 52 and 456 billion parameters, and about several devices. Their published "
    "configs are counted, and the planner predicts the rest.", figures,
    timed=False,
)  # fmt: skip
