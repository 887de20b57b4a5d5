"""Open a checkpoint's tensors, however its matrices are packed: one file for each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.archs import quantization as q
from ridgeline.load.checkpoint import Checkpoint
from ridgeline.load.gguf.files import GGUFFiles
from ridgeline.load.gguf.stored import stored_matrices
from ridgeline.load.packed import awq, bitsandbytes, compressed, fp8, gptq, mxfp4, torchao
from ridgeline.load.packed.files import PackedFiles
from ridgeline.load.packed.parts import Found, Parts
from ridgeline.load.safetensors import TensorFiles

__all__ = ["READERS", "Files", "PackedFiles", "open_tensors"]

Files = TensorFiles | PackedFiles | GGUFFiles

# Scheme -> the reader of its tensors: it checks all headers, and returns matrices that are read later.
READERS: Mapping[type[q.Quantization], Callable[[Any, TensorFiles], Found]] = {
    q.Awq: awq.read, q.Gptq: gptq.read, q.CompressedTensors: compressed.read, q.BnbInt8: bitsandbytes.read_int8,
    q.BnbNf4: bitsandbytes.read_nf4, q.Fp8: fp8.read, q.Fp8Blocks: fp8.read_blocks, q.ModelOptNvfp4: fp8.read_nvfp4,
    q.Mxfp4: mxfp4.read, q.TorchAo: torchao.read,
    q.Floats: lambda scheme, files: Found(kv_scales=Parts(files).kv_scales()),
}  # fmt: skip


def open_tensors(checkpoint: Checkpoint) -> Files:
    """Return the tensors under the names of the family's unpacked checkpoints. Raises CheckpointError."""
    if checkpoint.gguf:
        files = checkpoint.gguf.tensors()
        files.stored = stored_matrices(files)
        return files
    tensors, scheme = TensorFiles(checkpoint.folder), checkpoint.quantization
    return tensors if scheme is None else PackedFiles(tensors, READERS[type(scheme)](scheme, tensors))
