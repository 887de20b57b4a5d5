"""The cases of the oracle: tiny random models of every family, described as plain data.

A case is what transformers needs to build the model (a config class and its keyword arguments) and what a
comparison needs to be fair: how long sequences may be, and how far greedy decoding may go.  The values are
chosen so that each field that a family reads is away from its default and from any value that makes a
mistake invisible (a window is shorter than the sequences, a rotary part is smaller than a head, an
attention scale is not 1/sqrt(head_dim), an epsilon is large enough to matter).  `toggles` makes that claim
testable: each one is a change of config, on the same weights, that has to change the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCAB = 257  # no power of two and no multiple of anything: a padded vocabulary shows at once
WINDOW = 24  # shorter than the two longer test sequences, and than prompt plus greedy tokens
SPECIAL_TOKENS = (0, 1, 2)  # pad, bos, eos of every case; no prompt holds one


@dataclass(frozen=True)
class Case:
    """One tiny model and the ground on which it may be compared.

    `seed` draws weights and prompts.  It was chosen so that greedy decoding in float64 keeps the best token
    ahead of the second by more than 1e-3, never emits a special token, and does not fall into a short loop.

    `max_model_len` is the length to load the model with.  `greedy_tokens` 0 means: no greedy comparison.
    """

    model_type: str
    config_class: str
    kwargs: dict[str, Any]
    notes: str
    seed: int = 1
    max_model_len: int = 256
    lengths: tuple[int, ...] = (1, 7, 33, 100)
    greedy_prompt_length: int = 24
    greedy_tokens: int = 64
    toggles: tuple[dict[str, Any], ...] = field(default=())

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding; the classes disagree on the default, so cases say it."""
        return bool(self.kwargs["tie_word_embeddings"])


def prompts(case: Case) -> list[list[int]]:
    """Token sequences of the case's lengths, for the comparison of logits."""
    rng = np.random.default_rng([case.seed, 1])
    return [rng.integers(3, VOCAB, size=n).tolist() for n in case.lengths]


def greedy_prompt(case: Case) -> list[int]:
    """The prompt from which greedy decoding starts."""
    rng = np.random.default_rng([case.seed, 2])
    return rng.integers(3, VOCAB, size=case.greedy_prompt_length).tolist()


def dims(hidden: int = 64, heads: int = 4, kv: int = 2, layers: int = 4, **more: Any) -> dict[str, Any]:
    """The dimensions that most config classes name alike."""
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 88, "num_hidden_layers": layers}
    heads_ = {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    rest = {"rms_norm_eps": 1e-2, "tie_word_embeddings": False, **tokens}
    return sizes | heads_ | rest | more


def rope(theta: float = 10000.0, kind: str = "default", **more: Any) -> dict[str, Any]:
    """One rotation for all layers, as a config argument."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """A rotation for the full layers and one for the windowed ones, as a config argument."""
    both = {"full_attention": full["rope_parameters"], "sliding_attention": sliding["rope_parameters"]}
    return {"rope_parameters": both}


def family(cases: dict[str, Case], model_type: str, config_class: str) -> Callable[..., None]:
    """What adds cases of one family: a name, a seed, notes, config arguments, then the toggles."""

    def add(name: str, seed: int, notes: str, kwargs: dict[str, Any], *toggles: dict[str, Any], **more: Any) -> None:
        cases[name] = Case(model_type, config_class, kwargs, notes, seed, toggles=toggles, **more)

    return add


EPS = {"rms_norm_eps": 1e-6}
TIED = {"tie_word_embeddings": True}
WIN = {"sliding_window": WINDOW}
NO_WINDOW = {"sliding_window": None}
WIDER = {"sliding_window": WINDOW + 1}  # an off-by-one in the mask has to show
USE_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW}
UNUSED = {"use_sliding_window": False}
BIAS = {"attention_bias": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
PLAIN = rope()
OWN = rope(3000.0)  # a base of the rotation that is nobody's default
IN_TURN = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
ODD = {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
