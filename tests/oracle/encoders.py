"""Tiny random encoders, built and run with transformers: each text alone, without padding, with eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from oracle.build import redraw

VOCAB = 257
LENGTHS = (1, 7, 63, 100, 257)
Ids = Sequence[Sequence[int]]


@dataclass(frozen=True)
class EncoderCase:
    """One tiny encoder. Each field differs from its default. toggles: changes that must change the hidden states."""

    config_class: str
    kwargs: dict[str, Any]
    toggles: tuple[dict[str, Any], ...] = field(default=())


def _dims(**more: Any) -> dict[str, Any]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3}
    return {**sizes, "num_attention_heads": 4, "max_position_embeddings": 300, "tie_word_embeddings": True, **more}


_EPS = {"layer_norm_eps": 1e-2}
CASES = {
    "bert": EncoderCase(
        "BertConfig", _dims(**_EPS, type_vocab_size=3), ({"hidden_act": "relu"}, {"layer_norm_eps": 1e-5})
    ),
    "roberta": EncoderCase("RobertaConfig", _dims(**_EPS, pad_token_id=1, type_vocab_size=1), ({"pad_token_id": 4},)),
    "xlm-roberta": EncoderCase(
        "XLMRobertaConfig", _dims(**_EPS, pad_token_id=2, type_vocab_size=1), ({"hidden_act": "silu"},)
    ),
    "camembert": EncoderCase("CamembertConfig", _dims(**_EPS, pad_token_id=1, type_vocab_size=1)),
}


def texts(seed: int = 1) -> list[list[int]]:
    """Return token ids of texts of different lengths, without special tokens."""
    rng = np.random.default_rng(seed)
    return [rng.integers(5, VOCAB, n).tolist() for n in LENGTHS]


def build(case: EncoderCase, folder: Path, *, labels: int = 0, seed: int = 1, **changes: Any) -> nn.Module:
    """Build a case's model, draw its weights, and save it. labels: number of scores of a head; 0: there is none."""
    kwargs = {**case.kwargs, **changes, **({"num_labels": labels} if labels else {})}
    config = getattr(transformers, case.config_class)(**kwargs)
    kind = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    model: nn.Module = kind.from_config(config, attn_implementation="eager").to(torch.float32).eval()
    redraw(model, seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def hidden(model: nn.Module, ids: Ids, types: Ids | None = None) -> list[np.ndarray]:
    """Return the last hidden states [tokens, width] of each text, in float64."""
    return [_run(model, one, types and types[i]).last_hidden_state[0].numpy() for i, one in enumerate(ids)]


@torch.no_grad()
def scores(model: nn.Module, ids: Ids, types: Ids | None = None) -> np.ndarray:
    """Return the logits [texts, labels] of a head, in float64."""
    return np.stack([_run(model, one, types and types[i]).logits[0].numpy() for i, one in enumerate(ids)])


def _run(model: nn.Module, ids: Sequence[int], types: Sequence[int] | None) -> Any:
    more = {} if types is None else {"token_type_ids": torch.tensor([list(types)])}
    return model.double()(torch.tensor([list(ids)]), **more)
