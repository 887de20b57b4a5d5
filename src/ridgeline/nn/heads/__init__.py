"""Heads for speculative decoding as modules, over opaque arrays and ops. spec/heads.py describes them as data."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ridgeline.nn.heads.eagle import Eagle3Head, EagleHead
from ridgeline.nn.heads.medusa import MedusaHead
from ridgeline.nn.heads.parts import Parts
from ridgeline.nn.held import HeldWeights
from ridgeline.nn.model import Model
from ridgeline.ops import OpsTable
from ridgeline.ops.api import Array
from ridgeline.spec.heads import EagleSpec, HeadSpec, MedusaSpec
from ridgeline.spec.quant import AS_STORED, FormatTable

__all__ = ["AnyHead", "Eagle3Head", "EagleHead", "MedusaHead", "Parts", "build_head"]

AnyHead = MedusaHead | EagleHead | Eagle3Head


def build_head(
    spec: HeadSpec, weights: Mapping[str, Array], target: Model, table: OpsTable, max_model_len: int,
    vocabulary: np.ndarray[Any, np.dtype[np.int64]] | None = None, formats: FormatTable = AS_STORED,
) -> AnyHead:  # fmt: skip
    """Return a head that is ready to run on the device of its target.

    Args:
        weights: every weight of `spec.weights()`, by name.
        target: the model whose streams it reads; its embedding and its head are used where the spec says so.
        max_model_len: longest context in tokens.
        vocabulary: the target's token of each draft token, [draft_vocab_size]; None where they are the same.
        formats: how matrices are stored.

    Raises:
        ValueError: for a head that does not fit the target, or a vocabulary that does not fit the head.
    """
    if (problem := spec.misfit(target.spec)) is not None:
        raise ValueError(problem)
    given = None if vocabulary is None else vocabulary.shape
    if given != ((spec.draft_vocab_size,) if spec.has_table else None):
        raise ValueError(f"a head that proposes {spec.draft_vocab_size} of {spec.vocab_size} tokens has a table "
                         f"of them exactly if these differ; this one has shape {given}")  # fmt: skip
    parts = Parts(HeldWeights(weights), table, formats, vocabulary)
    if isinstance(spec, MedusaSpec):
        return MedusaHead(spec, parts)
    if isinstance(spec, EagleSpec):
        return EagleHead(spec, parts, target, max_model_len)
    return Eagle3Head(spec, parts, target, max_model_len)
