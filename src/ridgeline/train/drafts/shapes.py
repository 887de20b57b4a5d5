"""Choose the shape of a draft for a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.load.heads.layer import layer_config
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope
from ridgeline.spec.heads import Eagle3Spec, EagleSpec, HeadSpec, MedusaSpec, check_aux, default_aux
from ridgeline.train.drafts.continuations import Continuation
from ridgeline.train.drafts.options import DraftOptions

MOST_DRAFT_TOKENS = 32_000  # tokens that an EAGLE-3 head proposes, unless another number is given
THETA, EPS = 1e4, 1e-6  # of rotations and norms, if the target has none
Vocabulary = np.ndarray[Any, np.dtype[np.int64]]


def head_spec(options: DraftOptions, target: ModelSpec) -> HeadSpec:
    """Return the head that the options describe. Raises RequestError for one that no format can hold."""
    sizes: dict[str, Any] = {
        "hidden_size": target.hidden_size, "vocab_size": target.vocab_size, "draft_vocab_size": target.vocab_size,
        "target_layers": len(target.layers),
    }  # fmt: skip
    if options.kind == "medusa":
        # vLLM's format, which holds shared matrices, has no biases by default.
        return MedusaSpec(
            **sizes, num_heads=options.depth, shared_head=options.shared_head, bias=not options.shared_head
        )
    layer = {**sizes, **_layer(target), "own_embedding": False}
    spec: EagleSpec | Eagle3Spec
    if options.kind == "eagle":
        spec = EagleSpec(**layer, fc_bias=False)
    else:
        size = options.draft_vocab or min(MOST_DRAFT_TOKENS, target.vocab_size)
        if size > target.vocab_size:
            raise RequestError(f"draft_vocab is {size}, and the model has {target.vocab_size} tokens; lower it")
        spec = Eagle3Spec(**{**layer, "draft_vocab_size": size}, aux_layers=aux_layers(len(target.layers)))
    layer_config(spec)
    return spec


def aux_layers(num_layers: int) -> tuple[int, ...]:
    """Return the ids of a low, a middle and a high stream: vLLM's, and others for models of a few layers."""
    ids = default_aux(num_layers)
    if num_layers >= 8 and check_aux(ids, num_layers) is None:
        return ids
    return tuple(sorted({1, (num_layers + 1) // 2, num_layers}))


def frequent_tokens(spec: HeadSpec, data: Sequence[Continuation]) -> Vocabulary | None:
    """Return the tokens that the target wrote most often, in ascending order, for a head with a reduced vocabulary."""
    if not spec.has_table:
        return None
    counts = sum(np.bincount(one.ids[one.prompt :], minlength=spec.vocab_size) for one in data)
    order = np.argsort(-np.asarray(counts), kind="stable")
    return np.sort(order[: spec.draft_vocab_size]).astype(np.int64)


def draft_spec(target: ModelSpec) -> ModelSpec:
    """Return a small decoder for a target: 3/8 of its hidden size and a quarter of its layers, at least two."""
    width = max(32, -(-target.hidden_size * 3 // 8 // 32) * 32)
    dim = 64 if width % 64 == 0 else 32
    heads = width // dim
    norm = RMSNorm(_eps(target))
    kv = next(n for n in (heads // 4, heads // 3, 1) if n and heads % n == 0)
    mixer = Attention(heads, kv, dim, dim**-0.5, Rope(dim, _theta(target)), qk_norm=norm)
    mlp = GatedMLP(-(-width * 8 // 3 // 8) * 8)
    layers = (Layer(mixer, mlp, norm),) * max(2, len(target.layers) // 4)
    return ModelSpec(
        "draft", target.vocab_size, width, target.max_position_embeddings, layers, norm, tie_word_embeddings=True
    )


def check_draft_spec(spec: ModelSpec, target: ModelSpec, longest: int) -> None:
    """Raise RequestError for a decoder that cannot draft for a target. longest: tokens of a training sequence."""
    if spec.vocab_size != target.vocab_size:
        raise RequestError(
            f"the draft's spec has a vocabulary of {spec.vocab_size} tokens, and the model has {target.vocab_size}; "
            f"set vocab_size to {target.vocab_size}"
        )
    if spec.max_position_embeddings < longest:
        raise RequestError(
            f"the draft's spec has {spec.max_position_embeddings} positions, and continuations have up to {longest} "
            "tokens; raise max_position_embeddings"
        )
    for number, layer in enumerate(spec.layers):
        if layer.mixer is not None and layer.mixer.state().snapshot:
            raise RequestError(
                f"the draft's spec has a recurrent layer (layer {number}), whose state cannot be taken back when a "
                "draft is rejected; use attention only"
            )


def _layer(target: ModelSpec) -> dict[str, Any]:
    """Return the fields of an EAGLE head's layer, with the sizes of the target's layers where they fit."""
    width = target.hidden_size
    own = next(iter(target.attentions(shared=False)), None)
    if own is None or own.head_dim % 2:
        dim = next(d for d in (64, 32, 16, 8, 2) if width % d == 0 or d == 2)
        heads = kv = max(1, width // dim)
    else:
        dim, heads, kv = own.head_dim, own.num_heads, own.num_kv_heads
    sizes = (getattr(layer.mlp, "intermediate_size", None) for layer in target.layers)
    inner = next((size for size in sizes if size), None)
    return {
        "attention": Attention(heads, kv, dim, dim**-0.5, Rope(dim, _theta(target))),
        "mlp": GatedMLP(inner or -(-width * 8 // 3 // 8) * 8), "norm": RMSNorm(_eps(target)),
        "max_position_embeddings": target.max_position_embeddings,
    }  # fmt: skip


def _theta(target: ModelSpec) -> float:
    return next((rope.theta for rope in target.ropes()), THETA)


def _eps(target: ModelSpec) -> float:
    return target.norm.eps if isinstance(target.norm, RMSNorm) else EPS
