"""Measure how many drafts of the built-in pair are accepted: python bench/speculation.py [--prompts 36]

The target continues held-out contexts with 128 sampled tokens each. At each of these positions, with the probabilities
p of the target and q of the draft model after temperature and filters:

    possible   the sum of min(p, q): no way to accept drafts without loss accepts more (arXiv:2211.17192)
    same       the share of positions at which both models sample the same token with the noise of the answer
    rejection  the share at which a draft from q is accepted with probability min(1, p / q)
    one_number the share at which both models sample the same token if one number is walked through the token ids

The gates: `same` is at least 0.9 of what is possible, and `rejection` lies within three standard errors of it.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import sqrt
from pathlib import Path
from statistics import fmean

import numpy as np
from common import emit
from pocket import ANSWER, HELD_OUT, SEED, Bench, contexts

import ridgeline
from ridgeline import LLM, SamplingParams
from ridgeline.evals.documents import Text
from ridgeline.sample.acceptance import draw_draft
from ridgeline.sample.noise import PURPOSE_ACCEPT, PURPOSE_SAMPLE
from ridgeline.sample.rejection import Distribution, accepts
from ridgeline.sample.sampler import NoiseKey, SampleRow, distribution
from ridgeline.train import Corpus, split

CASES = {
    "temperature 1": {"temperature": 1.0}, "temperature 0.7": {"temperature": 0.7},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
}  # fmt: skip
LEAST_SAME = 0.9
ERRORS = 3  # standard errors


def logits(llm: LLM, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Return the logits [n, vocabulary] from which the n tokens of an answer are sampled."""
    loaded = llm.loaded
    step = loaded.dense_step([[*prompt, *answer]], [len(prompt)])
    rows = loaded.table.memory.integers(np.arange(len(prompt) - 1, len(prompt) + len(answer) - 1))
    return np.asarray(loaded.table.memory.get(loaded.model.logits(loaded.model.forward(step), rows)))


def walked(p: Distribution, number: float) -> int:
    """Return the token whose slice of [0, 1) holds a number; the slices are in order of token id."""
    return int(p.ids[min(int(np.searchsorted(p.probabilities.cumsum(), number)), p.ids.size - 1)])


def outcomes(bench: Bench, prompts: list[list[int]], params: SamplingParams) -> Iterator[tuple[float, ...]]:
    """Yield for each position the four values of the docstring."""
    target, draft = bench.llm("target"), bench.llm("draft")
    answers = target.generate([{"prompt_token_ids": p} for p in prompts], params)
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        tokens = list(answer.outputs[0].token_ids)
        key = NoiseKey(SEED + 1, number)  # not that of the answer, so that the contexts do not depend on it
        pairs = zip(logits(target, prompt, tokens), logits(draft, prompt, tokens), strict=True)
        for at, (x, y) in enumerate(pairs):
            row = SampleRow.start(params, prompt, key, (), tokens[:at])
            p, q = distribution(x, row), distribution(y, row)
            dense = np.zeros((2, x.size))
            dense[0, p.ids], dense[1, q.ids] = p.probabilities, q.probabilities
            uniform = key.uniform(row.position, PURPOSE_SAMPLE)
            yield (
                float(dense.min(axis=0).sum()),
                draw_draft(x, row, "same") == draw_draft(y, row, "same"),
                accepts(p, draw_draft(y, row, "rejection"), key.uniform(row.position, PURPOSE_ACCEPT)),
                walked(p, uniform) == walked(q, uniform),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=36, help="number of contexts; default: 36, 4,608 positions")
    options = parser.parse_args()
    models = Path(ridgeline.__file__).parent / "models"
    held_out = split(Corpus.stdlib().documents, HELD_OUT, SEED).held_out
    folders = {"target": models / "pocket", "draft": models / "pocket-draft"}
    bench = Bench(folders, argparse.Namespace(out=None), [Text(d.name, d.text) for d in held_out])
    prompts = contexts(bench, options.prompts)
    for name, fields in CASES.items():
        params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, seed=SEED, **fields)
        found = list(outcomes(bench, prompts, params))
        possible, same, rejection, one_number = (fmean(column) for column in zip(*found, strict=True))
        error = sqrt(rejection * (1 - rejection) / len(found))
        gate = same >= LEAST_SAME * possible and abs(rejection - possible) <= ERRORS * error
        emit(
            f"speculation: acceptance, {name}", gate, positions=len(found), possible=round(possible, 4),
            same=round(same, 4), same_of_possible=round(same / possible, 4), rejection=round(rejection, 4),
            standard_error=round(error, 4), one_number=round(one_number, 4),
        )  # fmt: skip


if __name__ == "__main__":
    main()
