"""Check that transformers computes the logits of a folder whose family is not that of the original."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from ridgeline.compress.folder import READ_BACK, READ_BACK_TOKENS
from ridgeline.errors import RequestError
from ridgeline.evals.scores import logit_blocks
from ridgeline.evals.windows import Batch
from ridgeline.runtime.load import LoadedModel


def checked_elsewhere(folder: Path, family: str, made: LoadedModel, ids: Sequence[int]) -> str:
    """Return a remark about what transformers computes from a folder.

    family: the family of its config. made: the model that was written. Raises RequestError if its logits differ.
    """
    if find_spec("torch") is None or find_spec("transformers") is None:
        return f"transformers is not installed, so that what it computes from the {family} config was not checked"
    from ridgeline.train.output import transformers_logits

    few = list(ids)[:READ_BACK_TOKENS]
    theirs = transformers_logits(folder, few)
    if theirs is None:
        return f"transformers cannot be imported, so that what it computes from the {family} config was not checked"
    batch = Batch([few], np.arange(len(few)), np.zeros(len(few), np.int64))
    own = np.concatenate(list(logit_blocks(made, batch)))
    off = float(np.abs(own - theirs).max() / max(float(np.abs(own).max()), 1e-30))
    if not off <= READ_BACK:
        raise RequestError(
            f"transformers computes other logits from the {family} config: they differ by {off:.2g} of the largest "
            "one; take --format ridgeline"
        )
    return (
        f"transformers computes the same logits from the {family} config: they differ by {off:.1g} of the largest one"
    )
