"""Proposers of draft tokens for speculative decoding. Verifying drafts belongs to the scheduler and the runner."""

from ridgeline.propose.given import GivenDrafts
from ridgeline.propose.guard import Guard
from ridgeline.propose.proposer import Proposer, Wanted

__all__ = ["GivenDrafts", "Guard", "Proposer", "Wanted"]
