"""The interface of the engine that answers: one engine process, or several replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.vectors import Floats, Reading, Text
from ridgeline.serve.engine.client import Answers, Health, State
from ridgeline.serve.engine.messages import Ready, Report


class EngineHandle(Protocol):
    """Answers requests. `EngineClient` is one engine, `dist.fleet.Fleet` has several."""

    @property
    def state(self) -> State:
        """Return the state of the process."""
        ...

    @property
    def health(self) -> Health:
        """Return the state, or "silent" if the engine should be ready but sends no heartbeat."""
        ...

    @property
    def up(self) -> bool:
        """Return whether requests can be answered."""
        ...

    @property
    def restarts(self) -> int:
        """Return the number of restarts of engine processes."""
        ...

    @property
    def silent_s(self) -> float:
        """Return the seconds since the last message of the engine."""
        ...

    @property
    def engines(self) -> int:
        """Return the number of engines."""
        ...

    def replicas(self) -> Sequence[dict[str, Any]]:
        """Return figures of each replica, for the live page; () for a single engine."""
        ...

    async def start(self) -> Ready:
        """Start and wait until the model is loaded. Raises StartFailed."""
        ...

    def submit(
        self, requests: Sequence[GenerationRequest], arrived: float, *, stream: bool, on_done: Callable[[], None]
    ) -> Answers:
        """Send requests, as `EngineClient.submit` does. Raises EngineDown."""
        ...

    async def embed(self, texts: Sequence[Text], reading: Reading) -> Floats:
        """Return a row of numbers for each text. Raises RequestError, EngineDown."""
        ...

    async def adapt(self, name: str, source: str | None) -> None:
        """Load an adapter, or drop it if there is no source. Raises RequestError, EngineDown."""
        ...

    async def report(self) -> Report:
        """Return the state and the counters. Raises EngineDown."""
        ...

    def end_all(self, why: str) -> None:
        """End every open request with the error `why`."""
        ...

    async def sleep(self) -> None:
        """End the processes, which frees their memory, until `wake`. Every open request ends. Raises EngineDown."""
        ...

    async def wake(self) -> None:
        """Start the processes again, and wait until the model is loaded. Raises EngineDown, StartFailed."""
        ...

    async def close(self) -> None:
        """End the processes and every open request. May be called again."""
        ...
