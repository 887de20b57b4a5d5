"""Write a trained draft as a folder that its target loads, beside its card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ridgeline.archs.write import config_of
from ridgeline.errors import RequestError
from ridgeline.load.gguf.paths import is_gguf
from ridgeline.load.heads import HeadFile, write_head
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec
from ridgeline.spec.heads import HeadSpec, MedusaSpec
from ridgeline.train.drafts.shapes import Vocabulary
from ridgeline.train.output import TOKENIZER_FILES, StoredType, host_tensor, write_model

Weights = Mapping[str, torch.Tensor]


def stored(weights: Weights, dtype: StoredType) -> dict[str, torch.Tensor]:
    """Return weights as they are stored, on the host."""
    return {name: w.detach().to("cpu", getattr(torch, dtype)) for name, w in weights.items()}


def write_trained_head(
    folder: Path, spec: HeadSpec, weights: Weights, vocabulary: Vocabulary | None, target: str, dtype: StoredType,
    depth: int,
) -> None:  # fmt: skip
    """Write a head in the format of its kind. depth: number of drafts that its config recommends."""
    format = "vllm-medusa" if isinstance(spec, MedusaSpec) and spec.shared_head else spec.kind
    hosts = {name: host_tensor(w, dtype) for name, w in stored(weights, dtype).items()}
    write_head(folder, HeadFile(spec, hosts, vocabulary, format, target, depth), format)


def write_draft_model(
    folder: Path, spec: ModelSpec, weights: Weights, target: LoadedModel, dtype: StoredType, sample: Sequence[int]
) -> None:
    """Write a draft model with the tokenizer of its target. sample: tokens on which the folder is compared."""
    end = min(target.eos_token_ids)
    write_model(folder, config_of(spec), weights, target.checkpoint.folder, end, dtype, sample, {})


def check_tokenizer(target: LoadedModel) -> None:
    """Raise RequestError for a target whose tokenizer a draft model's folder cannot have."""
    folder = target.checkpoint.folder
    missing = [name for name in TOKENIZER_FILES if is_gguf(folder) or not (folder / name).exists()]
    if missing:
        raise RequestError(f"{folder} has no {missing[0]}, which a draft model's folder needs; take another --kind")
    if not target.eos_token_ids:
        raise RequestError(f"{folder} names no eos_token_id, which a draft model's folder needs; take another --kind")
