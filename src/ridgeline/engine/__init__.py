"""The loop of scheduler and runner, and the sessions of requests on top of it."""

from ridgeline.engine.engine import Engine
from ridgeline.engine.session import Session, Sink
from ridgeline.engine.static import StaticGenerator

__all__ = ["Engine", "Session", "Sink", "StaticGenerator"]
