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
from ridgeline.cli.signals import Interrupted

if TYPE_CHECKING:
    from pathlib import Path

    from ridgeline.cli.flags.prompts import Row
    from ridgeline.cli.show.progress import PrefillBar
    from ridgeline.cli.show.results import Results
    from ridgeline.llm import LLM
    from ridgeline.runtime.request import Prompt
    from ridgeline.spec.request import Params, RequestOutput

DEFAULT_MAX_TOKENS = 128


def generate(
    model: o.Model = o.DEFAULT_MODEL,
    prompt: Annotated[
        str | None, typer.Argument(help="A text, a .txt file (a prompt per line), a .jsonl file, or - for stdin.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="Write a JSON line per prompt; run again, it goes on.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    verbose: o.Verbose = False,
    tokenizer: o.TokenizerName = None, skip_tokenizer_init: o.SkipTokenizer = False,
    device: o.Device = "auto", dtype: o.DType = "auto", weights: o.WeightFormat = "auto",
    max_model_len: o.MaxModelLen = None, load_format: o.LoadFormat = "auto",
    revision: o.Revision = None, ops: o.Ops = None, threads: o.Threads = None,
    cache: o.CacheMode = o.Cache.on, batching: o.BatchingMode = o.Batching.continuous,
    max_num_seqs: o.MaxNumSeqs = None, max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    block_size: o.BlockSize = None, state_snapshot_tokens: o.CheckpointTokens = None,
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None, kv_cache_dtype: o.KVCacheDType = "auto",
    swap_space_bytes: o.SwapSpaceBytes = None, steps_in_flight: o.StepsInFlight = None,
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    max_tokens: o.MaxTokens = None, min_tokens: o.MinTokens = 0,
    temperature: o.Temperature = None, top_p: o.TopP = None, top_k: o.TopK = None, min_p: o.MinP = None,
    typical_p: o.TypicalP = None, repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = 0.0, frequency_penalty: o.FrequencyPenalty = 0.0,
    logit_bias: o.LogitBias = None, allowed_token_ids: o.AllowedTokenIds = None, bad_token_ids: o.BadTokenIds = None,
    bad_words: o.BadWords = None,
    n: o.N = 1, seed: o.Seed = 0, beam_width: o.BeamWidth = None, length_penalty: o.LengthPenalty = 1.0,
    early_stopping: o.EarlyStopping = "false",
    stop: o.Stop = None, include_stop_str_in_output: o.IncludeStop = False,
    stop_token_ids: o.StopTokenIds = None, ignore_eos: o.IgnoreEos = False,
    logprobs: o.Logprobs = None, prompt_logprobs: o.PromptLogprobs = None, logprobs_mode: o.LogprobsMode = "raw",
    no_skip_special_tokens: o.KeepSpecial = False,
) -> None:  # fmt: skip
    """Continue one prompt, or every prompt of a file.

    Sampling options that are not given come from the model's generation_config.json.
    """
    given = locals()  # every option, by its name
    from ridgeline.cli.flags.loading import find
    from ridgeline.cli.flags.prompts import read_prompts

    prompts, options = read_prompts(prompt), o.llm_options(given)
    folder, patterns = find(model, revision, load_format)
    params = _params(prompts.rows, folder, *o.answer_fields(given))
    run = _Run(model, options, prompts.rows, params, verbose)
    if output is not None:
        _to_file(run, output, folder, patterns)
    elif prompts.many or json_output or n > 1:
        _to_stdout(run, json_output, prompts.many)
    else:
        _stream(run)


def _params(rows: Sequence[Row], folder: Path, kind: type[Params], given: Mapping[str, Any]) -> list[Params]:
    """How to answer each row: the model's defaults, the command's fields, the row's own; later ones win.

    Raises RequestError, with the row's place, before the model is loaded.
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
    """What to answer, and with what."""

    model: str
    options: dict[str, Any]
    rows: Sequence[Row]
    params: Sequence[Params]
    verbose: bool
    base_bytes: int | None = None  # that the process had before the model came

    def start(self, places: Sequence[int], *, quiet: bool) -> tuple[LLM, dict[str, Any]]:
        """The model, and the arguments of its `generate` for some of the rows, all checked.

        quiet: say nothing of what the engine chose, unless verbose. Raises RequestError, with the row's place.
        """
        from ridgeline.cli.flags.loading import load
        from ridgeline.cli.show.report import say_engine

        if self.verbose:
            import ridgeline.llm  # noqa: F401  # what is imported is no part of what the model takes
            from ridgeline.system import resident_bytes

            self.base_bytes = resident_bytes()
        llm = load(self.model, self.options)
        requests = self._requests(llm, places)
        if self.verbose or not quiet:
            say_engine(llm, self.verbose)
        return llm, requests

    def say_what_came(self, llm: LLM, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """Tokens and speed, pages; if verbose, what was predicted beside it."""
        from ridgeline.cli.show.beside import say_beside
        from ridgeline.cli.show.report import say, summary

        say(*summary(llm, outputs, seconds))
        if self.verbose:
            say_beside(llm, outputs, seconds, self.base_bytes)

    def _requests(self, llm: LLM, places: Sequence[int]) -> dict[str, Any]:
        from ridgeline.errors import RequestError, TokenizerError

        prompts: list[Prompt] = []
        params = []
        for place in places:
            row = self.rows[place]
            try:
                ids = llm.encode(row.prompt)
                prompts.append({"prompt_token_ids": ids, "cache_salt": row.cache_salt})
                params.append(_fit(llm, len(ids), self.params[place]))
                llm.frontend.request(prompts[-1], params[-1], place, row.priority)
            except (RequestError, TokenizerError) as e:
                raise type(e)(row.say(e)) from None
        return {
            "prompts": prompts, "sampling_params": params, "places": places,
            "priority": [self.rows[place].priority for place in places],
        }  # fmt: skip


def _fit(llm: LLM, num_prompt: int, params: Params) -> Params:
    """The default length of an answer: 128 tokens, or what the context has left."""
    from ridgeline.spec.request import SamplingParams

    if params.max_tokens is not None:
        return params
    least = params.min_tokens if isinstance(params, SamplingParams) else 0
    wanted = max(DEFAULT_MAX_TOKENS, least)
    return replace(params, max_tokens=max(1, least, min(wanted, llm.max_model_len - num_prompt)))


def _to_file(run: _Run, path: str, folder: Path, patterns: Sequence[str]) -> None:
    """Answer what the file has no answer to yet. Exits with 1 if any prompt failed."""
    from ridgeline.cli.show.report import say
    from ridgeline.cli.show.results import Results

    total = len(run.rows)
    names = [row.where or "the prompt" for row in run.rows]
    with Results(path, _fingerprints(run, folder, patterns), names) as results:
        places = [place for place in range(total) if place not in results.done]
        if len(places) < total:
            say(f"{path}: {total - len(places):,} of {total:,} prompts are complete")
        if not places:
            return
        try:
            outputs = _answer_into(results, run, places)
        except KeyboardInterrupt:
            raise Interrupted(
                f"{len(results.done):,} of {total:,} prompts are complete; the same command goes on from there"
            ) from None
    failures = [(names[place], reason) for place, out in zip(places, outputs, strict=True) if (reason := _error(out))]
    if failures:
        first, reason = failures[0]
        say(f"{len(failures):,} of {total:,} prompts failed; the same command tries them again. {first}: {reason}")
        raise typer.Exit(1)


def _answer_into(results: Results, run: _Run, places: Sequence[int]) -> list[RequestOutput]:
    from ridgeline.cli.show.progress import prompts_bar

    llm, requests = run.start(places, quiet=False)
    with prompts_bar(len(run.rows), len(run.rows) - len(places)) as done:

        def finished(index: int, output: RequestOutput) -> None:
            results.add(places[index], output)
            done(sum(len(choice.token_ids) for choice in output.outputs))

        start = time.perf_counter()
        outputs = llm.generate(**requests, on_done=finished, on_step=done.step)
        seconds = time.perf_counter() - start
    run.say_what_came(llm, outputs, seconds)
    return outputs


def _fingerprints(run: _Run, folder: Path, patterns: Sequence[str]) -> list[str]:
    """What the lines of an output file must agree with."""
    from ridgeline.cli.show.results import prompt_fingerprint
    from ridgeline.load.fingerprint import model_fingerprint
    from ridgeline.load.hub import SMALL_FILES, find_model

    options, seed = run.options, run.options["seed"]
    bearing = {
        name: options[name] for name in ("dtype", "weights", "max_model_len", "load_format", "skip_tokenizer_init")
    }
    if options["kv_cache_dtype"] not in ("auto", "float32"):  # which are one
        bearing["kv_cache_dtype"] = options["kv_cache_dtype"]
    if options["load_format"] == "dummy":
        bearing["seed"] = seed
    if options["tokenizer"]:
        bearing["tokenizer"] = model_fingerprint(find_model(options["tokenizer"], files=SMALL_FILES), SMALL_FILES)
    model = model_fingerprint(folder, patterns, **bearing)
    pairs = zip(run.rows, run.params, strict=True)
    return [f"{model}-{prompt_fingerprint(row.prompt, params, seed)}" for row, params in pairs]


def _to_stdout(run: _Run, as_json: bool, compact: bool) -> None:
    """Print every answer. compact: JSON on one line each. Raises RequestError for one that failed, in the end."""
    from ridgeline.cli.show.progress import prompts_bar

    quiet = as_json or not compact  # nothing but the answers for a program, or of a single prompt
    llm, requests = run.start(range(len(run.rows)), quiet=quiet)
    show = _InOrder(run.rows, as_json, compact, llm.tokenizer is None)
    prefill = _prefill_bar(llm, requests) if sys.stdout.isatty() else None  # otherwise the other bar is shown
    with prompts_bar(len(run.rows), hidden=sys.stdout.isatty()) as done:

        def finished(index: int, output: RequestOutput) -> None:
            if prefill is not None:
                prefill.close()
            show.add(index, output)
            done(sum(len(choice.token_ids) for choice in output.outputs))

        start = time.perf_counter()
        try:
            outputs = llm.generate(**requests, on_done=finished, on_step=prefill.step if prefill else done.step)
        except KeyboardInterrupt:
            raise Interrupted(f"{show.num_shown:,} of {len(run.rows):,} prompts are complete") from None
        seconds = time.perf_counter() - start
    if not quiet or run.verbose:
        run.say_what_came(llm, outputs, seconds)
    _check(outputs)


class _InOrder:
    """Prints results in the order of the prompts, each as soon as it and all before it are complete."""

    def __init__(self, rows: Sequence[Row], as_json: bool, compact: bool, as_ids: bool) -> None:
        self._rows, self._as_json, self._compact, self._as_ids = rows, as_json, compact, as_ids
        self._held: dict[int, RequestOutput] = {}
        self.num_shown = 0

    def add(self, index: int, output: RequestOutput) -> None:
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
    """Raise RequestError for the first answer that failed; the others have been printed."""
    from ridgeline.errors import RequestError

    for i, output in enumerate(outputs, 1):
        if reason := _error(output):
            raise RequestError(f"prompt {i}, {reason}")


def _error(output: RequestOutput) -> str | None:
    """Why a prompt's first answer that failed did."""
    failed = [choice for choice in output.outputs if choice.error]
    return f"after {len(failed[0].token_ids)} tokens: {failed[0].error}" if failed else None


def _stream(run: _Run) -> None:
    """Text as it comes; figures on stderr."""
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
        (output,) = llm.generate(**requests, on_text=show, on_step=bar.step)
        echo()
        if llm.tokenizer is None:
            sys.stdout.write(" ".join(map(str, output.outputs[0].token_ids)))
    finally:
        bar.close()
        sys.stdout.write("\n")
    if run.verbose:
        run.say_what_came(llm, [output], output.timing.total_s)
    t = output.timing
    pace = f", then {t.tpot_s * 1e3:.1f} ms per token" if t.tpot_s is not None else ""
    say(
        f"{len(output.prompt_token_ids)} prompt tokens, {len(output.outputs[0].token_ids)} new; "
        f"first after {t.ttft_s * 1e3:.0f} ms{pace}; {t.tokens_per_s:.1f} tokens/s"
    )
    _check([output])


def _prefill_bar(llm: LLM, requests: Mapping[str, Any]) -> PrefillBar:
    """For what `_Run.start` returned."""
    from ridgeline.cli.show.progress import PrefillBar

    tokens = sum(len(prompt["prompt_token_ids"]) for prompt in requests["prompts"])
    return PrefillBar(tokens, llm.config.max_num_batched_tokens if llm.config else None)


def _print_json(output: RequestOutput, compact: bool) -> None:
    print(json.dumps(output.to_json(), ensure_ascii=False, allow_nan=False, indent=None if compact else 2))


def _print_text(prompt: Any, output: RequestOutput, as_ids: bool) -> None:
    print(f">>> {prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)}")
    for choice in output.outputs:
        label = f"[{choice.index}] " if len(output.outputs) > 1 else ""
        print(f"{label}{' '.join(map(str, choice.token_ids)) if as_ids else choice.text}\n")
