"""`ridgeline generate`: continue prompts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.groups import EngineFlags, LoadFlags, grouped, llm_arguments
from ridgeline.cli.flags.sampling import SamplingFlags, params_of
from ridgeline.cli.signals import Interrupted

if TYPE_CHECKING:
    from pathlib import Path

    from ridgeline.cli.flags.prompts import Row
    from ridgeline.cli.show.progress import PrefillBar
    from ridgeline.cli.show.results import Results
    from ridgeline.llm import LLM
    from ridgeline.runtime.generator import GenerationRequest
    from ridgeline.spec.request import Params, RequestOutput

DEFAULT_MAX_TOKENS = 128
SAMPLING = SamplingFlags(defaults={"max_tokens": f"{DEFAULT_MAX_TOKENS}, or what the context has left"})


@grouped
def generate(
    *,
    model: o.Model = o.DEFAULT_MODEL,
    prompt: Annotated[
        str | None, typer.Argument(help="A text, a .txt file (a prompt per line), a .jsonl file, or - for stdin.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            help="Write one JSON line per prompt to this file. Run the command again to continue it. Default: stdout.",
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    verbose: o.Verbose = False,
    tokenizer: o.TokenizerName = None,
    skip_tokenizer_init: o.SkipTokenizer = False,
    cache: o.CacheMode = o.Cache.on,
    batching: o.BatchingMode = o.Batching.continuous,
    seed: o.Seed = 0,
    lora: o.Lora = None,
    load: LoadFlags,
    engine: EngineFlags,
    sampling: Annotated[Mapping[str, Any], SAMPLING],
) -> None:
    """Continue one prompt, or every prompt of a file.

    Sampling options that are not given come from the model's generation_config.json.
    """
    from ridgeline.cli.flags.loading import find
    from ridgeline.cli.flags.prompts import read_prompts

    prompts = read_prompts(prompt)
    options = llm_arguments(
        load, engine, tokenizer=tokenizer, skip_tokenizer_init=skip_tokenizer_init, cache=cache, batching=batching,
        seed=seed, **o.adapter_of(lora),
    )  # fmt: skip
    folder, patterns = find(model, load.revision, load.load_format)
    params = _params(prompts.rows, folder, *params_of(sampling))
    run = _Run(model, options, prompts.rows, params, verbose)
    if output is not None:
        _to_file(run, output, folder, patterns)
    elif prompts.many or json_output or sampling.get("n", 1) > 1:
        _to_stdout(run, json_output, prompts.many)
    else:
        _stream(run)


def _params(rows: Sequence[Row], folder: Path, kind: type[Params], given: Mapping[str, Any]) -> list[Params]:
    """Return how to answer each row: the model's defaults, the command's fields, the row's own; later ones win.

    Raises RequestError, with the row's file and line, before the model is loaded.
    """
    from ridgeline.errors import RequestError
    from ridgeline.load.checkpoint import open_checkpoint
    from ridgeline.spec.request import SamplingParams

    params, known = [], {f.name for f in fields(kind)}
    common = {"max_tokens": None, **given}
    kind(**common)
    if kind is SamplingParams:
        common = {**open_checkpoint(folder).sampling_defaults, **common}
    for row in rows:
        try:
            if other := sorted(set(row.sampling_params) - known):
                raise RequestError(f"{other[0]} is no parameter of {kind.__name__}")
            params.append(kind(**{**common, **row.sampling_params}))
        except RequestError as e:
            raise RequestError(row.say(e)) from None
    return params


@dataclass(slots=True)
class _Run:
    """The prompts of a command, how to answer them, and the model.

    base_bytes: memory of the process before the model is loaded; known only if verbose.
    """

    model: str
    options: dict[str, Any]
    rows: Sequence[Row]
    params: Sequence[Params]
    verbose: bool
    base_bytes: int | None = None

    def start(self, indices: Sequence[int], *, quiet: bool) -> tuple[LLM, list[GenerationRequest]]:
        """Load the model, and make the requests of some of the rows.

        quiet: print nothing about the engine's settings, unless verbose. Raises RequestError, with the row's file and
        line, if a prompt cannot be served.
        """
        from ridgeline.cli.flags.loading import load
        from ridgeline.cli.show.report import say, say_engine
        from ridgeline.diffusion import edit_notes

        if self.verbose:
            import ridgeline.llm  # noqa: F401  # imported modules do not count as memory of the model
            from ridgeline.system import resident_bytes

            self.base_bytes = resident_bytes()
        llm = load(self.model, self.options)
        requests = [self._request(llm, index) for index in indices]
        remarks = (note for request in requests for note in edit_notes(request.params, llm.loaded.spec))
        say(*(f"note: {note}" for note in dict.fromkeys(remarks)))
        if self.verbose or not quiet:
            say_engine(llm, self.verbose)
        return llm, requests

    def report(self, llm: LLM, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """Print tokens, speed and pages; if verbose, beside what was predicted."""
        from ridgeline.cli.show.beside import say_beside
        from ridgeline.cli.show.report import say, summary

        say(*summary(llm, outputs, seconds))
        if self.verbose:
            say_beside(llm, outputs, seconds, self.base_bytes)

    def _request(self, llm: LLM, index: int) -> GenerationRequest:
        """Return the request of a row. Its noise derives from `index`, its position in the input."""
        from ridgeline.errors import RequestError, TokenizerError

        row = self.rows[index]
        try:
            request = llm.frontend.request(row.prompt, self.params[index], index, row.priority)
        except (RequestError, TokenizerError) as e:
            raise type(e)(row.say(e)) from None
        params = _with_length(llm, len(request.prompt_token_ids), request.params)
        name = llm.adapters[0].name if llm.adapters else ""
        return replace(request, params=params, cache_salt=row.cache_salt, lora=name)


def _with_length(llm: LLM, num_prompt: int, params: Params) -> Params:
    """Return params with the default length of an answer: 128 tokens, or what the context has left."""
    from ridgeline.spec.request import SamplingParams

    if params.max_tokens is not None:
        return params
    least = params.min_tokens if isinstance(params, SamplingParams) else 0
    wanted = max(DEFAULT_MAX_TOKENS, least)
    return replace(params, max_tokens=max(1, least, min(wanted, llm.max_model_len - num_prompt)))


def _to_file(run: _Run, path: str, folder: Path, patterns: Sequence[str]) -> None:
    """Answer the prompts that the file has no answer to yet. Exits with status 1 if any prompt failed."""
    from ridgeline.cli.show.report import say
    from ridgeline.cli.show.results import Results

    total = len(run.rows)
    names = [row.where or "the prompt" for row in run.rows]
    with Results(path, _fingerprints(run, folder, patterns), names) as results:
        missing = [index for index in range(total) if index not in results.done]
        if len(missing) < total:
            say(f"{path}: {total - len(missing):,} of {total:,} prompts are complete")
        if not missing:
            return
        try:
            outputs = _answer_into(results, run, missing)
        except KeyboardInterrupt:
            raise Interrupted(
                f"{len(results.done):,} of {total:,} prompts are complete; run the same command to continue"
            ) from None
    failures = [(names[index], reason) for index, out in zip(missing, outputs, strict=True) if (reason := _error(out))]
    if failures:
        first, reason = failures[0]
        say(f"{len(failures):,} of {total:,} prompts failed; run the same command to try them again. {first}: {reason}")
        raise typer.Exit(1)


def _answer_into(results: Results, run: _Run, indices: Sequence[int]) -> list[RequestOutput]:
    """Answer some of the prompts, and write each result as soon as it is complete."""
    from ridgeline.cli.show.progress import prompts_bar

    llm, requests = run.start(indices, quiet=False)
    with prompts_bar(len(run.rows), len(run.rows) - len(indices)) as done:

        def finished(index: int, output: RequestOutput) -> None:
            results.add(indices[index], output)
            done(sum(len(choice.token_ids) for choice in output.outputs))

        start = time.perf_counter()
        outputs = llm.answer(requests, on_done=finished, on_step=done.step)
        seconds = time.perf_counter() - start
    run.report(llm, outputs, seconds)
    return outputs


def _fingerprints(run: _Run, folder: Path, patterns: Sequence[str]) -> list[str]:
    """Return for each prompt a hash of the model, the parameters and the prompt: an output file has to match them."""
    from ridgeline.cli.show.results import prompt_fingerprint
    from ridgeline.load.fingerprint import model_fingerprint
    from ridgeline.load.hub import SMALL_FILES, find_model
    from ridgeline.settings import storage_name

    options, seed = run.options, run.options["seed"]
    relevant = {
        name: options[name] for name in ("dtype", "weights", "max_model_len", "load_format", "skip_tokenizer_init")
    }
    relevant["kv_cache_dtype"] = storage_name(options["kv_cache_dtype"])
    relevant |= {name: options[name] for name in ("activations", "attention") if options[name] not in (None, "exact")}
    if options["load_format"] == "dummy":
        relevant["seed"] = seed
    if options["tokenizer"]:
        relevant["tokenizer"] = model_fingerprint(find_model(options["tokenizer"], files=SMALL_FILES), SMALL_FILES)
    model = model_fingerprint(folder, patterns, **relevant)
    pairs = zip(run.rows, run.params, strict=True)
    return [f"{model}-{prompt_fingerprint(row.prompt, params, seed)}" for row, params in pairs]


def _to_stdout(run: _Run, as_json: bool, compact: bool) -> None:
    """Print every answer. compact: one line of JSON each. At the end, raises RequestError if an answer failed."""
    from ridgeline.cli.show.progress import prompts_bar

    quiet = as_json or not compact  # a program, or the user of a single prompt, wants only the answers
    llm, requests = run.start(range(len(run.rows)), quiet=quiet)
    show = _InOrder(run.rows, as_json, compact, llm.tokenizer is None)
    prefill = _prefill_bar(llm, requests) if sys.stdout.isatty() else None  # otherwise the bar of prompts is shown
    with prompts_bar(len(run.rows), hidden=sys.stdout.isatty()) as done:

        def finished(index: int, output: RequestOutput) -> None:
            if prefill is not None:
                prefill.close()
            show.add(index, output)
            done(sum(len(choice.token_ids) for choice in output.outputs))

        start = time.perf_counter()
        try:
            outputs = llm.answer(requests, on_done=finished, on_step=prefill.step if prefill else done.step)
        except KeyboardInterrupt:
            raise Interrupted(f"{show.num_shown:,} of {len(run.rows):,} prompts are complete") from None
        seconds = time.perf_counter() - start
    if not quiet or run.verbose:
        run.report(llm, outputs, seconds)
    _check(outputs)


class _InOrder:
    """Prints results in the order of the prompts, each as soon as it and all results before it are complete."""

    def __init__(self, rows: Sequence[Row], as_json: bool, compact: bool, as_ids: bool) -> None:
        self._rows, self._as_json, self._compact, self._as_ids = rows, as_json, compact, as_ids
        self._held: dict[int, RequestOutput] = {}
        self.num_shown = 0

    def add(self, index: int, output: RequestOutput) -> None:
        """Take a result, and print what is ready."""
        self._held[index] = output
        while self.num_shown in self._held:
            ready = self._held.pop(self.num_shown)
            if self._as_json:
                _print_json(ready, self._compact)
            else:
                _print_text(self._rows[self.num_shown].prompt, ready, self._as_ids)
            sys.stdout.flush()
            self.num_shown += 1


def _check(outputs: Sequence[RequestOutput]) -> None:
    """Raise RequestError if an answer failed; the other answers have been printed."""
    from ridgeline.errors import RequestError

    for i, output in enumerate(outputs, 1):
        if reason := _error(output):
            raise RequestError(f"prompt {i}, {reason}")


def _error(output: RequestOutput) -> str | None:
    """Return why a prompt's first failed answer failed, or None."""
    failed = [choice for choice in output.outputs if choice.error]
    return f"after {len(failed[0].token_ids)} tokens: {failed[0].error}" if failed else None


def _stream(run: _Run) -> None:
    """Print text as it is generated, and figures to stderr."""
    from ridgeline.cli.show.report import say

    llm, requests = run.start([0], quiet=True)
    prompt = run.rows[0].prompt
    bar, to_echo = _prefill_bar(llm, requests), [prompt] if sys.stdout.isatty() and isinstance(prompt, str) else []

    def echo() -> None:
        bar.close()
        if to_echo:
            sys.stdout.write(f"\033[2m{to_echo.pop()}\033[0m")

    def show(request: int, choice: int, text: str) -> None:
        echo()
        sys.stdout.write(text)
        sys.stdout.flush()

    if not bar.is_shown:
        echo()
    try:
        (output,) = llm.answer(requests, on_text=show, on_step=bar.step)
        echo()
        if llm.tokenizer is None:
            sys.stdout.write(" ".join(map(str, output.outputs[0].token_ids)))
    finally:
        bar.close()
        sys.stdout.write("\n")
    if run.verbose:
        run.report(llm, [output], output.timing.total_s)
    t = output.timing
    pace = f", then {t.tpot_s * 1e3:.1f} ms per token" if t.tpot_s is not None else ""
    say(
        f"{len(output.prompt_token_ids)} prompt tokens, {len(output.outputs[0].token_ids)} new; "
        f"first after {t.ttft_s * 1e3:.0f} ms{pace}; {t.tokens_per_s:.1f} tokens/s"
    )
    _check([output])


def _prefill_bar(llm: LLM, requests: Sequence[GenerationRequest]) -> PrefillBar:
    """Return a progress bar over the prompt tokens of the requests."""
    from ridgeline.cli.show.progress import PrefillBar

    tokens = sum(len(request.prompt_token_ids) for request in requests)
    return PrefillBar(tokens, llm.config.max_num_batched_tokens if llm.config else None)


def _print_json(output: RequestOutput, compact: bool) -> None:
    print(json.dumps(output.to_json(), ensure_ascii=False, allow_nan=False, indent=None if compact else 2))


def _print_text(prompt: Any, output: RequestOutput, as_ids: bool) -> None:
    print(f">>> {prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)}")
    for choice in output.outputs:
        label = f"[{choice.index}] " if len(output.outputs) > 1 else ""
        print(f"{label}{' '.join(map(str, choice.token_ids)) if as_ids else choice.text}\n")
