"""DeepSeek-V2, V2-Lite and V3 (R1 has V3's config), and other models with its latent attention."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import REQUIRED, Config
from ridgeline.archs.family import Family, decoder, expert_groups, gated_mlp, rms_norm
from ridgeline.archs.names import LLAMA, Each, Flat, Tensor
from ridgeline.archs.rope import SCALINGS, Rotation, Scalings, read_rope, yarn_temperature
from ridgeline.spec import (
    GatedMLP,
    IndexedAttention,
    Indexer,
    LatentAttention,
    Layer,
    LayerNorm,
    ModelSpec,
    MoE,
    Norm,
    RMSNorm,
)


def latent_attention(
    c: Config, *, interleaved: bool, kinds: Scalings = SCALINGS, value: int | None = None, base: float = 10000.0
) -> LatentAttention:
    """Read the attention of both generations; yarn's temperature is part of the scale if the config asks for that.

    value: size of a value where `v_head_dim` is absent or null; None: 128, and a null is an error. base: the class's
    base of rotations.
    """
    nope, rotated = c.get_size("qk_nope_head_dim", 128), c.get_size("qk_rope_head_dim", 64)
    bias = c.get_bool("attention_bias", False)
    rope = read_rope(c, rotated, Rotation(base, interleaved=interleaved, kinds=kinds))
    return LatentAttention(
        num_heads=c.get_size("num_attention_heads"),
        kv_lora_rank=c.get_size("kv_lora_rank", 512),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rotated,
        v_head_dim=c.get_size("v_head_dim", value or 128, value or REQUIRED),
        scale=(nope + rotated) ** -0.5 * _temperature(c, rope.scaling) ** 2,
        latent_norm=RMSNorm(1e-6),  # independent of rms_norm_eps
        q_lora_rank=c.get_size("q_lora_rank", 1536, None),  # null: queries are not compressed
        rope=rope,
        latent_bias=bias,
        out_bias=bias,
    )


def _temperature(c: Config, scaling: object) -> float:
    """Return the factor on queries and keys, in addition to that on cosines and sines, from `mscale_all_dim`."""
    old, new = c.sub("rope_scaling"), c.sub("rope_parameters")
    fields = old if old is not None and old.filled else new
    if fields is None or scaling is None:
        return 1.0
    mscale = fields.get_float("mscale_all_dim", None, None)
    return yarn_temperature(fields.get_positive("factor"), mscale) if mscale else 1.0


def _layers(c: Config, mixer: LatentAttention, norm: Norm, moe: MoE, dense: GatedMLP, first: int) -> tuple[Layer, ...]:
    """Return the layers: dense MLPs before layer `first`, experts from there on."""
    return tuple(Layer(mixer, moe if i >= first else dense, norm) for i in range(c.get_layer_count()))


def _experts(c: Config, dense: GatedMLP, per_token: int, *, count: int, num_shared: int, size: int) -> MoE:
    """Return the experts with plain routing. count, num_shared, size: defaults for the number of experts, the number of
    shared experts and their intermediate size. The shared experts are one MLP of their summed size.
    """
    inner = c.get_size("moe_intermediate_size", size)
    together = c.get_int("n_shared_experts", num_shared)
    shared = replace(dense, intermediate_size=inner * together) if together else None
    experts = c.get_size("n_routed_experts", count)
    return MoE(experts, per_token, inner, dense.activation, shared=shared)


def deepseek_v2(c: Config) -> ModelSpec:
    """DeepSeek-V2 and V2-Lite: softmax scores, experts from the best groups (arXiv:2405.04434)."""
    norm, dense = rms_norm(c), gated_mlp(c, bias=c.get_bool("mlp_bias", False))
    c.expect("norm_topk_prob", False)  # the published code and transformers disagree on the meaning of true
    c.expect("scoring_func", "softmax")
    method = c.get_str("topk_method", "greedy")
    count, chosen = c.get_size("n_group", None, None), c.get_size("topk_group", None, None)
    groups = None
    if method == "group_limited_greedy":
        if count is None or chosen is None:
            raise c.error(
                "n_group" if count is None else "topk_group", f"is missing, but topk_method is {method!r:.100}"
            )
        experts = c.get_size("n_routed_experts", 64)
        groups = expert_groups(c, ("n_routed_experts", experts), ("n_group", count), ("topk_group", chosen), "best")
    elif method != "greedy":
        raise c.error("topk_method", f"is {method!r:.100}; supported: greedy, group_limited_greedy")
    moe = replace(
        _experts(c, dense, c.get_size("num_experts_per_tok"), count=64, num_shared=2, size=1407),
        normalize=False,
        groups=groups,
        scale=c.get_float("routed_scaling_factor", 1.0),
    )
    c.expect("moe_layer_freq", 1)
    first = c.get_int("first_k_dense_replace", 0)
    return decoder(c, _layers(c, latent_attention(c, interleaved=True), norm, moe, dense, first), norm)


def deepseek_v3(c: Config) -> ModelSpec:
    """DeepSeek-V3 and R1: sigmoid scores, and a bias that only affects which experts are chosen (arXiv:2412.19437)."""
    return _third(c, c.get_int("first_k_dense_replace", 3))


def _third(c: Config, first: int, kinds: Scalings = SCALINGS, *, every: bool = True) -> ModelSpec:
    """Return a model of the third generation, with experts from layer `first` on. kinds: scalings of rotations. every:
    whether `moe_layer_freq` must be 1.
    """
    norm, dense = rms_norm(c), gated_mlp(c)
    c.expect("scoring_func", "sigmoid")
    c.expect("topk_method", "noaux_tc")
    moe = replace(
        _experts(c, dense, c.get_size("num_experts_per_tok", 8), count=256, num_shared=1, size=2048),
        normalize=c.get_bool("norm_topk_prob", True, null=False),
        scores="sigmoid",
        choice_bias=True,
        groups=expert_groups(
            c,
            ("n_routed_experts", c.get_size("n_routed_experts", 256)),
            ("n_group", c.get_size("n_group", 8)),
            ("topk_group", c.get_size("topk_group", 4)),
            "best_two",
        ),
        scale=c.get_float("routed_scaling_factor", 2.5),
    )
    interleaved = c.get_bool("rope_interleave", True, null=False)
    if every:
        c.expect("moe_layer_freq", 1)
    mixer = latent_attention(c, interleaved=interleaved, kinds=kinds)
    return decoder(c, _layers(c, mixer, norm, moe, dense, first), norm)


def glm4_moe_lite(c: Config) -> ModelSpec:
    """GLM 4.7 Flash: DeepSeek-V3 in other sizes; `mlp_layer_types` says which layers have experts."""
    count, names = c.get_layer_count(), ("dense", "sparse")
    kinds = c.get_choices("mlp_layer_types", count, names) or ["dense", *["sparse"] * (count - 1)]
    sizes = {"moe_intermediate_size": 1536, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}
    experts = {"n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8}
    c.assume({**sizes, **experts, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5})
    spec, dense = _third(c, 0), gated_mlp(c)
    layers = zip(kinds, spec.layers, strict=True)
    return replace(spec, layers=tuple(replace(own, mlp=dense) if kind == "dense" else own for kind, own in layers))


def deepseek_v32(c: Config, interleaved: bool = False) -> ModelSpec:
    """DeepSeek-V3.2: an indexer selects the keys of each query (arXiv:2512.02556). interleaved: whether neighboring
    numbers of the indexer rotate together.
    """
    if c.is_null("q_lora_rank"):
        raise c.error("q_lora_rank", "is null, which has no meaning here")
    count, names = c.get_layer_count(), ("dense", "sparse")
    first = c.get_int("first_k_dense_replace", 3)
    kinds = c.get_choices("mlp_layer_types", count, names)
    kinds = kinds or ["dense" if i < first else "sparse" for i in range(count)]
    c.get_choices("layer_types", count, ("indexed_attention",))
    c.expect("rope_interleave", True)
    c.expect("mlp_bias", False)
    spec, dense = _third(c, 0), gated_mlp(c)
    own = spec.layers[0]
    assert isinstance(own, Layer) and isinstance(own.mixer, LatentAttention)
    heads, size = c.get_size("index_n_heads", 64), c.get_size("index_head_dim", 128)
    mixer = IndexedAttention(
        own.mixer, Indexer(heads, size, c.get_size("index_topk", 2048), LayerNorm(1e-6), interleaved)
    )
    sparse = replace(own, mixer=mixer)
    plain = replace(sparse, mlp=dense)
    return replace(spec, layers=tuple(plain if kind == "dense" else sparse for kind in kinds))


def glm_moe_dsa(c: Config) -> ModelSpec:
    """GLM 5: DeepSeek-V3.2 in other sizes; neighboring numbers of the indexer rotate together (arXiv:2602.15763)."""
    sizes = {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "index_n_heads": 32}
    c.assume({**sizes, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5})
    c.get_choices("indexer_types", c.get_layer_count(), ("full",))
    c.expect("index_topk_freq", 0, 1)  # other numbers mean layers that take the choice of the layer before
    c.expect("index_topk_pattern")
    c.expect("indexer_rope_interleave", True)
    c.expect("moe_router_dtype", "float32")
    c.expect("mlp_bias", False, null=False)
    return deepseek_v32(c, interleaved=True)


def axk1(c: Config) -> ModelSpec:
    """A.X K1: DeepSeek-V3 with a norm after the experts; `mlp_layer_types` says which layers have them."""
    if c.is_null("q_lora_rank"):
        raise c.error("q_lora_rank", "is null, which has no meaning here")
    count, names = c.get_layer_count(), ("dense", "sparse")
    first, step = c.get_int("first_k_dense_replace", 1), c.get_size("moe_layer_freq", 1)
    kinds = c.get_choices("mlp_layer_types", count, names)
    kinds = kinds or ["sparse" if i >= first and i % step == 0 else "dense" for i in range(count)]
    c.assume({"n_routed_experts": 192})
    spec, dense = _third(c, 0, every=False), gated_mlp(c)
    own = spec.layers[0]
    assert isinstance(own, Layer)
    sparse, plain = replace(own, mlp_post_norm=spec.norm), replace(own, mlp=dense)
    return replace(spec, layers=tuple(plain if kind == "dense" else sparse for kind in kinds))


def sarvam_mla(c: Config) -> ModelSpec:
    """Sarvam 105B: DeepSeek-V3 without groups, whose queries are not compressed."""
    c.rename({"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"})
    c.assume({"n_routed_experts": 128, "q_lora_rank": None, "n_group": 1, "topk_group": 1})
    return _third(c, c.get_int("first_k_dense_replace", 1), {**SCALINGS, "deepseek_yarn": SCALINGS["yarn"]})


def youtu(c: Config) -> ModelSpec:
    """Youtu-LLM 2B: DeepSeek-V3's attention with dense MLPs (arXiv:2512.24618)."""
    norm, dense, interleaved = rms_norm(c), gated_mlp(c), c.get_bool("rope_interleave", True, null=False)
    layer = Layer(latent_attention(c, interleaved=interleaved), dense, norm)
    return decoder(c, (layer,) * c.get_layer_count(), norm, tied=True)


def minicpm3(c: Config) -> ModelSpec:
    """MiniCPM3: latent attention, and factors on embeddings, branches and logits (arXiv:2404.06395)."""
    hidden, heads, count = c.get_size("hidden_size"), c.get_size("num_attention_heads"), c.get_layer_count()
    sizes = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
    c.assume({**sizes, "rms_norm_eps": 1e-5})
    norm, dense = rms_norm(c), gated_mlp(c, bias=c.get_bool("mlp_bias", False))
    depth = c.get_float("scale_depth", 1.4, count**0.5)
    layer = Layer(
        latent_attention(c, interleaved=False, value=hidden // heads), dense, norm, residual_scale=depth / count**0.5
    )
    return decoder(
        c, (layer,) * count, norm, tied=True, embedding_scale=c.get_float("scale_emb", 12.0),
        logit_scale=c.get_size("dim_model_base", 256, hidden) / hidden,
    )  # fmt: skip


_EXPERTS = ("gate", "up", "down")
V2_NAMES = LLAMA.with_parts(
    parts={
        **{f"mixer.{n}": None for n in ("k", "v", "q_norm", "k_norm")},
        "mixer.q_a": "self_attn.q_a_proj",
        "mixer.q_a_norm": "self_attn.q_a_layernorm",
        "mixer.q_b": "self_attn.q_b_proj",
        "mixer.kv_a": "self_attn.kv_a_proj_with_mqa",
        "mixer.kv_a_norm": "self_attn.kv_a_layernorm",
        "mixer.kv_b": Flat("self_attn.kv_b_proj"),
        "mlp.router": "mlp.gate",
        **{f"mlp.experts.{n}": Each("mlp.experts.{e}." + f"{n}_proj") for n in _EXPERTS},
        **{f"mlp.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in _EXPERTS},
    }
)
# V3's files contain one more layer for multi-token prediction, which is a draft model and is not loaded here.
V3_NAMES = V2_NAMES.with_parts(
    parts={"mlp.choice": Tensor("mlp.gate.e_score_correction_bias")},
    ignore=(*LLAMA.ignore, r"^model\.layers\.{layers}\."),
)

V32_NAMES = V3_NAMES.with_parts(
    parts={
        "mixer.index_q": "self_attn.indexer.wq_b",
        "mixer.index_k": "self_attn.indexer.wk",
        "mixer.index_k_norm": "self_attn.indexer.k_norm",
        "mixer.index_weights": "self_attn.indexer.weights_proj",
    }
)
AXK1_NAMES = V3_NAMES.with_parts(parts={"mlp_post_norm": "post_mlp_layernorm"})
# Other fields give the head sizes; load balancing matters in training only; ep_size is about placement.
_HARMLESS = ("num_key_value_heads", "head_dim", "qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size")
_MTP = ("num_nextn_predict_layers", "num_mtp_layers")
FAMILIES = (
    Family("deepseek_v2", deepseek_v2, V2_NAMES, _HARMLESS),
    Family("glm4_moe_lite", glm4_moe_lite, V3_NAMES, (*_HARMLESS, *_MTP, "first_k_dense_replace")),
    Family("axk1", axk1, AXK1_NAMES, (*_HARMLESS, *_MTP)),
    Family("sarvam_mla", sarvam_mla, V3_NAMES, (*_HARMLESS, *_MTP, "q_head_dim")),
    Family("youtu", youtu, V3_NAMES, (*_HARMLESS, "embedding_initializer_range")),
    Family("minicpm3", minicpm3, V2_NAMES, _HARMLESS),
    Family("deepseek_v32", deepseek_v32, V32_NAMES, (*_HARMLESS, *_MTP)),
    Family(
        "glm_moe_dsa",
        glm_moe_dsa,
        V32_NAMES,
        (*_HARMLESS, *_MTP, "index_skip_topk_offset", "index_share_for_mtp_iteration"),
    ),
    Family("deepseek_v3", deepseek_v3, V3_NAMES, (*_HARMLESS, *_MTP)),
)
