"""What a model makes of a text: its loss, and how far it is from another model."""

from ridgeline.evals.divergence import Divergence, measure_divergence
from ridgeline.evals.documents import Document, check_same_tokens, encode_texts, read_texts
from ridgeline.evals.estimates import Estimate, Proportion
from ridgeline.evals.perplexity import Perplexity, measure_perplexity
from ridgeline.evals.windows import SlidingContext

__all__ = [
    "Divergence",
    "Document",
    "Estimate",
    "Perplexity",
    "Proportion",
    "SlidingContext",
    "check_same_tokens",
    "encode_texts",
    "measure_divergence",
    "measure_perplexity",
    "read_texts",
]
