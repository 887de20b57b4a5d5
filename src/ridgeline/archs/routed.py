"""Families with DeepSeek-V3's router beside ordinary attention: GLM 4.5, dots.llm1 and MiniMax M2."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import (
    Family,
    Heads,
    attention,
    decoder,
    expert_groups,
    gated_mlp,
    layer_windows,
    rms_norm,
)
from ridgeline.archs.moe import MIXTRAL_NAMES, QWEN_NAMES
from ridgeline.archs.names import Tensor
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import GatedMLP, Layer, ModelSpec, MoE


def _experts(c: Config, dense: GatedMLP, experts: int, chosen: int, inner: int, shared: int, *, normalize: bool) -> MoE:
    """Return experts that sigmoid scores choose, with a number per expert that only affects the choice.

    inner: size of an expert; shared: number of shared experts, which are one MLP of their summed size.
    """
    groups = ("n_group", c.get_size("n_group", 1)), ("topk_group", c.get_size("topk_group", 1))
    return MoE(
        experts, chosen, inner, dense.activation, normalize=normalize, scores="sigmoid", choice_bias=True,
        groups=expert_groups(c, ("n_routed_experts", experts), *groups, "best_two"),
        scale=c.get_float("routed_scaling_factor", 1.0),
        shared=replace(dense, intermediate_size=inner * shared) if shared else None,
    )  # fmt: skip


def glm4_moe(c: Config) -> ModelSpec:
    """GLM 4.5 and 4.6: half of each head is rotated (arXiv:2508.06471)."""
    heads, norm, dense = Heads.read(c, num_kv_heads=8, null_kv=False), rms_norm(c, 1e-5), gated_mlp(c)
    moe = _experts(
        c, dense, c.get_size("n_routed_experts", 128), c.get_size("num_experts_per_tok", 8),
        c.get_size("moe_intermediate_size", 1408), c.get_int("n_shared_experts", 1),
        normalize=c.get_bool("norm_topk_prob", True),
    )  # fmt: skip
    mixer = attention(
        heads, read_rope(c, heads.head_dim, Rotation(partial=0.5)), qkv_bias=c.get_bool("attention_bias", False),
        qk_norm=norm if c.get_bool("use_qk_norm", False) else None,
    )  # fmt: skip
    first = c.get_int("first_k_dense_replace", 1)
    return decoder(c, tuple(Layer(mixer, moe if i >= first else dense, norm) for i in range(c.get_layer_count())), norm)


def dots1(c: Config) -> ModelSpec:
    """dots.llm1: norms of heads (arXiv:2506.05767)."""
    heads, norm, dense = Heads.read(c, num_kv_heads=32), rms_norm(c), gated_mlp(c)
    bias, window = c.get_bool("attention_bias", False), c.get_size("sliding_window", 4096, None)
    moe = _experts(
        c, dense, c.get_size("n_routed_experts"), c.get_size("num_experts_per_tok"),
        c.get_size("moe_intermediate_size", 1408), c.get_int("n_shared_experts"),
        normalize=c.get_bool("norm_topk_prob", False),
    )  # fmt: skip
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias, qk_norm=norm)
    first, last_full = c.get_int("first_k_dense_replace", 0), c.get_int("max_window_layers", 62)
    windows = layer_windows(c, lambda i: window is not None and i >= last_full, window)
    layers = (Layer(replace(mixer, window=w), moe if i >= first else dense, norm) for i, w in enumerate(windows))
    return decoder(c, tuple(layers), norm)


def minimax_m2(c: Config) -> ModelSpec:
    """MiniMax M2: norms of q and k over all heads, and experts in every layer."""
    heads, norm = Heads.read(c, num_kv_heads=8, head_dim_default=128, null_kv=False), rms_norm(c)
    moe = MoE(
        c.get_size("num_local_experts", 256), c.get_size("num_experts_per_tok", 8), c.get_size("intermediate_size"),
        c.get_activation("hidden_act", "silu"), scores="sigmoid", choice_bias=True,
    )  # fmt: skip
    size = c.get_size("rotary_dim", None, None)
    rope = read_rope(c, heads.head_dim, Rotation(5e6, partial=size / heads.head_dim if size else 1.0))
    mixer = attention(heads, rope, qk_norm=norm, qk_norm_over="all_heads")
    return decoder(c, (Layer(mixer, moe, norm),) * c.get_layer_count(), norm)


GLM_NAMES = QWEN_NAMES.with_parts(
    parts={
        "mlp.choice": Tensor("mlp.gate.e_score_correction_bias"),
        **{f"mlp.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
    },
    ignore=(*QWEN_NAMES.ignore, r"^model\.layers\.{layers}\."),  # a layer for multi-token prediction
)
M2_NAMES = MIXTRAL_NAMES.with_parts(parts={"mlp.choice": Tensor("block_sparse_moe.e_score_correction_bias")})

_MTP = ("num_nextn_predict_layers", "num_mtp_layers")
FAMILIES = (
    Family("glm4_moe", glm4_moe, GLM_NAMES, harmless=_MTP),
    Family("dots1", dots1, GLM_NAMES),
    Family("minimax_m2", minimax_m2, M2_NAMES, harmless=("router_jitter_noise",)),
)
