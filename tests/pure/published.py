"""The configs of published models, word for word where that could be seen, and their exact parameter counts.

They are what real config.json files look like, spellings, omissions and left-over keys included: no
`rope_theta` in Llama 2, no `partial_rotary_factor` in GLM-4, `rope_interleaved` in SmolLM2, `hidden_act`
beside `hidden_activation` in Gemma 2.  The counts check that an architecture has every tensor it should.

A count is of unique trained parameters, a tied head counted once.  The hub's figure for a model adds up the
tensors in its files, so it is another one where the files hold more than that; such models say so below.

How much is confirmed, model by model, is said above each: "count seen" means that the exact number was found
in public repositories as the hub's or a loaded model's; "config seen" that a copy of the file was; "memory"
that the fields come from general knowledge of the file and only their consequence, the count, is confirmed.
Every count also equals that of the model that transformers 5.23 builds from the config on the meta device.
"""

from __future__ import annotations

import json
from typing import Any

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {}


def _add(name: str, params: int, text: str, **more: Any) -> None:
    """Register a model; `more` takes the fields whose value is a long list."""
    PUBLISHED[name] = ({**json.loads(text), **more}, params)


# llama ------------------------------------------------------------------------------------------------

# Count seen.  The hub says 6738417664: its files hold the 64 rotary frequencies of all 32 layers.  Memory.
_add(
    "meta-llama/Llama-2-7b-hf",
    6738415616,
    """{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 4096,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": false,
    "torch_dtype": "float16", "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000}""",
)
# Count seen; memory.
_add(
    "meta-llama/Meta-Llama-3-8B",
    8030261248,
    """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 500000.0, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.0.dev0", "use_cache": true, "vocab_size": 128256}""",
)
# Count seen; config seen.
_add(
    "meta-llama/Llama-3.1-8B-Instruct",
    8030261248,
    """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256}""",
)
# Count seen; memory.
_add(
    "meta-llama/Llama-3.1-70B",
    70553706496,
    """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 8192,
    "initializer_range": 0.02, "intermediate_size": 28672, "max_position_embeddings": 131072, "mlp_bias": false,
    "model_type": "llama", "num_attention_heads": 64, "num_hidden_layers": 80, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256}""",
)
# Count seen; memory.
_add(
    "meta-llama/Llama-3.2-1B",
    1235814400,
    """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
    "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
    "low_freq_factor": 1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}""",
)
# Count seen; memory.
_add(
    "HuggingFaceTB/SmolLM2-135M",
    134515008,
    """{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576,
    "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": true,
    "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
    "num_key_value_heads": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false,
    "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": true, "vocab_size": 49152}""",
)

# mistral, mixtral -------------------------------------------------------------------------------------

# Count seen; memory.
_add(
    "mistralai/Mistral-7B-v0.1",
    7241732096,
    """{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}""",
)
# Count seen; memory.
_add(
    "mistralai/Mistral-7B-v0.3",
    7248023552,
    """{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0",
    "use_cache": true, "vocab_size": 32768}""",
)
# Count seen; memory.
_add(
    "mistralai/Mixtral-8x7B-v0.1",
    46702792704,
    """{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0",
    "use_cache": true, "vocab_size": 32000}""",
)

# qwen -------------------------------------------------------------------------------------------------

# Count seen; memory.
_add(
    "Qwen/Qwen2.5-0.5B",
    494032768,
    """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2",
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
    "vocab_size": 151936}""",
)
# Count seen; memory (layers, heads, window and vocabulary seen).
_add(
    "Qwen/Qwen2.5-7B",
    7615616512,
    """{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2",
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_cache": true, "use_mrope": false, "use_sliding_window": false,
    "vocab_size": 152064}""",
)
# Count seen.  The hub says 751632384: its file holds lm_head.weight although it is tied.  Memory.
_add(
    "Qwen/Qwen3-0.6B",
    596049920,
    """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
    "sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
)
# Count seen; memory.
_add(
    "Qwen/Qwen3-8B",
    8190735360,
    """{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "max_window_layers": 36, "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,
    "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
)
# Count seen; config seen.
_add(
    "Qwen/Qwen3-30B-A3B",
    30532122624,
    """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
    "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false, "vocab_size": 151936}""",
)

# smollm3 ----------------------------------------------------------------------------------------------

# Count seen; config seen field by field, but whether the file spells out that the head is tied was not.
_add(
    "HuggingFaceTB/SmolLM3-3B",
    3075098624,
    """{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 128000, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 11008, "max_position_embeddings": 65536,
    "max_window_layers": 28, "mlp_bias": false, "model_type": "smollm3", "no_rope_layer_interval": 4,
    "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004,
    "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 5000000.0,
    "sliding_window": null, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": false,
    "use_sliding_window": false, "vocab_size": 128256}""",
    no_rope_layers=[1, 1, 1, 0] * 9,
    layer_types=["full_attention"] * 36,
)

# gemma ------------------------------------------------------------------------------------------------

# Count seen; config seen for its sizes and, field by field, in the 9b one.
_add(
    "google/gemma-2-2b",
    2614341888,
    """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8,
    "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0, "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "float32",
    "transformers_version": "4.42.4", "use_cache": true, "vocab_size": 256000}""",
)
# Count seen; config seen.
_add(
    "google/gemma-2-9b-it",
    9241705984,
    """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "initializer_range": 0.02,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "gemma2",
    "num_attention_heads": 16, "num_hidden_layers": 42, "num_key_value_heads": 8, "pad_token_id": 0,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "sliding_window_size": 4096, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0",
    "use_cache": true, "vocab_size": 256000}""",
)
# Count seen; memory (sizes seen).  Its attention scale is not that of its heads: 144, not 128.
_add(
    "google/gemma-2-27b",
    27227128320,
    """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 128, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "initializer_range": 0.02,
    "intermediate_size": 36864, "max_position_embeddings": 8192, "model_type": "gemma2",
    "num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16, "pad_token_id": 0,
    "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
    "torch_dtype": "float32", "transformers_version": "4.42.0.dev0", "use_cache": true, "vocab_size": 256000}""",
)
# Count seen; config seen but for its last few keys.
_add(
    "google/gemma-3-270m",
    268098176,
    """{"_sliding_window_pattern": 6, "architectures": ["Gemma3ForCausalLM"], "attention_bias": false,
    "attention_dropout": 0.0, "attn_logit_softcapping": null, "bos_token_id": 2, "eos_token_id": 1,
    "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640, "initializer_range": 0.02, "intermediate_size": 2048, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0,
    "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": 512, "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0.dev0", "use_bidirectional_attention": false, "use_cache": true,
    "vocab_size": 262144}""",
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
)
# Count seen; config seen, in a copy that a later version had saved.
_add(
    "google/gemma-3-1b-it",
    999885952,
    """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "attn_logit_softcapping": null, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
    "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": true, "vocab_size": 262144}""",
)

# phi3 -------------------------------------------------------------------------------------------------

_PHI3_SHORT = [1.1, 1.1, 1.1, 1.3000000000000003, 1.3500000000000003, 1.3500000000000003, 1.4000000000000004]
_PHI3_SHORT += [1.5500000000000005, *[2.000000000000001] * 17, *[2.0500000000000007] * 6, *[2.1000000000000005] * 2]
_PHI3_SHORT += [2.1500000000000004, *[2.25] * 5, 2.3999999999999995, 2.4499999999999993, 2.499999999999999]
_PHI3_SHORT += [2.6999999999999984, 2.6999999999999984, 2.7499999999999982, 2.799999999999998, 2.8999999999999977]
_PHI3_SHORT += [3.049999999999997]
_PHI3_LONG = [1.0700000524520874, 1.1200000047683716, 1.149999976158142, 1.4199999570846558, 1.5699999332427979]
_PHI3_LONG += [1.7999999523162842, 2.129999876022339, 2.129999876022339, 3.009999990463257, 5.910000324249268]
_PHI3_LONG += [6.950000286102295, 9.070000648498535, 9.930000305175781, 10.710000038146973, 11.130000114440918]
_PHI3_LONG += [14.609999656677246, 15.409998893737793, 19.809999465942383, 37.279998779296875, 38.279998779296875]
_PHI3_LONG += [38.599998474121094, 40.12000274658203, 46.20000457763672, 50.940006256103516, 53.66000747680664]
_PHI3_LONG += [54.9373893737793, 56.89738845825195, 57.28738784790039, 59.98738479614258, 60.86738586425781]
_PHI3_LONG += [60.887386322021484, 61.71739196777344, 62.91739273071289, 62.957393646240234, 63.41739273071289]
_PHI3_LONG += [63.8173942565918, 63.83739471435547, 63.897396087646484, 63.93739700317383, 64.06739807128906]
_PHI3_LONG += [64.11434936523438, 64.12435150146484, 64.15435028076172, 64.19435119628906, 64.24435424804688]
_PHI3_LONG += [64.57435607910156, 64.69000244140625, 64.76000213623047]
_PHI4_LONG = [1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649]
_PHI4_LONG += [2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533]
_PHI4_LONG += [5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651]
_PHI4_LONG += [14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1]
_PHI4_LONG += [32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77]

_PHI3 = """"architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "embd_pdrop": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "model_type": "phi3", "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05, "torch_dtype": "bfloat16", "use_cache": true"""
_PHI3_MINI = f"""{_PHI3}, "bos_token_id": 1, "eos_token_id": 32000, "pad_token_id": 32000, "hidden_size": 3072,
    "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": false,
    "transformers_version": "4.40.2", "vocab_size": 32064"""

# Count seen; memory.
_add(
    "microsoft/Phi-3-mini-4k-instruct",
    3821079552,
    f"""{{{_PHI3_MINI}, "max_position_embeddings": 4096, "rope_scaling": null, "sliding_window": 2047}}""",
)
# Count seen; the factors seen, of the revision of June 2024; the rest from memory.
_add(
    "microsoft/Phi-3-mini-128k-instruct",
    3821079552,
    f"""{{{_PHI3_MINI}, "max_position_embeddings": 131072, "sliding_window": 262144}}""",
    rope_scaling={"long_factor": _PHI3_LONG, "short_factor": _PHI3_SHORT, "type": "longrope"},
)
# Count seen; config seen, factors included.
_add(
    "microsoft/Phi-4-mini-instruct",
    3836021760,
    f"""{{{_PHI3}, "bos_token_id": 199999, "eos_token_id": 199999, "pad_token_id": 199999, "full_attn_mod": 1,
    "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": false,
    "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 24, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true,
    "transformers_version": "4.45.0", "vocab_size": 200064}}""",
    rope_scaling={"long_factor": _PHI4_LONG, "short_factor": [1.0] * 48, "type": "longrope"},
)
# Count seen; memory.
_add(
    "microsoft/phi-4",
    14659507200,
    f"""{{{_PHI3}, "bos_token_id": 100257, "eos_token_id": 100265, "pad_token_id": 100349, "hidden_size": 5120,
    "intermediate_size": 17920, "max_position_embeddings": 16384, "num_attention_heads": 40,
    "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
    "rope_scaling": null, "rope_theta": 250000, "sliding_window": null, "tie_word_embeddings": false,
    "transformers_version": "4.47.0", "vocab_size": 100352}}""",
)

# olmo -------------------------------------------------------------------------------------------------

_OLMO = """"attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 100257, "hidden_act": "silu",
    "initializer_range": 0.02, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_theta": 500000,
    "tie_word_embeddings": false"""

# Count seen; memory.
_add(
    "allenai/OLMo-2-1124-7B",
    7298617344,
    f"""{{{_OLMO}, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "rope_scaling": null, "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0", "use_cache": true, "vocab_size": 100352}}""",
)
# Count seen; sizes, base of the rotation and vocabulary seen.
_add(
    "allenai/OLMo-2-0425-1B",
    1484916736,
    f"""{{{_OLMO}, "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "num_attention_heads": 16,
    "num_hidden_layers": 16, "num_key_value_heads": 16, "rope_scaling": null, "torch_dtype": "float32",
    "transformers_version": "4.47.0", "use_cache": true, "vocab_size": 100352}}""",
)
# Count seen; config seen field by field.
_add(
    "allenai/Olmo-3-1025-7B",
    7298011136,
    f"""{{{_OLMO}, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 65536, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "rope_scaling": {{"attention_factor": 1.2079441541679836,
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "rope_type": "yarn"}}, "sliding_window": 4096, "torch_dtype": "bfloat16", "transformers_version": "4.57.0",
    "use_cache": false, "vocab_size": 100278}}""",
    layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8,
)

# glm, granite -----------------------------------------------------------------------------------------

_GLM = """"attention_bias": true, "attention_dropout": 0.0, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 13696, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "pad_token_id": 151329, "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "use_cache": true, "vocab_size": 151552"""

# Count seen; config seen twice, once without partial_rotary_factor and once with it: half is the default.
_add(
    "THUDM/glm-4-9b-chat-hf",
    9399951360,
    f"""{{{_GLM}, "architectures": ["GlmForCausalLM"], "max_position_embeddings": 131072, "model_type": "glm",
    "rms_norm_eps": 1.5625e-07, "transformers_version": "4.46.0.dev0"}}""",
)
# Count seen; memory.
_add(
    "THUDM/GLM-4-9B-0414",
    9400279040,
    f"""{{{_GLM}, "architectures": ["Glm4ForCausalLM"], "max_position_embeddings": 32768, "model_type": "glm4",
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "transformers_version": "4.52.0.dev0"}}""",
)

_GRANITE = """"architectures": ["GraniteForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0, "hidden_act": "silu",
    "initializer_range": 0.02, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "granite",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "use_cache": true"""

# Count seen; sizes and multipliers seen.
_add(
    "ibm-granite/granite-3.1-2b-instruct",
    2533531648,
    f"""{{{_GRANITE}, "attention_multiplier": 0.015625, "hidden_size": 2048, "intermediate_size": 8192,
    "logits_scaling": 8.0, "rope_theta": 5000000.0, "transformers_version": "4.47.0", "vocab_size": 49155}}""",
)
# Count seen; the fields that differ from 3.1 from memory.
_add(
    "ibm-granite/granite-3.3-2b-instruct",
    2533539840,
    f"""{{{_GRANITE}, "attention_multiplier": 0.015625, "hidden_size": 2048, "intermediate_size": 8192,
    "logits_scaling": 8.0, "rope_theta": 10000000.0, "transformers_version": "4.49.0", "vocab_size": 49159}}""",
)
# Count seen; config seen.
_add(
    "ibm-granite/granite-3.3-8b-instruct",
    8170864640,
    f"""{{{_GRANITE}, "attention_multiplier": 0.0078125, "hidden_size": 4096, "intermediate_size": 12800,
    "logits_scaling": 16.0, "rope_theta": 10000000.0, "transformers_version": "4.49.0", "vocab_size": 49159}}""",
)

# gpt_oss ----------------------------------------------------------------------------------------------

_GPT_OSS = """"architectures": ["GptOssForCausalLM"], "attention_bias": true, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_key_value_heads": 8, "output_router_logits": false, "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
    "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05, "rope_scaling":
    {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": false}, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "swiglu_limit": 7.0, "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true,
    "vocab_size": 201088"""
_IN_TURN = ["sliding_attention", "full_attention"]

# Counts seen, of both; configs seen.  They count numbers, not the bytes that MXFP4 packs two of them into.
_add(
    "openai/gpt-oss-20b",
    20914757184,
    f'{{{_GPT_OSS}, "num_hidden_layers": 24, "num_local_experts": 32}}',
    layer_types=_IN_TURN * 12,
)
_add(
    "openai/gpt-oss-120b",
    116829156672,
    f'{{{_GPT_OSS}, "num_hidden_layers": 36, "num_local_experts": 128}}',
    layer_types=_IN_TURN * 18,
)

# gpt --------------------------------------------------------------------------------------------------

_GPT2 = """"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
    "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_positions": 1024, "resid_pdrop": 0.1,
    "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
    "summary_type": "cls_index", "summary_use_proj": true, "vocab_size": 50257"""
_NEOX = """"architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
    "initializer_range": 0.02, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "model_type": "gpt_neox",
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": false, "torch_dtype": "float16",
    "transformers_version": "4.24.0", "use_cache": true, "use_parallel_residual": true"""

# Counts seen, all four; memory.  The hub says 137022720 of the first: its file holds a causal mask per layer.
_add("openai-community/gpt2", 124439808, f'{{{_GPT2}, "n_embd": 768, "n_head": 12, "n_layer": 12}}')
_add("openai-community/gpt2-medium", 354823168, f'{{{_GPT2}, "n_embd": 1024, "n_head": 16, "n_layer": 24}}')
_add("openai-community/gpt2-large", 774030080, f'{{{_GPT2}, "n_embd": 1280, "n_head": 20, "n_layer": 36}}')
_add("openai-community/gpt2-xl", 1557611200, f'{{{_GPT2}, "n_embd": 1600, "n_head": 25, "n_layer": 48}}')
# Counts seen, in copies of the model cards' table; config seen of the family's smallest, else memory.  The
# hub's own figures are larger: its files hold causal masks.  The 6.9b one pads its vocabulary further.
_add(
    "EleutherAI/pythia-160m",
    162322944,
    f"""{{{_NEOX}, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
    "num_hidden_layers": 12, "vocab_size": 50304}}""",
)
_add(
    "EleutherAI/pythia-1.4b",
    1414647808,
    f"""{{{_NEOX}, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
    "num_hidden_layers": 24, "vocab_size": 50304}}""",
)
_add(
    "EleutherAI/pythia-6.9b",
    6857302016,
    f"""{{{_NEOX}, "hidden_size": 4096, "intermediate_size": 16384, "num_attention_heads": 32,
    "num_hidden_layers": 32, "vocab_size": 50432}}""",
)

# state space models -----------------------------------------------------------------------------------

# Memory.
_add(
    "state-spaces/mamba-130m-hf",
    129135360,
    """{"architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "d_inner": 1536, "d_model": 768,
    "eos_token_id": 0, "expand": 2, "fused_add_norm": true, "hidden_act": "silu", "hidden_size": 768,
    "initializer_range": 0.1, "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "model_type": "mamba",
    "n_layer": 24, "num_hidden_layers": 24, "pad_token_id": 0, "pad_vocab_size_multiple": 8,
    "rescale_prenorm_residual": false, "residual_in_fp32": true, "rms_norm": true, "ssm_cfg": {}, "state_size": 16,
    "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001,
    "time_step_rank": 48, "time_step_scale": 1.0, "torch_dtype": "float32", "transformers_version": "4.39.0.dev0",
    "use_bias": false, "use_cache": true, "use_conv_bias": true, "vocab_size": 50280}""",
)
_add(
    "state-spaces/mamba-2.8b-hf",
    2768345600,
    """{"architectures": ["MambaForCausalLM"], "conv_kernel": 4, "d_inner": 5120, "d_model": 2560, "expand": 2,
    "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 5120, "layer_norm_epsilon": 1e-05,
    "model_type": "mamba", "n_layer": 64, "num_hidden_layers": 64, "rms_norm": true, "ssm_cfg": {}, "state_size": 16,
    "time_step_rank": 160, "use_bias": false, "use_conv_bias": true, "vocab_size": 50280}""",
)
# Config seen; its expand says something else than its intermediate_size, which is what the weights have.
_add(
    "tiiuae/falcon-mamba-7b",
    7272665088,
    """{"_name_or_path": "./", "architectures": ["FalconMambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4,
    "eos_token_id": 11, "expand": 16, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1,
    "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "model_type": "falcon_mamba", "num_hidden_layers": 64,
    "pad_token_id": 11, "rescale_prenorm_residual": false, "residual_in_fp32": true, "state_size": 16,
    "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
    "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_bias": false, "use_cache": true, "use_conv_bias": true,
    "vocab_size": 65024}""",
)
# Memory.
_add(
    "mistralai/Mamba-Codestral-7B-v0.1",
    7285403648,
    """{"architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4,
    "eos_token_id": 0, "expand": 2, "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096,
    "layer_norm_epsilon": 1e-05, "model_type": "mamba2", "n_groups": 8, "norm_before_gate": true, "num_heads": 128,
    "num_hidden_layers": 64, "residual_in_fp32": false, "rms_norm": true, "state_size": 128,
    "tie_word_embeddings": false, "time_step_limit": [0.0, Infinity], "time_step_rank": 256,
    "use_bias": false, "use_conv_bias": true,
    "vocab_size": 32768}""",
)
_add(
    "ai21labs/Jamba-v0.1",
    51570323328,
    """{"architectures": ["JambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_offset": 4, "attn_layer_period": 8,
    "bos_token_id": 1, "calc_logits_for_entire_prompt": false, "eos_token_id": 2, "expert_layer_offset": 1,
    "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 14336, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256,
    "mamba_expand": 2, "mamba_inner_layernorms": true, "mamba_proj_bias": false, "model_type": "jamba", "n_ctx": 262144,
    "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "output_router_logits": false, "pad_token_id": 0, "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001, "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0", "use_cache": true, "use_mamba_kernels": true, "vocab_size": 65536}""",
)
_add(
    "LiquidAI/LFM2-1.2B",
    1170340608,
    """{"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": true, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0, "block_use_swiglu": true, "block_use_xavier_init": true, "bos_token_id": 1,
    "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": true,
    "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "initializer_range": 0.02,
    "max_position_embeddings": 128000, "model_type": "lfm2", "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": true, "use_pos_enc": true,
    "vocab_size": 65536}""",
)

# gated delta rule -------------------------------------------------------------------------------------

# Memory, but for the sizes, which were seen.  Its files hold the layer that predicts a second token, too.
_add(
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    79674391296,
    """{"architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
    "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
    "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
    "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": false,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": true, "vocab_size": 151936}""",
)


def _add_qwen(name: str, params: int, layers: int, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> None:
    """Qwen3.5: a language model inside one that sees."""
    text_config = json.loads(
        """{"attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
        "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false, "rms_norm_eps": 1e-06,
        "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default"}, "use_cache": true, "vocab_size": 248320}"""
    )
    fours = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    text_config |= {"num_hidden_layers": layers, "layer_types": fours * (layers // 4), **text}
    whole = """{"image_token_id": 248056, "transformers_version": "4.57.1", "video_token_id": 248057,
        "vision_end_token_id": 248054, "vision_start_token_id": 248053,
        "vision_config": {"deepstack_visual_indexes": [], "hidden_act": "gelu_pytorch_tanh", "in_channels": 3,
        "initializer_range": 0.02, "num_position_embeddings": 2304, "patch_size": 16,
        "spatial_merge_size": 2, "temporal_patch_size": 2}}"""
    _add(name, params, whole, text_config=text_config, **more)
    PUBLISHED[name][0]["vision_config"].update(vision)
    PUBLISHED[f"{name}, its language model"] = (text_config, params)


# Config seen of Qwen3.6-27B, whose sizes are those of Qwen3.5-27B; of the others the sizes, else memory.  Counts are of
# the language model: the files hold what sees images and what predicts a second token besides.
_add_qwen(
    "Qwen/Qwen3.5-0.8B",
    752393024,
    24,
    {
        "hidden_size": 1024, "intermediate_size": 3584, "linear_num_value_heads": 16, "model_type": "qwen3_5_text",
        "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    {
        "depth": 12, "hidden_size": 768, "intermediate_size": 3072, "model_type": "qwen3_5", "num_heads": 12,
        "out_hidden_size": 1024,
    },
    architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", tie_word_embeddings=True,
)  # fmt: skip
_add_qwen(
    "Qwen/Qwen3.6-27B",
    26895998464,
    64,
    {
        "bos_token_id": 248044, "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48,
        "model_type": "qwen3_5_text", "num_attention_heads": 24, "num_key_value_heads": 4, "output_gate_type": "swish",
        "pad_token_id": None, "partial_rotary_factor": 0.25, "tie_word_embeddings": False,
    },
    {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "model_type": "qwen3_5", "num_heads": 16,
        "out_hidden_size": 5120,
    },
    architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", tie_word_embeddings=False,
    language_model_only=False,
)  # fmt: skip
_add_qwen(
    "Qwen/Qwen3.5-35B-A3B",
    34660610688,
    40,
    {
        "hidden_size": 2048, "linear_num_value_heads": 32, "mlp_only_layers": [], "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
        "num_key_value_heads": 2, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    },
    {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "model_type": "qwen3_5_moe", "num_heads": 16,
        "out_hidden_size": 2048,
    },
    architectures=["Qwen3_5MoeForConditionalGeneration"], model_type="qwen3_5_moe", tie_word_embeddings=False,
)  # fmt: skip
# The fields that matter seen, the rest memory.
_add(
    "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    49122681728,
    """{"architectures": ["KimiLinearForCausalLM"], "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586,
    "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02,
    "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24,
    27], "head_dim": 128, "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
    "num_heads": 32, "short_conv_kernel_size": 4}, "mla_use_nope": true, "model_max_length": 1048576,
    "model_type": "kimi_linear", "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": true,
    "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
    "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
    "num_shared_experts": 1, "pad_token_id": 163839, "q_lora_rank": null, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446, "tie_word_embeddings": false, "topk_group": 1, "use_cache": true,
    "use_grouped_topk": true, "v_head_dim": 128, "vocab_size": 163840}""",
)

# hybrids of Mamba-2 -----------------------------------------------------------------------------------

_GRANITE_4 = """"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257, "hidden_act": "silu",
    "init_method": "mup", "initializer_range": 0.1, "mamba_chunk_size": 256, "mamba_conv_bias": true,
    "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
    "mamba_proj_bias": false, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
    "normalization_function": "rmsnorm", "num_hidden_layers": 40, "output_router_logits": false,
    "pad_token_id": 100256, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null,
    "rope_theta": 10000, "router_aux_loss_coef": 0.0001, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
    "transformers_version": "4.56.0", "use_cache": true, "vocab_size": 100352"""
_FOUR_OF_FORTY = ["attention" if i % 10 == 5 else "mamba" for i in range(40)]
_HYBRID = f"""{_GRANITE_4}, "position_embedding_type": "nope" """
# Memory; the sizes of files seen (12.93 and 59.99 GiB in bfloat16) agree with the two counts with experts.
_add(
    "ibm-granite/granite-4.0-h-micro",
    3191396096,
    f"""{{{_HYBRID}, "attention_multiplier": 0.015625, "hidden_size": 2048, "intermediate_size": 8192,
    "logits_scaling": 8, "mamba_n_heads": 64, "num_attention_heads": 32, "num_experts_per_tok": 0,
    "num_key_value_heads": 8, "num_local_experts": 0, "shared_intermediate_size": 8192}}""",
    layer_types=_FOUR_OF_FORTY,
)
_add(
    "ibm-granite/granite-4.0-h-tiny",
    6939037248,
    f"""{{{_HYBRID}, "attention_multiplier": 0.0078125, "hidden_size": 1536, "intermediate_size": 512,
    "logits_scaling": 6, "mamba_n_heads": 48, "num_attention_heads": 12, "num_experts_per_tok": 6,
    "num_key_value_heads": 4, "num_local_experts": 64, "shared_intermediate_size": 1024}}""",
    layer_types=_FOUR_OF_FORTY,
)
_add(
    "ibm-granite/granite-4.0-h-small",
    32207337984,
    f"""{{{_HYBRID}, "attention_multiplier": 0.0078125, "hidden_size": 4096, "intermediate_size": 768,
    "logits_scaling": 16, "mamba_n_heads": 128, "num_attention_heads": 32, "num_experts_per_tok": 10,
    "num_key_value_heads": 8, "num_local_experts": 72, "shared_intermediate_size": 1536}}""",
    layer_types=_FOUR_OF_FORTY,
)
_add(
    "ibm-granite/granite-4.0-micro",
    3402836480,
    f"""{{{_GRANITE_4}, "attention_multiplier": 0.015625, "hidden_size": 2560, "intermediate_size": 8192,
    "logits_scaling": 10, "mamba_n_heads": 80, "num_attention_heads": 40, "num_experts_per_tok": 0,
    "num_key_value_heads": 8, "num_local_experts": 0, "position_embedding_type": "rope",
    "shared_intermediate_size": 8192}}""",
    layer_types=["attention"] * 40,
)
# Memory.
_add(
    "ibm-granite/granite-3.1-3b-a800m-base",
    3298793472,
    """{"architectures": ["GraniteMoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.1,
    "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
    "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02, "intermediate_size": 512,
    "logits_scaling": 6.0, "max_position_embeddings": 131072, "model_type": "granitemoe", "num_attention_heads": 24,
    "num_experts_per_tok": 8, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 40,
    "output_router_logits": false, "pad_token_id": 0, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.0, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.47.0", "use_cache": true, "vocab_size": 49155}""",
)
# A test model of its class; its name seen, its sizes memory and nothing else: only transformers confirms their count.
_add(
    "ibm-research/moe-7b-1b-active-shared-experts",
    6370899456,
    """{"architectures": ["GraniteMoeSharedForCausalLM"], "attention_bias": false, "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 512,
    "logits_scaling": 6.0, "max_position_embeddings": 4096, "model_type": "granitemoeshared",
    "num_attention_heads": 12, "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4,
    "num_local_experts": 62, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_theta": 10000,
    "shared_intermediate_size": 1024, "tie_word_embeddings": true, "vocab_size": 49160}""",
)
# Layers, widths, heads and experts seen; the rest memory. The second's count holds the 2,944 numbers that balance its
# experts.
_NEMOTRON_H = """"architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "bos_token_id": 1, "chunk_size": 128,
    "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "hidden_dropout": 0.0, "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_proj_bias": false,
    "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8,
    "num_attention_heads": 32, "num_hidden_layers": 52, "num_logits_to_keep": 1, "pad_token_id": 0,
    "rescale_prenorm_residual": true, "residual_in_fp32": false, "ssm_state_size": 128, "tie_word_embeddings": false,
    "time_step_floor": 0.0001, "time_step_limit": [0.0, Infinity], "time_step_max": 0.1, "time_step_min": 0.001,
    "torch_dtype": "bfloat16", "use_bias": false, "use_cache": true, "use_conv_bias": true, "use_mamba_kernels": true,
    "vocab_size": 131072"""
_add(
    "nvidia/Nemotron-H-8B-Base-8K",
    8100852736,
    f"""{{{_NEMOTRON_H}, "attention_head_dim": 128, "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "intermediate_size": 21504,
    "mamba_num_heads": 128, "max_position_embeddings": 8192, "num_key_value_heads": 8, "rms_norm_eps": 1e-05}}""",
)
_add(
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    31577940288,
    f"""{{{_NEMOTRON_H}, "head_dim": 128, "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856,
    "mamba_num_heads": 64, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": true, "num_experts_per_tok": 6,
    "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rope_theta": 10000, "routed_scaling_factor": 2.5,
    "sliding_window": null, "topk_group": 1}}""",
)
# Memory, both; the second's count holds the 704 numbers that balance its experts.
_add(
    "ibm-ai-platform/Bamba-9B-v1",
    9780235392,
    """{"architectures": ["BambaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "bos_token_id": 128000, "eos_token_id": 128001,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": false,
    "max_position_embeddings": 4096, "mlp_bias": false, "model_type": "bamba", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0,
    "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 128256}""",
)
_add(
    "LiquidAI/LFM2-8B-A1B",
    8339930560,
    """{"architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": false,
    "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 7168,
    "max_position_embeddings": 128000, "model_type": "lfm2_moe", "moe_intermediate_size": 1792, "norm_eps": 1e-05,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0,
    "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "transformers_version": "4.57.0.dev0", "use_cache": true,
    "use_expert_bias": true, "vocab_size": 65536}""",
    layer_types=["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
)

# deepseek ---------------------------------------------------------------------------------------------

_DEEPSEEK = """"attention_bias": false, "attention_dropout": 0.0, "aux_loss_alpha": 0.001, "hidden_act": "silu",
    "initializer_range": 0.02, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1,
    "pretraining_tp": 1, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "seq_aux": true, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128"""
_DEEPSEEK_YARN = """"type": "yarn", "beta_fast": 32, "beta_slow": 1, "factor": 40,
    "original_max_position_embeddings": 4096"""
_DEEPSEEK_V2 = f"""{_DEEPSEEK}, "architectures": ["DeepseekV2ForCausalLM"], "bos_token_id": 100000,
    "eos_token_id": 100001, "first_k_dense_replace": 1, "model_type": "deepseek_v2", "n_shared_experts": 2,
    "norm_topk_prob": false, "num_experts_per_tok": 6, "scoring_func": "softmax", "vocab_size": 102400"""

# Counts seen, all three; config seen of V2 and V2-Lite, else memory.  V3's files hold more than its count: the layer
# that predicts a second token (11.5 billion) and the scales of its fp8 matrices.
_add(
    "deepseek-ai/DeepSeek-V2-Lite",
    15706484224,
    f"""{{{_DEEPSEEK_V2}, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
    "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "q_lora_rank": null, "rope_scaling": {{{_DEEPSEEK_YARN}, "mscale": 0.707, "mscale_all_dim": 0.707}},
    "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy", "transformers_version": "4.33.1"}}""",
)
_add(
    "deepseek-ai/DeepSeek-V2",
    235741434880,
    f"""{{{_DEEPSEEK_V2}, "ep_size": 1, "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "n_group": 8, "n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60,
    "num_key_value_heads": 128, "q_lora_rank": 1536,
    "rope_scaling": {{{_DEEPSEEK_YARN}, "mscale": 1.0, "mscale_all_dim": 1.0}}, "routed_scaling_factor": 16.0,
    "topk_group": 3, "topk_method": "group_limited_greedy", "transformers_version": "4.39.3"}}""",
)
_add(
    "deepseek-ai/DeepSeek-V3",
    671026419200,
    f"""{{{_DEEPSEEK}, "architectures": ["DeepseekV3ForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": true, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "quantization_config": {{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
    "weight_block_size": [128, 128]}},
    "rope_scaling": {{{_DEEPSEEK_YARN}, "mscale": 1.0, "mscale_all_dim": 1.0}}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "transformers_version": "4.33.1",
    "vocab_size": 129280}}""",
)

# minimax ----------------------------------------------------------------------------------------------

_MINIMAX = """"attention_dropout": 0.0, "bos_token_id": null, "eos_token_id": null, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02, "intermediate_size": 9216,
    "max_position_embeddings": 10240000, "num_attention_heads": 64, "num_experts_per_tok": 2, "num_hidden_layers": 80,
    "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false, "rms_norm_eps": 1e-05,
    "rope_theta": 10000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
    "sliding_window": null, "tie_word_embeddings": false, "use_cache": true, "vocab_size": 200064"""
_ALPHA = 3.5565588200778455
_MINIMAX_PUBLISHED = f"""{_MINIMAX}, "layernorm_full_attention_alpha": {_ALPHA}, "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": {_ALPHA}, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": {_ALPHA}, "layernorm_mlp_beta": 1.0, "postnorm": true, "shared_moe_mode": "sigmoid",
    "shared_intermediate_size": 0"""

# Count seen, of M1; the fields of MiniMax-Text-01 seen in programs that run it, the rest memory. The first is the
# second's as transformers writes it: its class rotates whole heads and knows no rotary_dim.
_add(
    "MiniMaxAI/MiniMax-Text-01-hf",
    456089655296,
    f"""{{{_MINIMAX}, "architectures": ["MiniMaxForCausalLM"], "block_size": 256, "model_type": "minimax",
    "full_attn_alpha_factor": {_ALPHA}, "full_attn_beta_factor": 1.0, "linear_attn_alpha_factor": {_ALPHA},
    "linear_attn_beta_factor": 1.0, "mlp_alpha_factor": {_ALPHA}, "mlp_beta_factor": 1.0}}""",
    layer_types=(["linear_attention"] * 7 + ["full_attention"]) * 10,
)
_add(
    "MiniMaxAI/MiniMax-Text-01",
    456089655296,
    f"""{{{_MINIMAX_PUBLISHED}, "architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01"}}""",
    attn_type_list=([0] * 7 + [1]) * 10,
)
_add(
    "MiniMaxAI/MiniMax-M1-80k",
    456089655296,
    f"""{{{_MINIMAX_PUBLISHED}, "architectures": ["MiniMaxM1ForCausalLM"], "model_type": "minimax_m1"}}""",
    attn_type_list=([0] * 7 + [1]) * 10,
)
