"""OLMo 2 and 3: norms after each branch, and q and k norms over all heads at once; OLMo Hybrid has delta layers too."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, gated_mlp, layer_windows, rms_norm
from ridgeline.archs.names import LLAMA, Tensor
from ridgeline.archs.rope import FULL, SLIDING, read_rope, read_ropes_by_kind
from ridgeline.spec import Attention, GatedDelta, Layer, ModelSpec, RMSNorm, Rope

LINEAR = "linear_attention"


def _attention(c: Config, heads: Heads, rope: Rope | None, norm: RMSNorm, window: int | None = None) -> Attention:
    bias = c.get_bool("attention_bias", False)
    return attention(heads, rope, window=window, qkv_bias=bias, out_bias=bias, qk_norm=norm, qk_norm_over="all_heads")


def olmo2(c: Config) -> ModelSpec:
    """OLMo 2 (arXiv:2501.00656)."""
    heads, norm = Heads.read(c), rms_norm(c, 1e-5)
    mixer = _attention(c, heads, read_rope(c, heads.head_dim), norm)
    layer = Layer(mixer, gated_mlp(c), pre_norm=None, post_norm=norm)
    return decoder(c, (layer,) * c.get_layer_count(), norm)


def olmo3(c: Config) -> ModelSpec:
    """OLMo 3: three local layers for each global one; yarn only on the global ones."""
    heads, norm, mlp = Heads.read(c), rms_norm(c, 1e-5), gated_mlp(c)
    ropes = read_ropes_by_kind(c, heads.head_dim, full_theta=5e5, sliding_theta=5e5, sliding_theta_field=None)
    layers = tuple(
        Layer(_attention(c, heads, ropes[SLIDING if w else FULL], norm, w), mlp, None, norm)
        for w in layer_windows(c, lambda i: (i + 1) % 4 != 0, c.get_size("sliding_window", 4096, None))
    )
    return decoder(c, layers, norm, max_len=c.get_size("max_position_embeddings"))


def olmo_hybrid(c: Config) -> ModelSpec:
    """OLMo Hybrid: three delta layers, with norms before their branches, for each layer of attention."""
    heads, norm, mlp, count = Heads.read(c), rms_norm(c), gated_mlp(c), c.get_layer_count()
    given = c.sub("rope_parameters")
    rotates = not (given.is_null("rope_theta") if given else c.is_null("rope_theta"))  # published models do not
    rope = read_rope(c, heads.head_dim) if rotates else None
    if not rotates:
        c.expect("rope_scaling")
        c.raw("rope_theta")
    full = Layer(_attention(c, heads, rope, norm), mlp, None, norm)
    linear = Layer(_delta(c, heads.num_heads), mlp, norm)
    kinds = c.get_choices("layer_types", count, {FULL, LINEAR})
    kinds = kinds or [FULL if i % 4 == 3 or (count < 4 and i == count - 1) else LINEAR for i in range(count)]
    return decoder(c, tuple(full if kind == FULL else linear for kind in kinds), norm)


def _delta(c: Config, heads: int) -> GatedDelta:
    """Return the delta layers. heads: the default of their heads of keys and of values."""
    keys = c.get_size("linear_num_key_heads", heads, heads)
    values = c.get_size("linear_num_value_heads", heads, heads)
    c.divide("linear_num_value_heads", values, "linear_num_key_heads", keys)
    usual = int(0.75 * c.get_size("hidden_size") / keys)
    size, reach = c.get_size("linear_key_head_dim", usual, usual), 1 + c.get_bool("linear_allow_neg_eigval", True)
    return GatedDelta(
        num_heads=values, num_key_heads=keys, key_dim=size,
        head_dim=c.get_size("linear_value_head_dim", 2 * size, 2 * size),
        conv_size=c.get_size("linear_conv_kernel_dim", 4), norm=RMSNorm(1e-5),  # independent of rms_norm_eps
        activation=c.get_activation("hidden_act", "silu"), reach=float(reach),
    )  # fmt: skip


NAMES = LLAMA.with_parts(
    parts={
        "mixer_norm": None,
        "mlp_norm": None,
        "mixer_post_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }
)

HYBRID_NAMES = NAMES.with_parts(
    parts={
        "mixer_norm": "attention_layer_norm",
        "mlp_norm": "feedforward_layer_norm",
        **{f"mixer.in_{n}": f"linear_attn.{n}_proj" for n in "qkv"},
        **{f"mixer.{n}_conv": f"linear_attn.{n}_conv1d" for n in "qkv"},
        "mixer.A_log": Tensor("linear_attn.A_log"),
        "mixer.dt_bias": Tensor("linear_attn.dt_bias"),
        "mixer.decay": "linear_attn.a_proj",
        "mixer.beta": "linear_attn.b_proj",
        "mixer.gate": "linear_attn.g_proj",
        "mixer.gate_norm": "linear_attn.o_norm",
        "mixer.out": "linear_attn.o_proj",
    }
)
# transformers saves a norm of attention layers under the name that one of delta layers has.
SAVED_NAMES = HYBRID_NAMES.with_parts(parts={"mixer_post_norm": "feedforward_layer_norm"})

# How weights are drawn before training.
_DRAWN = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
FAMILIES = (
    Family("olmo2", olmo2, NAMES),
    Family("olmo3", olmo3, NAMES),
    Family("olmo_hybrid", olmo_hybrid, HYBRID_NAMES.with_parts(others=(SAVED_NAMES,)), harmless=_DRAWN),
)
