"""Load the model of a command, with a progress bar and notes on stderr."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.llm import LLM


def find(model: str, revision: str | None, load_format: str) -> tuple[Path, tuple[str, ...]]:
    """Return a model's folder, and the patterns of the files that are read from it. Downloads it from the hub."""
    from ridgeline.load.hub import MODEL_FILES, SMALL_FILES, find_model

    files = SMALL_FILES if load_format == "dummy" else MODEL_FILES
    return find_model(model, revision=revision, files=files), files


def load(model: str, options: dict[str, Any]) -> LLM:
    """Return LLM(model, **options)."""
    from ridgeline.cli.show.progress import loading_bar
    from ridgeline.cli.show.report import say
    from ridgeline.llm import LLM

    with loading_bar() as progress_bar:
        llm = LLM(model, progress_bar=progress_bar, on_wait=say, **options)
    for note in llm.loaded.notes:
        say(f"note: {note}")
    return llm
