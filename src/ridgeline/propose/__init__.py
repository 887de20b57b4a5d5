"""Proposers of draft tokens for speculative decoding. Verifying drafts belongs to the scheduler and the runner."""

from ridgeline.propose.given import GivenDrafts
from ridgeline.propose.guard import Guard
from ridgeline.propose.ngram import NgramProposer
from ridgeline.propose.proposer import Drafts, Proposer, Wanted

__all__ = ["PROPOSERS", "Drafts", "GivenDrafts", "Guard", "NgramProposer", "Proposer", "Wanted", "proposer_of"]

PROPOSERS = ("off", "ngram")  # values of EngineOptions.speculative that do not name a draft model


def proposer_of(name: str) -> Proposer | None:
    """Return a new proposer by its name in EngineOptions.speculative; None for "off" and for a draft model."""
    return NgramProposer() if name == "ngram" else None
