"""Keep the most likely tokens of a teacher on disk, so that several students learn from one pass of it.

Each row of training tokens has a file, whose name is the hash of the row. So the files serve every run with these texts
and this context, whatever its batches, ranks and stages are.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.errors import DataError
from ridgeline.nn import Model
from ridgeline.ops.api import Memory
from ridgeline.runtime.step import DenseStep
from ridgeline.train.objectives import Predictions, TopPredictions

Arrays = np.ndarray[Any, Any]


class StoredTeacher:
    """A teacher whose `count` most likely tokens are read from files; those of new rows are computed and written.

    A row is computed by itself, so that its numbers do not depend on the batch in which it is first met.

    Args:
        folder: has the files of one teacher, one context and one count.
        context: tokens of a row.
        open_teacher: loads the teacher; it is called only if a row has no file.
    """

    def __init__(self, folder: Path, context: int, count: int, open_teacher: Callable[[], Model]) -> None:
        self._folder, self._context, self._count = folder, context, count
        self._open, self._model = open_teacher, list[Model]()

    def read(self, step: DenseStep) -> Predictions:
        ids = cast("Tensor", step.token_ids)
        whole = ids.cpu().numpy()
        found = [self._row(whole, step, start) for start in range(0, len(whole), self._context)]
        tokens, logprobs = (torch.from_numpy(np.concatenate(parts)) for parts in zip(*found, strict=True))
        return TopPredictions(tokens.long().to(ids.device), logprobs.to(ids.device))

    def _row(self, whole: Arrays, step: DenseStep, start: int) -> tuple[Arrays, Arrays]:
        """Return ids and log probabilities [context, count] of the row that begins at a token of a step."""
        ids, ends = whole[start : start + self._context], np.cumsum(step.lengths).tolist()
        own = [n for n, end in zip(step.lengths, ends, strict=True) if start < end <= start + len(ids)]
        key = hashlib.sha256(np.array([len(own), *own, *ids], np.int64).tobytes()).hexdigest()[:32]
        path = self._folder / key[:2] / f"{key}.npz"
        if not path.exists():
            _write(path, *self._compute(np.split(ids, np.cumsum(own)[:-1]), step.memory))
        return _read(path, len(ids), self._count)

    @torch.no_grad()
    def _compute(self, sequences: list[Arrays], memory: Memory) -> tuple[Arrays, Arrays]:
        if not self._model:
            self._model.append(self._open())
        logits: Any = self._model[0](DenseStep.build([s.tolist() for s in sequences], memory))
        top = F.log_softmax(logits.float(), -1).topk(self._count, -1)
        return top.indices.cpu().numpy().astype(np.uint32), top.values.cpu().numpy()


def _write(path: Path, ids: Arrays, logprobs: Arrays) -> None:
    """Write the file of a row, whole or not at all. Two ranks that write the same row write the same numbers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            np.savez(file, ids=ids, logprobs=logprobs)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: Path, tokens: int, count: int) -> tuple[Arrays, Arrays]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            ids, logprobs = arrays["ids"], arrays["logprobs"]
        if ids.shape != (tokens, count) or logprobs.shape != (tokens, count):
            raise ValueError(f"it has {ids.shape} ids and {logprobs.shape} probabilities")
    except (OSError, ValueError, KeyError, EOFError) as e:
        raise DataError(f"{path} is damaged ({e}); remove it to compute these predictions again") from None
    return ids, logprobs
