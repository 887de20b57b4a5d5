"""Nemotron-H: each layer is either Mamba-2, attention without positions, an MLP, or a mixture of experts."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, expert_groups
from ridgeline.archs.mamba import step_limits
from ridgeline.archs.names import LLAMA, Each, Tensor
from ridgeline.spec import MLP, Attention, Layer, Mamba2, ModelSpec, MoE, RMSNorm, Ungated

NAMES = LLAMA.with_parts(
    root={"embed": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
    layer="backbone.layers.{i}.",
    parts={
        **dict.fromkeys(("mlp.gate", "mixer.q_norm", "mixer.k_norm")),
        "mixer_norm": "norm",
        "mlp_norm": "norm",
        **{f"mixer.{n}": f"mixer.{n}_proj" for n in "qkvo"},
        "mixer": "mixer",
        "mixer.in": "mixer.in_proj",
        "mixer.conv": "mixer.conv1d",
        "mixer.gate_norm": "mixer.norm",
        "mixer.out": "mixer.out_proj",
        "mlp.up": "mixer.up_proj",
        "mlp.down": "mixer.down_proj",
        "mlp.router": "mixer.gate",
        "mlp.choice": Tensor("mixer.gate.e_score_correction_bias"),
        "mlp.experts.up": Each("mixer.experts.{e}.up_proj"),
        "mlp.experts.down": Each("mixer.experts.{e}.down_proj"),
        "mlp.shared.up": "mixer.shared_experts.up_proj",
        "mlp.shared.down": "mixer.shared_experts.down_proj",
        "mlp.latent_in": "mixer.fc1_latent_proj",
        "mlp.latent_out": "mixer.fc2_latent_proj",
    },
    # Layers for multi-token prediction, which are a draft model and are not loaded here.
    ignore=(*LLAMA.ignore, r"^mtp\."),
)
# The kind of a layer, in all spellings.
LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
WORDS = {**{word: word for word in LETTERS.values()}, "linear_attention": "mamba", "full_attention": "attention"}
# The initialization of weights; implementation choices of a scan; multi-token prediction; RoPE fields, which no layer
# uses; fields that repeat the numbers and sizes of heads; biases of attention, which no published model has.
HARMLESS = (
    "time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual", "residual_in_fp32", "chunk_size",
    "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep",
    "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern", "rope_theta",
    "partial_rotary_factor", "rope_parameters", "expand", "attention_bias",
)  # fmt: skip


def nemotron_h(c: Config) -> ModelSpec:
    """Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3.

    `time_step_limit` bounds the steps, as in the published models' own code. `time_step_min` only initializes biases;
    transformers 5, however, also uses it as a lower bound for the steps of a prompt.
    """
    eps = c.get_eps("layer_norm_epsilon", 1e-5)
    for name in ("rms_norm_eps", "norm_eps"):
        c.expect(name, eps)
    norm = RMSNorm(eps)
    layers = {
        "mamba": Layer(_mamba(c, norm), None, norm),
        "attention": Layer(_attention(c), None, norm),
        "mlp": Layer(None, _mlp(c, c.get_size("intermediate_size", 21504)), norm),
        "moe": Layer(None, _experts(c), norm),
    }
    max_len = c.get_size("max_position_embeddings", 4096)
    return decoder(c, tuple(layers[kind] for kind in _kinds(c)), norm, max_len=max_len)


def _mamba(c: Config, norm: RMSNorm) -> Mamba2:
    least, most = step_limits(c)
    c.expect("mamba_proj_bias", False, null=False)  # use_bias decides
    heads, groups = c.get_size("mamba_num_heads", 128), c.get_size("n_groups", 8)
    c.divide("mamba_num_heads", heads, "n_groups", groups)
    return Mamba2(
        num_heads=heads, head_dim=c.get_size("mamba_head_dim", 64), state_size=c.get_size("ssm_state_size", 128),
        num_groups=groups,
        conv_size=c.get_size("conv_kernel", 4), norm=norm, activation=c.get_activation("mamba_hidden_act", "silu"),
        bias=c.get_bool("use_bias", False), conv_bias=c.get_bool("use_conv_bias", True),
        dt_least=least, dt_most=most,
    )  # fmt: skip


def _attention(c: Config) -> Attention:
    heads, size = c.get_size("num_attention_heads", 32), c.get_size("attention_head_dim", 128)
    c.expect("sliding_window")
    c.expect("rope_scaling")
    kv_heads = c.get_size("num_key_value_heads", 8)
    c.divide("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return attention(Heads(heads, kv_heads, c.get_size("head_dim", size)), None)


def _mlp(c: Config, size: int) -> MLP:
    return MLP(size, c.get_activation("mlp_hidden_act", "relu2"), c.get_bool("mlp_bias", False))


def _experts(c: Config) -> MoE:
    """Return Nemotron 3's experts: routed as in DeepSeek-V3, without gates; Super and Ultra run them on a shorter
    vector.
    """
    latent = c.get_size("moe_latent_size", None, None)
    if latent is not None:
        c.expect("mlp_bias", False)  # otherwise the matrices around the experts would have biases, too
    c.expect("n_shared_experts", 1, null=False)  # its size is moe_shared_expert_intermediate_size
    experts, count, chosen = (
        c.get_size("n_routed_experts", 8),
        c.get_size("n_group", 1),
        c.get_size("topk_group", 1),
    )
    groups = expert_groups(c, ("n_routed_experts", experts), ("n_group", count), ("topk_group", chosen), "best_two")
    return MoE(
        experts, c.get_size("num_experts_per_tok", 2),
        c.get_size("moe_intermediate_size", 7688),
        Ungated(c.get_activation("mlp_hidden_act", "relu2")),
        normalize=c.get_bool("norm_topk_prob", True), scores="sigmoid", choice_bias=True,
        groups=groups, scale=c.get_float("routed_scaling_factor", 1.0),
        shared=_mlp(c, c.get_size("moe_shared_expert_intermediate_size", 7688)), latent_size=latent,
    )  # fmt: skip


def _kinds(c: Config) -> list[str]:
    """Return the kind of each layer, from a string of letters or a list of words, which has one of two names."""
    letters, words = c.get_str("hybrid_override_pattern", None, None), c.get_list("layer_types", None)
    if letters is None and words is None:
        words = c.get_list("layers_block_type")
    block = c.get_list("layers_block_type", words, words)  # may also occur besides the letters
    if c.present("layer_types") and c.present("layers_block_type") and words != block:
        raise c.error("layer_types", "differs from layers_block_type; both must be equal")
    words = block
    name, found, known = "hybrid_override_pattern", list(letters or ""), LETTERS
    if words is not None:
        name, found, known = "layers_block_type", words, WORDS
    if not found or not all(isinstance(kind, str) and kind in known for kind in found):
        raise c.error(name, f"must have one entry per layer, each one of {', '.join(map(repr, known))}")
    if (count := c.get_int("num_hidden_layers", len(found))) != len(found):
        raise c.error("num_hidden_layers", f"is {count}, but {len(found)} layers are described")
    if not {"mamba", "attention"}.intersection(known[kind] for kind in found):
        raise c.error(name, "must have a layer of mamba or attention: without one, no token sees another")
    return [known[kind] for kind in found]


FAMILIES = (Family("nemotron_h", nemotron_h, NAMES, HARMLESS),)
