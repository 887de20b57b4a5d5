"""Read the JSON of vLLM's --speculative-config as options of Ridgeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ridgeline.errors import RequestError

NAME = "--speculative-config"
METHODS = ("ngram", "draft_model", "medusa", "eagle", "eagle3")
# Fields that hold for every draft here, with the only value that they may have.
FIXED: Mapping[str, Any] = {"draft_tensor_parallel_size": 1, "disable_padded_drafter_batch": False}


def speculative_flags(text: str) -> tuple[str, ...]:
    """Return the flags that replace a --speculative-config. Raises RequestError for what they cannot say."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise RequestError(f'{NAME} {text[:80]}: it must be a JSON object such as {{"method": "ngram"}}')
    fields = dict(given)
    method, model = fields.pop("method", None), fields.pop("model", None)
    depth = fields.pop("num_speculative_tokens", None)
    for name, value in FIXED.items():
        if fields.pop(name, value) != value:
            raise RequestError(f"{NAME}: {name} is {given[name]!r}; it must be {value!r}, or left out")
    if fields:
        raise RequestError(f"{NAME}: Ridgeline has no {next(iter(fields))!r}; leave the field out")
    if method not in (None, *METHODS):
        raise RequestError(f"{NAME}: method is {method!r}; it must be {', '.join(METHODS[:-1])} or {METHODS[-1]}")
    chosen = "ngram" if method == "ngram" or model == "ngram" else model
    if not isinstance(chosen, str) or not chosen:
        raise RequestError(
            f"{NAME}: model is {model!r}; it must name the draft model or the head, unless method is ngram"
        )
    if depth is None:
        return ("--speculative", chosen)
    if type(depth) is not int or depth < 1:
        raise RequestError(f"{NAME}: num_speculative_tokens is {depth!r}; it must be a whole number of at least 1")
    return ("--speculative", chosen, "--num-speculative-tokens", str(depth))
