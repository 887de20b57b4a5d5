"""Compare packed checkpoints with transformers, which runs the dequantized matrices."""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from oracle.build import PLAIN, double, make_model, oracle_logits, redraw
from oracle.case import prompts
from oracle.families import CASES
from oracle.packers import RECIPES, Recipe, Tensors, write
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.packed import open_tensors
from ridgeline.load.weights import StoredWeights
from ridgeline.nn import Model
from ridgeline.ops import OpsTable, open_table
from ridgeline.ops.host.backend import NumpyBackend
from ridgeline.ops.host.memory import NumpyMemory
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.quant import Activations

TOLERANCE = 1e-4
# Sizes that are multiples of a word of 3-bit numbers and of MXFP4's groups; most cases have 88 instead.
ROUND = {"intermediate_size": 96}


@cache
def plain_model(name: str, sizes: tuple[tuple[str, int], ...] = ()) -> tuple[nn.Module, Path]:
    """Return a case's model with other sizes, and the folder in which it is saved."""
    model = make_model(CASES[name], **dict(sizes))
    redraw(model, 3)
    folder = Path(mkdtemp(prefix="packed-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    return model, folder


def packed_folder(recipe: str, folder: Path, family: str = "llama_gqa", sizes: Mapping[str, int] = {}) -> Path:
    """Write the tiny model of a case in a format, with sizes that the format can have, and return its folder.

    sizes: further sizes of the model.
    """
    is_round = "mxfp4" in recipe or "nvfp4" in recipe or any(bits in recipe for bits in "23")
    _, source = plain_model(family, (*(ROUND.items() if is_round else ()), *sizes.items()))
    write(RECIPES[recipe], source, folder / "packed")
    return folder / "packed"


def theirs(name: str, dense: Tensors, folder: Path, sizes: dict[str, int]) -> list[np.ndarray]:
    """Return the logits of transformers with dequantized tensors, in float64."""
    model, source = plain_model(name, tuple(sizes.items()))
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", folder)
    save_file(dense, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = type(model).from_pretrained(folder, dtype=torch.float32, **PLAIN).eval()
    return oracle_logits(double(loaded), prompts(CASES[name]))


def host_table() -> OpsTable:
    """Return the table of numpy's kernels alone."""
    return OpsTable(NumpyMemory(), (NumpyBackend(),))


def ours(
    name: str, folder: Path, table: OpsTable | None = None, activations: Activations | None = "exact"
) -> list[np.ndarray]:
    """Return our logits of a packed folder."""
    table = table or open_table("reference")
    checkpoint = open_checkpoint(folder)
    weights = StoredWeights(
        checkpoint.spec, checkpoint.family.names, open_tensors(checkpoint), table.memory, None, lambda done: None,
        activations,
    )  # fmt: skip
    model: Any = Model(checkpoint.spec, weights, table, CASES[name].max_model_len)
    sequences = prompts(CASES[name])
    step = DenseStep.build(sequences, table.memory, None)
    rows = table.memory.get(model(step))
    return np.split(rows, np.cumsum([len(s) for s in sequences])[:-1])


def error(recipe: Recipe, name: str, folder: Path, sizes: dict[str, int], table: OpsTable | None = None) -> float:
    """Return the largest difference of a logit between us and transformers, for a case whose matrices are packed."""
    _, source = plain_model(name, tuple(sizes.items()))
    dense = write(recipe, source, folder / "packed", transposed=CASES[name].model_type == "gpt2")
    wanted = theirs(name, dense, folder / "dense", sizes)
    assert float(np.concatenate(wanted).std()) > 0.3
    found = ours(name, folder / "packed", table)
    return max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
