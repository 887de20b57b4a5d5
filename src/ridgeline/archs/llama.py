"""Llama and the families that differ from it in a few fields: Mistral, Qwen 2 and 3, SmolLM3, Granite, Phi-3 ..."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.archs.config import Config
from ridgeline.archs.family import (
    Family,
    Heads,
    attention,
    decoder,
    gated_mlp,
    layer_windows,
    pre_norm_layers,
    rms_norm,
    whole_heads,
)
from ridgeline.archs.names import FUSED_GATE_UP, FUSED_QKV, LLAMA, Names
from ridgeline.archs.rope import PHI3_SCALINGS, Rotation, read_rope
from ridgeline.spec import Attention, Layer, ModelSpec, RMSNorm


def llama(c: Config, theta: float = 1e4) -> ModelSpec:
    """Llama 1 to 3.x and models of the same architecture: Yi, TinyLlama, SmolLM 1 and 2 ... (arXiv:2302.13971,
    2407.21783). theta: the default base of rotations.
    """
    heads, norm, bias = Heads.read(c, null_head_dim=True), rms_norm(c), c.get_bool("attention_bias", False)
    c.expect("rope_interleaved", False)
    mixer = attention(heads, read_rope(c, heads.head_dim, Rotation(theta)), qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp(c, bias=c.get_bool("mlp_bias", False))
    return decoder(c, pre_norm_layers(c, mixer, norm, mlp), norm)


def iquest_coder(c: Config) -> ModelSpec:
    """IQuest-Coder V1: Llama."""
    c.expect("clip_qkv")
    c.expect("use_sliding_window", False)
    return llama(c.assume({"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5}))


def internlm3(c: Config) -> ModelSpec:
    """InternLM 3: Llama, with other names for the biases."""
    c.rename({"qkv_bias": "attention_bias", "bias": "mlp_bias"})
    bias, same = c.get_bool("attention_bias", False), c.get_bool("mlp_bias", False)
    if bias != same:
        raise c.error("mlp_bias", f"is {same}, but attention_bias is {bias}; both must be equal")
    return llama(c.assume({"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5}))


def exaone(c: Config) -> ModelSpec:
    """EXAONE 3.0 and 3.5: Llama, with GPT-2's names for some fields (arXiv:2412.04862)."""
    names = {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps"}
    c.rename({**names, "activation_function": "hidden_act"})
    return llama(c.assume({"num_key_value_heads": 8, "rms_norm_eps": 1e-5}), theta=5e5)


def cwm(c: Config) -> ModelSpec:
    """Code World Model: three local layers after each global one, and Llama 3.1's rotation (arXiv:2510.02387)."""
    heads, norm = Heads.read(c, num_kv_heads=8, head_dim_default=128, null_kv=False), rms_norm(c, 1e-5)
    scaling = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = read_rope(c, heads.head_dim, Rotation(1e6, parameters=scaling))
    mlp, mixer = gated_mlp(c, bias=c.get_bool("mlp_bias", False)), attention(heads, rope)
    window = c.get_size("sliding_window", 8192) if c.raw("sliding_window") != 0 else None  # 0 means none
    windows = layer_windows(c, lambda i: i % 4 != 0, window)
    return decoder(c, tuple(Layer(replace(mixer, window=w), mlp, norm) for w in windows), norm)


def mistral(c: Config) -> ModelSpec:
    """Mistral 7B: every layer has the same sliding window, or none (arXiv:2310.06825)."""
    heads, norm = Heads.read(c, num_kv_heads=8, null_kv=False, null_head_dim=True), rms_norm(c)
    window = c.get_size("sliding_window", 4096, None)
    mixer = attention(heads, read_rope(c, heads.head_dim), window=window)
    return decoder(c, pre_norm_layers(c, mixer, norm), norm)


def ministral(c: Config) -> ModelSpec:
    """Ministral: Mistral with windows in some layers; `layer_types` says in which."""
    heads, norm = Heads.read(c, num_kv_heads=8, null_kv=False, null_head_dim=True), rms_norm(c)
    window, mlp = c.get_size("sliding_window", 4096, None), gated_mlp(c)
    mixer = attention(heads, read_rope(c, heads.head_dim))
    windows = layer_windows(c, lambda i: window is not None, window)
    return decoder(c, tuple(Layer(replace(mixer, window=w), mlp, norm) for w in windows), norm)


def qwen_layers(c: Config, mixer: Attention, norm: RMSNorm) -> tuple[Layer, ...]:
    """Return Qwen's layers: with `use_sliding_window`, those from `max_window_layers` on are local."""
    c.expect("use_mrope", False)
    first_local, mlp, window = c.get_int("max_window_layers", 28), gated_mlp(c), switched_window(c)
    windows = layer_windows(c, lambda i: window is not None and i >= first_local, window)
    return tuple(Layer(replace(mixer, window=w), mlp, norm) for w in windows)


def switched_window(c: Config) -> int | None:
    """Return the window of Qwen's local layers; None if `use_sliding_window` is off or the window is null."""
    window = c.get_int("sliding_window", 4096, None)
    if not c.get_bool("use_sliding_window", False):
        return None
    return c.get_size("sliding_window", window, None)


def qwen2(c: Config) -> ModelSpec:
    """Qwen 2 and 2.5: biases on q, k and v (arXiv:2412.15115)."""
    heads, norm = Heads.read(c, num_kv_heads=32), rms_norm(c)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=True)
    return decoder(c, qwen_layers(c, mixer, norm), norm)


def qwen3_attention(c: Config, norm: RMSNorm, heads: Heads, window: int | None = None) -> Attention:
    """Return Qwen 3's attention: no bias by default, and a norm on every query and key head."""
    bias = c.get_bool("attention_bias", False)
    rope = read_rope(c, heads.head_dim)
    return attention(heads, rope, qkv_bias=bias, out_bias=bias, qk_norm=norm, window=window)


def qwen3(c: Config) -> ModelSpec:
    """Qwen 3, dense (arXiv:2505.09388)."""
    norm, heads = rms_norm(c), Heads.read(c, num_kv_heads=32, head_dim_default=128)
    return decoder(c, qwen_layers(c, qwen3_attention(c, norm, heads), norm), norm)


def smollm3(c: Config) -> ModelSpec:
    """SmolLM3: every fourth layer has no position information (NoPE, arXiv:2501.18795)."""
    heads, norm, bias = Heads.read(c, num_kv_heads=4), rms_norm(c), c.get_bool("attention_bias", False)
    count, interval = c.get_layer_count(), c.get_int("no_rope_layer_interval", 4)
    if interval < 1:
        raise c.error("no_rope_layer_interval", f"is {interval}; it must be positive")
    rotated = c.get_list("no_rope_layers", None, None)
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(count)]
    if len(rotated) < count or not all(type(r) is int and r in (0, 1) for r in rotated):
        raise c.error("no_rope_layers", f"must hold {count} entries, each 0 or 1")
    sliding, window = c.get_bool("use_sliding_window", False), c.get_size("sliding_window", None, None)
    windows = layer_windows(c, lambda i: sliding and window is not None and not rotated[i], window)
    mixer = attention(heads, read_rope(c, heads.head_dim, Rotation(2e6)), qkv_bias=bias, out_bias=bias)
    mlp = gated_mlp(c, bias=c.get_bool("mlp_bias", False))
    layers = tuple(
        Layer(replace(mixer, rope=mixer.rope if r else None, window=w), mlp, norm)
        for r, w in zip(rotated, windows, strict=False)  # the list may be longer than the model
    )
    return decoder(c, layers, norm, tied=True)


def granite(c: Config) -> ModelSpec:
    """Granite 3: four multipliers (embedding, attention, residual, logits)."""
    heads, norm, bias = Heads.read(c), rms_norm(c), c.get_bool("attention_bias", False)
    scale = c.get_positive("attention_multiplier", 1.0)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias, scale=scale)
    mlp = gated_mlp(c, bias=c.get_bool("mlp_bias", False))
    layer = Layer(mixer, mlp, norm, residual_scale=c.get_float("residual_multiplier", 1.0))
    return decoder(
        c, (layer,) * c.get_layer_count(), norm,
        embedding_scale=c.get_float("embedding_multiplier", 1.0),
        logit_scale=1.0 / c.get_positive("logits_scaling", 1.0),
    )  # fmt: skip


def hyperclovax(c: Config) -> ModelSpec:
    """HyperCLOVA X SEED Think: Granite with norms after the branches too, and logits that are multiplied."""
    heads, norm, bias = (
        whole_heads(c, Heads.read(c, null_head_dim=True)),
        rms_norm(c),
        c.get_bool("attention_bias", False),
    )
    scale = c.get_positive("attention_multiplier", usual := heads.head_dim**-0.5, usual)
    mixer = attention(heads, read_rope(c, heads.head_dim), qkv_bias=bias, out_bias=bias, scale=scale)
    mlp, factor = gated_mlp(c, bias=c.get_bool("mlp_bias", False)), c.get_float("residual_multiplier", 1.0)
    post = norm if c.get_bool("use_post_norm", True) else None
    return decoder(
        c, (Layer(mixer, mlp, norm, post, residual_scale=factor),) * c.get_layer_count(), norm,
        embedding_scale=c.get_float("embedding_multiplier", 1.0), logit_scale=c.get_float("logits_scaling", 1.0),
    )  # fmt: skip


def phi3(c: Config) -> ModelSpec:
    """Phi-3 and Phi-4: fused matrices in the checkpoint, LongRoPE in the long-context ones (arXiv:2404.14219)."""
    heads, norm = Heads.read(c), rms_norm(c, 1e-5)
    trained = c.get_int("original_max_position_embeddings", 4096)  # needed even without scaling
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        c.expect(name, False)
    for name in ("full_attn_mod", "interpolate_factor"):  # Phi-4 mini has them; the published code supports only 1
        c.expect(name, 1)
    rope = read_rope(c, heads.head_dim, Rotation(partial=1.0, kinds=PHI3_SCALINGS, length=trained))
    mixer = attention(heads, rope, window=c.get_size("sliding_window", None, None))
    return decoder(c, pre_norm_layers(c, mixer, norm), norm)


EXAONE_NAMES = Names(
    root={"embed": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"},
    layer="transformer.h.{i}.",
    parts={
        "mixer_norm": "ln_1",
        **{f"mixer.{n}": f"attn.attention.{n}_proj" for n in "qkv"},
        "mixer.o": "attn.attention.out_proj",
        "mlp_norm": "ln_2",
        **{
            f"mlp.{ours}": f"mlp.{theirs}"
            for ours, theirs in {"gate": "c_fc_0", "up": "c_fc_1", "down": "c_proj"}.items()
        },
    },
    ignore=(r"rotary\.inv_freq$",),
    others=(LLAMA,),
)
CLOVA_NAMES = LLAMA.with_parts(parts={"mixer_post_norm": "post_norm1", "mlp_post_norm": "post_norm2"})

FAMILIES = (
    Family("llama", llama),
    Family("iquestcoder", iquest_coder),
    Family("internlm3", internlm3),
    Family("exaone", exaone, EXAONE_NAMES, harmless=("embed_dropout",)),
    Family("cwm", cwm),
    Family("mistral", mistral),
    Family("ministral", ministral),
    Family("qwen2", qwen2),
    Family("qwen3", qwen3),
    # max_window_layers remains from the class that this config was derived from.
    Family("smollm3", smollm3, harmless=("max_window_layers",)),
    Family("granite", granite),
    Family("hyperclovax", hyperclovax, CLOVA_NAMES),
    Family("phi3", phi3, LLAMA.with_parts(parts={**FUSED_QKV, **FUSED_GATE_UP})),
)
