"""What to run with: settings from the model, the machine and the user's aim, each with its reason."""

from ridgeline.settings.config import EngineConfig, EngineOptions
from ridgeline.settings.preempt import PreemptCost
from ridgeline.settings.resolve import choose_storage, resolve

__all__ = ["EngineConfig", "EngineOptions", "PreemptCost", "choose_storage", "resolve"]
