"""`ridgeline evaluate`: measure losses of texts, divergence, associative recall, and answers to questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.option import option

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Table
    from ridgeline.evals import Divergence, Document, Estimate, Perplexity
    from ridgeline.llm import LLM

SHOWN = 3  # number of skipped files that the note names


_Model = Annotated[str, typer.Argument(help="A folder or a Hugging Face hub id.")]
_Text = Annotated[
    list[str] | None,
    option(
        "--text",
        help="A text file, a .jsonl file with a text per row, or a folder. May be given several times. Default: none; "
        "required without --recall and --tasks.",
    ),
]
_Against = Annotated[
    str | None,
    option(
        "--against",
        help="The original model: also report the divergence from it and the top-1 agreement. Default: none.",
    ),
]
_Context = Annotated[
    int | None,
    option("--context", help="Tokens of a window. Default: the model's longest context, at most 2048."),
]
_Recall = Annotated[
    bool,
    option(
        "--recall",
        help="Also measure associative recall: pairs of random tokens are read, and then the second one of each must "
        "be found again. Use it after a change of attention, which perplexity may hide. Needs no text.",
    ),
]
_Stride = Annotated[
    int | None,
    option("--stride", help="Tokens from one window's start to the next. Default: half of --context."),
]
_LimitTokens = Annotated[int | None, option("--limit-tokens", min=2, help="Use only the first N tokens. Default: all.")]
_Tasks = Annotated[
    str | None,
    option(
        "--tasks",
        help="Benchmarks to answer, separated by commas: hellaswag, arc_easy, arc_challenge, piqa, winogrande, mmlu, "
        "gsm8k. Default: none. Needs --task-data.",
    ),
]
_TaskData = Annotated[
    Path | None,
    option(
        "--task-data",
        help="The folder with TASK.jsonl for each of --tasks, and with TASK.shots.jsonl for --shots. Rows have the "
        "fields of the data sets on the hub. Default: none; required with --tasks.",
    ),
]
_Shots = Annotated[
    int, option("--shots", min=0, max=64, help="Solved examples before each question of --tasks. Default: 0.")
]
_Limit = Annotated[
    int | None, option("--limit", min=1, help="Use only the first N questions of each of --tasks. Default: all.")
]
_Speculative = Annotated[
    str | None,
    option(
        "--speculative",
        help="Has no effect, and a note says so: evaluate scores given texts and generates none. Default: off.",
    ),
]
_JsonOutput = Annotated[bool, option("--json", help="Print one JSON object.")]


def evaluate(
    model: _Model,
    text: _Text = None,
    against: _Against = None,
    recall: _Recall = False,
    tasks: _Tasks = None,
    task_data: _TaskData = None,
    shots: _Shots = 0,
    limit: _Limit = None,
    context: _Context = None,
    stride: _Stride = None,
    limit_tokens: _LimitTokens = None,
    json_output: _JsonOutput = False,
    tokenizer: o.TokenizerName = None, device: o.Device = "auto", dtype: o.DType = "auto",
    weights: o.WeightFormat = "auto", activations: o.Activations = None,
    kv_cache_dtype: o.KVCacheDType = "auto", attention: o.Attention = "exact", max_model_len: o.MaxModelLen = None,
    load_format: o.LoadFormat = "auto", revision: o.Revision = None, ops: o.Ops = None,
    speculative: _Speculative = None,
) -> None:  # fmt: skip
    """Measure perplexity and bits per byte of texts, associative recall, and answers to questions of benchmarks. With
    --against, compare the model with its original.
    """
    from ridgeline.cli.evaluate_tasks import is_generated, measure, read_tasks
    from ridgeline.cli.show.report import say
    from ridgeline.errors import RequestError

    if not text and not recall and not tasks:
        raise RequestError("there is nothing to measure: give --text, --recall or --tasks")
    questions = read_tasks(tasks, task_data, shots, limit)

    if speculative not in (None, "off"):
        say(f"note: --speculative {speculative} has no effect: evaluate scores given texts and generates none")
    # Answers are generated in batches, which only the engine makes; texts are scored without its memory.
    common = {
        "cache": "on" if is_generated(questions) else "off",
        "device": device,
        "max_model_len": max_model_len,
        "ops": o.parse_ops(ops),
    }
    given = {
        "tokenizer": tokenizer,
        "dtype": dtype,
        "weights": weights,
        "activations": activations,
        "kv_cache_dtype": kv_cache_dtype,
        "attention": attention,
        "load_format": load_format,
        "revision": revision,
    }
    llm, original = _load(model, against, common, given)
    report: dict[str, Any] = {"model": model} | ({"against": against} if against else {})
    if text:
        windows = {"context": context, "stride": stride}
        report |= _texts(model, llm, original, text, limit_tokens, windows, is_shown=not json_output)
    if recall:
        report |= _recall(llm, original, is_shown=not json_output)
    if questions:
        report |= measure(questions, [llm, *([original] if original else [])], shots, is_shown=not json_output)
    if json_output:
        print(json.dumps(report, indent=2, allow_nan=False))


def _load(
    model: str, against: str | None, common: dict[str, Any], given: dict[str, Any]
) -> tuple[LLM, LLM | None]:  # fmt: skip
    """Return the model and the original. Raises TokenizerError if the model has no tokenizer."""
    from ridgeline.cli.flags.loading import load
    from ridgeline.errors import TokenizerError

    llm = load(model, common | given)
    if llm.tokenizer is None:
        raise TokenizerError(f"{model} has no tokenizer, and evaluate needs one; name one with --tokenizer")
    return llm, load(against, common | {"kv_cache_dtype": "float32"}) if against is not None else None


def _texts(
    model: str, llm: LLM, original: LLM | None, text: list[str], limit_tokens: int | None, windows: dict[str, Any],
    *, is_shown: bool,
) -> dict[str, Any]:  # fmt: skip
    """Measure texts, and return the report's part about them."""
    from ridgeline.cli.show.progress import count_bar
    from ridgeline.cli.show.report import say
    from ridgeline.evals import measure_divergence, measure_perplexity, read_texts

    skipped: list[str] = []
    texts = list(read_texts(text, skipped.append))
    if skipped:
        more = f" and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
        say(f"note: skipped: {'; '.join(skipped[:SHOWN])}{more}")
    documents = _documents(llm, original, texts, limit_tokens)
    divergence = None
    with count_bar("tokens", sum(d.num_scored for d in documents)) as on_tokens:
        if original is None:
            perplexity = measure_perplexity(llm.loaded, documents, on_tokens=on_tokens, **windows)
        else:
            divergence = measure_divergence(original.loaded, llm.loaded, documents, on_tokens=on_tokens, **windows)
            perplexity = divergence.other
    if is_shown:
        _print(model, perplexity, divergence)
    report: dict[str, Any] = {"text": text, "skipped": skipped, **perplexity.to_json()}
    return report | ({"original": divergence.original.to_json(), **divergence.to_json()} if divergence else {})


def _recall(llm: LLM, original: LLM | None, *, is_shown: bool) -> dict[str, Any]:
    """Measure the recall of one or both models with equal sequences, and return the report's part about it."""
    from ridgeline.cli.show.progress import count_bar
    from ridgeline.cli.show.recall import recall_table
    from ridgeline.cli.show.tables import screen, show
    from ridgeline.evals import measure_recall, num_recall_tokens, recall_tokens

    assert llm.tokenizer is not None  # _load has checked it
    tokens = recall_tokens(llm.tokenizer, llm.loaded.spec.vocab_size)
    prefix = llm.tokenizer.encode("")
    models = [llm.loaded] + ([original.loaded] if original else [])
    with count_bar("tokens", sum(num_recall_tokens(one.max_model_len, len(prefix)) for one in models)) as on_tokens:
        found = [measure_recall(one, tokens, prefix, on_tokens=on_tokens) for one in models]
    if is_shown:
        show(screen(), *recall_table(found))
    report: dict[str, Any] = {"recall": found[0].to_json()}
    return report | ({"original_recall": found[1].to_json()} if original else {})


def _documents(llm: LLM, original: LLM | None, texts: Sequence[Any], limit_tokens: int | None) -> list[Document]:
    """Return the tokenized texts."""
    from ridgeline.evals import check_same_tokens, encode_texts

    assert llm.tokenizer is not None  # _load has checked it
    documents = encode_texts(texts, llm.tokenizer, limit_tokens)
    if original is not None and original.tokenizer is not None:
        check_same_tokens(documents, llm.tokenizer, original.tokenizer)
    return documents


# ---- tables --------------------------------------------------------------------------------------------------------


def _print(model: str, perplexity: Perplexity, divergence: Divergence | None) -> None:
    from ridgeline.cli.show.tables import screen, show

    p = perplexity
    both = " by both models" if divergence else ""
    show(
        screen(),
        f"{model}: {p.num_tokens:,} tokens, {p.num_bytes:,} bytes, {p.num_documents:,} "
        f"document{'' if p.num_documents == 1 else 's'}; windows of {p.context:,} tokens, {p.stride:,} apart",
        _losses_table(p, divergence),
        *((_divergence_table(divergence),) if divergence else ()),
        f"{p.tokens_per_s:,.0f} tokens/s scored{both}; {p.num_computed_tokens:,} computed in {p.seconds:.1f} s. "
        "± is one standard error.",
    )


def _losses_table(perplexity: Perplexity, divergence: Divergence | None) -> Table:
    table = _table("", "model", "±", *(("original", "±") if divergence else ()))
    models = (perplexity, divergence.original) if divergence else (perplexity,)
    for name, estimates, digits in (
        ("nll per token (nats)", [m.nll_per_token for m in models], 4),
        ("perplexity", [m.perplexity for m in models], 3),
        ("bits per byte", [m.bits_per_byte for m in models], 4),
    ):
        table.add_row(name, *(cell for estimate in estimates for cell in _cells(estimate, digits)))
    return table


def _divergence_table(d: Divergence) -> Table:
    table = _table("", "value", "±", "")
    table.add_row("KL(original || model) (nats)", *_small(d.kl), f"median {d.kl_median:.3g}, p99 {d.kl_p99:.3g}")
    agreement = d.top1_agreement
    interval = f"95 %: {agreement.low:.2%} to {agreement.high:.2%}"
    table.add_row("top-1 agreement", f"{agreement.value:.2%}", "", interval)
    table.add_row("nll, model - original (nats)", *_small(d.nll_difference), "")
    return table


def _table(*names: str) -> Table:
    """Return an empty table of estimates. A column without a name, except for the first, holds remarks."""
    from ridgeline.cli.show.tables import Column, Table

    return Table("", [Column(name, right=bool(i and name)) for i, name in enumerate(names)])


def _cells(estimate: Estimate | None, digits: int) -> tuple[str, str]:
    if estimate is None:
        return "-", ""
    error = estimate.standard_error
    return f"{estimate.value:,.{digits}f}", "-" if error is None else f"{error:,.{digits}f}"


def _small(estimate: Estimate) -> tuple[str, str]:
    """Format an estimate that may be very small."""
    error = estimate.standard_error
    return f"{estimate.value:.4g}", "-" if error is None else f"{error:.2g}"
