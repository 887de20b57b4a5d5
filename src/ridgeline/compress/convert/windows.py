"""Windows in most attention layers; those that stay whole are the ones that suffer most from a window, as measured."""

from __future__ import annotations

import numpy as np

from ridgeline.compress.changed import SameWeights
from ridgeline.compress.compare import compare
from ridgeline.compress.data import Samples
from ridgeline.compress.deliver import OnProgress
from ridgeline.compress.folder import changed_model, stored_types
from ridgeline.errors import RequestError
from ridgeline.evals.documents import Document
from ridgeline.plan import rewrite
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import ModelSpec


def with_measured_windows(
    original: LoadedModel, window: int, local: int | None, samples: Samples | None, on_progress: OnProgress
) -> ModelSpec:
    """Return the model with windows in `local` of every local + 1 attention layers; None: in all.

    Raises RequestError for a window below 1, and if which layers stay whole cannot be measured: without text, or with
    sequences that are not longer than the window.
    """
    if window < 1:
        raise RequestError(f"--to window={window}: a window has at least 1 token")
    spec = original.spec
    several = [i for i in range(len(spec.layers)) if spec.attention(i) is not None]
    many = 0 if local is None else len(several) // (local + 1)
    if not many or window >= spec.max_position_embeddings:
        return rewrite.with_windows(spec, window, local if many else None)
    if samples is None:
        raise RequestError("which layers stay whole is measured on text: name some with --calibrate")
    check_lengths(f"window={window}", window, samples)
    harm = _harms(original, window, len(several), samples, on_progress)
    whole = np.argsort(-harm, kind="stable")[:many]
    return rewrite.with_windows(spec, window, local, {int(i) for i in whole})


def check_lengths(to: str, window: int, samples: Samples) -> None:
    """Raise RequestError if no sequence of the text is longer than the window of a change."""
    longest = max(map(len, samples.calibration))
    if longest <= window:
        raise RequestError(
            f"--to {to}: sequences of {longest} tokens show nothing of such a window; take a longer --sequence-length"
        )


def _harms(
    original: LoadedModel, window: int, several: int, samples: Samples, on_progress: OnProgress
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return by how many nats per token the model differs (KL) with a window in each attention layer alone."""
    types, widen = stored_types(original), original.table.memory.get
    documents, found = [Document(ids) for ids in samples.calibration], np.zeros(several)
    for i in range(several):
        on_progress("giving each layer a window", i, several)
        spec = rewrite.with_windows(original.spec, window, 0, set(range(several)) - {i})
        weights = SameWeights(spec, original.model.weights, types, widen)
        quality = compare(original, {"one": changed_model(original, weights)}, documents).others["one"]
        assert quality.kl is not None
        found[i] = quality.kl.value
    return found
