"""What a run says on stderr: what the engine chose before it, and what came of it after."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.cli.show.tables import Table
    from ridgeline.llm import LLM
    from ridgeline.sched.stats import Stats
    from ridgeline.spec.request import RequestOutput


def say(*lines: str) -> None:
    """Print lines on stderr. On a terminal they break between words, so that it cuts no number at its edge.

    rich is not used: a short run would spend a tenth of its time on the import.
    """
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    for line in lines:
        if width is None or len(line) <= width:
            print(line, file=sys.stderr)
            continue
        for part in textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False):
            print(part, file=sys.stderr)


def say_tables(*tables: Table) -> None:
    """Print tables on stderr."""
    from ridgeline.cli.show.tables import screen, show

    show(screen(stderr=True), *tables)


def say_engine(llm: LLM, verbose: bool) -> None:
    """Say what the engine chose: the two lines of `chosen`, or with verbose every setting and all memory."""
    if not verbose or llm.config is None:
        say(*chosen(llm))
        return
    from ridgeline.cli.flags.settings import settings_tables

    on_host = llm.loaded.table.memory.on_host
    say_tables(*settings_tables("engine", llm.config, llm.loaded.weight_bytes, on_host=on_host))


def chosen(llm: LLM) -> list[str]:
    """The choices of the engine that matter most, in two lines."""
    from ridgeline.spec.text import num_bytes

    config, weights = llm.config, llm.loaded.weight_bytes
    if config is None:
        return [f"naive sampling: nothing is kept between tokens; {num_bytes(weights)} of weights"]
    pages = " and ".join(
        f"{n - 1:,} pages of {g.page_tokens} tokens" + (f" ({g.name})" if len(config.groups) > 1 else "")
        for n, g in zip(config.num_pages, config.groups, strict=True)
    )
    return [
        f"memory: {num_bytes(config.state_bytes)} in {pages}, {num_bytes(weights)} of weights, "
        f"{num_bytes(config.workspace_bytes)} of workspace",
        f"engine: contexts of {config.max_model_len:,} tokens, {config.max_num_seqs:,} sequences at once, "
        f"{config.max_num_batched_tokens:,} tokens a step",
    ]


def summary(llm: LLM, outputs: Sequence[RequestOutput], seconds: float) -> list[str]:
    """What came of a run: tokens and speed, and how the pages were used."""
    prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    new = sum(len(choice.token_ids) for o in outputs for choice in o.outputs)
    lines = [
        f"{_many(len(outputs), 'prompt')} with {_many(prompt_tokens, 'token')}, {_many(new, 'new token')} in "
        f"{seconds:.1f} s: {new / seconds if seconds else 0.0:,.1f} tokens/s"
    ]
    if (stats := llm.stats()) is not None:
        pages = " and ".join(f"{g.peak_pages:,} of {g.num_pages:,}" for g in stats.groups)
        swapped = f", {stats.preempted_swap:,} of them to the host" if stats.preempted_swap else ""
        lines += _checkpoints(llm, stats)
        lines.append(
            f"pages: at most {pages}; prefix hits: {stats.hit_rate:.0%} of prompt tokens; "
            f"preemptions: {stats.preempted_recompute + stats.preempted_swap:,}{swapped}"
        )
        if stats.unrecorded and llm.loaded.table.driver is not None:
            lines.append(f"decode steps are not recorded: {stats.unrecorded}")
    return lines


def _checkpoints(llm: LLM, stats: Stats) -> list[str]:
    """How the states of recurrent layers were used, where there are any."""
    if llm.config is None or not any(group.snapshot for group in llm.config.groups):
        return []
    return [
        f"state snapshots: {stats.snapshots:,} kept, {_many(stats.restored, 'request')} began from one; "
        f"{_many(stats.recomputed_tokens, 'token')} that were computed before lay past the nearest"
    ]


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
