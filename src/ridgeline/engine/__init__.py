"""The loop over scheduler and runner."""

from ridgeline.engine.engine import Engine, Event

__all__ = ["Engine", "Event"]
