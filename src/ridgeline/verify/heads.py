"""Heads with random weights for any model: their drafts are mostly wrong, and must not change a token."""

from __future__ import annotations

import numpy as np

from ridgeline.load.heads import HeadFile
from ridgeline.load.safetensors import HostTensor
from ridgeline.runtime.heads import LoadedHead, prepare_head
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import Attention, GatedMLP, ModelSpec, RMSNorm, Rope
from ridgeline.spec.heads import Eagle3Spec, EagleSpec, HeadSpec, MedusaSpec

HEADS = ("medusa", "eagle", "eagle3")
DIM, INNER = 16, 64  # numbers of an attention head, and of the MLP


def head_spec(kind: str, target: ModelSpec, heads: int) -> HeadSpec:
    """Return a small head for a model. kind: one of HEADS. heads: number of heads of a Medusa model."""
    width, vocab = target.hidden_size, target.vocab_size
    if kind == "medusa":
        return MedusaSpec(hidden_size=width, vocab_size=vocab, draft_vocab_size=vocab, num_heads=heads)
    attention, mlp, norm = Attention(2, 1, DIM, DIM**-0.5, Rope(DIM)), GatedMLP(INNER), RMSNorm(1e-5)
    length, layers = target.max_position_embeddings, len(target.layers)
    if kind == "eagle":
        return EagleSpec(
            hidden_size=width, vocab_size=vocab, draft_vocab_size=vocab, attention=attention, mlp=mlp, norm=norm,
            max_position_embeddings=length, own_embedding=False,
        )  # fmt: skip
    return Eagle3Spec(
        hidden_size=width, vocab_size=vocab, draft_vocab_size=vocab - 1, attention=attention, mlp=mlp, norm=norm,
        max_position_embeddings=length, own_embedding=False, aux_layers=tuple(sorted({0, layers // 2, layers})),
    )  # fmt: skip


def random_head(kind: str, target: LoadedModel, heads: int, seed: int) -> LoadedHead:
    """Return a head with random weights on the device of its target; see `head_spec`."""
    spec, rng = head_spec(kind, target.spec, heads), np.random.default_rng(seed)
    weights = {
        w.name: HostTensor((rng.normal(0, 1, w.shape) / np.sqrt(w.shape[-1])).astype(np.float32), "float32")
        for w in spec.weights()
    }
    # The token of the middle is never proposed.
    table = np.delete(np.arange(spec.vocab_size), spec.vocab_size // 2) if spec.has_table else None
    return prepare_head(HeadFile(spec, weights, table), target)
