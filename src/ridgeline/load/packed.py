"""Open a checkpoint's tensors, however its matrices are packed."""

from __future__ import annotations

from ridgeline.archs import packing_of
from ridgeline.load.checkpoint import Checkpoint
from ridgeline.load.fp8 import BlockScaledFiles
from ridgeline.load.mxfp4 import Mxfp4Files
from ridgeline.load.safetensors import TensorFiles

Files = TensorFiles | BlockScaledFiles


def open_tensors(checkpoint: Checkpoint) -> Files:
    """Return the tensors under the names and in the form of the family's unpacked checkpoints."""
    if checkpoint.weight_blocks:
        return BlockScaledFiles(TensorFiles(checkpoint.folder), checkpoint.weight_blocks)
    packed = packing_of(checkpoint.config) == "mxfp4"
    return Mxfp4Files(checkpoint.folder) if packed else TensorFiles(checkpoint.folder)
