"""Memory that caches waste, and pages that answers share."""

from __future__ import annotations

import numpy as np

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.footprint import Memory
from ridgeline.cost.precision import Precision
from ridgeline.cost.shard import Scheme
from ridgeline.errors import RequestError
from ridgeline.lab.experiment import Experiment, Facts, Figure, Series, Setup
from ridgeline.lab.judgement import Judgement, at_most
from ridgeline.lab.timing import model
from ridgeline.spec.request import SamplingParams

PAGE, LONGEST, MEANS, MANY = 16, 4096, (30, 60, 120, 250, 500, 1000), 4000
USUAL = 500  # mean tokens of a sequence by which the claim is judged
ANSWERS, PROMPT, TOKENS = 8, 256, 17


def predict(setup: Setup) -> Facts:
    """Half a page of each sequence is empty; a reserved cache holds the longest sequence for each."""
    pages = -(-(PROMPT + TOKENS) // PAGE)
    own = pages - PROMPT // PAGE
    return {
        "paged": {str(n): (PAGE - 1) / 2 / (n + (PAGE - 1) / 2) for n in MEANS},
        "reserved": {str(n): 1 - n / LONGEST for n in MEANS},
        "pages": PROMPT // PAGE + ANSWERS * own, "pages_apart": ANSWERS * pages,
    }  # fmt: skip


def measure(setup: Setup) -> Facts:
    """Draw geometric lengths and count what three kinds of caches hold; then count pages of answers to one prompt."""
    memory = Memory(find_model("llama-2-7b").spec, Precision(), hardware("h100"), Scheme(), page_tokens=PAGE, chunk=512)
    (group,) = memory.groups
    found: dict[str, dict[str, float]] = {"paged": {}, "buddy": {}, "reserved": {}}
    for mean in MEANS:
        used = np.random.default_rng((setup.seed, mean)).geometric(1 / mean, MANY).clip(max=LONGEST)
        total = float(used.sum())
        found["paged"][str(mean)] = 1 - total / (PAGE * sum(group.most_pages(int(n)) for n in used))
        found["buddy"][str(mean)] = 1 - total / float((2.0 ** np.ceil(np.log2(used))).sum())
        found["reserved"][str(mean)] = 1 - total / (LONGEST * MANY)
    setup.on_part("paging: answers to one prompt")
    return {**found, "pages": _pages(setup, ANSWERS)}


def _pages(setup: Setup, answers: int) -> int:
    """Return the most pages that answers to one prompt held at a time."""
    llm = model(setup.model, setup.threads, answers, PROMPT + TOKENS)
    before = llm.stats()
    ids = np.random.default_rng(setup.seed).integers(0, llm.loaded.spec.vocab_size, PROMPT).tolist()
    params = SamplingParams(n=answers, max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=setup.seed)
    llm.generate([{"prompt_token_ids": ids}], params)
    after = llm.stats()
    assert before is not None and after is not None
    if len(after.groups) != 1:
        raise RequestError(f"--model {setup.model} has several kinds of pages; take one with full attention everywhere")
    return after.groups[0].peak_pages - before.groups[0].used_pages


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge waste at usual lengths, and shared pages by the count."""
    usual, short = str(USUAL), str(MEANS[0])
    paged, reserved, pages = measured["paged"], measured["reserved"], measured["pages"]
    return (
        at_most(
            37, paged[usual] if reserved[usual] > 0.5 else 1.0, 0.04,
            f"at {usual} tokens in the mean pages waste {paged[usual]:.1%}, blocks of powers of two "
            f"{measured['buddy'][usual]:.0%} and reserved caches of {LONGEST:,} tokens {reserved[usual]:.0%}; at "
            f"{short} tokens pages waste {paged[short]:.0%}, so the lengths decide",
        ),
        at_most(
            38, pages, predicted["pages"],
            f"{ANSWERS} answers to one prompt of {PROMPT} tokens held {pages} pages; each with pages of its own would "
            f"need {predicted['pages_apart']}",
        ),
    )  # fmt: skip


def figures(predicted: Facts, measured: Facts) -> tuple[Figure, ...]:
    """Return the waste over the mean length."""
    curves = [Series(f"{name}, by formula", _points(predicted[name]), measured=False) for name in ("paged", "reserved")]
    curves += [Series(name, _points(measured[name]), measured=True) for name in ("paged", "buddy", "reserved")]
    return (Figure("Memory of a cache that holds nothing", "mean tokens of a sequence", "share", tuple(curves)),)


def _points(by_mean: Facts) -> list[tuple[float, float]]:
    return [(float(n), share) for n, share in by_mean.items()]


EXPERIMENT = Experiment(
    "paging", "Waste of caches, and pages that are shared", (37, 38), predict, measure, judge,
    "A reserved cache holds the longest sequence for each. Pages waste half a page of each sequence, which is little "
    "beside long answers and much beside short ones. Answers to one prompt hold its pages once, and copy a page when "
    "they write to it.", figures,
    timed=False,
)  # fmt: skip
