"""Write the models that all peers run: published shapes, random weights, once, as a Hugging Face folder.

Matrices are N(0, 1/inputs) in bfloat16 and norms are ones, so activations stay of order one and logits are N(0, 1).
The tokenizer is a byte-level BPE with invented merges and the model's vocabulary size: converters require one, and
nothing here uses it. Scaled rotary frequencies (Llama 3.2, GPT-OSS) are left out: they take no time, and converters
differ.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ridgeline.archs import family_of, spec_from_config
from ridgeline.cost.operations import Slice, operations
from ridgeline.cost.precision import Precision
from ridgeline.load.export import write_safetensors
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.weights import stored_shape
from ridgeline.spec import ModelSpec

SEED = 6
COMMON = {
    "dtype": "bfloat16", "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False,
    "initializer_range": 0.02, "use_cache": True,
}  # fmt: skip
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "S": {  # SmolLM2-135M
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "vocab_size": 49152, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0,
        "mlp_bias": False,
    },
    "M": {  # Qwen3-0.6B
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "sliding_window": None, "use_sliding_window": False, "max_window_layers": 28,
    },
    "L": {  # Llama-3.2-1B
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
        "mlp_bias": False,
    },
    "granite-moe": {  # granite-3.1-1b-a400m: 32 experts, of which a token uses 8
        "model_type": "granitemoe", "architectures": ["GraniteMoeForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8,
        "vocab_size": 49155, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_theta": 1500000.0,
        "num_local_experts": 32, "num_experts_per_tok": 8, "embedding_multiplier": 12.0, "logits_scaling": 6.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "attention_dropout": 0.0,
    },
    "mamba2": {  # mamba2-130m
        "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "hidden_size": 768, "num_hidden_layers": 24,
        "expand": 2, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1, "conv_kernel": 4,
        "vocab_size": 50288, "layer_norm_epsilon": 1e-5, "chunk_size": 256, "use_bias": False, "use_conv_bias": True,
    },
    "qwen3-next": {  # Qwen3-Next-80B-A3B's parts, with about 0.5B parameters
        "model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 128, "vocab_size": 65536, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
        "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "num_experts": 32, "num_experts_per_tok": 4,
        "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "mlp_only_layers": [],
    },
    "gpt-oss": {  # gpt-oss-20b's parts, with about 0.5B parameters; llama.cpp requires a head of its own
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "hidden_size": 1024,
        "intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
        "head_dim": 64, "vocab_size": 65536, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}, "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 6, "num_local_experts": 16,
        "num_experts_per_tok": 4, "swiglu_limit": 7.0, "attention_bias": True, "tie_word_embeddings": False,
    },
}  # fmt: skip
# Fields that a family does not have.
NOT_IN = {"mamba2": ("attention_bias",)}
DENSE = ("S", "M", "L")


def make_model(shape: str, folder: Path) -> Path:
    """Return the folder; write it if it is missing."""
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = config_of(shape)
        write_tokenizer(folder, config["vocab_size"])
        last = config["vocab_size"] - 1
        config |= {"bos_token_id": last - 1, "eos_token_id": last, "pad_token_id": last}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        (folder / "generation_config.json").write_text(json.dumps({k: config[k] for k in keys}))
        write_safetensors(folder / "model.safetensors", {n: draw(shape, n, s) for n, s in tensors(shape).items()})
    return folder


def config_of(shape: str) -> dict[str, Any]:
    """Return the config of a shape, without the ids of special tokens."""
    family = {key: value for key, value in COMMON.items() if key not in NOT_IN.get(shape, ())}
    return {**family, **CONFIGS[shape]}


@cache
def spec_of(shape: str) -> ModelSpec:
    return spec_from_config(config_of(shape))


def tensors(shape: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by transformers' names."""
    spec, reads = spec_of(shape), family_of(CONFIGS[shape]).names.reads(spec_of(shape))
    return {key: stored_shape(w, reads[w.name]) for w in spec.weights() for key in reads[w.name].keys}


def draw(shape: str, name: str, size: tuple[int, ...]) -> HostTensor:
    """Return random numbers, which depend on the tensor's name and size alone."""
    rng = np.random.default_rng((SEED, zlib.crc32(name.encode())))
    values = vector(shape, name, size, rng)
    if values is None:
        values = rng.standard_normal(size, np.float32)
        values *= size[-2 if transposed(name) else -1] ** -0.5
    return HostTensor(values.astype(ml_dtypes.bfloat16).view(np.uint16), "bfloat16")


def transposed(name: str) -> bool:
    """Return whether a tensor has its inputs before its outputs: GPT-OSS's experts in one tensor."""
    return name.endswith(("gate_up_proj", "down_proj"))


def vector(shape: str, name: str, size: tuple[int, ...], rng: np.random.Generator) -> np.ndarray | None:
    """Return a tensor that is no matrix, or None. Decays and steps are drawn as Mamba-2 begins to train."""
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, size))
    if name.endswith("dt_bias"):
        step = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), size))
        return step + np.log(-np.expm1(-step))  # the inverse of softplus
    if name.endswith(("bias", "sinks")):
        return 0.1 * rng.standard_normal(size)
    if len(size) > 1:
        return None
    # Qwen3-Next stores weights of norms minus one, except for that of the delta layers.
    centered = shape == "qwen3-next" and "linear_attn" not in name
    return np.zeros(size) if centered else np.ones(size)


def write_tokenizer(folder: Path, size: int) -> None:
    """Write a tokenizer of bytes, then pairs and triples of bytes until `size` tokens, with three special tokens at the
    end.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<pad>", "<s>", "</s>"]
    room = size - len(letters) - len(specials)
    pairs = list(islice(product(letters, letters), room))
    longer = islice(product((a + b for a, b in pairs[: len(letters) ** 2]), letters), room - len(pairs))
    merges = pairs + list(longer)
    words = [*letters, *(a + b for a, b in merges), *specials]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    assert tokenizer.get_vocab_size() == size
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192, **named})
    )


def num_params(shape: str) -> int:
    return spec_of(shape).num_params()


def num_active_params(shape: str) -> int:
    """Return the parameters that a token reads: without the experts that it skips and an embedding beside the head."""
    return spec_of(shape).num_active_params() - num_embedding_params(shape)


def num_embedding_params(shape: str) -> int:
    """Return the parameters of the embedding; 0 if it is the head too."""
    spec = spec_of(shape)
    return 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size


def products(shape: str, tokens: int) -> float:
    """Return the multiplications for a token; the head counts only for a share of the tokens."""
    head = spec_of(shape).vocab_size * spec_of(shape).hidden_size
    return num_active_params(shape) - head + head / tokens


def state_bytes(shape: str, context: int) -> float:
    """Return the bytes of state that a token reads: keys and values in 16 bits, recurrent states in 32."""
    step = operations(spec_of(shape), [Slice(1, 1, context)], Precision(state="float16"))
    return sum(op.layers * op.state_bytes for op in step)


def bits_per_weight(shape: str, kind: str) -> float:
    """Return the bits of a weight that products read, with scales: int8 has a float for each row, int4 a half for each
    32 numbers. Matrices that are never rounded have 16 bits.
    """
    numbers = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0, "int4": 4.5 / 8}[kind]
    weights = [w for w in spec_of(shape).weights() if w.name != "embed.weight" or spec_of(shape).tie_word_embeddings]
    rounded = [w for w in weights if w.may_be_rounded]
    count, total = sum(w.num_params for w in rounded), sum(w.num_params for w in weights)
    rows = sum(w.num_params // w.shape[-1] for w in rounded)
    size = numbers * count + max(numbers, 2.0) * (total - count) + 4.0 * rows * (kind == "int8")
    return 8 * size / total


def weight_bytes(shape: str, kind: str) -> float:
    """Return the bytes of all weights at the bits of a kind."""
    return bits_per_weight(shape, kind) / 8 * num_params(shape)
