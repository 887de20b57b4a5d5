"""Sequences of different lengths in one step: equal tokens, and no padding."""

from __future__ import annotations

from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.timing import middle, model
from ridgeline.measure.latency import check, random_prompts
from ridgeline.spec.request import SamplingParams

LENGTHS, TOKENS = (8, 40, 72, 104, 136, 168, 200, 232), 24  # of the prompts, and of each answer
FASTER = 1.2  # least gain over the same sequences one after the other


def predict(setup: Setup) -> Facts:
    """Count the rows that padding to the longest prompt would add, and the steps of both ways."""
    longest = max(LENGTHS)
    return {"padded_share": 1 - sum(LENGTHS) / (longest * len(LENGTHS)), "steps_apart": len(LENGTHS) * TOKENS}


def measure(setup: Setup) -> Facts:
    """Answer prompts of different lengths together and one after the other, with the same noise."""
    llm = model(setup.model, setup.threads, len(LENGTHS), max(LENGTHS) + TOKENS)
    vocab = llm.loaded.spec.vocab_size
    greedy = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    drawn = SamplingParams(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, seed=setup.seed)
    params = [(greedy, drawn)[i % 2] for i in range(len(LENGTHS))]
    together, apart, equal = [], [], True
    for i in range(3 if setup.quick else 7):
        setup.on_part(f"selective: round {i + 1}")
        prompts = [random_prompts((setup.seed, i, n), 1, n, vocab)[0] for n in LENGTHS]
        both = llm.generate(prompts, params)
        alone = [
            llm.generate([prompt | {"cache_salt": "alone"}], [p])[0] for prompt, p in zip(prompts, params, strict=True)
        ]
        check([*both, *alone])
        equal &= [o.outputs[0].token_ids for o in both] == [o.outputs[0].token_ids for o in alone]
        together.append(max(o.timing.total_s for o in both))
        apart.append(sum(o.timing.total_s for o in alone))
    return {"equal": equal, "gains": [b / a for a, b in zip(together, apart, strict=True)]}


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge the tokens, which have to be equal, and the gain."""
    gain, spread = middle(measured["gains"])
    same = "the same tokens" if measured["equal"] else "other tokens"
    found = at_least(
        36, gain, FASTER,
        f"{len(LENGTHS)} prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens get {same} in one batch as alone, {gain:.1f} "
        f"times as fast; padding them would have added {predicted['padded_share']:.0%} of empty rows",
        spread,
    )  # fmt: skip
    return (only_if(found, measured["equal"]),)


EXPERIMENT = Experiment(
    "selective", "Sequences of different lengths in one step", (36,), predict, measure, judge,
    "Products with matrices do not care to which sequence a token belongs, so tokens of all lengths lie side by side "
    "without padding. Only attention looks at one sequence at a time. Half of the prompts are sampled, and half are "
    "greedy.",
)  # fmt: skip
