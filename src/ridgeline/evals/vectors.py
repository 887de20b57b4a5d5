"""Measure what rounding an encoder's weights costs: how far the mean hidden states of a sample text turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ridgeline.errors import RidgelineError
from ridgeline.evals.price import MAX_TOKENS, SAMPLE
from ridgeline.load.hub import SMALL_FILES, find_model
from ridgeline.load.tokenizer import Tokenizer, has_tokenizer
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model
from ridgeline.runtime.vectors import Floats, Reader, Reading, Text

PARTS = 8  # texts into which the sample is divided


def describe_vectors(
    model: str, options: LoadOptions, tokenizer: str | None, loaded: LoadedModel, on_start: Callable[[str], None]
) -> str:
    """Return a line with the least cosine similarity of the original's and the rounded model's vectors.

    The original is loaded again, one layer at a time.
    """
    kind = options.weights if options.weights != "auto" else f"activations {options.activations}"
    subject, folder = f"weights in {kind}", loaded.checkpoint.folder
    with_tokenizer = find_model(tokenizer, files=SMALL_FILES) if tokenizer else folder
    if options.load_format == "dummy" or not has_tokenizer(with_tokenizer):
        why = "the weights are random" if options.load_format == "dummy" else "there is no tokenizer for the sample"
        return f"{subject}: the accuracy cost is not known: {why}"
    on_start(f"{kind} on {model}: measuring the accuracy cost on a sample text")
    try:
        original = pass_model(model, replace(options, weights="auto", dtype="auto", activations=None))
        texts = _sample(with_tokenizer, loaded.max_model_len)
        a, b = (_vectors(one, texts) for one in (original, loaded))
    except RidgelineError as e:
        return f"{subject}: the accuracy cost is not known: {e}"
    least = float((a * b).sum(1).min())
    return (
        f"{subject}: the least cosine similarity to the vectors of the stored model is {least:.4f}, "
        f"for {len(texts)} parts of a sample text"
    )


def _sample(folder: Path, most: int) -> list[Text]:
    ids = Tokenizer.from_folder(folder).encode(SAMPLE.read_text(encoding="utf-8"))[:MAX_TOKENS]
    parts = np.array_split(np.array(ids), PARTS)
    return [Text(part[:most].tolist()) for part in parts if part.size]


def _vectors(loaded: LoadedModel, texts: list[Text]) -> Floats:
    return Reader(loaded).read(texts, Reading(pool="mean", normalize=True))
