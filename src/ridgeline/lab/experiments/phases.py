"""Prefill and decode beside both roofs, and the times of a request."""

from __future__ import annotations

import time

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model, published_config
from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if, within
from ridgeline.lab.timing import SMALL, answers, middle, random_model, token_s
from ridgeline.measure.machine import measure_roof
from ridgeline.ops.devices import open_table
from ridgeline.plan.planner import Deployment, Planner

PROMPT, TOKENS, BATCH = 256, 17, 8
SHORT = 8  # tokens of prompts before the decode steps that are timed, which no long prompt should delay
FLOAT = 4  # bytes of a weight as it is measured
NEAR = 0.4  # least share of its own roof that each phase has to reach; the other roof is far by count
GROWS = 3.0  # least factor of TTFT, and of tokens per second, from one sequence to BATCH


def predict(setup: Setup) -> Facts:
    """Say what bounds a Llama 3.1 8B on an H100, and measure this machine's two peaks."""
    planner = Planner(Deployment(find_model("llama-3.1-8b").spec, hardware("h100")))
    roof = measure_roof(open_table("cpu", threads=setup.threads))
    small = find_model(SMALL).spec
    return {
        "prefill_by": planner.decode(1, 2048, 2048).by_cause(), "decode_by": planner.decode(1, 2048).by_cause(),
        "flops_per_s": roof.flops_per_s, "bytes_per_s": roof.read_bytes_per_s, "params": small.num_params(),
        "ttft_per_token_s": 2 * small.num_params() / roof.flops_per_s,
        "tpot_s": FLOAT * small.num_params() / roof.read_bytes_per_s,
    }  # fmt: skip


def measure(setup: Setup) -> Facts:
    """Time prompts and decode steps of a model with 135 M random weights, alone and in a batch."""
    repetitions, config = (3 if setup.quick else 7), published_config(SMALL)
    assert config is not None
    ttft: dict[str, list[float]] = {"1": [], str(BATCH): []}
    tpot: dict[str, list[float]] = {"1": [], str(BATCH): []}
    walls, sums, wrong = [], [], []
    with random_model(config, setup.threads, BATCH, PROMPT + TOKENS, dtype="float32") as llm:
        for batch in (1, BATCH):
            token_s(llm, (setup.seed, batch), batch, 32, 4)  # the first step of a size is recorded
            for i in range(repetitions):
                setup.on_part(f"phases: {batch} sequences, {i + 1} of {repetitions}")
                start = time.perf_counter()
                found = answers(llm, (setup.seed, batch, i), batch, PROMPT, TOKENS)
                wall = time.perf_counter() - start
                ttft[str(batch)].append(max(out.timing.ttft_s for out in found))
                tpot[str(batch)].append(token_s(llm, (setup.seed, batch, i, 1), batch, SHORT, TOKENS))
                if batch == 1:
                    one = found[0].timing
                    walls.append(wall)
                    sums.append(one.ttft_s + (TOKENS - 1) * one.tpot_s)
                    wrong.append(one.ttft_s + TOKENS * one.tpot_s)
    return {"ttft_s": ttft, "tpot_s": tpot, "wall_s": walls, "sum_s": sums, "sum_of_n_s": wrong}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge which roof each phase is near, how both times grow with the batch, and the sum of a request's times."""
    ttft, tpot = ({n: middle(values) for n, values in measured[name].items()} for name in ("ttft_s", "tpot_s"))
    flops, size = 2 * predicted["params"], FLOAT * predicted["params"]
    peaks = predicted["flops_per_s"], predicted["bytes_per_s"]
    prefill = [n / ttft["1"][0] / peak for n, peak in zip((flops * PROMPT, size), peaks, strict=True)]
    decode = [n / tpot["1"][0] / peak for n, peak in zip((flops, size), peaks, strict=True)]
    causes = max(predicted["prefill_by"], key=predicted["prefill_by"].get), max(
        predicted["decode_by"], key=predicted["decode_by"].get
    )  # fmt: skip
    many = str(BATCH)
    slower, faster = ttft[many][0] / ttft["1"][0], BATCH * tpot["1"][0] / tpot[many][0]
    off = middle([sum_s / wall - 1 for sum_s, wall in zip(measured["sum_s"], measured["wall_s"], strict=True)])
    more = middle([sum_s / wall - 1 for sum_s, wall in zip(measured["sum_of_n_s"], measured["wall_s"], strict=True)])
    first = at_least(
        5, min(prefill[0], decode[1]), NEAR,
        f"a prompt of {PROMPT} tokens reaches {prefill[0]:.0%} of the peak of arithmetic and {prefill[1]:.0%} of the "
        f"bandwidth; a decode step {decode[0]:.0%} and {decode[1]:.0%}. By the plan a Llama 3.1 8B on an H100 is bound "
        f"by {causes[0]} and by {causes[1]}",
    )  # fmt: skip
    return (
        only_if(first, causes == ("compute", "weights")),
        at_least(
            11, min(slower, faster), GROWS,
            f"from 1 to {BATCH} prompts the last first token comes {slower:.1f} times later, and decode has "
            f"{faster:.1f} times the tokens per second",
        ),
        within(
            12, off[0], -0.05, 0.05,
            f"TTFT + (n - 1) x TPOT differs from the clock by {off[0]:+.1%}, and TTFT + n x TPOT by {more[0]:+.1%}: "
            "the first token is in TTFT",
            off[1],
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "phases", "Prefill and decode beside both roofs", (5, 11, 12), predict, measure, judge,
    "A prompt multiplies every weight with all of its tokens, and a decode step with one. So a prompt is near the peak "
    "of arithmetic, and a decode step near the bandwidth. More prompts at once delay first tokens and raise the "
    "throughput of decode.",
)  # fmt: skip
