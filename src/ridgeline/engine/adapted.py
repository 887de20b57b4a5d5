"""The part of an LLM that loads and drops adapters."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.engine.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.runtime.adapters import Adapters, LoadedAdapter
from ridgeline.runtime.generator import GenerationRequest


class HasAdapters:
    """Loads adapters beside the weights of an engine's model. `_engine` is None where no engine answers."""

    _engine: Engine | None = None

    @property
    def adapters(self) -> tuple[LoadedAdapter, ...]:
        """Return the adapters that are loaded."""
        return () if self._engine is None else tuple(self._engine.adapters or ())

    def load_lora(self, name: str, source: str) -> None:
        """Load an adapter beside the weights. source: a folder or a hub id. Raises CheckpointError or RequestError."""
        self._adapters_of(self._engine).load(name, source)

    def unload_lora(self, name: str) -> None:
        """Drop an adapter. Raises RequestError for an unknown name, and while a request uses it."""
        adapters = self._adapters_of(self._engine)
        adapters.unload(name, lambda slot: self._engine is not None and self._engine.uses_adapter(slot))

    def _check_adapters(self, requests: Sequence[GenerationRequest]) -> Sequence[GenerationRequest]:
        """Return the requests. Raises RequestError for one whose adapter is not loaded."""
        for name in {request.lora for request in requests} - {""}:
            self._adapters_of(self._engine).get(name)
        return requests

    @staticmethod
    def _adapters_of(engine: Engine | None) -> Adapters:
        if engine is None or engine.adapters is None:
            raise RequestError(
                "adapters need the engine: leave out cache='off' (--cache off), or put the adapter into the weights "
                "(ridgeline merge)"
            )
        return engine.adapters
