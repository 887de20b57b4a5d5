"""Diffusion language models: tokens in parallel, for one answer and for many, measured here and by plan."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ridgeline.archs import OUR_MODEL_TYPE, spec_from_config
from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model, published_config
from ridgeline.diffusion import as_blocks
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.passes import LENGTH, chance_of_one_pass, share_in_order
from ridgeline.lab.timing import SMALL, middle, random_model
from ridgeline.llm import LLM
from ridgeline.measure.latency import check, random_prompts
from ridgeline.plan.denoise import denoise
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.spec import to_json
from ridgeline.spec.request import SamplingParams

MODEL, MACHINE, PROMPT, ANSWER = "llama-3.1-8b", "h100", 128, 128
BATCHES, PASSES = (1, 8, 64, 256), (8, 16, 32, 64, 128)
FILLED, NEAR = (1, 2, 4, LENGTH), 0.05  # passes of a text of eight words; most distance of a share from its law
FEW = 16  # passes of an answer of 128 tokens: 8 tokens a pass, as decoders with a threshold of confidence report


BLOCK, BLOCK_PASSES, TOKENS, HERE = 16, 2, 32, (1, 16)  # of the model that is measured here, and its answers at once


def predict(setup: Setup) -> Facts:
    """Count passes, which read the weights once, as a step of a causal model does; a finished block is read again."""
    passes = TOKENS // BLOCK * (BLOCK_PASSES + 1)
    return {
        "gain_of_one_answer": ANSWER / FEW, "passes": passes, "steps": TOKENS, "right_in_one": chance_of_one_pass(),
    }  # fmt: skip


def measure(setup: Setup) -> Facts:
    """Time random weights as a causal model and as one of blocks, plan a larger model, and fill texts in few passes."""
    planner = Planner(Deployment(find_model(MODEL).spec, hardware(MACHINE)))
    causal = {b: _causal_s(planner, b) for b in BATCHES}
    return {
        "gains": {
            str(p): {str(b): causal[b] / denoise(planner, Load(b, PROMPT, ANSWER), p).latency_s for b in BATCHES}
            for p in PASSES
        },
        "here": _here(setup),
        "right": {str(n): share_in_order(n, setup.seed) for n in FILLED},
    }


def _here(setup: Setup) -> dict[str, list[float]]:
    """Return how many times as fast a model of blocks answers as a causal one of its size, in turn."""
    config = published_config(SMALL)
    assert config is not None
    spec = as_blocks(spec_from_config(config), BLOCK, 0)
    blocks = {"model_type": OUR_MODEL_TYPE, "spec": to_json(spec), "eos_token_id": 0}
    given = setup.threads, max(HERE), BLOCK + TOKENS
    found: dict[str, list[float]] = {}
    with random_model(config, *given, dtype="float32") as causal, random_model(blocks, *given, dtype="float32") as own:
        for batch in HERE:
            setup.on_part(f"diffusion: {batch} answers at once")
            rounds = range(4 if setup.quick else 8)
            times = [[_answer_s(llm, (setup.seed, i), batch) for llm in (causal, own)] for i in rounds]
            found[str(batch)] = [a / b for a, b in times[1:]]  # the first ones record steps
    return found


def _answer_s(llm: LLM, seed: Sequence[int], batch: int) -> float:
    passes = BLOCK_PASSES if llm.loaded.spec.diffusion else None
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, denoising_passes=passes)
    prompts = random_prompts((*seed, batch), batch, BLOCK, llm.loaded.spec.vocab_size)
    start = time.perf_counter()
    check(llm.generate(prompts, params))
    return time.perf_counter() - start


def _causal_s(planner: Planner, batch: int) -> float:
    """Return the seconds of `batch` answers at once: their prompts together, and then a token each in every step."""
    load = Load(batch, PROMPT, ANSWER)
    return planner.decode(batch, PROMPT, PROMPT).seconds + (ANSWER - 1) * planner.tpot_s(load)


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the gain of few passes for one answer; the sentence names where many answers at once lose."""
    few, here, right = measured["gains"][str(FEW)], measured["here"], list(measured["right"].values())
    filled = ", ".join(f"{share:.0%}" for share in right)
    is_law = abs(right[0] - predicted["right_in_one"]) <= NEAR and right == sorted(right) and right[-1] == 1
    (one, planned), *_, (most, last) = few.items()
    slow = measured["gains"][str(PASSES[-1])][one]
    (gain, spread), (many, _) = (middle(here[str(n)]) for n in HERE)
    return (
        only_if(
            at_least(
                23, gain, 1.0,
                f"a model of 135 M weights that fills blocks of {BLOCK} tokens in {BLOCK_PASSES} passes answers "
                f"{gain:.2f} times as fast as a causal one of its size, and {many:.2f} times for {HERE[1]} answers at "
                f"once; by plan, a Llama 3.1 8B on an H100 with {FEW} passes for {ANSWER} tokens is {planned:.1f} "
                f"times as fast for one answer, with a pass for each token {slow:.2f} times, and for {most} at once it "
                f"takes {1 / last:.1f} times as long; with the exact law of each word, {filled} of texts "
                f"of {LENGTH} words are in order after {', '.join(map(str, FILLED))} passes, and arithmetic says "
                f"{predicted['right_in_one']:.1%} for one",
                spread,
            ),
            planned >= 1.0 and slow <= planned and is_law,
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the gain over the batch, for each number of passes."""
    curves = [
        Series(f"{passes} passes", [(float(b), g) for b, g in gains.items()], measured=False)
        for passes, gains in measured["gains"].items()
    ]
    return (
        Figure(
            f"Speed of a denoiser over that of a causal model, {ANSWER} tokens on an H100", "answers at once", "times",
            tuple(curves),
        ),
        Figure(
            f"Texts of {LENGTH} words that are right", "passes", "share",
            (Series("exact laws", [(float(n), x) for n, x in measured["right"].items()], measured=True),),
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "diffusion",
    "Diffusion language models",
    (23,),
    predict,
    measure,
    judge,
    "A pass over all positions reads the weights once, as a step of one token does, but computes all positions again. "
    "So few passes gain much while memory limits a step, and lose once a batch makes steps compute-bound. Words of one "
    "pass do not know of each other: texts of words in order are right as a whole only after many passes.",
    figures,
)
