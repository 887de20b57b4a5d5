"""Write a trained model as a folder that Ridgeline loads, and transformers too if it has the architecture.

The files are written to a temporary folder and read back before they are moved, so no reader finds an unchecked model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ridgeline.archs import OUR_MODEL_TYPE, family_of, spec_from_config
from ridgeline.errors import CheckpointError
from ridgeline.load.checkpoint import read_config
from ridgeline.load.export import checkpoint_tensors, write_safetensors
from ridgeline.load.hub import SMALL_FILES
from ridgeline.load.safetensors import SINGLE, HostTensor
from ridgeline.ops import open_table
from ridgeline.ops.table import REFERENCE
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.runtime.step import DenseStep
from ridgeline.train.module import LanguageModel

StoredType = Literal["float32", "bfloat16"]
TOLERANCE = 1e-4  # for logits, relative to the largest one where that is above 1
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_model(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], tokenizer: Path, end_id: int,
    dtype: StoredType, sample: Sequence[int], sampling: Mapping[str, Any],
) -> dict[str, float]:  # fmt: skip
    """Write config.json, generation_config.json, model.safetensors and the tokenizer's files into a folder.

    weights: by the spec's names; they are stored as `dtype`. tokenizer: the folder of its files. end_id: id of
    <|endoftext|>. sample: token ids on which the written folder is compared. sampling: default sampling parameters, for
    generation_config.json.

    Returns the largest difference of a logit from the trained model with its weights as stored, for each program that
    read the folder: "ridgeline", and "transformers" if it is installed and has the architecture. Raises CheckpointError
    if a program reads a different model.
    """
    ids = {"bos_token_id": end_id, "eos_token_id": end_id}

    def add_rest(draft: Path) -> None:
        _write_json(draft / "generation_config.json", {**ids, **sampling})
        for name in TOKENIZER_FILES:
            shutil.copyfile(tokenizer / name, draft / name)

    return _write(folder, {**config, **ids}, weights, dtype, sample, add_rest)


def write_with_weights(
    folder: Path, source: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], dtype: StoredType,
    sample: Sequence[int],
) -> dict[str, float]:  # fmt: skip
    """Write the model of the folder `source` with other weights. Its tokenizer and other small files are copied.

    config: the config.json of the source. For the other arguments, the result and the errors, see `write_model`.
    """

    def add_rest(draft: Path) -> None:
        for pattern in SMALL_FILES:
            for path in source.glob(pattern):
                if path.is_file() and path.name != "config.json":
                    shutil.copyfile(path, draft / path.name)

    return _write(folder, {k: v for k, v in config.items() if k != "torch_dtype"}, weights, dtype, sample, add_rest)


def write_random(folder: Path, source: Path, seed: int) -> None:
    """Write a model with the config and the small files of the folder `source`, and random weights to begin a training
    run from. Raises CheckpointError if it is not read as it was written.
    """
    config = read_config(source)
    model: Any = LanguageModel(spec_from_config(config), open_table(REFERENCE), 2, seed=seed)
    write_with_weights(folder, source, config, model.weights(), "float32", [0, 1])


def _write(
    folder: Path, config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], dtype: StoredType,
    sample: Sequence[int], add_rest: Callable[[Path], None],
) -> dict[str, float]:  # fmt: skip
    """Write and check a folder. add_rest: writes the files besides config and weights."""
    spec = spec_from_config(config)
    stored = {name: tensor.detach().to("cpu", getattr(torch, dtype)) for name, tensor in weights.items()}
    draft = folder / ".unfinished"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    try:
        _write_json(draft / "config.json", {**config, "dtype": dtype})
        hosts = {name: host_tensor(tensor, dtype) for name, tensor in stored.items()}
        write_safetensors(draft / SINGLE, checkpoint_tensors(spec, family_of(config).names, hosts))
        add_rest(draft)
        errors = _compare(draft, config, stored, list(sample))
        for path in sorted(draft.iterdir(), key=lambda p: p.name == "config.json"):  # last: marks the folder complete
            path.replace(folder / path.name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return errors


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def host_tensor(tensor: torch.Tensor, dtype: StoredType) -> HostTensor:
    """Return a tensor's numbers as files hold them, bfloat16 as its bits."""
    data = tensor.contiguous()
    return HostTensor(data.view(torch.uint16).numpy() if dtype == "bfloat16" else data.numpy(), dtype)


def _compare(
    folder: Path, config: Mapping[str, Any], stored: Mapping[str, torch.Tensor], sample: list[int]
) -> dict[str, float]:  # fmt: skip
    wanted = _trained_logits(spec_from_config(config), stored, sample)
    found = {"ridgeline": _our_logits(folder, sample)}
    if config.get("model_type") != OUR_MODEL_TYPE and (theirs := transformers_logits(folder, sample)) is not None:
        found["transformers"] = theirs
    limit = TOLERANCE * max(1.0, float(np.abs(wanted).max()))
    errors = {program: float(np.abs(logits - wanted).max()) for program, logits in found.items()}
    for program, error in errors.items():
        if not error <= limit:
            raise CheckpointError(
                f"{folder.parent}: {program} computes other logits from the written model than the trained one: they "
                f"differ by {error:.2e}, more than {limit:.1e}; report this"
            )
    return errors


def _trained_logits(spec: Any, stored: Mapping[str, torch.Tensor], sample: list[int]) -> np.ndarray[Any, Any]:
    """Return the logits of the trained module with its weights rounded as they are stored."""
    module: Any = LanguageModel(spec, open_table(REFERENCE), len(sample))
    with torch.no_grad():
        for name, parameter in module.weights().items():
            parameter.copy_(stored[name])
        ids, rows = torch.tensor(sample), torch.arange(len(sample))
        logits = module.eval().logits(ids, rows, (len(sample),), rows)
    out: np.ndarray[Any, Any] = logits.float().numpy()
    return out


def _our_logits(folder: Path, sample: list[int]) -> np.ndarray[Any, Any]:
    loaded = load_model(str(folder), LoadOptions(device=REFERENCE, dtype="float32"))
    memory = loaded.table.memory
    out: np.ndarray[Any, Any] = memory.get(loaded.model(DenseStep.build([sample], memory)))
    return out


def transformers_logits(folder: Path, sample: Sequence[int]) -> np.ndarray[Any, Any] | None:
    """Return the logits of transformers, or None if it is not installed."""
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError:
        return None
    library: Any = logging
    library.disable_progress_bar()  # the model is small, and was just written
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([list(sample)])).logits[0]
    out: np.ndarray[Any, Any] = logits.float().numpy()
    return out
