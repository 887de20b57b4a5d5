"""`ridgeline run-batch`: answer a file of requests in OpenAI's batch format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags.groups import EngineFlags, LoadFlags, grouped, llm_arguments
from ridgeline.cli.flags.serving import ServedFlags, ServerFlags, serve_options

if TYPE_CHECKING:
    from ridgeline.serve.api.batch import Line
    from ridgeline.serve.options import ServeOptions
    from ridgeline.serve.service import Service


@grouped
def run_batch(
    *,
    requests: Annotated[
        Path,
        typer.Argument(
            help='File of requests, one JSON object per line: {"custom_id": ..., "method": "POST", "url": ..., '
            '"body": ...}.'
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="File of results, one JSON object per line. If the file exists, requests that have an answer in it "
            "are skipped.",
        ),
    ],
    verbose: o.Verbose = False,
    served: ServedFlags,
    tokenizer: o.TokenizerName = None,
    load: LoadFlags,
    engine: EngineFlags,
    seed: o.Seed = 0,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Each answer is written to the output as soon as it is complete.
    The exit status is 1 if a request failed; its line in the output says why.
    Run the command again to continue after an interruption.
    """
    from ridgeline.cli.flags.loading import find
    from ridgeline.cli.show.progress import prompts_bar
    from ridgeline.cli.show.report import say
    from ridgeline.serve.api.batch import read_done, read_lines

    lines, done = read_lines(requests), read_done(output)
    left = [line for line in lines if line.id not in done]
    errors = [line.id for line in lines if done.get(line.id)]
    if len(left) < len(lines):
        say(f"{len(lines) - len(left)} of {len(lines)} requests already have an answer in {output}")
    if left:
        find(served.model, load.revision, load.load_format)
        arguments = llm_arguments(load, engine, tokenizer=tokenizer, seed=seed)
        options = serve_options(served, ServerFlags(), seed)
        with prompts_bar(len(lines), len(done)) as advance:
            errors += _answer(served.model, arguments, options, left, output, verbose, advance)
        say(f"{len(left)} requests answered: {output}")
    if errors:
        say(f"{len(errors)} of {len(lines)} requests failed, first {errors[0]!r:.60}; the reasons are in {output}")
        raise typer.Exit(1)


def _answer(
    model: str, arguments: Mapping[str, Any], options: ServeOptions, lines: list[Line], output: Path,
    verbose: bool, advance: Callable[[int], None],
) -> list[str]:  # fmt: skip
    """Answer requests, and return the ids of those that failed. arguments: the arguments of LLM. advance: is called
    with the number of tokens of each answer.
    """
    import asyncio

    from ridgeline.cli.flags.settings import settings_tables
    from ridgeline.cli.show.report import say_tables
    from ridgeline.serve.api.batch import run_batch

    errors = []

    def ready(service: Service) -> None:
        if verbose:
            ready = service.ready
            say_tables(*settings_tables("engine", ready.config, ready.weight_bytes, on_host=ready.on_host))

    def record(result: Mapping[str, Any]) -> None:
        usage = result["response"]["body"].get("usage", {})
        advance(usage.get("completion_tokens", usage.get("output_tokens", 0)))
        if result["error"] is not None:
            errors.append(result["custom_id"])

    asyncio.run(run_batch(model, arguments, options, lines, output, on_ready=ready, on_done=record))
    return errors
