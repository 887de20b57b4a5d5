"""Damaged and lying GGUF models: one clear line each, and no large allocation."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline.archs import spec_from_config
from ridgeline.errors import CheckpointError, RidgelineError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.gguf.layout import read_layout
from ridgeline.load.gguf.write import choose_types, write_gguf
from ridgeline.load.packed import open_tensors
from ridgeline.load.safetensors import HostTensor
from ridgeline.spec import from_json, to_json

CONFIG = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "rope_theta": 10000.0,
}  # fmt: skip
MOST_BYTES = 4 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file, in Q8_0."""
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    r = np.random.default_rng(0)
    spec = spec_from_config(CONFIG)
    assert from_json(to_json(spec)) == spec
    weights = {w.name: HostTensor(r.normal(size=w.shape).astype(np.float32), "float32") for w in spec.weights()}
    write_gguf(path, CONFIG, weights, None, choose_types(CONFIG, "Q8_0")[0])
    return path.read_bytes()


def test_weights_that_cannot_be_written(tmp_path: Path) -> None:
    spec = spec_from_config(CONFIG)
    weights = {w.name: HostTensor(np.ones(w.shape, np.float32), "float32") for w in spec.weights()}
    weights["layers.1.mlp.up.weight"].data[3, 3] = np.nan
    with pytest.raises(CheckpointError, match=r"blk.1.ffn_up.weight cannot be written as Q8_0: it has values that are"):
        write_gguf(tmp_path / "m.gguf", CONFIG, weights, None, choose_types(CONFIG, "Q8_0")[0])
    assert not list(tmp_path.iterdir())


def read_all(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    files = open_tensors(checkpoint)
    for name in files:
        files.read(name)


def refused(data: bytes, path: Path, text: str = "") -> None:
    path.write_bytes(data)
    with pytest.raises(RidgelineError, match=text) as caught:
        read_all(path)
    assert "\n" not in str(caught.value) and path.name in str(caught.value), caught.value


def test_the_whole_file_is_read(model: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(model)
    read_all(tmp_path / "m.gguf")


@pytest.mark.parametrize("share", np.linspace(0, 0.999, 23))
def test_truncated(model: bytes, tmp_path: Path, share: float) -> None:
    refused(model[: int(len(model) * share)], tmp_path / "m.gguf", "truncated|damaged|GGUF|empty")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits(model: bytes, tmp_path: Path, data: st.DataObject) -> None:
    header = read_header_size(model)
    damaged = bytearray(model)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, header - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "m.gguf"
    path.write_bytes(damaged)
    tracemalloc.start()
    try:
        read_all(path)
    except RidgelineError as e:
        assert "\n" not in str(e)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MOST_BYTES


def read_header_size(model: bytes) -> int:
    """Bytes before the first tensor's data."""
    return model.index(b"blk.1.ffn_down.weight") + 60


def entry(model: bytes, name: bytes) -> int:
    """Where the description of a tensor begins, after its name."""
    return model.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)


def change(name: bytes, skip: int, code: str, value: int) -> Callable[[bytes], bytes]:
    def apply(model: bytes) -> bytes:
        at = entry(model, name) + skip
        return model[:at] + struct.pack("<" + code, value) + model[at + struct.calcsize(code) :]

    return apply


NAME = b"blk.0.ffn_up.weight"  # two dimensions: rank at 0, sizes at 4 and 12, type at 20, offset at 24
LIES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "rank 0": (change(NAME, 0, "I", 0), "0 dimensions"),
    "rank 5": (change(NAME, 0, "I", 5), "5 dimensions"),
    "rank 2**31": (change(NAME, 0, "I", 1 << 31), "dimensions"),
    "no columns": (change(NAME, 4, "Q", 0), "shape"),
    "huge rows": (change(NAME, 12, "Q", 1 << 60), "shape"),
    "many rows": (change(NAME, 12, "Q", 1 << 30), "truncated"),
    "half a block": (change(NAME, 4, "Q", 48), "multiple of the 32"),
    "unknown type": (change(NAME, 20, "I", 77), "type 77, which is not supported; supported: F32"),
    "known type": (change(NAME, 20, "I", 16), "type IQ2_XXS, which is not supported"),
    "offset beyond": (change(NAME, 24, "Q", 1 << 40), "truncated"),
    "offset 2**64": (change(NAME, 24, "Q", (1 << 64) - 32), "truncated"),
    "unaligned offset": (change(NAME, 24, "Q", 33), "multiple of 32"),
    "shared bytes": (change(NAME, 24, "Q", 0), "share bytes"),
    "fewer rows": (change(NAME, 12, "Q", 95), "shape"),
    "twice": (lambda model: model.replace(b"blk.1.ffn_up.weight", NAME, 1), "twice"),
    "unknown name": (lambda model: model.replace(b"blk.1.ffn_up.", b"blk.1.ffn_xx.", 1), "lacks|does not have"),
    "architecture": (lambda model: model.replace(b"llama", b"lhama"), "'lhama', which is not supported"),
    "latent attention": (
        lambda m: m.replace(struct.pack("<Q", 5) + b"llama", struct.pack("<Q", 9) + b"deepseek2", 1),
        "tensors of latent attention .* open the safetensors",
    ),
    "unknown key": (lambda m: m.replace(b"llama.vocab_size", b"llama.vocab_sizf"), "vocab_sizf is not understood"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies(model: bytes, tmp_path: Path, lie: str) -> None:
    from ridgeline import LLM

    apply, text = LIES[lie]
    path = tmp_path / "m.gguf"
    path.write_bytes(apply(model))
    with pytest.raises(RidgelineError, match=text) as caught:
        LLM(str(path))
    assert "\n" not in str(caught.value)


def test_a_scale_that_is_not_finite(model: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model)
    tensor = read_layout(path).tensors["blk.1.attn_q.weight"]
    damaged = model[: tensor.start + 34] + b"\x00\x7e" + model[tensor.start + 36 :]
    refused(damaged, path, r"blk.1.attn_q.weight in m.gguf has a scale that is infinite or NaN")


def test_a_vocabulary_without_a_model(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    text = b"general.architecture"
    pair = struct.pack("<Q", len(text)) + text + struct.pack("<IQ", 8, 5) + b"llama"
    refused(head + pair, tmp_path / "v.gguf", "has only a vocabulary")
