"""Measure models: loss, divergence from others, acceptance of drafts, associative recall, validity of code."""

from ridgeline.evals.acceptance import Acceptance, measure_acceptance
from ridgeline.evals.completions import Verdict, function_headers, judge
from ridgeline.evals.divergence import Divergence, measure_divergence
from ridgeline.evals.documents import Document, check_same_tokens, encode_texts, read_texts
from ridgeline.evals.estimates import Estimate, Proportion
from ridgeline.evals.likelihood import Likelihood, Pair, encode_pair, first_token, score
from ridgeline.evals.perplexity import Perplexity, measure_perplexity
from ridgeline.evals.questions import END, TASKS, Question, Task, find_task, read_questions
from ridgeline.evals.recall import Recall, measure_recall, num_recall_tokens, recall_tokens
from ridgeline.evals.tasks import MAX_ANSWER_TOKENS, Score, measure_choices, measure_generated
from ridgeline.evals.windows import SlidingContext

__all__ = [
    "END",
    "MAX_ANSWER_TOKENS",
    "TASKS",
    "Acceptance",
    "Divergence",
    "Document",
    "Estimate",
    "Likelihood",
    "Pair",
    "Perplexity",
    "Proportion",
    "Question",
    "Recall",
    "Score",
    "SlidingContext",
    "Task",
    "Verdict",
    "check_same_tokens",
    "encode_pair",
    "encode_texts",
    "find_task",
    "first_token",
    "function_headers",
    "judge",
    "measure_acceptance",
    "measure_choices",
    "measure_divergence",
    "measure_generated",
    "measure_perplexity",
    "measure_recall",
    "num_recall_tokens",
    "read_questions",
    "read_texts",
    "recall_tokens",
    "score",
]
