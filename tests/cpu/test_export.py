"""An exported checkpoint equals the one that was read: every family, tensor by tensor, in every type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from oracle.build import build
from oracle.families import CASES
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.export import checkpoint_tensors, write_safetensors
from ridgeline.load.safetensors import HostTensor, TensorFiles
from ridgeline.load.weights import load_weights
from ridgeline.ops import open_table

FAMILIES = ["llama_biases", "gemma2", "phi3_partial", "gpt_neox", "gpt2", "olmo2", "qwen3_moe_mixed", "glm4", "granite"]
FAMILIES += ["deepseek_v2", "deepseek_v3", "qwen3_next", "qwen3_next_biases", "qwen3_5_moe_text"]
FAMILIES += ["granitemoehybrid", "nemotron_h_latent", "lfm2_moe"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_is_restored(name: str, dtype: str, tmp_path: Path) -> None:
    model = build(CASES[name], tmp_path)
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    checkpoint, files = open_checkpoint(tmp_path), TensorFiles(tmp_path)
    spec, names = checkpoint.spec, checkpoint.family.names
    weights = load_weights(spec, names, files, open_table("reference").memory, None, lambda done: None)
    hosts = {}
    for w in spec.weights():
        array: torch.Tensor = weights[w.name]  # type: ignore[assignment]
        array = array.to(getattr(torch, dtype))
        bits = array.view(torch.uint16) if dtype == "bfloat16" else array
        hosts[w.name] = HostTensor(bits.numpy(), dtype)
    write_safetensors(tmp_path / "again.safetensors", checkpoint_tensors(spec, names, hosts))
    saved, again = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "again.safetensors")
    original = {key.removeprefix(names.optional_prefix): tensor for key, tensor in saved.items()}
    derived = {key for key in original if names.is_ignored(key, spec)}
    assert original.keys() - derived == again.keys()
    for key, tensor in again.items():
        assert torch.equal(tensor, original[key]), key
    assert not list(tmp_path.glob(".*"))


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"a": HostTensor(np.ones(3, np.float32), "float32")})

    bad = HostTensor(np.zeros((2, 2), np.float32), "float32")
    object.__setattr__(bad, "data", _Failing())
    with pytest.raises(OSError, match="no space"):
        write_safetensors(path, {"a": HostTensor(np.zeros(3, np.float32), "float32"), "b": bad})
    assert load_file(path)["a"].tolist() == [1, 1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


class _Failing:
    """An array whose bytes cannot be written."""

    nbytes, shape, dtype = 16, (2, 2), np.float32

    def __array__(self, *args: object, **more: object) -> np.ndarray:  # type: ignore[type-arg]
        raise OSError("no space left on device")


def test_types_that_differ_in_one_tensor_are_refused(tmp_path: Path) -> None:
    build(CASES["phi3_partial"], tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    hosts = {
        w.name: HostTensor(np.zeros(w.shape, np.float16 if "mixer.q." in w.name else np.float32),
                           "float16" if "mixer.q." in w.name else "float32")
        for w in checkpoint.spec.weights()
    }  # fmt: skip
    with pytest.raises(ValueError, match="would contain"):
        checkpoint_tensors(checkpoint.spec, checkpoint.family.names, hosts)
