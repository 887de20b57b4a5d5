"""Associative recall against the size of state: the sizes are counted, and the models would have to be trained."""

from __future__ import annotations

from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, untried
from ridgeline.lab.mixing import HEADS, WIDTH, attention, model, page_bytes
from ridgeline.spec import S4D, GatedConvolution, Mamba, ModelSpec, TaylorAttention

CONTEXTS = (256, 1024, 4096, 16_384)
FLOAT = 4  # bytes
NEEDED = (
    "it needs small models that are trained on MQAR until attention solves it, with three seeds and a rate for each "
    "mixer; a sequence of {:,} tokens has {:,} bytes of state with {}, and {:,} with attention; `ridgeline evaluate "
    "MODEL --recall` measures a model that you have"
)


def _models() -> dict[str, ModelSpec]:
    """Return models that differ in their mixers only. BASED has a convolution, linear attention and a short window."""
    based = GatedConvolution(WIDTH, 3), TaylorAttention(HEADS // 2, 32, 16), attention(8, 64)
    return {
        "attention": model([attention(8)]),
        "S4": model([S4D(WIDTH, 64)]),
        "Mamba": model([Mamba(2 * WIDTH, 16, 4, WIDTH // 16)]),
        "BASED": model(based),
    }


def predict(setup: Setup) -> Facts:
    """Count numbers of state by the formulas of the mixers, in float32."""
    models = _models()
    return {"bytes": {name: {str(n): FLOAT * m.state_elements(n) for n in CONTEXTS} for name, m in models.items()}}


def measure(setup: Setup) -> Facts:
    """Count the bytes of the pages that the scheduler gives to a sequence."""
    models = _models()
    return {"bytes": {name: {str(n): page_bytes(m, n) for n in CONTEXTS} for name, m in models.items()}}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Say what would be needed, beside the state of each mixer."""
    sizes = {name: found[str(CONTEXTS[-1])] for name, found in predicted["bytes"].items()}
    return tuple(
        untried(claim, NEEDED.format(CONTEXTS[-1], sizes[name], name, sizes["attention"]))
        for claim, name in ((17, "S4"), (18, "Mamba"), (20, "BASED"))
    )


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the bytes of state over the context, by formula and in pages."""
    curves = [
        Series(f"{name}, {kind}", [(float(n), float(size)) for n, size in sizes.items()], kind == "pages")
        for kind, facts in (("formula", predicted), ("pages", measured))
        for name, sizes in facts["bytes"].items()
    ]
    return (Figure("State of a sequence in models of four layers", "tokens", "bytes", tuple(curves)),)


EXPERIMENT = Experiment(
    "recall",
    "Recall against the size of state",
    (17, 18, 20),
    predict,
    measure,
    judge,
    "Only the sizes of state are measured. Recurrent states exist twice in pages: one is read, and one is written.",
    figures,
)
