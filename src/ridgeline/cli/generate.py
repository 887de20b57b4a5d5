"""`ridgeline generate`: continue prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli import options as o

if TYPE_CHECKING:
    from ridgeline.cli.prompts import Prompts
    from ridgeline.llm import LLM
    from ridgeline.spec.request import RequestOutput, SamplingParams

DEFAULT_MAX_TOKENS = 128


class Cache(StrEnum):
    """What is kept between tokens."""

    on = "on"
    off = "off"


def generate(
    model: o.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="A text, a .txt file (a prompt per line), a .jsonl file, or - for stdin.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    cache: Annotated[
        Cache, typer.Option(help="on: paged state. off: naive sampling, the whole history at every token.")
    ] = Cache.on,
    tokenizer: o.TokenizerName = None, skip_tokenizer_init: o.SkipTokenizer = False,
    device: o.Device = "auto", dtype: o.DType = "auto", max_model_len: o.MaxModelLen = None,
    load_format: o.LoadFormat = "auto", revision: o.Revision = None, ops: o.Ops = None,
    max_num_seqs: o.MaxNumSeqs = None, max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    block_size: o.BlockSize = None, kv_cache_memory_bytes: o.KVCacheMemoryBytes = None,
    max_tokens: o.MaxTokens = None, min_tokens: o.MinTokens = 0,
    temperature: o.Temperature = None, top_p: o.TopP = None, top_k: o.TopK = None, min_p: o.MinP = None,
    typical_p: o.TypicalP = None, repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = 0.0, frequency_penalty: o.FrequencyPenalty = 0.0,
    logit_bias: o.LogitBias = None, allowed_token_ids: o.AllowedTokenIds = None, bad_token_ids: o.BadTokenIds = None,
    n: o.N = 1, seed: o.Seed = 0,
    stop: o.Stop = None, include_stop_str_in_output: o.IncludeStop = False,
    stop_token_ids: o.StopTokenIds = None, ignore_eos: o.IgnoreEos = False,
    logprobs: o.Logprobs = None, prompt_logprobs: o.PromptLogprobs = None, logprobs_mode: o.LogprobsMode = "raw",
    no_skip_special_tokens: o.KeepSpecial = False,
) -> None:  # fmt: skip
    """Continue one prompt, or every prompt of a file.

    Sampling options that are not given come from the model's generation_config.json.
    """
    from ridgeline.cli.prompts import read_prompts
    from ridgeline.plan import EngineOptions
    from ridgeline.spec.request import SamplingParams

    prompts = read_prompts(prompt)
    given: dict[str, Any] = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "typical_p": typical_p,
    }  # fmt: skip
    fixed: dict[str, Any] = {
        "n": n, "max_tokens": max_tokens, "min_tokens": min_tokens, "ignore_eos": ignore_eos, "stop": stop or [],
        "include_stop_str_in_output": include_stop_str_in_output, "stop_token_ids": stop_token_ids or [],
        "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
        "logit_bias": o.parse_logit_bias(logit_bias), "allowed_token_ids": allowed_token_ids or None,
        "bad_token_ids": bad_token_ids or [], "logprobs": logprobs, "prompt_logprobs": prompt_logprobs,
        "logprobs_mode": logprobs_mode, "skip_special_tokens": not no_skip_special_tokens,
    }  # fmt: skip
    chosen = {k: v for k, v in given.items() if v is not None}
    SamplingParams(**fixed, **chosen)  # a bad value fails before the model is loaded
    llm = _load(
        model, tokenizer=tokenizer, skip_tokenizer_init=skip_tokenizer_init, cache=cache.value, device=device,
        dtype=dtype, max_model_len=max_model_len, load_format=load_format, revision=revision, seed=seed,
        ops=o.parse_ops(ops),
        engine=EngineOptions(max_num_seqs, max_num_batched_tokens, block_size, kv_cache_memory_bytes),
    )  # fmt: skip
    _answer(llm, prompts, SamplingParams(**{**llm.default_sampling_fields(), **chosen, **fixed}), json_output)


def _load(model: str, **options: Any) -> LLM:
    """The model, with a progress bar, and what there is to know of it on stderr."""
    from ridgeline.cli.progress import loading_bar
    from ridgeline.llm import LLM

    with loading_bar() as progress_bar:
        llm = LLM(model, progress_bar=progress_bar, **options)
    for note in llm.loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    return llm


def _answer(llm: LLM, prompts: Prompts, params: SamplingParams, json_output: bool) -> None:
    from ridgeline.cli.progress import prompts_bar

    fitted = [_fit(llm, p, params) for p in prompts.items] if params.max_tokens is None else None
    if not prompts.many and not json_output and params.n == 1:
        _check([_stream(llm, prompts, params if fitted is None else fitted[0])])
        return
    show = _InOrder(prompts.items, json_output, prompts.many, llm.tokenizer is None)
    with prompts_bar(len(prompts.items)) as done:

        def finished(index: int, output: RequestOutput) -> None:
            show.add(index, output)
            done()

        outputs = llm.generate(prompts.items, params if fitted is None else fitted, on_done=finished)
    _check(outputs)


class _InOrder:
    """Prints results in the order of the prompts, each as soon as it and all before it are complete."""

    def __init__(self, prompts: Sequence[Any], as_json: bool, compact: bool, as_ids: bool) -> None:
        self._prompts, self._as_json, self._compact, self._as_ids = prompts, as_json, compact, as_ids
        self._held: dict[int, RequestOutput] = {}
        self._next = 0

    def add(self, index: int, output: RequestOutput) -> None:
        self._held[index] = output
        while self._next in self._held:
            ready = self._held.pop(self._next)
            if self._as_json:
                _print_json(ready, self._compact)
            else:
                _print_text(self._prompts[self._next], ready, self._as_ids)
            sys.stdout.flush()
            self._next += 1


def _check(outputs: Sequence[RequestOutput]) -> None:
    """Raise RequestError for the first answer that failed; the others have been printed."""
    from ridgeline.errors import RequestError

    for i, output in enumerate(outputs, 1):
        for choice in output.outputs:
            if choice.error:
                raise RequestError(f"prompt {i}, after {len(choice.token_ids)} tokens: {choice.error}")


def _fit(llm: LLM, prompt: Any, params: SamplingParams) -> SamplingParams:
    """The default length of an answer: 128 tokens, or what the context has left."""
    from dataclasses import replace

    room = llm.max_model_len - len(llm.encode(prompt))
    wanted = max(DEFAULT_MAX_TOKENS, params.min_tokens)
    return replace(params, max_tokens=max(1, params.min_tokens, min(wanted, room)))


def _stream(llm: LLM, prompts: Prompts, params: SamplingParams) -> RequestOutput:
    """Text as it comes; figures on stderr."""

    def show(request: int, choice: int, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    if sys.stdout.isatty() and isinstance(prompts.items[0], str):
        sys.stdout.write(f"\033[2m{prompts.items[0]}\033[0m")
    (output,) = llm.generate(prompts.items, params, on_text=show)
    if llm.tokenizer is None:
        sys.stdout.write(" ".join(map(str, output.outputs[0].token_ids)))
    sys.stdout.write("\n")
    t = output.timing
    count = len(output.outputs[0].token_ids)
    pace = f", then {t.tpot_s * 1e3:.1f} ms per token" if t.tpot_s is not None else ""
    print(
        f"{len(output.prompt_token_ids)} prompt tokens, {count} new; first after {t.ttft_s * 1e3:.0f} ms{pace}; "
        f"{t.tokens_per_s:.1f} tokens/s",
        file=sys.stderr,
    )
    return output


def _print_json(output: RequestOutput, compact: bool) -> None:
    print(json.dumps(output.to_json(), ensure_ascii=False, allow_nan=False, indent=None if compact else 2))


def _print_text(prompt: Any, output: RequestOutput, as_ids: bool) -> None:
    print(f">>> {prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)}")
    for choice in output.outputs:
        label = f"[{choice.index}] " if len(output.outputs) > 1 else ""
        print(f"{label}{' '.join(map(str, choice.token_ids)) if as_ids else choice.text}\n")
