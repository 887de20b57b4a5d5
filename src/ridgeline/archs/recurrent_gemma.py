"""RecurrentGemma: gated linear recurrent units, with local attention in one layer of three."""

from __future__ import annotations

from itertools import cycle, islice
from math import frexp, ldexp

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, rms_norm
from ridgeline.archs.mamba import LONGEST
from ridgeline.archs.names import LLAMA, AllExperts, Tensor
from ridgeline.archs.rope import SCALINGS, Rotation, read_rope
from ridgeline.spec import GatedLRU, GatedMLP, Layer, ModelSpec

KINDS = {"recurrent", "attention"}
ROTATION = Rotation(partial=0.5, kinds={"default": SCALINGS["default"]})
# Deviations of initial weights, and a name of the list of blocks that transformers derives.
HARMLESS = ("w_init_variance_scale", "final_w_init_variance_scale", "layer_types", "layers_block_type")
NAMES = LLAMA.with_parts(
    root={"embed": "model.embed_tokens", "norm": "model.final_norm", "head": "lm_head"},
    parts={
        "mixer_norm": "temporal_pre_norm",
        **{f"mixer.{n}": f"temporal_block.{n}_proj" for n in "qkvo"},
        "mixer.in": "temporal_block.linear_x",
        "mixer.gate": "temporal_block.linear_y",
        "mixer.conv": "temporal_block.conv_1d",
        "mixer.input_gate.weight": AllExperts("temporal_block.rg_lru.input_gate_weight"),
        "mixer.input_gate.bias": Tensor("temporal_block.rg_lru.input_gate_bias"),
        "mixer.decay_gate.weight": AllExperts("temporal_block.rg_lru.recurrent_gate_weight"),
        "mixer.decay_gate.bias": Tensor("temporal_block.rg_lru.recurrent_gate_bias"),
        "mixer.decay": Tensor("temporal_block.rg_lru.recurrent_param"),
        "mixer.out": "temporal_block.linear_out",
        "mlp_norm": "channel_pre_norm",
        **{f"mlp.{n}": f"mlp_block.{n}_proj" for n in ("gate", "up", "down")},
    },
)


def recurrent_gemma(c: Config) -> ModelSpec:
    """RecurrentGemma (arXiv:2404.07839). The stream begins with the embeddings times sqrt(hidden_size) in bfloat16."""
    c.rename({"_block_types": "block_types"})
    c.expect("embeddings_scale_by_sqrt_dim", True)
    norm, heads, width = rms_norm(c, offset=1.0), Heads.read(c), c.get_size("hidden_size")
    act, bias = c.get_activation("hidden_activation", "gelu_pytorch_tanh"), c.get_bool("attention_bias", False)
    channels = c.get_size("lru_width", width, width)
    c.divide("lru_width", channels, "num_attention_heads", heads.num_heads)
    if (conv := c.get_size("conv1d_width", 4)) == 1:
        raise c.error("conv1d_width", "is 1; it must be at least 2, or the convolution mixes no tokens")
    lru = GatedLRU(channels, heads.num_heads, conv, act)
    window, rope = c.get_size("attention_window_size", 2048), read_rope(c, heads.head_dim, ROTATION)
    local = attention(heads, rope, window=window, qkv_bias=bias, out_bias=True)
    if (inner := c.get_size("intermediate_size")) == 1:
        raise c.error("intermediate_size", "is 1, and its half is the size of an MLP; it must be at least 2")
    mlp = GatedMLP(inner // 2, act, bias=True)
    layers = tuple(Layer(lru if kind == "recurrent" else local, mlp, norm) for kind in _kinds(c))
    return decoder(
        c, layers, norm, tied=True, max_len=c.get_size("max_position_embeddings", LONGEST),
        embedding_scale=_bfloat16(width**0.5), logit_softcap=c.get_positive("logits_soft_cap", 30.0),
    )  # fmt: skip


def _kinds(c: Config) -> list[str]:
    """Return the kind of each layer: the list of blocks, again and again."""
    blocks = c.get_list("block_types", ["recurrent", "recurrent", "attention"])
    if not blocks or not all(isinstance(kind, str) and kind in KINDS for kind in blocks):
        raise c.error("block_types", f"is {blocks!r:.100}; it must be a list of 'recurrent' and 'attention'")
    return list(islice(cycle(blocks), c.get_layer_count()))


def _bfloat16(x: float) -> float:
    """Round to the 8 bits that bfloat16 keeps, to nearest, ties to even."""
    mantissa, exponent = frexp(x)
    return ldexp(round(ldexp(mantissa, 8)), exponent - 8)


FAMILIES = (Family("recurrent_gemma", recurrent_gemma, NAMES, HARMLESS),)
