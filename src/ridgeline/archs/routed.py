"""Families with DeepSeek-V3's router beside ordinary attention: GLM 4.5, dots.llm1, MiniMax M2, Trinity and others."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.dense import local_and_unrotated
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
from ridgeline.archs.names import FusedRows, Tensor
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import GatedMLP, Layer, ModelSpec, MoE


def experts(
    c: Config, dense: GatedMLP, num_experts: int, chosen: int, inner: int, shared: int, *, normalize: bool,
    name: str = "n_routed_experts", factor: str = "routed_scaling_factor", scale: float = 1.0, grouped: bool = True,
) -> MoE:  # fmt: skip
    """Return experts that sigmoid scores choose, with a number per expert that only affects the choice.

    inner: size of an expert; shared: number of shared experts, which are one MLP of their summed size. name, factor:
    fields of the number of experts and of the factor on their weights; scale: the default of that factor. grouped:
    whether the family has groups of experts.
    """
    if shared < 0:
        field = "n_shared_experts" if name == "n_routed_experts" else "num_shared_experts"
        raise c.error(field, f"is {shared}; it must not be negative")
    names = ("n_group", "topk_group")
    count, best = ((field, c.get_size(field, 1) if grouped else 1) for field in names)
    return MoE(
        num_experts, chosen, inner, dense.activation, normalize=normalize, scores="sigmoid", choice_bias=True,
        groups=expert_groups(c, (name, num_experts), count, best, "best_two"),
        scale=c.get_float(factor, scale),
        shared=replace(dense, intermediate_size=inner * shared) if shared else None,
    )  # fmt: skip


def glm4_moe(c: Config) -> ModelSpec:
    """GLM 4.5 and 4.6: half of each head is rotated (arXiv:2508.06471)."""
    first, qk_norm = c.get_int("first_k_dense_replace", 1), c.get_bool("use_qk_norm", False)
    return _glm(c, Rotation(partial=0.5), gated_mlp(c), first, qk_norm=qk_norm)


def _glm(c: Config, rotation: Rotation, dense: GatedMLP, first: int, *, qk_norm: bool) -> ModelSpec:
    """Return a model whose layers have experts from layer `first` on. rotation: the class's defaults."""
    heads, norm = Heads.read(c, num_kv_heads=8, null_kv=False), rms_norm(c, 1e-5)
    moe = experts(
        c, dense, c.get_size("n_routed_experts", 128), c.get_size("num_experts_per_tok", 8),
        c.get_size("moe_intermediate_size", 1408), c.get_int("n_shared_experts", 1),
        normalize=c.get_bool("norm_topk_prob", True),
    )  # fmt: skip
    rope = read_rope(c, heads.head_dim, rotation)
    mixer = attention(
        heads, rope, qkv_bias=c.get_bool("attention_bias", False),
        qk_norm=norm if qk_norm else None,
    )  # fmt: skip
    return decoder(c, tuple(Layer(mixer, moe if i >= first else dense, norm) for i in range(c.get_layer_count())), norm)


def sarvam_moe(c: Config) -> ModelSpec:
    """Sarvam 30B: GLM 4.5 whose whole heads rotate, with norms of heads."""
    c.rename({"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"})
    c.rename({"use_qkv_bias": "attention_bias"})
    sizes = {"num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 1024, "num_experts_per_tok": 6}
    defaults = {"rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5}
    c.assume({**sizes, **defaults})
    first, qk_norm = c.get_int("first_k_dense_replace", 1), c.get_bool("use_qk_norm", True)
    return _glm(c, Rotation(8e6, partial=1.0), gated_mlp(c), first, qk_norm=qk_norm)


def solar_open(c: Config) -> ModelSpec:
    """Solar Open: GLM 4.5 whose whole heads rotate, with experts in every layer."""
    experts = GatedMLP(c.get_size("moe_intermediate_size", 1280), c.get_activation("hidden_act", "silu"))
    c.assume({"moe_intermediate_size": 1280, "head_dim": 128})
    return _glm(c, Rotation(1e6), experts, 0, qk_norm=False)


def exaone_moe(c: Config) -> ModelSpec:
    """K-EXAONE: EXAONE 4's attention with norms before the branches (arXiv:2601.01739)."""
    norm, dense, count = rms_norm(c, 1e-5), gated_mlp(c), c.get_layer_count()
    moe = experts(
        c, dense, c.get_size("num_experts", 64), c.get_size("num_experts_per_tok", 8),
        c.get_size("moe_intermediate_size", 1024), c.get_int("num_shared_experts", 1),
        normalize=c.get_bool("norm_topk_prob", True), name="num_experts", scale=2.5,
    )  # fmt: skip
    first = c.get_int("first_k_dense_replace", 1)
    kinds = c.get_choices("mlp_layer_types", count, ("dense", "sparse"))
    kinds = kinds or ["dense" if i < first else "sparse" for i in range(count)]
    mixers = local_and_unrotated(c, norm)
    mlps = (dense if kind == "dense" else moe for kind in kinds)
    return decoder(c, tuple(Layer(own, mlp, norm) for own, mlp in zip(mixers, mlps, strict=True)), norm)


def hy_v3(c: Config) -> ModelSpec:
    """Hy3: norms of heads, experts after the first layer."""
    heads, norm = Heads.read(c, num_kv_heads=8, head_dim_default=128, null_kv=False), rms_norm(c, 1e-5)
    dense, bias, count = gated_mlp(c, bias=c.get_bool("mlp_bias", False)), _bias(c), c.get_layer_count()
    moe = experts(
        c, dense, c.get_size("num_experts", 192), c.get_size("num_experts_per_tok", 8),
        c.get_size("moe_intermediate_size", 1536), c.get_int("num_shared_experts", 1),
        normalize=True, name="num_experts", factor="router_scaling_factor", scale=2.826, grouped=False,
    )  # fmt: skip
    rope = read_rope(c, heads.head_dim, Rotation(11_158_840.0))
    mixer = attention(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm)
    kinds = c.get_choices("mlp_layer_types", count, ("dense", "sparse")) or ["dense", *["sparse"] * (count - 1)]
    return decoder(c, tuple(Layer(mixer, dense if kind == "dense" else moe, norm) for kind in kinds), norm)


def _bias(c: Config) -> bool:
    return c.get_bool("attention_bias", False)


def afmoe(c: Config) -> ModelSpec:
    """Trinity (Arcee's AFMoE): gated attention, norms before and after each branch; global layers have no positions."""
    heads, norm, dense = Heads.read(c, head_dim_default=128, null_head_dim=True), rms_norm(c, 1e-5), gated_mlp(c)
    moe = experts(
        c, dense, c.get_size("num_experts", 64), c.get_size("num_experts_per_tok", 6),
        c.get_size("moe_intermediate_size", 1408), c.get_int("num_shared_experts", 2),
        normalize=True, name="num_experts", factor="route_scale",
    )  # fmt: skip
    c.expect("attention_bias", False)
    mixer = attention(heads, read_rope(c, heads.head_dim), qk_norm=norm, out_gate=True)
    period = c.get_size("global_attn_every_n_layers", 4)
    windows = layer_windows(c, lambda i: (i + 1) % period != 0, c.get_size("sliding_window", 1024, None))
    first = c.get_int("num_dense_layers", 1)
    layers = tuple(
        Layer(replace(mixer, window=w, rope=mixer.rope if w else None), moe if i >= first else dense, norm, norm)
        for i, w in enumerate(windows)
    )
    scale = c.get_size("hidden_size") ** 0.5 if c.get_bool("mup_enabled", False) else 1.0
    return decoder(c, layers, norm, embedding_scale=scale)


def dots1(c: Config) -> ModelSpec:
    """dots.llm1: norms of heads (arXiv:2506.05767)."""
    heads, norm, dense = Heads.read(c, num_kv_heads=32), rms_norm(c), gated_mlp(c)
    bias, window = c.get_bool("attention_bias", False), c.get_size("sliding_window", 4096, None)
    moe = experts(
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

AFMOE_NAMES = GLM_NAMES.with_parts(
    parts={
        "mixer.out_gate": "self_attn.gate_proj",
        "mixer_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
        "mlp.router": "mlp.router.gate",
        "mlp.choice": Tensor("mlp.expert_bias"),
    }
)
HY_NAMES = GLM_NAMES.with_parts(
    parts={
        "mlp.router": "mlp.router.gate",
        "mlp.choice": Tensor("mlp.expert_bias"),
        **{f"mlp.shared.{n}": f"mlp.shared_mlp.{n}_proj" for n in ("gate", "up", "down")},
    }
)
EXAONE_NAMES = GLM_NAMES.with_parts(
    parts={"mlp.choice": Tensor("mlp.e_score_correction_bias")}, ignore=(*GLM_NAMES.ignore, r"^mtp\.")
)
_QKV = ("mixer.q", "mixer.k", "mixer.v")
SARVAM_NAMES = GLM_NAMES.with_parts(
    root={"embed": "model.word_embeddings", "norm": "model.norm", "head": "lm_head"},
    parts={
        **{n: FusedRows("attention.query_key_value", _QKV) for n in _QKV},
        "mixer.o": "attention.dense",
        "mixer.q_norm": "attention.query_layernorm",
        "mixer.k_norm": "attention.key_layernorm",
        "mlp.choice": Tensor("mlp.gate.expert_bias"),
    },
)

_MTP = ("num_nextn_predict_layers", "num_mtp_layers")
FAMILIES = (
    Family("glm4_moe", glm4_moe, GLM_NAMES, harmless=_MTP),
    Family("sarvam_moe", sarvam_moe, SARVAM_NAMES, harmless=_MTP),
    Family("solar_open", solar_open, GLM_NAMES, harmless=(*_MTP, "intermediate_size", "first_k_dense_replace")),
    Family("exaone_moe", exaone_moe, EXAONE_NAMES, harmless=_MTP),
    Family("hy_v3", hy_v3, HY_NAMES, harmless=(*_MTP, "enable_moe_fp32_combine")),
    Family("afmoe", afmoe, AFMOE_NAMES),
    Family("dots1", dots1, GLM_NAMES),
    Family("minimax_m2", minimax_m2, M2_NAMES, harmless=("router_jitter_noise",)),
)
