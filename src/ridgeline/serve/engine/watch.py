"""Watch in the HTTP process whether the engine process is alive."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from ridgeline.serve.engine.messages import Beat

T = TypeVar("T")
log = logging.getLogger(__name__)
TICK_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits in seconds on a silent or hanging engine. 0 means no limit.

    heartbeat: time without any message after which the engine does not count as ready. engine: time without any message
    after which it is restarted. step: time in one step, or without any message while it loads the model, after which
    it is restarted.
    """

    heartbeat: float = 5.0
    engine: float = 60.0
    step: float = 600.0


class EngineSilent(Exception):
    """The engine process must be restarted. The message continues the words "the engine process"."""


class Watch:
    """Counts the seconds since the last message.

    Time in which the HTTP process itself did not run is not counted, since both processes may have been stopped.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._warned = False
        self.silent_s = 0.0
        self.turn_s = 0.0  # time that the engine had spent in its current step at its last heartbeat

    @property
    def silent(self) -> bool:
        """Return whether the engine has been silent for too long to count as ready."""
        return 0 < self._patience.heartbeat < self.silent_s

    def heard(self, message: object) -> None:
        """Note that a message of the engine arrived."""
        self.silent_s, self._warned = 0.0, False
        if isinstance(message, Beat):
            self.turn_s = message.turn_s

    async def run(self, work: Coroutine[Any, Any, T], *, loading: bool = False) -> T:
        """Run `work`, which calls `heard` for each message. Raises EngineSilent if a limit is exceeded."""
        self.silent_s = self.turn_s = 0.0
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                before = time.monotonic()
                await asyncio.wait((task,), timeout=TICK_SECONDS)
                self.silent_s += min(time.monotonic() - before, 2 * TICK_SECONDS)
                self._check(loading)
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _check(self, loading: bool) -> None:
        p = self._patience
        if self.silent and not loading and not self._warned:
            self._warned = True
            log.warning("the engine sends no heartbeat; /health answers 503 until it does")
        limit, name = (p.step, "--timeout-step") if loading else (p.engine, "--timeout-engine")
        if 0 < limit < self.silent_s:
            raise EngineSilent(f"sent no heartbeat for {limit:g} s ({name})")
        if not loading and 0 < p.step < self.turn_s:
            raise EngineSilent(f"was in one step for more than {p.step:g} s (--timeout-step)")
