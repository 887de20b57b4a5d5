"""Write the models that all peers run: published shapes, random weights, once, as a Hugging Face folder.

Matrices are N(0, 1/inputs) in bfloat16 and norms are ones, so activations stay of order one and logits are N(0, 1).
The tokenizer is a byte-level BPE with invented merges and the model's vocabulary size: converters require one, and
nothing here uses it. Llama 3.2's scaled rotary frequencies are left out: they take no time, and converters differ.
"""

from __future__ import annotations

import json
from itertools import islice, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ridgeline.load.export import write_safetensors
from ridgeline.load.safetensors import HostTensor

SEED = 6
COMMON = {"dtype": "bfloat16", "tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False}
CONFIGS: dict[str, dict[str, Any]] = {
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
}  # fmt: skip


def make_model(shape: str, folder: Path) -> Path:
    """Return the folder; write it if it is missing."""
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        config = CONFIGS[shape] | COMMON
        write_tokenizer(folder, config["vocab_size"])
        last = config["vocab_size"] - 1
        config |= {"bos_token_id": last - 1, "eos_token_id": last, "pad_token_id": last}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        (folder / "generation_config.json").write_text(json.dumps({k: config[k] for k in keys}))
        rng = np.random.default_rng(SEED)
        write_safetensors(folder / "model.safetensors", {n: draw(rng, s) for n, s in tensors(config).items()})
    return folder


def tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by transformers' names."""
    d, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = {
        "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q), "mlp.gate_proj": (inner, d), "mlp.up_proj": (inner, d), "mlp.down_proj": (d, inner),
        "input_layernorm": (d,), "post_attention_layernorm": (d,),
    }  # fmt: skip
    if config["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], d)}
    for i in range(config["num_hidden_layers"]):
        out |= {f"model.layers.{i}.{name}.weight": size for name, size in layer.items()}
    return out | {"model.norm.weight": (d,)}


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> HostTensor:
    if len(shape) == 1:
        return HostTensor(np.ones(shape, ml_dtypes.bfloat16).view(np.uint16), "bfloat16")
    values = rng.standard_normal(shape, np.float32)
    values *= shape[1] ** -0.5
    return HostTensor(values.astype(ml_dtypes.bfloat16).view(np.uint16), "bfloat16")


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
    return sum(int(np.prod(size)) for size in tensors(CONFIGS[shape]).values())


def num_matrix_params(shape: str) -> int:
    """Return the parameters of the matrices that a token reads; the embedding, which is the head, counts once."""
    return sum(int(np.prod(size)) for size in tensors(CONFIGS[shape]).values() if len(size) == 2)


def products(shape: str, tokens: int) -> float:
    """Return the multiplications for a token; the head counts only for a share of the tokens."""
    head = CONFIGS[shape]["vocab_size"] * CONFIGS[shape]["hidden_size"]
    return num_matrix_params(shape) - head + head / tokens


def state_numbers(shape: str) -> int:
    """Return the numbers of keys and values for each token."""
    config = CONFIGS[shape]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])
