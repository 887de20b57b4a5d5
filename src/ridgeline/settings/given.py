"""Check what a caller of `LLM` gives, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ridgeline.errors import RequestError
from ridgeline.settings.attention import ATTENTIONS
from ridgeline.settings.config import EngineOptions

CHOICES = {"cache": ("on", "off"), "batching": ("continuous", "static"), "attention": ATTENTIONS}


def check_choices(given: Mapping[str, object]) -> None:
    """Raise RequestError for an option of CHOICES that has another value."""
    for name, value in given.items():
        if value not in CHOICES[name]:
            raise RequestError(f"{name} is {value!r}; it must be {' or '.join(map(repr, CHOICES[name]))}")


def with_speculative(options: EngineOptions, speculative: str | None) -> EngineOptions:
    """Return options with `speculative`, if it is given. Raises RequestError if they have another one."""
    if speculative is None:
        return options
    if options.speculative not in (None, speculative):
        raise RequestError(
            f"speculative is {speculative!r}, and EngineOptions(speculative={options.speculative!r}) is given as well; "
            "leave one of them out"
        )
    return replace(options, speculative=speculative)
