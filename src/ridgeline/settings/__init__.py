"""Choose the settings of an engine, each with its reason. Counting what they cost belongs in cost/."""

from ridgeline.settings.config import EngineConfig, EngineOptions
from ridgeline.settings.preempt import PreemptCost
from ridgeline.settings.resolve import check_tree, choose_storage, resolve, storage_name, with_drafts

__all__ = [
    "EngineConfig", "EngineOptions", "PreemptCost", "check_tree", "choose_storage", "resolve", "storage_name",
    "with_drafts",
]  # fmt: skip
