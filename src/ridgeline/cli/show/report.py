"""Print the engine's settings before a run and a summary after it, on stderr."""

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
    """Print lines on stderr. On a terminal, lines break between words, so that no number is cut at the edge.

    This does not use rich, whose import would take a tenth of a short run's time.
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
    """Print the engine's settings: the two lines of `chosen`, or with verbose all settings and the memory."""
    if not verbose or llm.config is None:
        say(*chosen(llm))
        return
    from ridgeline.cli.flags.settings import huge_line, settings_tables
    from ridgeline.measure.predict import memory_of

    if not llm.loaded.table.memory.on_host:
        say_tables(*settings_tables("engine", llm.config, llm.loaded.weight_bytes, on_host=False))
        return
    program = memory_of(llm.loaded, llm.config, 1, 1, 1).by_use(llm.loaded.spec.vocab_size)["program"]
    now = {"now": resident_now(llm)}
    say_tables(*settings_tables("engine", llm.config, llm.loaded.weight_bytes, program_bytes=program, resident=now))
    say(huge_line())


def resident_now(llm: LLM) -> dict[str, int]:
    """Return the bytes that are resident now: pages of state, by the count of those that were used or touched, and the
    process, by the system's count.
    """
    from ridgeline.system import resident_bytes

    found, stats = {"process": resident_bytes()}, llm.stats()
    if stats is None or llm.config is None:
        return found
    return {"state pages": llm.config.bytes_of(stats.resident_pages), **found}


def chosen(llm: LLM) -> list[str]:
    """Return the engine's most important settings in two lines."""
    from ridgeline.spec.text import num_bytes

    config, weights = llm.config, llm.loaded.weight_bytes
    if config is None:
        return [f"naive sampling: no state is kept between tokens; {num_bytes(weights)} of weights"]
    pages = " and ".join(
        f"{n - 1:,} pages of {g.page_tokens} tokens" + (f" ({g.name})" if len(config.groups) > 1 else "")
        for n, g in zip(config.num_pages, config.groups, strict=True)
    )
    return [
        f"memory: {num_bytes(config.state_bytes)} in {pages}, {num_bytes(weights)} of weights, "
        f"{num_bytes(config.workspace_bytes)} of workspace",
        f"engine: contexts of {config.max_model_len:,} tokens, at most {config.max_num_seqs:,} sequences and "
        f"{config.max_num_batched_tokens:,} tokens a step",
    ]


def summary(llm: LLM, outputs: Sequence[RequestOutput], seconds: float) -> list[str]:
    """Summarize a run: tokens, speed, and the use of pages."""
    prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
    new = sum(len(choice.token_ids) for o in outputs for choice in o.outputs)
    lines = [
        f"{_many(len(outputs), 'prompt')} with {_many(prompt_tokens, 'token')}, {_many(new, 'new token')} in "
        f"{seconds:.1f} s: {new / seconds if seconds else 0.0:,.1f} tokens/s"
    ]
    if passes := sum(o.num_passes for o in outputs):
        lines.append(f"passes over blocks: {passes:,}, each of which gave {new / passes:.2f} tokens")
    if (stats := llm.stats()) is not None:
        pages = " and ".join(f"{g.peak_pages:,} of {g.num_pages:,}" for g in stats.groups)
        swapped = f", {stats.preempted_swap:,} of them to the host" if stats.preempted_swap else ""
        lines += _checkpoints(llm, stats)
        lines.append(
            f"pages: peak {pages}; prefix hits: {stats.hit_rate:.0%} of prompt tokens; "
            f"preemptions: {stats.preempted_recompute + stats.preempted_swap:,}{swapped}"
        )
        lines += drafts(stats)
        if stats.unrecorded and llm.loaded.table.driver is not None:
            lines.append(f"decode steps are not recorded: {stats.unrecorded}")
        if stats.shrunk:
            lines.append(stats.shrunk)
    return lines


def _checkpoints(llm: LLM, stats: Stats) -> list[str]:
    """Describe the use of state snapshots, if the model has recurrent layers."""
    if llm.config is None or not any(group.snapshot for group in llm.config.groups):
        return []
    return [
        f"state snapshots: {stats.snapshots:,} kept, {_many(stats.restored, 'request')} resumed from one; "
        f"{_many(stats.recomputed_tokens, 'token')} after the nearest snapshot had to be computed again"
    ]


def drafts(stats: Stats | None) -> list[str]:
    """Describe what drafts gained, in lines of at most 80 columns; nothing if none were verified."""
    from ridgeline.sched.draft_report import draft_report

    if stats is None:
        return []
    return draft_report(stats.proposer, stats.drafts, stats.draft_speed, stats.draft_acceptance, stats.untreed)


def _many(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
