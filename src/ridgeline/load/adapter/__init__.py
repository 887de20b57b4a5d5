"""Read adapters that peft writes: low-rank terms for matrices of a model, and weights that replace its own."""

from ridgeline.load.adapter.config import MAX_RANK, AdapterConfig
from ridgeline.load.adapter.read import Adapter, find_adapter, rank_of, read_adapter
from ridgeline.load.adapter.terms import Term

__all__ = ["MAX_RANK", "Adapter", "AdapterConfig", "Term", "find_adapter", "rank_of", "read_adapter"]
