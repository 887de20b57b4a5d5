"""Choose the arithmetic of attention: exact, or rounded to bfloat16 where keys and values have 16 bits."""

from __future__ import annotations

from ridgeline.errors import RequestError
from ridgeline.spec import ModelSpec
from ridgeline.spec.storage import StateDType, has_rows

EXACT, ROUNDED = "exact", "bf16"
ATTENTIONS = EXACT, ROUNDED
ROUNDS: tuple[StateDType, ...] = ("bfloat16", "float16")  # types of keys and values that can be rounded


def choose_attention(attention: str, state: StateDType, spec: ModelSpec) -> tuple[str, str]:
    """Return how attention is computed, and why.

    attention: the user's choice. state: the type of keys and values. Raises RequestError for an unknown choice, and for
    keys and values that cannot be rounded.
    """
    if attention not in ATTENTIONS:
        raise RequestError(f"attention (--attention) {attention!r} is not known; known are {', '.join(ATTENTIONS)}")
    if attention == EXACT:
        return EXACT, "in float32; bf16 is faster for prompts on CPUs with AVX-512 BF16, and its loss is printed"
    if not has_rows(spec):
        return EXACT, "without effect: no layer has keys and values"
    if state not in ROUNDS:
        raise RequestError(
            f"attention (--attention) bf16 needs keys and values of 16 bits, and these are in {state}; add "
            "--kv-cache-dtype float16, or leave --attention out"
        )
    return ROUNDED, "as given"
