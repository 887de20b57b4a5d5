"""`ridgeline run-batch`: answer a file of requests in OpenAI's batch format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags import server as s
from ridgeline.cli.serve import serve_options, which_model

if TYPE_CHECKING:
    from ridgeline.serve.service import Service


def run_batch(
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
            "--output", "-o",
            help="File of results, one JSON object per line. If the file exists, requests that have an answer in it "
            "are skipped.",
        ),
    ],
    model_argument: s.ModelArgument = None,
    model: s.ModelOption = None,
    verbose: o.Verbose = False,
    served_model_name: s.ServedModelName = None,
    chat_template: s.ChatTemplateFile = None,
    tool_call_parser: s.ToolParser = None,
    reasoning_parser: s.ReasoningParser = None,
    unknown_fields: s.UnknownFieldsChoice = "error",
    tokenizer: o.TokenizerName = None, device: o.Device = "auto", dtype: o.DType = "auto",
    weights: o.WeightFormat = "auto", max_model_len: o.MaxModelLen = None, load_format: o.LoadFormat = "auto",
    revision: o.Revision = None, ops: o.Ops = None, threads: o.Threads = None,
    max_num_seqs: o.MaxNumSeqs = None, max_num_batched_tokens: o.MaxNumBatchedTokens = None,
    block_size: o.BlockSize = None, state_snapshot_tokens: o.CheckpointTokens = None,
    kv_cache_memory_bytes: o.KVCacheMemoryBytes = None, kv_cache_dtype: o.KVCacheDType = "auto",
    swap_space_bytes: o.SwapSpaceBytes = None, steps_in_flight: o.StepsInFlight = None, seed: o.Seed = 0,
) -> None:  # fmt: skip
    """Answer a file of requests in OpenAI's batch format.

    Each answer is written to the output as soon as it is complete.
    The exit status is 1 if a request failed; its line in the output says why.
    Run the command again to continue after an interruption.
    """
    _run(locals())


def _run(given: dict[str, Any]) -> None:
    """Run the batch. given: the value of every option of the command, by name. Exits with 1 if a request failed."""
    import asyncio

    from ridgeline.cli.flags.loading import find
    from ridgeline.cli.flags.settings import settings_tables
    from ridgeline.cli.show.progress import prompts_bar
    from ridgeline.cli.show.report import say, say_tables
    from ridgeline.serve.api.batch import read_done, read_lines, run_batch

    model, requests, output = which_model(given["model_argument"], given["model"]), given["requests"], given["output"]
    lines, done = read_lines(requests), read_done(output)
    left = [line for line in lines if line.id not in done]
    errors = [line.id for line in lines if done.get(line.id)]
    if len(left) < len(lines):
        say(f"{len(lines) - len(left)} of {len(lines)} requests already have an answer in {output}")

    def ready(service: Service) -> None:
        if given["verbose"]:
            ready = service.ready
            say_tables(*settings_tables("engine", ready.config, ready.weight_bytes, on_host=ready.on_host))

    def answer(advance: Callable[[int], None]) -> None:
        def record(result: Mapping[str, Any]) -> None:
            usage = result["response"]["body"].get("usage", {})
            advance(usage.get("completion_tokens", usage.get("output_tokens", 0)))
            if result["error"] is not None:
                errors.append(result["custom_id"])

        options = serve_options(given, given["served_model_name"] or [model])
        batch = run_batch(model, o.llm_options(given), options, left, output, on_ready=ready, on_done=record)
        asyncio.run(batch)

    if left:
        find(model, given["revision"], given["load_format"])
        with prompts_bar(len(lines), len(done)) as advance:
            answer(advance)
        say(f"{len(left)} requests answered: {output}")
    if errors:
        say(f"{len(errors)} of {len(lines)} requests failed, first {errors[0]!r:.60}; the reasons are in {output}")
        raise typer.Exit(1)
