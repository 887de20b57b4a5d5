"""The decoders of ModernBERT (Ettin): no norm before the first branch, and a transform before the output head."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention, decoder, layer_windows
from ridgeline.archs.names import FusedRows, Names
from ridgeline.archs.rope import FULL, SLIDING, read_ropes_of_layers
from ridgeline.spec import GatedMLP, HeadTransform, Layer, LayerNorm, ModelSpec


def modernbert_decoder(c: Config) -> ModelSpec:
    """The decoders of ModernBERT's size and parts (arXiv:2412.13663, 2507.11412).

    A local token sees half of `local_attention`. `sliding_window`, which transformers also writes, has priority.
    """
    norm = LayerNorm(c.get_eps("norm_eps", 1e-5), c.get_bool("norm_bias", False))
    heads, bias = _heads(c), c.get_bool("attention_bias", False)
    whole = c.get_size("local_attention", 128)
    period = c.get_size("global_attn_every_n_layers", 3)
    windows = layer_windows(c, lambda i: i % period != 0, c.get_size("sliding_window", max(1, whole // 2)))
    kinds = [SLIDING if window else FULL for window in windows]
    thetas = {FULL: c.get_positive("global_rope_theta", 160_000.0), SLIDING: c.get_positive("local_rope_theta", 1e4)}
    c.expect("rope_scaling")
    ropes = read_ropes_of_layers(
        c, dict.fromkeys(sorted(set(kinds)), heads.head_dim),
        {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()},
    )  # fmt: skip
    mlp = GatedMLP(
        c.get_size("intermediate_size"), c.get_activation("hidden_activation", "gelu"), c.get_bool("mlp_bias", False)
    )
    layers = [
        Layer(attention(heads, ropes[kind], window=window, qkv_bias=bias, out_bias=bias), mlp, norm)
        for kind, window in zip(kinds, windows, strict=True)
    ]
    layers[0] = replace(layers[0], pre_norm=None, mlp_pre_norm=norm)
    spec = decoder(
        c, tuple(layers), norm, tied=True, max_len=c.get_size("max_position_embeddings"),
        head_bias=c.get_bool("decoder_bias", True),
    )  # fmt: skip
    act = c.get_activation("classifier_activation", "gelu")
    return replace(spec, embed_norm=norm, head_transform=HeadTransform(act, norm, c.get_bool("classifier_bias", False)))


def _heads(c: Config) -> Heads:
    hidden, count = c.get_size("hidden_size"), c.get_size("num_attention_heads")
    c.divide("hidden_size", hidden, "num_attention_heads", count)
    return Heads(count, count, hidden // count)


_PAIR = ("mlp.gate", "mlp.up")
NAMES = Names(
    root={
        "embed": "model.embeddings.tok_embeddings",
        "embed_norm": "model.embeddings.norm",
        "norm": "model.final_norm",
        "head_dense": "lm_head.dense",
        "head_norm": "lm_head.norm",
        "head": "decoder",
    },
    layer="model.layers.{i}.",
    parts={
        "mixer_norm": "attn_norm",
        **{f"mixer.{n}": f"attn.{n}_proj" for n in "qkv"},
        "mixer.o": "attn.Wo",
        "mlp_norm": "mlp_norm",
        **{name: FusedRows("mlp.Wi", _PAIR) for name in _PAIR},
        "mlp.down": "mlp.Wo",
    },
)
# Fields of training, of batches without padding, and of heads for other tasks.
_HARMLESS = (
    "embedding_dropout", "mlp_dropout", "initializer_cutoff_factor", "deterministic_flash_attn", "reference_compile",
    "repad_logits_with_grad", "sparse_prediction", "sparse_pred_ignore_index", "classifier_pooling",
)  # fmt: skip
FAMILIES = (Family("modernbert-decoder", modernbert_decoder, NAMES, _HARMLESS),)
