"""Run the benchmarks of `ridgeline evaluate --tasks`, and show the share of right answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Table
    from ridgeline.evals import Estimate, Question, Score, Task
    from ridgeline.llm import LLM


class Chosen(NamedTuple):
    """A task of --tasks with its questions, and solved examples for --shots."""

    name: str
    task: Task
    questions: list[Question]
    examples: list[Question]


def read_tasks(names: str | None, folder: Path | None, shots: int, limit: int | None) -> list[Chosen]:
    """Return the tasks that are named, separated by commas. Raises RequestError for what cannot be read."""
    if names is None:
        return []
    from ridgeline.errors import RequestError
    from ridgeline.evals import find_task, read_questions

    if folder is None:
        raise RequestError("--tasks needs --task-data, the folder with TASK.jsonl for each task")
    found = []
    for name in dict.fromkeys(one.strip() for one in names.split(",")):
        task = find_task(name)
        examples = read_questions(folder / f"{name}.shots.jsonl", task) if shots else []
        found.append(Chosen(name, task, read_questions(folder / f"{name}.jsonl", task, limit), examples))
    return found


def is_generated(chosen: Sequence[Chosen]) -> bool:
    """Return whether a task has answers that are generated."""
    return any(one.task.is_generated for one in chosen)


def measure(chosen: Sequence[Chosen], models: Sequence[LLM], shots: int, *, is_shown: bool) -> dict[str, Any]:
    """Measure each task with the model, and with its original if there is one; return the report's part about them."""
    from ridgeline.cli.show.progress import count_bar
    from ridgeline.cli.show.tables import screen, show

    total = sum(len(q.continuations) for one in chosen for q in one.questions) * len(models)
    with count_bar("answers", total) as on_answers:
        found = [[_measure(one, llm, shots, on_answers) for one in chosen] for llm in models]
    if is_shown:
        show(screen(), tasks_table(found), "± is one standard error.")
    report: dict[str, Any] = {"tasks": [score.to_json() for score in found[0]]}
    return report | ({"original_tasks": [score.to_json() for score in found[1]]} if len(found) > 1 else {})


def _measure(one: Chosen, llm: LLM, shots: int, on_answers: Callable[[int], None]) -> Score:
    from ridgeline.errors import RequestError
    from ridgeline.evals import END, MAX_ANSWER_TOKENS, measure_choices, measure_generated
    from ridgeline.spec.request import SamplingParams

    tokenizer = llm.frontend.tokenizer()
    if not one.task.is_generated:
        return measure_choices(
            one.name, one.task, llm.loaded, tokenizer, one.questions, one.examples, shots, on_pairs=on_answers
        )
    greedy = {"max_tokens": MAX_ANSWER_TOKENS, "temperature": 0, "stop": list(END)}
    params = SamplingParams(**{**llm.default_sampling_fields(), **greedy})
    room = llm.max_model_len - MAX_ANSWER_TOKENS
    if room < 1:
        raise RequestError(
            f"{one.name} generates {MAX_ANSWER_TOKENS} tokens, and the context is {llm.max_model_len}; use a larger "
            "--max-model-len"
        )

    def generate(prompts: Sequence[Sequence[int]]) -> list[str]:
        outputs = llm.generate([list(ids) for ids in prompts], params, on_done=lambda index, output: on_answers(1))
        return [output.outputs[0].text for output in outputs]

    return measure_generated(one.name, one.task, tokenizer, generate, room, one.questions, one.examples, shots)


def tasks_table(found: Sequence[Sequence[Score]]) -> Table:
    """Return the shares of right answers of a model, and of its original if it is given."""
    from ridgeline.cli.show.tables import Column, Table

    models = ("model", "original")[: len(found)]
    columns = [Column("questions", right=True), *(Column(c, right=True) for name in models for c in (name, "±"))]
    table = Table("", [Column("", right=False), *columns])
    for scores in zip(*found, strict=True):
        name, count = scores[0].task, f"{scores[0].num_questions:,}"
        table.add_row(f"{name}, accuracy", count, *(cell for s in scores for cell in _cells(s.accuracy)))
        for label, figures in (
            ("by length", [s.normalized for s in scores]),
            ("last number", [s.last_number for s in scores]),
        ):
            if figures[0] is not None:
                table.add_row(f"{name}, {label}", count, *(cell for figure in figures for cell in _cells(figure)))
    return table


def _cells(estimate: Estimate | None) -> tuple[str, str]:
    assert estimate is not None  # both models have the same figures
    error = estimate.standard_error
    return f"{estimate.value:.4f}", "-" if error is None else f"{error:.4f}"
