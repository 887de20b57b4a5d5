"""Operations over bytes: a knee for products with a matrix, at this machine's ridge, and none for attention."""

from __future__ import annotations

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_most, within
from ridgeline.measure.machine import measure_roof
from ridgeline.measure.passes import ROWS, attention_s, product_passes
from ridgeline.ops.devices import open_table
from ridgeline.plan.planner import Deployment, Planner

FLOAT = 4  # bytes of a number of the matrix that is measured
SEQUENCES, LAYERS = (1, 4, 16, 64), 192  # layers x sequences is constant, so that each case reads as many bytes
KNEE, FLAT = 1.5, 2.0  # largest factors between predicted and measured knee, and between rates of attention
BATCHES, PROMPT = (1, 2, 4, 8), 16
MLP = "gate+up", "down"  # names of its operations


def predict(setup: Setup) -> Facts:
    """Count the intensities of a Llama 2 7B, and measure this machine's two peaks, which give its ridge."""
    planner = Planner(Deployment(find_model("llama-2-7b").spec, hardware("h100")))
    grouped = Planner(Deployment(find_model("llama-3.1-8b").spec, hardware("h100")))
    roof = measure_roof(open_table("cpu", threads=setup.threads))
    ridge = roof.flops_per_s / roof.read_bytes_per_s
    return {
        "mlp": [_intensity(planner, batch, *MLP) for batch in BATCHES],
        "mlp_of_a_prompt": _intensity(planner, 1, *MLP, tokens=PROMPT),
        "attention": [_intensity(planner, batch, "Attention") for batch in BATCHES],
        "grouped_attention": _intensity(grouped, 1, "Attention"),
        "flops_per_s": roof.flops_per_s, "bytes_per_s": roof.read_bytes_per_s, "ridge": ridge,
        "knee_rows": ridge * FLOAT / 2,
    }  # fmt: skip


def _intensity(planner: Planner, batch: int, *names: str, tokens: int = 1) -> float:
    """Return the operations for each byte of some operations of a step. tokens: number of tokens of each sequence."""
    found = [t.operation for t in planner.decode(batch, 2048, tokens).operations if t.operation.name in names]
    return sum(op.flops * op.layers for op in found) / sum(op.bytes * op.layers for op in found)


def measure(setup: Setup) -> Facts:
    """Time products of 1 to 256 tokens with matrices beyond the caches, and attention of 1 to 64 sequences."""
    table = open_table("cpu", threads=setup.threads)
    setup.on_part("intensity: products")
    passes = product_passes(table, "float32").far
    setup.on_part("intensity: attention")
    attention = {n: attention_s(table, "float32", 1, 1, LAYERS // n, n) for n in SEQUENCES}
    return {
        "products": {str(rows): 2 / seconds for rows, seconds in zip(ROWS, passes.values, strict=True)},
        "attention": {str(n): 2 / seconds for n, seconds in attention.items()},
    }


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the counts by their definitions, and the knee and the flat line by what was measured."""
    products, attention = list(measured["products"].values()), list(measured["attention"].values())
    knee = products[-1] / products[0]
    off = max(knee / predicted["knee_rows"], predicted["knee_rows"] / knee)
    mlp, flat = predicted["mlp"], max(attention) / min(attention)
    far = max(abs(found / batch - 1) for batch, found in zip(BATCHES, mlp, strict=True))
    prompt = abs(predicted["mlp_of_a_prompt"] / PROMPT - 1)
    return (
        at_most(
            1, off, KNEE,
            f"products stop to grow at {knee:.1f} tokens, and the ridge of {predicted['ridge']:.1f} operations a byte "
            f"says {predicted['knee_rows']:.1f}",
        ),
        within(2, mlp[0], 0.98, 1.0, f"the MLP of a Llama 2 7B has {mlp[0]:.3f} operations a byte with one token"),
        at_most(
            3, max(far, prompt), 0.03,
            f"batches to {BATCHES[-1]} have {mlp[-1]:.2f} operations a byte at most, and {PROMPT} tokens of a prompt "
            f"{predicted['mlp_of_a_prompt']:.2f}",
        ),
        at_most(
            4, flat, FLAT,
            f"attention has {min(attention) / 1e9:.2f} to {max(attention) / 1e9:.2f} GFLOP/s at every batch, and by "
            f"count {predicted['attention'][0]:.2f} operations a byte; heads in groups of 4 have "
            f"{predicted['grouped_attention']:.2f}",
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the rates over tokens, below the roof."""
    peak, rate = predicted["flops_per_s"], predicted["bytes_per_s"]
    roof = [(float(n), min(peak, rate * 2 * n / FLOAT) / 1e9) for n in ROWS]
    return (
        Figure(
            "Rate of products and of attention", "tokens or sequences in a step", "GFLOP/s",
            (
                Series("roof", roof, measured=False),
                *(
                    Series(name, [(float(n), r / 1e9) for n, r in measured[name].items()], measured=True)
                    for name in ("products", "attention")
                ),
            ),
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "intensity", "Operations over bytes", (1, 2, 3, 4), predict, measure, judge,
    "The roof is this machine's bandwidth times intensity, up to its peak, both measured before. Products with a "
    "matrix follow it to the knee, because all tokens share one read. Attention does not rise: each sequence reads its "
    "own keys.", figures,
)  # fmt: skip
