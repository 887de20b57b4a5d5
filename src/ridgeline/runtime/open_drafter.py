"""Make the drafter of what was loaded beside a target."""

from __future__ import annotations

from ridgeline.nn.heads import MedusaHead
from ridgeline.nn.model import Model
from ridgeline.runtime.drafter import Drafter, Place
from ridgeline.runtime.eagle_drafter import EagleDrafter
from ridgeline.runtime.eagle_tree import EagleTrees
from ridgeline.runtime.heads import LoadedHead
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.medusa_drafter import MedusaDrafter
from ridgeline.runtime.medusa_tree import MedusaTrees
from ridgeline.runtime.model_drafter import ModelDrafter


def open_drafter(draft: LoadedModel | LoadedHead, target: Model, place: Place) -> Drafter:
    """Return what proposes drafts with a draft model or a head; only heads propose trees."""
    if not isinstance(draft, LoadedHead):
        return ModelDrafter(draft, place)
    if isinstance(draft.head, MedusaHead):
        if place.tree > 1:
            return MedusaTrees(draft.head, target, place, draft.file.accuracies)
        return MedusaDrafter(draft.head, target, place)
    return (EagleTrees if place.tree > 1 else EagleDrafter)(draft.head, target, place)
