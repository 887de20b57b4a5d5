"""LLaDA and Dream: a Llama and a Qwen 2 whose tokens see the whole sequence and whose answers are filled by masks."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention
from ridgeline.archs.llama import qwen2
from ridgeline.archs.names import Names
from ridgeline.archs.rope import Rotation, read_rope
from ridgeline.spec import GatedMLP, Layer, MaskedDiffusion, ModelSpec, RMSNorm, WholeSequence

DREAM_MASK_TOKEN = 151_666  # default of the published class


def _check(c: Config) -> None:
    """Raise ConfigError for a variant of LLaDA's class that no published model uses."""
    c.expect("block_type", "llama")
    c.expect("block_group_size", 1)
    c.expect("layer_norm_type", "rms")
    c.expect("layer_norm_with_affine", True)
    c.expect("rope", True)
    for name in (
        "alibi", "attention_layer_norm", "bias_for_layer_norm", "include_bias", "include_qkv_bias", "input_emb_norm",
        "scale_logits",
    ):  # fmt: skip
        c.expect(name, False)
    c.expect("multi_query_attention", False)


def llada(c: Config) -> ModelSpec:
    """LLaDA, dense: logits are for the token at the same position (arXiv:2502.09992)."""
    _check(c)
    width, count = c.get_size("d_model"), c.get_size("n_heads")
    c.divide("d_model", width, "n_heads", count)
    kv = c.get_size("n_kv_heads", count, count)
    c.divide("n_heads", count, "n_kv_heads", kv)
    heads, norm = Heads(count, kv, width // count), RMSNorm(c.get_eps("rms_norm_eps", 1e-5))
    mixer = attention(heads, read_rope(c, heads.head_dim, Rotation()), sight=WholeSequence())
    mlp = GatedMLP(c.get_size("mlp_hidden_size"), c.get_activation("activation_type", "silu"))
    vocabulary = c.get_size("vocab_size")
    return ModelSpec(
        c.model_type,
        c.get_size("embedding_size", vocabulary, vocabulary),
        width,
        c.get_size("max_sequence_length"),
        (Layer(mixer, mlp, norm),) * c.get_layer_count("n_layers"),
        norm,
        tie_word_embeddings=c.get_bool("weight_tying", True),
        diffusion=MaskedDiffusion(c.get_int("mask_token_id")),
    )


def _dream_masks(c: Config) -> MaskedDiffusion:
    return MaskedDiffusion(c.get_int("mask_token_id", DREAM_MASK_TOKEN), predicts_next=True, schedule="time")


def dream(c: Config) -> ModelSpec:
    """Dream: the layers and names of Qwen 2; logits are for the token after a position (arXiv:2508.15487)."""
    spec = qwen2(c)
    if any(own.window for own in spec.attentions(shared=True)):
        raise c.error("use_sliding_window", "is true, but a token of this model sees the whole sequence")
    return spec.seeing(WholeSequence(), _dream_masks(c))


LLADA = Names(
    root={"embed": "model.transformer.wte", "norm": "model.transformer.ln_f", "head": "model.transformer.ff_out"},
    layer="model.transformer.blocks.{i}.",
    parts={
        "mixer_norm": "attn_norm",
        "mixer.q": "q_proj",
        "mixer.k": "k_proj",
        "mixer.v": "v_proj",
        "mixer.o": "attn_out",
        "mlp_norm": "ff_norm",
        "mlp.gate": "ff_proj",
        "mlp.up": "up_proj",
        "mlp.down": "ff_out",
    },
)
# Fields for training, and for the precision and the kernels of the published code. mlp_ratio is used only where
# mlp_hidden_size is missing, and alibi_bias_max only with alibi.
FAMILIES = (
    Family(
        "llada", llada, LLADA,
        harmless=(
            "alibi_bias_max", "attention_layer_norm_with_affine", "embedding_dropout", "flash_attention",
            "init_cutoff_factor", "init_device", "init_fn", "init_std", "mlp_ratio", "precision", "residual_dropout",
            "rope_full_precision",
        ),
    ),
    Family("Dream", dream),
)  # fmt: skip
