"""llama.cpp reads the GGUF files that we write, with our logits.

LLAMA_CPP_PYTHON is the path of a Python with llama-cpp-python and numpy, for example that of `bench/peer_envs.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from oracle.case import prompts
from oracle.gguf_models import LLAMA3, case_of, write
from ridgeline import LLM
from ridgeline.compress import quantize
from ridgeline.load.hub import find_model
from ridgeline.load.tokenizer import Tokenizer

PYTHON = os.environ.get("LLAMA_CPP_PYTHON")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not PYTHON, reason="LLAMA_CPP_PYTHON names no Python with llama-cpp-python"),
]
# It computes F32 exactly, but GELU and soft caps from tables of float16. Gemma's case and GPT-2's have those.
ROUGH = {"gemma2_tied": 1e-2, "gemma3": 1e-2, "gpt2_tied": 1e-2}
NAMES = (
    "llama_gqa", "llama_head_dim", "llama_biases", "llama_tied", "llama_linear", "llama_yarn", "llama_llama3",
    "mistral_full", "mixtral", "qwen2_tied", "qwen3", "qwen3_moe", "smollm3", "gemma2_tied", "gemma3", "phi3", "olmo2",
    "olmo3_plain", "granite", "granite_bias_tied", "granitemoe", "granitemoeshared", "glm4", "gpt_oss", "gpt2_tied",
    "mamba_tied",
)  # fmt: skip
# Llama 3's published lengths; and no YaRN for gpt-oss, because llama.cpp rounds the dimensions between which it blends.
ROPE = {"llama_llama3": LLAMA3, "gpt_oss": {"rope_type": "default", "rope_theta": 3000.0}}
# The largest mean divergence where llama.cpp rounds activations to the type of the matrices, or to 8 bits.
ROUNDED = {"F16": 1e-4, "BF16": 1e-3, "Q8_0": 3e-3, "Q4_0": 3e-3}
DRIVER = """
import ctypes, json, sys
import llama_cpp as lib, numpy as np
model = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
size, found = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)), []
for tokens in json.loads(sys.argv[2]):
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.type_k = params.type_v = params.flash_attn_type = 0
    context, batch = lib.llama_init_from_model(model, params), lib.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    assert lib.llama_decode(context, batch) == 0
    logits = lib.llama_get_logits(context)
    found.append(np.ctypeslib.as_array(logits, shape=(len(tokens) * size,)).reshape(-1, size).copy())
np.savez(sys.argv[3], *found)
"""


def logits_of_llama_cpp(file: Path, sequences: list[list[int]]) -> list[np.ndarray]:
    out = file.with_suffix(".npz")
    subprocess.run([str(PYTHON), "-c", DRIVER, str(file), json.dumps(sequences), str(out)], check=True, timeout=300)
    with np.load(out) as found:
        return [found[name] for name in found.files]


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """The mean KL divergence of the distributions over tokens, in nats."""
    p, q = (x - np.logaddexp.reduce(x, axis=-1, keepdims=True) for x in (a.astype(np.float64), b.astype(np.float64)))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("name", NAMES)
def test_the_same_logits(name: str, tmp_path: Path) -> None:
    case = case_of(name, **({"rope_parameters": ROPE[name]} if name in ROPE else {}))
    write(case, tmp_path)
    sequences = prompts(case)[:3]
    ours = LLM(str(tmp_path / "model.gguf"), max_model_len=case.max_model_len, kv_cache_dtype="float32").logits(
        sequences
    )
    for got, wanted in zip(ours, logits_of_llama_cpp(tmp_path / "model.gguf", sequences), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=ROUGH.get(name, 1e-4))


@pytest.mark.parametrize("kind", ROUNDED)
def test_close_logits_where_it_rounds_activations(kind: str, tmp_path: Path) -> None:
    case = case_of("llama_gqa")
    write(case, tmp_path, kind)
    sequences = prompts(case)[:3]
    ours = LLM(str(tmp_path / "model.gguf"), max_model_len=case.max_model_len, kv_cache_dtype="float32").logits(
        sequences
    )
    theirs = logits_of_llama_cpp(tmp_path / "model.gguf", sequences)
    assert divergence(np.concatenate(ours), np.concatenate(theirs)) <= ROUNDED[kind]


@pytest.mark.parametrize("scheme", ["q4_k", "q6_k", "q8_0", "q4_0", "f16"])
def test_quantized_files_of_a_trained_model(scheme: str, tmp_path: Path) -> None:
    """Files of `ridgeline quantize` predict the same in both programs: llama.cpp rounds activations to 8 bits."""
    quantize("pocket", scheme, out=tmp_path / "out")
    text = "def sizes(rows, columns):\n    return [row * columns for row in range(rows)]\n" * 4
    ids = Tokenizer.from_folder(find_model("pocket")).encode(text)
    ours = LLM(str(tmp_path / "out"), kv_cache_dtype="float32").logits([ids])[0]
    theirs = logits_of_llama_cpp(tmp_path / "out" / "model.gguf", [ids])[0]
    assert divergence(ours, theirs) <= 3e-3
    two = np.sort(ours, axis=-1)[:, -2:]
    clear = two[:, 1] - two[:, 0] > 0.3
    assert (ours.argmax(-1) == theirs.argmax(-1))[clear].all()
