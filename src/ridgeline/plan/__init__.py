"""What to run with: settings from the model, the machine and the user's aim, each with its reason."""

from ridgeline.plan.resolve import EngineConfig, EngineOptions, resolve

__all__ = ["EngineConfig", "EngineOptions", "resolve"]
