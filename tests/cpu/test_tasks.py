"""Compare `evaluate --tasks` and the model class for lm-eval with lm-eval's own tasks and its model hf."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.cli.evaluate import evaluate
from ridgeline.errors import RequestError
from ridgeline.evals import Pair, encode_pair, find_task, read_questions, score
from ridgeline.evals.tasks import prompts
from ridgeline.llm import LLM
from ridgeline.load.hub import BUILT_IN

DATA = Path(__file__).parents[3] / "shared/data/models"
ROWS: dict[str, list[dict[str, Any]]] = {
    "hellaswag": [
        {
            "activity_label": "Cooking", "ctx_b": "then she",
            "ctx_a": "[header] How to boil  an egg [title] Fill a pot.",
            "endings": ["eats the [substeps] pot.", "puts the egg in.", "is red", "runs  far away"], "label": "1",
        },
        {
            "activity_label": "Play", "ctx_a": "A girl has a ball.", "ctx_b": "",
            "endings": ["She plays with it.", "No.", "The ball is a king of stone", "It."], "label": "0",
        },
    ],
    "arc_easy": [
        {
            "question": "Which one is hot?", "answerKey": "B",
            "choices": {"text": ["ice", "the sun", "a fish"], "label": ["A", "B", "C"]},
        },
        {
            "question": "Which one can fly?", "answerKey": "1",
            "choices": {"text": ["a bird", "a stone"], "label": ["1", "2"]},
        },
    ],
    "piqa": [
        {"goal": "To warm up,", "sol1": "sit by the fire.", "sol2": "sit in the snow.", "label": 0},
        {"goal": "Eat soup", "sol1": "with a fork", "sol2": "with a big spoon", "label": 1},
    ],
    "winogrande": [
        {"sentence": "Tom gave Sam a ball because _ was kind.", "option1": "Tom", "option2": "Sam", "answer": "1"},
        {"sentence": "The box was not in the bag; the _ was small.", "option1": "box", "option2": "bag", "answer": "2"},
    ],
    "mmlu_anatomy": [
        {"question": " Where is the heart? ", "choices": ["foot", "chest", "hand", "knee"], "answer": 1,
         "subject": "anatomy"},
        {"question": "How many hands?", "choices": ["1", "2", "3", "4"], "answer": 1, "subject": "anatomy"},
    ],
    "gsm8k": [
        {"question": "Tim has 2 cats and gets 3 more. How many?", "answer": "2 + 3 = 5\n#### 5"},
        {"question": "A car costs $1,000 and a hat $5. Both?", "answer": "It is 1000 + 5.\n#### 1,005"},
    ],
}  # fmt: skip
FILES = {
    "hellaswag": "hellaswag/hellaswag", "arc_easy": "arc/arc_easy", "piqa": "piqa/piqa",
    "winogrande": "winogrande/default", "mmlu_anatomy": "mmlu/default/mmlu_anatomy", "gsm8k": "gsm8k/gsm8k",
}  # fmt: skip


def ours(name: str) -> str:
    return name.split("_anatomy")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the questions of each task, and one solved example."""
    for name, rows in ROWS.items():
        for suffix, some in (("", rows), (".shots", rows[1:])):
            lines = "".join(json.dumps(row) + "\n" for row in some)
            (tmp_path / f"{ours(name)}{suffix}.jsonl").write_text(lines)
    return tmp_path


def lm_eval_tasks(folder: Path, shots: int) -> list[dict[str, Any]]:
    """Return the configs of lm-eval's tasks, with rows of this file in place of the hub's."""
    import lm_eval
    from lm_eval.tasks._yaml_loader import load_yaml

    found = []
    for name, file in FILES.items():
        config = load_yaml(Path(lm_eval.__file__).parent / f"tasks/{file}.yaml")
        split, few = config.get("test_split") or config["validation_split"], config.get("fewshot_split") or "train"
        files = {split: str(folder / f"{ours(name)}.jsonl"), few: str(folder / f"{ours(name)}.shots.jsonl")}
        found.append({
            **{key: value for key, value in config.items() if key not in ("dataset_name", "group", "tag")},
            "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": split,
            "training_split": None, "validation_split": None, "fewshot_split": few,
            "fewshot_config": {"sampler": "first_n"}, "num_fewshot": shots,
        })  # fmt: skip
    return found


@pytest.fixture
def run_lm_eval(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    lm_eval = pytest.importorskip("lm_eval")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(folder / "home"))

    def run(model: Any, shots: int, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        return lm_eval.simple_evaluate(  # type: ignore[no-any-return]
            model=model, model_args=arguments, tasks=lm_eval_tasks(folder, shots), log_samples=True, bootstrap_iters=0
        )

    return run


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # lm-eval and its imports warn
@pytest.mark.parametrize(("model", "shots"), [(BUILT_IN["pocket"], 0), (DATA / "stories260K", 1)])
def test_tasks_equal_those_of_lm_eval(
    model: Path,
    shots: int,
    folder: Path,
    run_lm_eval: Callable[..., dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run lm-eval's tasks with hf, with our model class, and `evaluate --tasks`: prompts, likelihoods, accuracies."""
    pytest.importorskip("lm_eval")
    import ridgeline.harness  # noqa: F401

    if not model.is_dir():
        pytest.skip(f"needs {model}")
    name = str(model)
    theirs = run_lm_eval("hf", shots, {"pretrained": name, "dtype": "float32", "device": "cpu"})
    mine = run_lm_eval("ridgeline", shots, {"pretrained": name})
    evaluate(
        name, tasks=",".join(map(ours, ROWS)), task_data=folder, shots=shots, json_output=True, kv_cache_dtype="float32"
    )
    report = {one["task"]: one for one in json.loads(capsys.readouterr().out)["tasks"]}
    for name in ROWS:
        hf, own = (sorted(found["samples"][name], key=lambda s: (s["doc_id"], s["filter"])) for found in (theirs, mine))
        task = find_task(ours(name))
        questions = read_questions(folder / f"{ours(name)}.jsonl", task)
        examples = read_questions(folder / f"{ours(name)}.shots.jsonl", task)
        for one, other in zip(hf, own, strict=True):
            texts = prompts(task, questions[one["doc_id"]], examples, shots)
            assert [args[0] for args in one["arguments"]] == texts[: len(one["arguments"])]
            if task.is_generated:
                assert one["resps"][0][0].strip() == other["resps"][0][0].strip()
                continue
            for (a, greedy), (b, also) in zip(one["filtered_resps"], other["filtered_resps"], strict=True):
                assert float(b) == pytest.approx(float(a), abs=1e-4)
                assert str(greedy) == str(also)
        result, mean = theirs["results"][name], report[ours(name)]
        if task.is_generated:
            assert mean["accuracy"] == result["exact_match,strict-match"]
            assert mean["accuracy_last_number"] == result["exact_match,flexible-extract"]
        else:
            assert mean["accuracy"] == result["acc,none"]
            assert mean["accuracy_normalized"] == result.get("acc_norm,none")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # lm-eval and its imports warn
@pytest.mark.parametrize("max_length", [None, 64])
def test_likelihoods_of_whole_texts_equal_those_of_hf(max_length: int | None) -> None:
    """Texts of one window and of several, and an empty one: the sums that lm-eval makes perplexities from."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    from ridgeline.harness import RidgelineLM

    source = Path(__file__).read_text(encoding="utf-8")
    texts = ["", "def", source[:200], source[:3000]]
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    for model in (BUILT_IN["pocket"], DATA / "stories260K"):
        if not model.is_dir():
            continue
        hf = huggingface.HFLM(str(model), dtype="float32", device="cpu", max_length=max_length)
        theirs = hf.loglikelihood_rolling(requests, disable_tqdm=True)
        mine = RidgelineLM(str(model), max_length=max_length).loglikelihood_rolling(requests)
        assert mine == pytest.approx(theirs, abs=1e-4, rel=1e-6)
        assert theirs[-1] < theirs[1] < 0


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("pocket", cache="off", max_model_len=64)


def test_a_likelihood_is_the_sum_of_log_probabilities(llm: LLM) -> None:
    """Compare with the definition in float64. A context beyond the model's is cut at its left, an empty pair is 0."""
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (3, 63), (63, 1), (100, 7), (5, 0), (1, 64), (257, 64)]
    ids = [rng.integers(5, llm.loaded.spec.vocab_size, a + b).tolist() for a, b in sizes]
    pairs = [Pair(some[:a], some[a:]) for some, (a, _) in zip(ids, sizes, strict=True)]
    counted: list[int] = []
    found = score(llm.loaded, pairs, batch_tokens=100, on_pairs=counted.append)
    assert sum(counted) == len(pairs)
    for some, (_, b), one in zip(ids, sizes, found, strict=True):
        kept = some[-65:]
        logits = llm.logits([kept[:-1]])[0].astype(np.float64)[len(kept) - b - 1 :] if b else np.zeros((0, 1))
        logprobs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
        assert one.logprob == pytest.approx(logprobs[np.arange(b), kept[len(kept) - b :]].sum(), abs=1e-4)
        assert one.is_greedy == (logprobs.argmax(1) == kept[len(kept) - b :]).all()
    with pytest.raises(RequestError, match="65 tokens, and the model's context is 64"):
        score(llm.loaded, [Pair([5], [5] * 65)])


def test_spaces_at_the_end_of_a_context_belong_to_the_continuation(llm: LLM) -> None:
    tokenizer = llm.frontend.tokenizer()
    pair = encode_pair(tokenizer, "import os  ", "\nx", 0)
    assert [*pair.context, *pair.continuation] == tokenizer.encode("import os  \nx")
    assert list(pair.context) == tokenizer.encode("import os")
    assert encode_pair(tokenizer, "", "import", 0).context == [0]


def test_rows_that_are_none_are_refused(folder: Path) -> None:
    task, file = find_task("arc_easy"), folder / "arc_easy.jsonl"
    for text, reason in (
        ("\n", "has no question"),
        ("{}\n", "arc_easy.jsonl:1 is not a row of this task: it has no 'choices'"),
        ("[1]\n", "is not a row"),
        ("[" * 100_000, "is not a row"),
        ("x" * (1 << 20) + "x\n", "has more than 1048576 characters"),
        ('{"question": "a", "answerKey": "C", "choices": {"text": ["a"], "label": ["A"]}}', "is not in list"),
    ):
        file.write_text(text)
        with pytest.raises(RequestError, match=reason):
            read_questions(file, task)
    with pytest.raises(RequestError, match="cannot be read"):
        read_questions(folder / "none.jsonl", task)
    with pytest.raises(RequestError, match="no task 'x'; the tasks are hellaswag"):
        evaluate("pocket", tasks="x", task_data=folder)
    with pytest.raises(RequestError, match="--tasks needs --task-data"):
        evaluate("pocket", tasks="piqa")


def test_a_table_has_each_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate("pocket", tasks="piqa, gsm8k", task_data=folder, against="pocket", limit=1)
    table = capsys.readouterr().out
    assert [line.split("  ")[0] for line in table.splitlines()[1:5]] == [
        "piqa, accuracy", "piqa, by length", "gsm8k, accuracy", "gsm8k, last number",
    ]  # fmt: skip
