"""`ridgeline chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o

if TYPE_CHECKING:
    from ridgeline.llm import LLM
    from ridgeline.spec.request import RequestOutput, SamplingParams

HELP = """\
/reset   forget the conversation
/stats   what the last answer cost, and how full the context is
/quit    end (so does Ctrl-D)
Ctrl-C   stop an answer"""


def chat(
    model: o.Model,
    system: Annotated[str | None, typer.Option("--system", help="What the model is told before all else.")] = None,
    verbose: o.Verbose = False,
    tokenizer: o.TokenizerName = None, device: o.Device = "auto", dtype: o.DType = "auto",
    weights: o.WeightFormat = "auto", max_model_len: o.MaxModelLen = None, load_format: o.LoadFormat = "auto",
    revision: o.Revision = None, ops: o.Ops = None, threads: o.Threads = None,
    max_num_seqs: o.MaxNumSeqs = None, max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    block_size: o.BlockSize = None, state_snapshot_tokens: o.CheckpointTokens = None,
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None, kv_cache_dtype: o.KVCacheDType = "auto",
    swap_space_bytes: o.SwapSpaceBytes = None, steps_in_flight: o.StepsInFlight = None,
    max_tokens: o.MaxTokensChat = None, temperature: o.Temperature = None, top_p: o.TopP = None,
    top_k: o.TopK = None, min_p: o.MinP = None, repetition_penalty: o.RepetitionPenalty = None,
    presence_penalty: o.PresencePenalty = 0.0, frequency_penalty: o.FrequencyPenalty = 0.0,
    seed: o.Seed = 0, stop: o.Stop = None,
) -> None:  # fmt: skip
    """Talk with a model: several turns, streamed, through the model's own chat template.

    Every turn reuses the state of those before it. Sampling options that are not given come from the model's
    generation_config.json. From a pipe, every line is a turn.
    """
    from ridgeline.cli.flags.loading import load
    from ridgeline.cli.show.report import say_engine
    from ridgeline.spec.request import SamplingParams

    given: dict[str, Any] = {
        "temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "stop": stop or None,
        "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
    }  # fmt: skip
    chosen = {name: value for name, value in given.items() if value is not None}
    SamplingParams(max_tokens=max_tokens, **chosen)  # a bad value fails before the model is loaded
    llm = load(model, o.llm_options(locals()))
    if verbose or sys.stdin.isatty():
        say_engine(llm, verbose)
    params = SamplingParams(**{**llm.default_sampling_fields(), **chosen, "max_tokens": max_tokens})
    _Chat(llm, system, params, seed).run()


class _Chat:
    """The loop, and what `/stats` shows."""

    def __init__(self, llm: LLM, system: str | None, params: SamplingParams, seed: int) -> None:
        from ridgeline.load.conversation import Conversation

        self._llm, self._params, self._seed = llm, params, seed
        self._talk = Conversation(llm.frontend.tokenizer(), system)
        self._tty = sys.stdin.isatty()
        self._turns = 0
        self._last: RequestOutput | None = None
        self._talk.ask("hello")  # a model without a chat template says so now
        self._talk.reset()

    def run(self) -> None:
        if self._tty:
            import readline  # noqa: F401  # line editing and history for input()

            name, context = self._llm.checkpoint.folder.name, self._llm.max_model_len
            _say(f"{name}: a context of {context} tokens. /help lists what there is.")
        with _interrupts():
            for line in self._lines():
                if line.strip().lower() in ("/quit", "/exit", "/bye"):
                    return
                if line.strip():
                    self._handle(line)

    def _lines(self) -> Iterator[str]:
        while True:
            try:
                yield input(">>> " if self._tty else "")
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._tty:
                    raise
                _say("\nCtrl-D or /quit ends the conversation.")

    def _handle(self, line: str) -> None:
        command = line.strip().lower()
        if command == "/reset":
            self._talk.reset()
            self._last = None
            _say("The conversation is forgotten.")
        elif command == "/stats":
            _say(self._stats())
        elif command in ("/help", "/?"):
            _say(HELP)
        elif command.startswith("/"):
            _say(f"{line.strip()} is no command.\n{HELP}")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """One turn. What cannot be answered is said, and the conversation stands as before."""
        from ridgeline.errors import RidgelineError

        try:
            prompt = self._talk.ask(line)
        except RidgelineError as e:
            _say(f"{e}")
            return
        try:
            self._stream(prompt)
        except RidgelineError as e:
            self._talk.withdraw()
            _say(f"{e}\n/reset forgets the conversation.")

    def _stream(self, prompt: list[int]) -> None:
        from ridgeline.cli.show.progress import PrefillBar

        self._turns += 1  # another question, other noise
        params = replace(self._params, seed=(self._seed + self._turns - 1) % 2**63)
        ids: list[int] = []
        text = ""
        bar = PrefillBar(len(prompt), self._llm.config.max_num_batched_tokens if self._llm.config else None)
        stream = self._llm.stream(prompt, params, on_step=bar.step)
        try:
            for chunk in stream:
                bar.close()
                ids += chunk.token_ids
                text += chunk.text
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
                self._last = chunk.output or self._last
                if chunk.error:
                    _say(f"\n{chunk.error}")
        except KeyboardInterrupt:
            bar.close()
            if not self._tty:
                raise
            stream.close()
            _say("\n(stopped)")
        else:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._talk.answered(ids, text)

    def _stats(self) -> str:
        if self._last is None:
            return "No answer yet."
        output, limit = self._last, self._llm.max_model_len
        t, new = output.timing, len(output.outputs[0].token_ids)
        used = len(output.prompt_token_ids) + new
        pace = f", then {t.tpot_s * 1e3:.1f} ms per token" if t.tpot_s is not None else ""
        return (
            f"last answer    {new} tokens; first after {t.ttft_s * 1e3:.0f} ms{pace}; {t.tokens_per_s:.1f} tokens/s\n"
            f"prompt         {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} found in the cache\n"
            f"context        {used} of {limit} tokens ({used / limit:.0%})"
        )


def _say(text: str) -> None:
    from ridgeline.cli.show.report import say

    say(*text.split("\n"))
    sys.stderr.flush()


@contextmanager
def _interrupts() -> Iterator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt every time: it stops an answer, not the program."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
