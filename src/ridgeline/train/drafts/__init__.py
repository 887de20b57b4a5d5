"""Train drafts for speculative decoding on what their target says: Medusa and EAGLE heads, and small draft models."""

from ridgeline.train.drafts.measure import DraftQuality
from ridgeline.train.drafts.options import KINDS, DraftOptions, Kind
from ridgeline.train.drafts.produce import Watch, train_draft

__all__ = ["KINDS", "DraftOptions", "DraftQuality", "Kind", "Watch", "train_draft"]
