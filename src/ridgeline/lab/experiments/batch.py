"""Latency against throughput over the batch, copies of a model, and fewer bytes."""

from __future__ import annotations

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model, published_config
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, within
from ridgeline.lab.timing import SMALL, middle, random_model, token_s
from ridgeline.measure.machine import measure_roof
from ridgeline.ops.devices import open_table
from ridgeline.plan.planner import Deployment
from ridgeline.sim import LinearCost, Request, Workload, settings, simulate

BATCHES, PROMPT, TOKENS, COPIES = (1, 2, 4, 8, 16, 32), 32, 9, 4
GAIN = 3.0  # least factor of tokens per second from one sequence to 32
LESS = (0.6, 1.3)  # measured over predicted gain of int8, whose reads are a fourth of float32's


def predict(setup: Setup) -> Facts:
    """Divide the bytes of a model with 135 M weights by this machine's bandwidth, up to its peak of arithmetic."""
    roof, params = measure_roof(open_table("cpu", threads=setup.threads)), find_model(SMALL).spec.num_params()
    step = {str(n): max(4 * params / roof.read_bytes_per_s, 2 * n * params / roof.flops_per_s) for n in BATCHES}
    return {"step_s": step, "int8_gain": 4 / (1 + 4 / 576), "copies": COPIES}  # a row of 576 codes has one scale


def _copies() -> dict[str, float]:
    """Serve equal requests on one copy and on several, on a virtual clock with steps of a hundredth of a second."""
    deployment, found = Deployment(find_model("pocket").spec, hardware("h100")), {}
    for copies in (1, COPIES):
        work = Workload([Request(0, 64, 32)] * (80 * copies), clients=8 * copies)
        run = simulate(work, settings(deployment, max_num_seqs=8), LinearCost((1,), (0.01,)), replicas=copies).report
        assert run.ttft_s is not None
        found[f"rate_{copies}"], found[f"ttft_{copies}"] = run.output_tokens_per_s, run.ttft_s.p50
    return found


def measure(setup: Setup) -> Facts:
    """Time decode steps of random weights in float32 over the batch, and in int8 alone; simulate copies."""
    repetitions, config = (3 if setup.quick else 7), published_config(SMALL)
    assert config is not None
    steps: dict[str, list[float]] = {}
    with random_model(config, setup.threads, max(BATCHES), PROMPT + TOKENS, dtype="float32") as llm:
        for n in BATCHES:
            setup.on_part(f"batch: {n} sequences")
            token_s(llm, (setup.seed, n), n, PROMPT, 2)  # the first step of a size is recorded
            steps[str(n)] = [token_s(llm, (setup.seed, n, i), n, PROMPT, TOKENS) for i in range(repetitions)]
    setup.on_part("batch: int8")
    with random_model(config, setup.threads, 1, PROMPT + TOKENS, dtype="float32", weights="int8") as llm:
        token_s(llm, (setup.seed, 0), 1, PROMPT, 2)
        small = [token_s(llm, (setup.seed, 1, i), 1, PROMPT, TOKENS) for i in range(repetitions)]
    return {"step_s": steps, "int8_s": small, **_copies()}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the trade over the batch, the copies, and the gain of fewer bytes beside that of the bytes."""
    steps = {n: middle(values) for n, values in measured["step_s"].items()}
    last = str(BATCHES[-1])
    rates = [int(n) / seconds for n, (seconds, _) in steps.items()]
    gain, slower = rates[-1] / rates[0], steps[last][0] / steps["1"][0]
    times = measured[f"rate_{COPIES}"] / measured["rate_1"]
    later = measured[f"ttft_{COPIES}"] / measured["ttft_1"]
    fewer = middle([steps["1"][0] / s / predicted["int8_gain"] for s in measured["int8_s"]])
    return (
        at_least(
            8, min(gain, GAIN * slower), GAIN,
            f"from 1 to {last} sequences tokens per second grow {gain:.1f} times, and a token takes {slower:.1f} times "
            f"as long; a step alone takes {steps['1'][0] / predicted['step_s']['1']:.2f} times its bytes over the "
            "bandwidth",
        ),
        within(
            9, times / COPIES / later, 0.95, 1.05,
            f"{COPIES} copies have {times:.2f} times the tokens per second and {later:.2f} times the TTFT, where "
            "requests are spread evenly",
        ),
        within(
            26, fewer[0], *LESS,
            f"int8 decodes {fewer[0] * predicted['int8_gain']:.2f} times as fast as float32, and reads "
            f"{predicted['int8_gain']:.2f} times fewer bytes",
            fewer[1],
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the throughput over the time of a token."""
    floor = [(seconds * 1e3, int(n) / seconds) for n, seconds in predicted["step_s"].items()]
    seen = [(t * 1e3, int(n) / t) for n, (t, _) in ((n, middle(v)) for n, v in measured["step_s"].items())]
    curves = Series("roof", floor, measured=False), Series("measured", seen, measured=True)
    return (Figure("Throughput against latency, batches of 1 to 32", "ms per token", "tokens/s", curves),)


EXPERIMENT = Experiment(
    "batch", "Latency against throughput", (8, 9, 26), predict, measure, judge,
    "All sequences of a step share one read of the weights, so that throughput grows almost freely until arithmetic "
    "takes longer than the read. From there on a larger batch only delays its tokens.", figures,
)  # fmt: skip
