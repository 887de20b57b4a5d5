"""`ridgeline chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.groups import EngineFlags, LoadFlags, grouped, llm_arguments
from ridgeline.cli.flags.sampling import SamplingFlags
from ridgeline.spec.parameters import Stage
from ridgeline.spec.request import SAMPLING as PARAMETERS

if TYPE_CHECKING:
    from ridgeline.llm import LLM
    from ridgeline.spec.request import RequestOutput, SamplingParams

HELP = """\
/reset   start a new conversation
/stats   show the speed of the last answer, and how full the context is
/quit    end the program (Ctrl-D does it, too)
Ctrl-C   stop an answer"""
# A turn has one answer, which is shown as text; masks and log probabilities are for programs.
STAGES = (Stage.PENALTY, Stage.TEMPERATURE, Stage.FILTER, Stage.PASSES)
SAMPLING = SamplingFlags(
    beams=False,
    only=frozenset({"max_tokens", "stop", *(name for name, _, one in PARAMETERS if one.stage in STAGES)}),
    defaults={"max_tokens": "what the context holds"},
)


@grouped
def chat(
    *,
    model: o.Model,
    system: Annotated[
        str | None, typer.Option("--system", help="System message of the conversation. Default: none.")
    ] = None,
    verbose: o.Verbose = False,
    seed: o.Seed = 0,
    tokenizer: o.TokenizerName = None,
    load: LoadFlags,
    engine: EngineFlags,
    sampling: Annotated[Mapping[str, Any], SAMPLING],
) -> None:
    """Talk with a model: several turns, streamed, through the model's own chat template.

    Every turn reuses the state of the turns before it. Sampling options that are not given come from the model's
    generation_config.json. If the input is a pipe, every line is a turn.
    """
    from ridgeline.cli.flags.loading import load as load_model
    from ridgeline.cli.show.report import say, say_engine
    from ridgeline.diffusion import edit_notes
    from ridgeline.spec.request import SamplingParams

    chosen = {"max_tokens": None, **sampling}
    SamplingParams(**chosen)  # a bad value fails before the model is loaded
    llm = load_model(model, llm_arguments(load, engine, tokenizer=tokenizer, seed=seed))
    params = SamplingParams(**{**llm.default_sampling_fields(), **chosen})
    llm.frontend.check_kind(params)  # before the first turn: no turn could be answered
    say(*(f"note: {note}" for note in edit_notes(params, llm.loaded.spec)))
    if verbose or sys.stdin.isatty():
        say_engine(llm, verbose)
    _Chat(llm, system, params, seed).run()


class _Chat:
    """A conversation: reads turns, streams answers, and keeps what `/stats` shows."""

    def __init__(self, llm: LLM, system: str | None, params: SamplingParams, seed: int) -> None:
        from ridgeline.load.conversation import Conversation

        self._llm, self._params, self._seed = llm, params, seed
        self._talk = Conversation(llm.frontend.tokenizer(), system)
        self._tty = sys.stdin.isatty()
        self._turns = 0
        self._last: RequestOutput | None = None
        self._talk.ask("hello")  # raises now if the model has no chat template
        self._talk.reset()

    def run(self) -> None:
        """Answer turns until the user quits or the input ends."""
        if self._tty:
            import readline  # noqa: F401  # line editing and history for input()

            name, context = self._llm.checkpoint.folder.name, self._llm.max_model_len
            _say(f"{name}: a context of {context} tokens. /help lists the commands.")
        with _interrupts():
            for line in self._lines():
                if line.strip().lower() in ("/quit", "/exit", "/bye"):
                    return
                if line.strip():
                    self._handle(line)

    def _lines(self) -> Iterator[str]:
        """Yield the lines that the user writes."""
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
            _say("The conversation starts anew.")
        elif command == "/stats":
            _say(self._stats())
        elif command in ("/help", "/?"):
            _say(HELP)
        elif command.startswith("/"):
            _say(f"{line.strip()} is no command.\n{HELP}")
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        """Answer one turn. If that fails, print why, and leave the conversation as it was."""
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
            _say(f"{e}\n/reset starts a new conversation.")

    def _stream(self, prompt: list[int]) -> None:
        from ridgeline.cli.show.progress import PrefillBar

        self._turns += 1  # every turn has noise of its own
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
        from ridgeline.cli.show.report import drafts

        output, limit = self._last, self._llm.max_model_len
        t, new = output.timing, len(output.outputs[0].token_ids)
        used = len(output.prompt_token_ids) + new
        pace = f", then {t.tpot_s * 1e3:.1f} ms per token" if t.tpot_s is not None else ""
        return (
            f"last answer    {new} tokens; first after {t.ttft_s * 1e3:.0f} ms{pace}; {t.tokens_per_s:.1f} tokens/s\n"
            f"prompt         {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} from the prefix cache\n"
            f"{_passes(output, new)}context        {used} of {limit} tokens ({used / limit:.0%})"
            + "".join(f"\n{line}" for line in drafts(self._llm.stats()))
        )


def _passes(output: RequestOutput, new: int) -> str:
    """Return the line about the passes of a diffusion model; nothing for other models."""
    count = output.num_passes
    return f"passes         {count}, {new / count:.2f} tokens each\n" if count else ""


def _say(text: str) -> None:
    from ridgeline.cli.show.report import say

    say(*text.split("\n"))
    sys.stderr.flush()


@contextmanager
def _interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt every time: it stops an answer, not the program."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, old)
