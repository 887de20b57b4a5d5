"""MiniMax-Text-01 and MiniMax-M1: lightning attention, full attention in one layer of eight, experts, DeepNorm."""

from __future__ import annotations

from collections.abc import Callable

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, rms_norm
from ridgeline.archs.moe import MIXTRAL_NAMES
from ridgeline.archs.rope import FULL, Rotation, read_rope
from ridgeline.spec import DeepNormLayer, LightningAttention, ModelSpec, MoE, RMSNorm

NAMES = MIXTRAL_NAMES.with_parts(
    parts={
        "mixer.qkv": "self_attn.qkv_proj",
        "mixer.gate": "self_attn.output_gate",
        "mixer.out_norm": "self_attn.norm",
        "mixer.out": "self_attn.out_proj",
    },
    # Tensors that follow from the slopes.
    ignore=(*MIXTRAL_NAMES.ignore, r"self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"),
)
LINEAR = "linear_attention"
TINY = 1e-5  # the published code adds it to the slopes, so that none is zero and no division by zero occurs


def minimax(c: Config) -> ModelSpec:
    """MiniMax-01 (arXiv:2501.08313), as transformers writes its configs."""
    return _model(c, _layer_types(c), lambda part, factor: f"{part}_{factor}_factor", "full_attn", "linear_attn")


def minimax_text_01(c: Config) -> ModelSpec:
    """MiniMax-Text-01, with the fields of the published config."""
    c.expect("postnorm", True)
    if c.raw("shared_intermediate_size") not in (None, 0, [0]):
        raise c.error("shared_intermediate_size", "is not 0, but shared experts are not supported for this model")
    kinds = c.get_choices("attn_type_list", c.get_layer_count(), {0, 1}, null=False)
    if kinds is None:
        raise c.error("attn_type_list", "is missing")
    full = [kind == 1 for kind in kinds]
    return _model(c, full, lambda part, factor: f"layernorm_{part}_{factor}", "full_attention", "linear_attention")


def minimax_m1(c: Config) -> ModelSpec:
    """MiniMax-M1 (arXiv:2506.13585): the architecture and config fields of MiniMax-Text-01."""
    return minimax_text_01(c)


def _model(c: Config, full: list[bool], name: Callable[[str, str], str], *parts: str) -> ModelSpec:
    """Return the model. full: for each layer, whether it has full attention. name: returns the field with alpha or beta
    of a part. parts: the names for full and for linear attention.
    """
    heads, norm = Heads.read(c, num_kv_heads=8, null_kv=False, null_head_dim=True), rms_norm(c, 1e-5)
    count = c.get_layer_count()
    # transformers' class rotates whole heads, but the published model was trained with RoPE on half of each head.
    rotated = c.get_size("rotary_dim", None, None)
    if rotated is not None and rotated > heads.head_dim:
        raise c.error("rotary_dim", f"is {rotated}, more than the head size {heads.head_dim}")
    partial = None if rotated is None else rotated / heads.head_dim
    rope = read_rope(c, heads.head_dim, Rotation(1e6, partial))
    whole = attention(heads, rope, window=c.get_size("sliding_window", None, None))
    act = c.get_activation("hidden_act", "silu")
    experts, chosen = c.get_size("num_local_experts", 8), c.get_size("num_experts_per_tok", 2)
    moe = MoE(experts, chosen, c.get_size("intermediate_size"), act)
    factors = {part: [c.get_float(name(part, f), 1.0) for f in ("alpha", "beta")] for part in (*parts, "mlp")}

    def layer(i: int) -> DeepNormLayer:
        slope = 1 - i / (count - 1 + TINY) + TINY  # falls from almost 1 to almost 0 over the layers
        linear = LightningAttention(heads.num_heads, heads.head_dim, RMSNorm(1e-6), slope, act)
        own = factors[parts[0 if full[i] else 1]]
        return DeepNormLayer(whole if full[i] else linear, moe, norm, *own, *factors["mlp"])

    return decoder(c, tuple(map(layer, range(count))), norm)


def _layer_types(c: Config) -> list[bool]:
    """Return for each layer whether it has full attention; by default every second one, starting with the first."""
    count = c.get_layer_count()
    kinds = c.get_choices("layer_types", count, {FULL, LINEAR})
    if kinds is None:
        return [i % 2 == 0 for i in range(count)]
    return [kind == FULL for kind in kinds]


# block_size: a setting of the kernels. shared_moe_mode: weighting of a shared expert, which does not exist.
_HARMLESS = ("block_size", "shared_moe_mode", "router_jitter_noise")
FAMILIES = (
    Family("minimax", minimax, NAMES, ("block_size", "router_jitter_noise")),
    Family("minimax_text_01", minimax_text_01, NAMES, _HARMLESS),
    Family("minimax_m1", minimax_m1, NAMES, _HARMLESS),
)
