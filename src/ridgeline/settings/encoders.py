"""Choose the settings of an encoder, which computes whole texts in one pass and keeps no state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from ridgeline.cost.memory import pass_bytes
from ridgeline.errors import RequestError
from ridgeline.settings.config import EngineConfig, EngineOptions
from ridgeline.spec import ModelSpec
from ridgeline.spec.text import num_bytes

SEQS, TOKENS = 256, 1024  # the choice if memory allows it
LIMITS = ("max_num_seqs", "max_num_batched_tokens")


def resolve_encoder(
    spec: ModelSpec, max_model_len: int, options: EngineOptions, *, free_bytes: int, fraction: float,
    on_host: bool, float_bytes: int,
) -> EngineConfig:  # fmt: skip
    """Choose how many tokens and texts a pass has at most. Raises RequestError for options without a meaning here, and
    if the longest text does not fit.

    free_bytes: device memory after weights are loaded. fraction: share of it to use.
    """
    given = {name: value for name, value in asdict(options).items() if value not in (None, "auto", "off", 0)}
    if unknown := sorted(set(given) - set(LIMITS)):
        raise RequestError(
            f"{unknown[0]} is {given[unknown[0]]}, but {spec.family} is an encoder, which keeps no state and writes no "
            "tokens; leave it out"
        )
    for name, value in given.items():
        if type(value) is not int or value < 1:
            raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1")
    limit = int(free_bytes * fraction)

    def size(tokens: int) -> int:
        return pass_bytes(spec, tokens, max_model_len, on_cpu=on_host, float_bytes=float_bytes)

    least = max_model_len  # a text is computed in one pass
    if size(least) > limit:
        raise RequestError(
            f"a pass over a text of {max_model_len} tokens needs {num_bytes(size(least))} of workspace; "
            f"{num_bytes(max(limit, 0))} are available: lower --max-model-len, or free some memory"
        )
    wanted = options.max_num_batched_tokens or max(TOKENS, least)
    tokens, why = _fitting(max(wanted, least), least, limit, size)
    reasons = {
        "max_model_len": "the model's longest text, unless it was given",
        "max_num_batched_tokens": "as given" if options.max_num_batched_tokens == tokens else why,
        "max_num_seqs": "as given" if options.max_num_seqs else "texts that are accepted at once before others wait",
    }
    return EngineConfig(
        max_model_len, options.max_num_seqs or SEQS, tokens, 1, 1, "float32", 1, (), (), (), size(tokens), free_bytes,
        reasons,
    )  # fmt: skip


def _fitting(wanted: int, least: int, limit: int, size: Callable[[int], int]) -> tuple[int, str]:
    """Return the tokens of a pass that fit, and why so many."""
    tokens = wanted
    while tokens > least and size(tokens) > limit:
        tokens = max(least, tokens // 2)
    if tokens < wanted:
        return tokens, f"lowered from {wanted}, so that a pass fits: its workspace takes {num_bytes(size(tokens))}"
    return tokens, "short texts share a pass without padding; more tokens would make other requests wait longer"
