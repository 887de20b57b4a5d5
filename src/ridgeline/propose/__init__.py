"""Proposers of draft tokens for speculative decoding. Verifying drafts belongs to the scheduler and the runner."""

from ridgeline.propose.given import GivenDrafts
from ridgeline.propose.guard import Guard
from ridgeline.propose.ngram import NgramProposer
from ridgeline.propose.proposer import Proposer, Wanted

__all__ = ["GivenDrafts", "Guard", "NgramProposer", "Proposer", "Wanted", "proposer_of"]


def proposer_of(name: str) -> Proposer | None:
    """Return a new proposer by its name in EngineOptions.speculative; None for "off"."""
    return NgramProposer() if name == "ngram" else None
