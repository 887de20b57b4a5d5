"""Command R and R7B (Cohere): parallel branches behind one norm without a bias, and scaled logits."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, layer_windows, whole_heads
from ridgeline.archs.moe import QWEN_NAMES
from ridgeline.archs.rope import FULL, MROPE, SLIDING, Rotation, read_rope, read_ropes_of_layers
from ridgeline.spec import Attention, GatedMLP, LayerNorm, ModelSpec, MoE, ParallelLayer, RMSNorm


def cohere(c: Config) -> ModelSpec:
    """Command R and Aya 23: neighboring numbers of a head are rotated together."""
    c.expect("use_qk_norm", False)  # Command R+ has a norm with weights of its own for each head
    mixer = _attention(c, Heads.read(c), theta=5e5)
    return _model(c, [mixer] * c.get_layer_count())


def cohere2(c: Config) -> ModelSpec:
    """Command R7B and A: three local layers for each global one, which has no positions (arXiv:2504.00698)."""
    mixer = _attention(c, Heads.read(c), theta=1e4)
    period = c.get_size("sliding_window_pattern", 4)
    windows = layer_windows(c, lambda i: (i + 1) % period != 0, c.get_size("sliding_window", 4096, None))
    return _model(c, [replace(mixer, window=w, rope=mixer.rope if w else None) for w in windows])


def cohere_compass(c: Config) -> ModelSpec:
    """North Micro (Command Compass), the language model: each kind of layer has a rotation of its own, or none."""
    heads, count, bias = whole_heads(c, Heads.read(c)), c.get_layer_count(), c.get_bool("attention_bias", False)
    c.expect("pooling")  # checkpoints with it give vectors, not texts
    kinds = c.get_choices("layer_types", count, {FULL, SLIDING}) or [FULL] * count
    own = c.sub("rope_parameters")
    if own is None:
        raise c.error("rope_parameters", "is missing")
    rotating = {kind: heads.head_dim for kind in kinds if not own.is_null(kind)}
    ropes = read_ropes_of_layers(c, rotating, {}, whole=True, harmless=_BESIDE)
    window = c.get_size("sliding_window", 4096)
    mixer = attention(heads, None, qkv_bias=bias, out_bias=bias)
    norm, mlp = LayerNorm(c.get_eps("layer_norm_eps", 1e-5), bias=False), gated_mlp(c)
    layers = tuple(
        ParallelLayer(
            replace(mixer, rope=ropes.get(kind), window=window if kind == SLIDING else None), mlp, norm, one_norm=True
        )
        for kind in kinds
    )
    return decoder(
        c, layers, norm, tied=True, max_len=c.get_size("max_position_embeddings"),
        logit_scale=c.get_float("logit_scale", 1.0, 1.0),
    )  # fmt: skip


def cohere2_moe(c: Config) -> ModelSpec:
    """Command A+: Command A with experts; dense layers before them have windows and rotations of their own."""
    _check_rotation(c)
    mixer = _attention(c, Heads.read(c, head_dim_default=128), theta=1e4)
    dense, count = gated_mlp(c), c.get_layer_count()
    first, inner = c.get_int("first_k_dense_replace", 0), dense.intermediate_size
    period, early = c.get_size("sliding_window_pattern", 4), c.get_size("prefix_dense_sliding_window_pattern", 1)
    windows = layer_windows(
        c, lambda i: (i + 1) % early != 0 if i < first else (i - first + 1) % period != 0,
        c.get_size("sliding_window", 4096, None),
    )  # fmt: skip
    kinds = c.get_choices("mlp_layer_types", count, ("dense", "sparse"))
    kinds = kinds or ["dense" if i < first else "sparse" for i in range(count)]
    before = replace(dense, intermediate_size=c.get_size("prefix_dense_intermediate_size", inner, inner))
    norm: LayerNorm | RMSNorm = LayerNorm(c.get_eps("layer_norm_eps", 1e-5), bias=False)
    if c.get_float("rms_norm_eps", None, None) is not None:
        norm = RMSNorm(c.get_eps("rms_norm_eps", 0.0))
    moe = _experts(c, dense)
    layers = tuple(
        ParallelLayer(
            replace(mixer, window=w, rope=mixer.rope if w or (early == 1 and kind == "dense") else None),
            before if kind == "dense" else moe, norm, one_norm=True,
        )
        for w, kind in zip(windows, kinds, strict=True)
    )  # fmt: skip
    length, scale = c.get_size("max_position_embeddings"), c.get_float("logit_scale", 0.0625)
    return decoder(c, layers, norm, tied=True, max_len=length, logit_scale=scale)


def _check_rotation(c: Config) -> None:
    """Check the fields of the rotation, which this class reads from `rope_parameters` alone where they exist."""
    c.expect("rope_scaling")
    c.get_float("rope_theta", 1e4)
    if (given := c.sub("rope_parameters")) is not None:
        given.get_positive("rope_theta")
        if given.get_str("rope_type") in ("llama3", "yarn"):
            given.get_size("original_max_position_embeddings")


def _experts(c: Config, dense: GatedMLP) -> MoE:
    """Return experts beside shared ones, with which they are added or averaged."""
    for name, values in (
        ("expert_selection_fn", ("softmax", "sigmoid")),
        ("shared_expert_combination_strategy", ("average", "sum")),
    ):
        c.expect(name, *values, null=False)
    sigmoid = c.get_str("expert_selection_fn", "softmax") == "sigmoid"
    inner, shared = dense.intermediate_size, c.get_int("num_shared_experts", 0)
    beside = replace(dense, intermediate_size=inner * shared) if shared > 0 else None
    share = 0.5 if beside and c.get_str("shared_expert_combination_strategy", "average") == "average" else 1.0
    return MoE(
        c.get_size("num_experts", 8), c.get_size("num_experts_per_tok", 2), inner, dense.activation,
        normalize=c.get_bool("norm_topk_prob", True) or not sigmoid, scores="sigmoid" if sigmoid else "softmax",
        scale=share, shared_scale=share, shared=beside,
    )  # fmt: skip


def _attention(c: Config, heads: Heads, theta: float) -> Attention:
    bias = c.get_bool("attention_bias", False)
    rope = read_rope(c, heads.head_dim, Rotation(theta, interleaved=True))
    return attention(heads, rope, qkv_bias=bias, out_bias=bias)


def _model(c: Config, mixers: list[Attention]) -> ModelSpec:
    norm, mlp = LayerNorm(c.get_eps("layer_norm_eps", 1e-5), bias=False), gated_mlp(c)
    layers = tuple(ParallelLayer(mixer, mlp, norm, one_norm=True) for mixer in mixers)
    length = c.get_size("model_max_length", c.get_size("max_position_embeddings"))  # Command R was trained for more
    return decoder(c, layers, norm, tied=True, max_len=length, logit_scale=c.get_float("logit_scale", 0.0625))


# Some published files repeat a base and a kind beside those of each kind of layer.
_BESIDE = (*MROPE, "rope_theta", "rope_type")
MOE_NAMES = QWEN_NAMES.with_parts(
    parts={f"mlp.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")}
)
# Fields that describe what the published code always does.
_FIXED = (
    "layer_switch", "order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing",
    "use_gated_activation", "use_parallel_block", "use_parallel_embedding", "use_qk_norm",
)  # fmt: skip
FAMILIES = (
    Family("cohere", cohere),
    Family("cohere2", cohere2, harmless=_FIXED),
    Family("cohere_compass_text", cohere_compass),
    Family("cohere2_moe", cohere2_moe, MOE_NAMES, harmless=_FIXED),
)
