"""Invented predictions and measurements of the lab's experiments, by which verdicts are tested."""

from __future__ import annotations

from typing import Any, NamedTuple


class Faked(NamedTuple):
    """Facts of an experiment. predicted, good: all claims hold by them. bad: the claims of `wrong` differ by it."""

    predicted: dict[str, Any]
    good: dict[str, Any]
    bad: dict[str, Any]
    wrong: set[int]


EXACT = ("memory", "orca")  # experiments whose verdicts are the same on every machine
FAKED: dict[str, Faked] = {
    "intensity": Faked(
        {"mlp": [1.0, 2.0, 3.99, 7.98], "mlp_of_a_prompt": 15.9, "attention": [1.0], "grouped_attention": 4.0,
         "flops_per_s": 1e11, "bytes_per_s": 1e10, "ridge": 10.0, "knee_rows": 20.0},
        {"products": {"1": 5e9, "256": 9.5e10}, "attention": {"1": 4e9, "64": 5e9}},
        {"products": {"1": 5e9, "256": 2e10}, "attention": {"1": 4e9, "64": 4e10}}, {1, 4},
    ),
    "memory": Faked(
        {"llama_cache": 2**30, "llama_weights": 13476831232, "mistral_cache_by_query_heads": 2**33,
         "rates": [124.7, 2689.5, 3561.8], "memory": [1e9, 2e9, 2e11], "h100_memory": 8e10, "latent_numbers": 576},
        {"llama_cache": 2**30, "mistral_cache": 8 * 10**9, "latent_numbers": 576},
        {"llama_cache": 2**29, "mistral_cache": 2**31, "latent_numbers": 16384}, {7, 14, 42},
    ),
    "orca": Faked({"gains": {"2": 1.5}}, {"gains": {"2": 1.52}}, {"gains": {"2": 1.1}}, {35}),
}  # fmt: skip
