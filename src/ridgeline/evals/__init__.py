"""Measure models: loss, divergence from others, acceptance of drafts, associative recall, validity of code."""

from ridgeline.evals.acceptance import Acceptance, measure_acceptance
from ridgeline.evals.completions import Verdict, function_headers, judge
from ridgeline.evals.divergence import Divergence, measure_divergence
from ridgeline.evals.documents import Document, check_same_tokens, encode_texts, read_texts
from ridgeline.evals.estimates import Estimate, Proportion
from ridgeline.evals.perplexity import Perplexity, measure_perplexity
from ridgeline.evals.recall import Recall, measure_recall, num_recall_tokens, recall_tokens
from ridgeline.evals.windows import SlidingContext

__all__ = [
    "Acceptance",
    "Divergence",
    "Document",
    "Estimate",
    "Perplexity",
    "Proportion",
    "Recall",
    "SlidingContext",
    "Verdict",
    "check_same_tokens",
    "encode_texts",
    "function_headers",
    "judge",
    "measure_acceptance",
    "measure_divergence",
    "measure_perplexity",
    "measure_recall",
    "num_recall_tokens",
    "read_texts",
    "recall_tokens",
]
