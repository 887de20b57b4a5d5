"""Tiny models as GGUF files, for tests: the weights of an oracle's case, written by our writer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from oracle.build import build
from oracle.case import Case
from oracle.families import CASES
from ridgeline.load.checkpoint import Checkpoint, open_checkpoint
from ridgeline.load.gguf.write import choose_types, write_gguf
from ridgeline.load.packed import open_tensors
from ridgeline.load.safetensors import HostTensor
from ridgeline.load.weights import StoredWeights
from ridgeline.ops.host.memory import NumpyMemory

# Llama 3's scaling with the trained length that all published models have; other lengths become LongRoPE.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}  # fmt: skip


def case_of(name: str, **changes: Any) -> Case:
    """A case of the oracle with the attention scale and the gate of published models, which GGUF files imply."""
    case = CASES[name]
    kwargs = {**case.kwargs, **changes}
    if case.model_type.startswith("gemma"):
        kwargs["query_pre_attn_scalar"] = kwargs["head_dim"]
    if case.model_type == "gpt_oss":
        kwargs |= {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
    return replace(case, kwargs=kwargs)


def weights_of(checkpoint: Checkpoint) -> dict[str, HostTensor]:
    """All weights of a checkpoint by our names, in float32."""
    stored = StoredWeights(
        checkpoint.spec,
        checkpoint.family.names,
        open_tensors(checkpoint),
        NumpyMemory(),
        "float32",
        lambda done: None,
    )
    return {name: HostTensor(np.asarray(value), "float32") for name, value in stored.items()}


def write(case: Case, folder: Path, kind: str = "F32", types: Mapping[str, str] | None = None) -> Any:
    """Build a case in transformers and write it as `folder`/model.gguf; return transformers' model."""
    model = build(case, folder / "original")
    checkpoint = open_checkpoint(folder / "original")
    chosen = choose_types(checkpoint.config, kind)[0] if types is None else types
    write_gguf(folder / "model.gguf", checkpoint.config, weights_of(checkpoint), None, chosen)
    return model
