"""Open an engine on a device that may have less memory than it said."""

from __future__ import annotations

import gc
from collections.abc import Callable

from ridgeline.engine.engine import Engine
from ridgeline.errors import DeviceMemoryError, RequestError
from ridgeline.propose import Proposer
from ridgeline.runtime.heads import LoadedHead
from ridgeline.runtime.load import LoadedModel
from ridgeline.settings import EngineConfig

SMALLER, LEAST_SHARE = 0.8, 0.2  # of the free memory: each plan after the first one, and the last plan


def open_engine(
    loaded: LoadedModel, plan: Callable[[float], EngineConfig], *, proposer: Callable[[EngineConfig], Proposer | None],
    draft: LoadedModel | LoadedHead | None, is_fixed: bool,
) -> tuple[Engine, str]:  # fmt: skip
    """Return an engine, and a note if its plan was made again because the device had too little memory.

    plan: chooses the settings for a share of the memory that is free. proposer: returns what proposes drafts. is_fixed:
    the user set the bytes of all pages, so that no other plan is made. Raises DeviceMemoryError if no plan fits.
    """
    config, share, note = plan(1.0), 1.0, ""
    while True:
        try:
            with loaded.table.memory.guard():
                return Engine(loaded, config, proposer=proposer(config), draft=draft), note
        except DeviceMemoryError as e:
            share, failure = share * SMALLER, str(e)
        gc.collect()  # arrays of the engine that was not opened
        remedy = "a smaller --kv-cache-memory-bytes" if is_fixed else "a smaller --max-model-len or --max-num-seqs"
        failed = DeviceMemoryError(f"{failure} for the pages and the arrays of the plan; take {remedy}")
        if is_fixed or share < LEAST_SHARE:
            raise failed
        try:
            config = plan(share)
        except RequestError:
            raise failed from None
        note = f"{failure} for the first plan; this one takes {share:.0%} of the memory that is free"
