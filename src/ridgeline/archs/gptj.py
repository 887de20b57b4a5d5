"""GPT-J, CodeGen and StarCoder 1 (GPT-BigCode): GPT-2's fields, with rotation and parallel branches or one key head."""

from __future__ import annotations

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention
from ridgeline.archs.gpt import GPT2_HARMLESS, GPT2_NAMES
from ridgeline.archs.names import FusedRows, Groups, Names
from ridgeline.spec import MLP, AnyLayer, Attention, Layer, LayerNorm, ModelSpec, ParallelLayer, Rope

CODEGEN_PARTS = 4  # devices that CodeGen was trained on: each has its own q, v and k in the fused matrix


def gpt_bigcode(c: Config) -> ModelSpec:
    """SantaCoder and StarCoder: one head of keys and values, learned positions (arXiv:2305.06161)."""
    heads, hidden, _ = _sizes(c)
    c.expect("multi_query", True, null=False)
    scale = heads.head_dim**-0.5 if c.get_bool("scale_attn_weights", True) else 1.0
    one = Heads(heads.num_heads, 1, heads.head_dim)
    mixer = attention(one, None, qkv_bias=True, out_bias=True, scale=scale)
    norm, mlp = LayerNorm(c.get_eps("layer_norm_epsilon", 1e-5)), _mlp(c, hidden, "gelu_pytorch_tanh")
    return _model(c, Layer(mixer, mlp, norm), tied=True, learned=True)


def gptj(c: Config) -> ModelSpec:
    """GPT-J: a part of each head is rotated in neighboring pairs; the MLP and the head have biases."""
    heads, hidden, _ = _sizes(c)
    return _rotated(c, heads, hidden)


def codegen(c: Config) -> ModelSpec:
    """CodeGen: GPT-J whose q, v and k are one matrix, in four parts (arXiv:2203.13474)."""
    heads, hidden, positions = _sizes(c)
    c.divide("n_embd", hidden, "the number of its parts,", CODEGEN_PARTS)
    c.expect("n_ctx", positions, null=False)
    return _rotated(c, heads, hidden)


def _sizes(c: Config) -> tuple[Heads, int, int]:
    """Return the heads, the hidden size and the longest context."""
    hidden, count = c.get_size("n_embd"), c.get_size("n_head")
    c.divide("n_embd", hidden, "n_head", count)
    return Heads(count, count, hidden // count), hidden, c.get_size("n_positions")


def _mlp(c: Config, hidden: int, default: str) -> MLP:
    size = c.get_size("n_inner", 4 * hidden, 4 * hidden)
    return MLP(size, c.get_activation("activation_function", default), bias=True)


def _rotated(c: Config, heads: Heads, hidden: int) -> ModelSpec:
    dim, norm = c.get_size("rotary_dim", 64), LayerNorm(c.get_eps("layer_norm_epsilon", 1e-5))
    if dim > heads.head_dim or dim % 2:
        raise c.error("rotary_dim", f"is {dim}; it must be even and at most {heads.head_dim}, the size of a head")
    mixer: Attention = attention(heads, Rope(dim, interleaved=True))
    layer = ParallelLayer(mixer, _mlp(c, hidden, "gelu_new"), norm, one_norm=True)
    return _model(c, layer, tied=False, learned=False)


def _model(c: Config, layer: AnyLayer, *, tied: bool, learned: bool) -> ModelSpec:
    """Return the model of equal layers. learned: whether positions are learned; otherwise its head has a bias."""
    positions = c.get_size("n_positions")
    assert layer.pre_norm is not None
    return ModelSpec(
        family=c.model_type,
        vocab_size=c.get_size("vocab_size"),
        hidden_size=c.get_size("n_embd"),
        max_position_embeddings=positions,
        layers=(layer,) * c.get_layer_count("n_layer"),
        norm=layer.pre_norm,
        tie_word_embeddings=c.get_bool("tie_word_embeddings", tied),
        num_position_embeddings=positions if learned else 0,
        head_bias=not learned,
    )


_QKV = ("mixer.q", "mixer.k", "mixer.v")
BIGCODE_NAMES = GPT2_NAMES.with_parts(
    parts={n: FusedRows("attn.c_attn", _QKV) for n in _QKV}, transposed=frozenset[str]()
)
GPTJ_NAMES = Names(
    root={"embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"},
    layer="transformer.h.{i}.",
    parts={
        "mixer_norm": "ln_1",
        **{f"mixer.{n}": f"attn.{n}_proj" for n in "qkv"},
        "mixer.o": "attn.out_proj",
        "mlp.up": "mlp.fc_in",
        "mlp.down": "mlp.fc_out",
    },
    ignore=(r"\.attn\.(masked_bias|bias|causal_mask)$",),
)
_QVK = ("mixer.q", "mixer.v", "mixer.k")
CODEGEN_NAMES = GPTJ_NAMES.with_parts(parts={n: Groups("attn.qkv_proj", _QVK, CODEGEN_PARTS) for n in _QVK})

_SCALED = ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")  # precision of the softmax, float32 here
_UNUSED = ("gradient_checkpointing", "rotary", "scale_attn_weights", "tokenizer_class")
FAMILIES = (
    Family("gpt_bigcode", gpt_bigcode, BIGCODE_NAMES, (*GPT2_HARMLESS, *_SCALED, "num_key_value_heads")),
    Family("gptj", gptj, GPTJ_NAMES, (*GPT2_HARMLESS, *_UNUSED)),
    Family("codegen", codegen, CODEGEN_NAMES, (*GPT2_HARMLESS, *_UNUSED)),
)
