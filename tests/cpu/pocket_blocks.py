"""The built-in model as a block diffusion model: its weights, which are not trained for blocks, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy

from safetensors.numpy import save_file

from ridgeline.archs import OUR_MODEL_TYPE
from ridgeline.diffusion import as_blocks
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.hub import find_model
from ridgeline.load.packed import open_tensors
from ridgeline.load.weights import load_weights
from ridgeline.ops import open_table
from ridgeline.spec import to_json

MASK = 4095


def write_pocket_blocks(folder: Path, size: int) -> None:
    """Write a folder of our own format. size: tokens of a block."""
    pocket, memory = open_checkpoint(find_model("pocket")), open_table("cpu").memory
    for name in ("tokenizer.json", "tokenizer_config.json"):
        copy(pocket.folder / name, folder)
    weights = load_weights(
        pocket.spec, pocket.family.names, open_tensors(pocket), memory, "float32", lambda done: None
    )  # fmt: skip
    save_file({name: memory.get(array) for name, array in weights.items()}, folder / "model.safetensors")
    config = {"model_type": OUR_MODEL_TYPE, "spec": to_json(as_blocks(pocket.spec, size, MASK)), "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
