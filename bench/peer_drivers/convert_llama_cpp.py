"""Convert a Hugging Face folder to GGUF: convert_llama_cpp.py FOLDER OUT Q8_0|Q4_0

Every matrix gets the same type, including the embedding (which is the head): llama-quantize would keep it in more bits.
The file of a dense model has no vocabulary, because all runs use token ids. Other models are converted by llama.cpp's
own script from the source release of llama-cpp-python, which its environment has unpacked.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from gguf.quants import quantize

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def main() -> None:
    source, out, form = sys.argv[1:]
    config = json.loads((Path(source) / "config.json").read_text())
    Path(out).mkdir(parents=True, exist_ok=True)
    if config["model_type"] in ("llama", "qwen3"):
        write(source, Path(out) / f"{form}.gguf", config, form)
    else:
        theirs(source, Path(out), form)


def theirs(source: str, out: Path, form: str) -> None:
    """Convert a model with llama.cpp's own script, and quantize every matrix that may be to the one type."""
    import llama_cpp as lib  # type: ignore[import-not-found]

    wide = out / "wide.gguf"
    script = Path(__file__).with_name("convert_llama_cpp_wide.py")
    subprocess.run([sys.executable, str(script), source, str(wide)], check=True)
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.pure = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{form}"), True
    params.token_embedding_type = params.output_tensor_type = getattr(lib, f"GGML_TYPE_{form}")
    if lib.llama_model_quantize(str(wide).encode(), str(out / f"{form}.gguf").encode(), params):
        raise RuntimeError(f"llama.cpp cannot quantize {source} to {form}")
    wide.unlink()


def write(source: str, path: Path, config: dict[str, Any], form: str) -> None:
    """Write the file of a dense model, tensor by tensor."""
    arch = config["model_type"]
    writer = GGUFWriter(str(path), arch)
    describe(writer, config, form)
    kind = GGMLQuantizationType[form]
    for name, values in read(Path(source) / "model.safetensors"):
        if arch == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = paired(values, config["head_dim"])
        if values.ndim == 1:
            writer.add_tensor(rename(name), values)
        else:
            writer.add_tensor(rename(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: GGUFWriter, config: dict[str, Any], form: str) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(LlamaFileType[f"MOSTLY_{form}"])
    writer.add_tokenizer_model("none")


def rename(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def paired(values: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder the rows of each head so that rows which rope rotates together are neighbors: ggml's order for Llama."""
    heads = values.reshape(-1, 2, head_dim // 2, values.shape[1])
    return heads.swapaxes(1, 2).reshape(values.shape)


def read(path: Path) -> Any:
    """Yield (name, float32 values) for each tensor of a safetensors file in bfloat16."""
    data = np.memmap(path, np.uint8, "r")
    size = int(data[:8].view(np.int64)[0])
    for name, info in json.loads(bytes(data[8 : 8 + size])).items():
        if name != "__metadata__":
            start, stop = (8 + size + at for at in info["data_offsets"])
            bits = data[start:stop].view(np.uint16).astype(np.uint32) << 16
            yield name, bits.view(np.float32).reshape(info["shape"])


if __name__ == "__main__":
    main()
