"""Read the questions of known benchmarks from files: rows as their data sets have them, one JSON object in a line.

Prompts are those of lm-eval's tasks by the same names, which tests/cpu/test_tasks.py compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.errors import RequestError

MAX_ROW = 1 << 20  # characters
END = ("Question:", "</s>", "<|im_end|>")  # ends a generated answer
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose possible answers are scored, or one whose answer is generated.

    contexts, continuations: the texts before and after the space, one for each possible answer; a generated answer
    has one of each. answer: index of the right one. about: the subject, whose questions share examples.
    """

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    answer: int
    about: str = ""

    @property
    def solved(self) -> str:
        """Return the question with its right answer, as an example."""
        return f"{self.contexts[self.answer]} {self.continuations[self.answer]}"


@dataclass(frozen=True, slots=True)
class Task:
    """A benchmark. read: makes a question of a row. heading: text before the prompt; {about} is the subject.

    is_generated: the answer is generated, and its number counts. is_normalized: the accuracy with likelihoods divided
    by the answers' lengths is reported too.
    """

    read: Callable[[Row], Question]
    heading: str = ""
    is_generated: bool = False
    is_normalized: bool = False


def _hellaswag(row: Row) -> Question:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _choices(_plain(context), [_plain(ending) for ending in row["endings"]], int(row["label"]))


def _plain(text: str) -> str:
    """Remove the marks that HellaSwag's texts from WikiHow have."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _arc(row: Row) -> Question:
    choices = row["choices"]
    return _choices(_ask(row["question"]), choices["text"], choices["label"].index(row["answerKey"]))


def _piqa(row: Row) -> Question:
    return _choices(_ask(row["goal"]), [row["sol1"], row["sol2"]], int(row["label"]))


def _winogrande(row: Row) -> Question:
    before, after = row["sentence"].split("_", 1)
    contexts = before + row["option1"], before + row["option2"]
    return Question(contexts, (after.strip(),) * 2, ("1", "2").index(row["answer"]))


def _mmlu(row: Row) -> Question:
    letters = "ABCD"
    options = [f"{letter}. {text}" for letter, text in zip(letters, row["choices"], strict=True)]
    context = "\n".join([row["question"].strip(), *options, "Answer:"])
    return _choices(context, letters, int(row["answer"]), row.get("subject", "").replace("_", " "))


def _gsm8k(row: Row) -> Question:
    return _choices(_ask(row["question"]), [row["answer"]], 0)


def _ask(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def _choices(context: str, answers: list[str] | str, answer: int, about: str = "") -> Question:
    return Question((context,) * len(answers), tuple(answers), answer, about)


TASKS = {
    "hellaswag": Task(_hellaswag, is_normalized=True),
    "arc_easy": Task(_arc, is_normalized=True),
    "arc_challenge": Task(_arc, is_normalized=True),
    "piqa": Task(_piqa, is_normalized=True),
    "winogrande": Task(_winogrande),
    "mmlu": Task(_mmlu, "The following are multiple choice questions (with answers) about {about}.\n\n"),
    "gsm8k": Task(_gsm8k, is_generated=True),
}


def find_task(name: str) -> Task:
    """Return a task by name. Raises RequestError for an unknown one."""
    if name not in TASKS:
        raise RequestError(f"there is no task {name!r}; the tasks are {', '.join(TASKS)}")
    return TASKS[name]


def read_questions(path: Path, task: Task, limit: int | None = None) -> list[Question]:
    """Return the first `limit` questions of a file, by default all.

    Raises RequestError for a file that cannot be read or has no question, and for a row that is not the task's.
    """
    questions: list[Question] = []
    for name, line in _lines(path):
        if limit is not None and len(questions) == limit:
            break
        try:
            question = task.read(json.loads(line))
            if not 0 <= question.answer < len(question.contexts) or not all(question.continuations):
                raise ValueError("the answer is none of the choices, or a choice is empty")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            why = f"it has no {e}" if isinstance(e, KeyError) else str(e)
            raise RequestError(f"{name} is not a row of this task: {why}") from None
        questions.append(question)
    if not questions:
        raise RequestError(f"{path} has no question; write one JSON object a line")
    return questions


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file and number, text) of each line that is not blank."""
    try:
        with path.open(encoding="utf-8") as file:
            number = 0
            while line := file.readline(MAX_ROW + 1):
                number += 1
                if len(line) > MAX_ROW:
                    raise RequestError(f"{path}:{number} has more than {MAX_ROW} characters; write one row a line")
                if line.strip():
                    yield f"{path}:{number}", line
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise RequestError(f"the questions of {path} cannot be read: {reason}") from None
