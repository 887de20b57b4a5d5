"""The cases of the oracle: tiny random models of every family, described as plain data.

A case contains a config class of transformers with its keyword arguments, and the limits of a fair comparison: the
lengths of sequences, and the number of greedy tokens. In the configs, each field of a family differs from its default
and from values that would hide a mistake: a window is shorter than the sequences, the rotary part is smaller than a
head, the attention scale is not 1/sqrt(head_dim), an epsilon is large enough to matter. `toggles` tests this: each one
changes the config, and must change the logits with equal weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

VOCAB = 257  # not a power of two or a common multiple, so that a padded vocabulary is noticed
WINDOW = 24  # shorter than the two longer test sequences, and than prompt plus greedy tokens
SPECIAL_TOKENS = (0, 1, 2)  # pad, bos, eos of every case; no prompt contains one


@dataclass(frozen=True)
class Case:
    """One tiny model and the range in which it may be compared.

    `seed` draws weights and prompts. It was chosen so that in float64 each greedy token leads the second best by more
    than 1e-3, no special token is generated, and the text does not fall into a short loop.

    `max_model_len` is the length with which the model is loaded. `greedy_tokens` of 0 means no greedy comparison.
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
        """Return whether the output head is the embedding; the classes have different defaults, so cases set it."""
        return bool(self.kwargs["tie_word_embeddings"])


def prompts(case: Case) -> list[list[int]]:
    """Return token sequences of the case's lengths, for the comparison of logits."""
    rng = np.random.default_rng([case.seed, 1])
    return [rng.integers(3, VOCAB, size=n).tolist() for n in case.lengths]


def greedy_prompt(case: Case) -> list[int]:
    """Return the prompt from which greedy decoding starts."""
    rng = np.random.default_rng([case.seed, 2])
    return rng.integers(3, VOCAB, size=case.greedy_prompt_length).tolist()


def dims(hidden: int = 64, heads: int = 4, kv: int = 2, layers: int = 4, **more: Any) -> dict[str, Any]:
    """Return the dimensions that most config classes name alike."""
    sizes = {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 88, "num_hidden_layers": layers}
    heads_ = {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 256}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    rest = {"rms_norm_eps": 1e-2, "tie_word_embeddings": False, **tokens}
    return sizes | heads_ | rest | more


def rope(theta: float = 10000.0, kind: str = "default", **more: Any) -> dict[str, Any]:
    """Return one rotation for all layers, as a config argument."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def ropes(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    """Return rotations for full and for windowed layers, as a config argument."""
    both = {"full_attention": full["rope_parameters"], "sliding_attention": sliding["rope_parameters"]}
    return {"rope_parameters": both}


def family(cases: dict[str, Case], model_type: str, config_class: str) -> Callable[..., None]:
    """Return a function that adds cases of one family: a name, a seed, notes, config arguments, then the toggles."""

    def add(name: str, seed: int, notes: str, kwargs: dict[str, Any], *toggles: dict[str, Any], **more: Any) -> None:
        cases[name] = Case(model_type, config_class, kwargs, notes, seed, toggles=toggles, **more)

    return add


EPS = {"rms_norm_eps": 1e-6}
TIED = {"tie_word_embeddings": True}
WIN = {"sliding_window": WINDOW}
NO_WINDOW = {"sliding_window": None}
WIDER = {"sliding_window": WINDOW + 1}  # an off-by-one in the mask must be noticed
USE_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW}
UNUSED = {"use_sliding_window": False}
BIAS = {"attention_bias": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
PLAIN = rope()
OWN = rope(3000.0)  # a RoPE base that is no class's default
IN_TURN = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]}
ODD = {"layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
