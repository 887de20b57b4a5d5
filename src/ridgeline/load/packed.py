"""A checkpoint's tensors, whichever way its matrices are packed."""

from __future__ import annotations

from ridgeline.archs import packing_of
from ridgeline.load.checkpoint import Checkpoint
from ridgeline.load.mxfp4 import Mxfp4Files
from ridgeline.load.safetensors import TensorFiles

PACKINGS = {None: TensorFiles, "mxfp4": Mxfp4Files}


def open_tensors(checkpoint: Checkpoint) -> TensorFiles:
    """The tensors under the names, and in the form, of the family's unpacked checkpoints."""
    return PACKINGS[packing_of(checkpoint.config)](checkpoint.folder)
