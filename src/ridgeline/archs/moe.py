"""Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE: Llama-like layers whose MLP is a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, layer_windows, rms_norm, whole_heads
from ridgeline.archs.llama import qwen3_attention, switched_window
from ridgeline.archs.names import LLAMA, Each, Tensor
from ridgeline.archs.rope import PHIMOE_SCALINGS, Rotation, read_rope
from ridgeline.spec import GatedMLP, Layer, LayerNorm, ModelSpec, MoE, SparseMixer


def mixtral(c: Config) -> ModelSpec:
    """Mixtral 8x7B and 8x22B (arXiv:2401.04088)."""
    heads, norm = Heads.read(c, num_kv_heads=8, null_kv=False, null_head_dim=True), rms_norm(c, 1e-5)
    rope = read_rope(c, heads.head_dim, Rotation(1e6))
    mixer = attention(heads, rope, window=c.get_size("sliding_window", None, None))
    experts = (c.get_size("num_local_experts"), c.get_size("num_experts_per_tok"), c.get_size("intermediate_size"))
    layer = Layer(mixer, MoE(*experts, c.get_activation("hidden_act", "silu")), norm)
    return decoder(c, (layer,) * c.get_layer_count(), norm)


def qwen3_moe(c: Config) -> ModelSpec:
    """Qwen3-MoE: experts in every `decoder_sparse_step`-th layer, except for `mlp_only_layers` (arXiv:2505.09388)."""
    norm = rms_norm(c)
    heads = Heads.read(c, num_kv_heads=4, null_kv=False)
    mixer = qwen3_attention(c, norm, heads, switched_window(c))
    num_experts = c.get_size("num_experts") if c.present("num_experts") else c.get_size("num_local_experts")
    moe = MoE(
        num_experts, c.get_size("num_experts_per_tok"), c.get_size("moe_intermediate_size"),
        c.get_activation("hidden_act", "silu"), normalize=c.get_bool("norm_topk_prob", False),
    )  # fmt: skip
    dense: GatedMLP = gated_mlp(c)
    step, dense_layers = c.get_size("decoder_sparse_step", 1), c.get_indices("mlp_only_layers", [])
    layers = tuple(
        Layer(mixer, dense if i in dense_layers or (i + 1) % step else moe, norm) for i in range(c.get_layer_count())
    )
    return decoder(c, layers, norm)


def qwen2_moe(c: Config) -> ModelSpec:
    """Qwen1.5-MoE and Qwen2-MoE: a shared expert whose result has a gate; biases on q, k and v (arXiv:2407.10671)."""
    heads, norm, dense = Heads.read(c, num_kv_heads=16, null_kv=False), rms_norm(c), gated_mlp(c)
    shared = replace(dense, intermediate_size=c.get_size("shared_expert_intermediate_size", 5632))
    moe = MoE(
        c.get_size("num_experts", 60), c.get_size("num_experts_per_tok", 4), c.get_size("moe_intermediate_size", 1408),
        dense.activation, normalize=c.get_bool("norm_topk_prob", False), shared=shared, shared_gate=True,
    )  # fmt: skip
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=c.get_bool("qkv_bias", True))
    step, dense_layers = c.get_size("decoder_sparse_step", 1), c.get_indices("mlp_only_layers", [])
    first_global, window = c.get_int("max_window_layers", 28), switched_window(c)
    windows = layer_windows(c, lambda i: window is not None and i % 2 == 0 and i < first_global, window)
    layers = tuple(
        Layer(replace(mixer, window=w), dense if i in dense_layers or (i + 1) % step else moe, norm)
        for i, w in enumerate(windows)
    )
    return decoder(c, layers, norm)


def olmoe(c: Config) -> ModelSpec:
    """OLMoE: norms of q and k over all heads (arXiv:2409.02060)."""
    heads, norm, bias = whole_heads(c, Heads.read(c)), rms_norm(c, 1e-5), c.get_bool("attention_bias", False)
    c.expect("clip_qkv")
    rope = read_rope(c, heads.head_dim)
    mixer = attention(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all_heads")
    moe = MoE(
        c.get_size("num_experts", 64), c.get_size("num_experts_per_tok", 8), c.get_size("intermediate_size"),
        c.get_activation("hidden_act", "silu"), normalize=c.get_bool("norm_topk_prob", False),
    )  # fmt: skip
    return decoder(c, (Layer(mixer, moe, norm),) * c.get_layer_count(), norm)


def flex_olmo(c: Config) -> ModelSpec:
    """FlexOlmo: OLMo 2 with experts in every layer (arXiv:2507.07024)."""
    heads, norm, bias = whole_heads(c, Heads.read(c)), rms_norm(c), c.get_bool("attention_bias", False)
    rope = read_rope(c, heads.head_dim, Rotation(5e5))
    mixer = attention(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all_heads")
    moe = MoE(
        c.get_size("num_experts", 7), c.get_size("num_experts_per_tok", 5), c.get_size("intermediate_size"),
        c.get_activation("hidden_act", "silu"), normalize=c.get_bool("norm_topk_prob", False),
    )  # fmt: skip
    return decoder(c, (Layer(mixer, moe, None, norm),) * c.get_layer_count(), norm)


def ernie4_5_moe(c: Config) -> ModelSpec:
    """ERNIE 4.5 with experts: neighboring numbers rotate together; a number per expert affects the choice alone."""
    c.rename({"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"})
    heads, norm, bias = Heads.read(c, num_kv_heads=4), rms_norm(c, 1e-5), c.get_bool("use_bias", False)
    dense = gated_mlp(c, bias=bias)
    rope = read_rope(c, heads.head_dim, Rotation(5e5, interleaved=True))
    mixer = attention(heads, rope, qkv_bias=bias, out_bias=bias)
    experts, chosen = c.get_size("moe_num_experts", 64), c.get_size("moe_k", 6)
    inner, num_shared = c.get_size("moe_intermediate_size", 1536), c.get_int("moe_num_shared_experts", 2)
    if chosen > experts:
        raise c.error("moe_k", f"is {chosen}, more than the {experts} experts")
    if c.get_float("moe_norm_min", 1e-12) > chosen / experts:
        raise c.error("moe_norm_min", f"is not below {chosen / experts}, the least sum of the chosen scores")
    moe = MoE(
        experts, chosen, inner, dense.activation, choice_bias=True,
        shared=replace(dense, intermediate_size=inner * num_shared) if num_shared > 0 else None,
    )  # fmt: skip
    count, step = c.get_layer_count(), c.get_size("moe_layer_interval", 1)
    first, last = c.get_int("moe_layer_start_index", 1), c.get_int("moe_layer_end_index", -1)
    last = count - 1 if last == -1 else last
    layers = (Layer(mixer, moe if (i + 1) % step == 0 and first <= i <= last else dense, norm) for i in range(count))
    return decoder(c, tuple(layers), norm, tied=True, head_bias=bias)


def phimoe(c: Config) -> ModelSpec:
    """Phi-3.5-MoE: layer norms, and two experts that are chosen one after the other (arXiv:2404.14219)."""
    heads, norm, bias = (
        Heads.read(c, num_kv_heads=8, null_kv=False),
        LayerNorm(c.get_eps("rms_norm_eps", 1e-5)),
        _bias(c),
    )
    c.expect("num_experts_per_tok", 2, null=False)
    mixer = attention(
        heads, read_rope(c, heads.head_dim, Rotation(1e6, kinds=PHIMOE_SCALINGS)), qkv_bias=bias, out_bias=bias,
        window=c.get_size("sliding_window", None, None),
    )  # fmt: skip
    moe = MoE(
        c.get_size("num_local_experts", 16), 2, c.get_size("intermediate_size"), c.get_activation("hidden_act", "silu"),
        normalize=False, scores=SparseMixer(c.get_float("router_jitter_noise", 0.01)),
    )  # fmt: skip
    layers = (Layer(mixer, moe, norm),) * c.get_layer_count()
    return decoder(c, layers, norm, head_bias=c.get_bool("lm_head_bias", False))


def _bias(c: Config) -> bool:
    return c.get_bool("attention_bias", False)


MIXTRAL_NAMES = LLAMA.with_parts(
    parts={
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts.gate": Each("block_sparse_moe.experts.{e}.w1"),
        "mlp.experts.down": Each("block_sparse_moe.experts.{e}.w2"),
        "mlp.experts.up": Each("block_sparse_moe.experts.{e}.w3"),
    }
)
QWEN_NAMES = LLAMA.with_parts(
    parts={
        "mlp.router": "mlp.gate",
        **{f"mlp.experts.{n}": Each("mlp.experts.{e}." + f"{n}_proj") for n in ("gate", "up", "down")},
    }
)

QWEN2_NAMES = QWEN_NAMES.with_parts(
    parts={
        **{f"mlp.shared.{n}": f"mlp.shared_expert.{n}_proj" for n in ("gate", "up", "down")},
        "mlp.shared_gate": "mlp.shared_expert_gate",
    }
)

ERNIE_NAMES = QWEN_NAMES.with_parts(
    parts={
        **{f"mlp.shared.{n}": f"mlp.shared_experts.{n}_proj" for n in ("gate", "up", "down")},
        "mlp.choice": Tensor("mlp.moe_statics.e_score_correction_bias", axes=(1, 0)),
    },
    ignore=(*QWEN_NAMES.ignore, r"^model\.mtp_"),
)
FLEX_NAMES = QWEN_NAMES.with_parts(
    parts={"mixer_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
)

FAMILIES = (
    Family("mixtral", mixtral, MIXTRAL_NAMES, harmless=("router_jitter_noise",)),
    Family("phimoe", phimoe, MIXTRAL_NAMES, harmless=("input_jitter_noise",)),
    Family("qwen2_moe", qwen2_moe, QWEN2_NAMES),
    Family("olmoe", olmoe, QWEN_NAMES),
    Family("flex_olmo", flex_olmo, FLEX_NAMES),
    Family("ernie4_5_moe", ernie4_5_moe, ERNIE_NAMES),
    # Old versions write max_window_layers, but the published code windows either all layers or none.
    Family("qwen3_moe", qwen3_moe, QWEN_NAMES, harmless=("max_window_layers",)),
)
