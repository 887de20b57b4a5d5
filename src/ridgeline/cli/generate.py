"""`ridgeline generate`: continue prompts."""

from __future__ import annotations

import json
import sys
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

    off = "off"


def generate(
    model: o.Model,
    prompt: Annotated[
        str | None, typer.Argument(help="A text, a .txt file (a prompt per line), a .jsonl file, or - for stdin.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")] = False,
    cache: Annotated[
        Cache, typer.Option(help="off: naive sampling, the whole history computed again at every token.")
    ] = Cache.off,
    tokenizer: o.TokenizerName = None,
    skip_tokenizer_init: o.SkipTokenizer = False,
    device: o.Device = "auto",
    dtype: o.DType = "auto",
    max_model_len: o.MaxModelLen = None,
    load_format: o.LoadFormat = "auto",
    revision: o.Revision = None,
    ops: o.Ops = None,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    n: o.N = 1,
    seed: o.Seed = 0,
    stop_token_ids: o.StopTokenIds = None,
    ignore_eos: o.IgnoreEos = False,
    logprobs: o.Logprobs = None,
    no_skip_special_tokens: o.KeepSpecial = False,
) -> None:
    """Continue one prompt, or every prompt of a file.

    Sampling options that are not given come from the model's generation_config.json.
    """
    from ridgeline.cli.progress import loading_bar
    from ridgeline.cli.prompts import read_prompts
    from ridgeline.spec.request import SamplingParams

    prompts = read_prompts(prompt)
    given: dict[str, Any] = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    fixed: dict[str, Any] = {
        "n": n, "max_tokens": max_tokens, "stop_token_ids": tuple(stop_token_ids or ()), "ignore_eos": ignore_eos,
        "logprobs": logprobs, "skip_special_tokens": not no_skip_special_tokens,
    }  # fmt: skip
    chosen = {k: v for k, v in given.items() if v is not None}
    SamplingParams(**fixed, **chosen)  # a bad value fails before the model is loaded
    overrides = o.parse_ops(ops)
    from ridgeline.llm import LLM

    with loading_bar() as progress_bar:
        llm = LLM(
            model, tokenizer=tokenizer, skip_tokenizer_init=skip_tokenizer_init, progress_bar=progress_bar,
            device=device, dtype=dtype, max_model_len=max_model_len, load_format=load_format, revision=revision,
            seed=seed, ops=overrides,
        )  # fmt: skip
    params = SamplingParams(**{**llm.default_sampling_fields(), **chosen, **fixed})
    _answer(llm, prompts, params, json_output)


def _answer(llm: LLM, prompts: Prompts, params: SamplingParams, json_output: bool) -> None:
    from ridgeline.cli.progress import prompts_bar

    fitted = [_fit(llm, p, params) for p in prompts.items] if params.max_tokens is None else None
    if not prompts.many and not json_output and params.n == 1:
        _stream(llm, prompts, params if fitted is None else fitted[0])
        return
    with prompts_bar(len(prompts.items)) as done:
        outputs = llm.generate(prompts.items, params if fitted is None else fitted, on_done=lambda _: done())
    for item, output in zip(prompts.items, outputs, strict=True):
        _print_json(output, prompts.many) if json_output else _print_text(item, output, llm.tokenizer is None)


def _fit(llm: LLM, prompt: Any, params: SamplingParams) -> SamplingParams:
    """The default length of an answer: 128 tokens, or what the context has left."""
    from dataclasses import replace

    room = llm.max_model_len - len(llm.encode(prompt))
    return replace(params, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room)))


def _stream(llm: LLM, prompts: Prompts, params: SamplingParams) -> None:
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


def _print_json(output: RequestOutput, compact: bool) -> None:
    print(json.dumps(output.to_json(), ensure_ascii=False, indent=None if compact else 2))


def _print_text(prompt: Any, output: RequestOutput, as_ids: bool) -> None:
    print(f">>> {prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False)}")
    for choice in output.outputs:
        label = f"[{choice.index}] " if len(output.outputs) > 1 else ""
        print(f"{label}{' '.join(map(str, choice.token_ids)) if as_ids else choice.text}\n")
