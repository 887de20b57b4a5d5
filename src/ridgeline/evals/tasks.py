"""Measure a model on questions: the share of right answers, chosen by likelihood or generated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ridgeline.evals.estimates import Estimate, clustered_mean
from ridgeline.evals.likelihood import encode_pair, first_token, score
from ridgeline.evals.perplexity import estimate_json
from ridgeline.evals.questions import Question, Task
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel

MAX_ANSWER_TOKENS = 256  # of a generated answer
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_LOOSE = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
Generate = Callable[[Sequence[Sequence[int]]], list[str]]  # from prompts of ids to answers, cut at END


@dataclass(frozen=True, slots=True)
class Score:
    """The shares of right answers that a model reached on a task.

    accuracy: the share of questions whose right answer is the likeliest; of generated answers, those whose number
    after "####" is right. normalized: with each log likelihood divided by the characters of its answer. last_number:
    the share of generated answers whose last number is right. None: not a figure of this task.
    """

    task: str
    num_questions: int
    num_shots: int
    accuracy: Estimate
    normalized: Estimate | None = None
    last_number: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, None for unknown ones."""
        return {
            "task": self.task,
            "num_questions": self.num_questions,
            "num_shots": self.num_shots,
            **estimate_json("accuracy", self.accuracy),
            **estimate_json("accuracy_normalized", self.normalized),
            **estimate_json("accuracy_last_number", self.last_number),
        }


def prompts(task: Task, question: Question, examples: Sequence[Question], num_shots: int) -> list[str]:
    """Return the text before each possible answer: heading, solved examples, question.

    examples: the first num_shots of the question's subject are used.
    """
    shots = [one for one in examples if one.about == question.about][:num_shots]
    head = task.heading.format(about=question.about) if question.about else ""
    head += "".join(f"{one.solved}\n\n" for one in shots)
    return [head + context for context in question.contexts]


def measure_choices(
    name: str, task: Task, loaded: LoadedModel, tokenizer: Tokenizer, questions: Sequence[Question],
    examples: Sequence[Question] = (), num_shots: int = 0, *, on_pairs: Callable[[int], None] = lambda scored: None,
) -> Score:  # fmt: skip
    """Score every possible answer of the questions. on_pairs: called with the number of answers just scored."""
    first = first_token(tokenizer, loaded)
    pairs = [
        encode_pair(tokenizer, prompt, f" {continuation}", first)
        for question in questions
        for prompt, continuation in zip(
            prompts(task, question, examples, num_shots), question.continuations, strict=True
        )
    ]  # fmt: skip
    found = iter(score(loaded, pairs, on_pairs=on_pairs))
    right, normalized = [], []
    for question in questions:
        values = np.array([next(found).logprob for _ in question.continuations])
        lengths = np.array([len(text) for text in question.continuations])
        right.append(int(values.argmax()) == question.answer)
        normalized.append(int((values / lengths).argmax()) == question.answer)
    accuracy = _share(normalized) if task.is_normalized else None
    return Score(name, len(questions), num_shots, _share(right), normalized=accuracy)


def measure_generated(
    name: str, task: Task, tokenizer: Tokenizer, generate: Generate, max_prompt_tokens: int,
    questions: Sequence[Question], examples: Sequence[Question] = (), num_shots: int = 0,
) -> Score:  # fmt: skip
    """Generate the answers and compare numbers. max_prompt_tokens: a longer prompt is cut at its left."""
    texts = [prompts(task, question, examples, num_shots)[0] for question in questions]
    answers = generate([tokenizer.encode(text, max_tokens=max_prompt_tokens) for text in texts])
    gold = [_plain_number(question.continuations[0]) for question in questions]
    strict = [_plain_number(found[1]) if (found := _STRICT.search(text)) else None for text in answers]
    loose = [_plain_number(numbers[-1]) if (numbers := _LOOSE.findall(text)) else None for text in answers]
    shares = [_share([a == b for a, b in zip(some, gold, strict=True)]) for some in (strict, loose)]
    return Score(name, len(questions), num_shots, shares[0], last_number=shares[1])


def _plain_number(text: str) -> str:
    """Return what counts of a number or of a solution: the text after "####" without commas, "$" and a final point."""
    return re.sub(r"\.$", "", re.sub(r"(?s),|\$|.*#### ", "", text)).lower()


def _share(hits: Sequence[bool]) -> Estimate:
    return clustered_mean(np.asarray(hits, np.float64), np.ones(len(hits), np.int64))
