"""Ridgeline: LLM inference that predicts its cost, runs at the roofline, and proves its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ridgeline.async_llm import AsyncLLM
    from ridgeline.errors import RidgelineError
    from ridgeline.llm import LLM
    from ridgeline.spec.request import BeamSearchParams, OutputChunk, RequestOutput, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "OutputChunk",
    "RequestOutput",
    "RidgelineError",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "AsyncLLM": "ridgeline.async_llm",
    "BeamSearchParams": "ridgeline.spec.request",
    "LLM": "ridgeline.llm",
    "OutputChunk": "ridgeline.spec.request",
    "RequestOutput": "ridgeline.spec.request",
    "RidgelineError": "ridgeline.errors",
    "SamplingParams": "ridgeline.spec.request",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that `import ridgeline` and `ridgeline --help` stay instant.
    if name not in _HOMES:
        raise AttributeError(f"module 'ridgeline' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
