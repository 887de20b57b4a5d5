"""The training loop of drafts. An update depends only on its number, so a run resumes exactly where it stopped."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ridgeline.errors import DataError
from ridgeline.train.drafts.batch import Batch, Target
from ridgeline.train.drafts.continuations import Continuation
from ridgeline.train.drafts.learners import Learner
from ridgeline.train.drafts.options import DraftOptions
from ridgeline.train.loop import LOG, Progress
from ridgeline.train.optimizer import Optimizer, learning_rate
from ridgeline.train.saves import Saves

OnStep = Callable[[Progress], None]


class DraftTrainer:
    """One run in a folder, which holds log.jsonl and checkpoints/.

    Args:
        run: Facts that must be unchanged for the run to resume.
        machine: Description of the machine, for the log.
    """

    def __init__(
        self, learner: Learner, target: Target, data: Sequence[Continuation], options: DraftOptions, folder: Path,
        run: Mapping[str, Any], machine: str = "",
    ) -> None:  # fmt: skip
        self._learner, self._target, self._data, self._options = learner, target, data, options
        self._folder, self._machine = folder, machine
        self._optimizer = Optimizer(learner.weights(), "muon", options.weight_decay)
        self._saves = Saves(folder / "checkpoints", {**run, "options": asdict(options)})
        mean = sum(len(one.ids) for one in data) / len(data)
        self._rows = max(1, round(options.batch_tokens / mean))
        self.steps = max(1, round(options.train_tokens / (self._rows * mean)))
        self._order = lru_cache(2)(lambda epoch: _permutation(len(data), options.seed, epoch))

    def run(self, on_step: OnStep = lambda progress: None) -> None:
        """Run all updates that are left. Raises DataError if the loss is not finite; the last good state stays."""
        start = self._resume()
        with (self._folder / LOG).open("a", encoding="utf-8") as file:
            for step in range(start, self.steps):
                progress = self._update(step)
                file.write(json.dumps(asdict(progress)) + "\n")
                file.flush()
                on_step(progress)
                if progress.step % self._options.save_every == 0 or progress.step == self.steps:
                    self._save(progress.step)

    def _update(self, step: int) -> Progress:
        o, began = self._options, time.perf_counter()
        rate = learning_rate(
            step, self.steps, o.learning_rate, o.warmup_steps, math.ceil(o.decay_share * self.steps), 0.0
        )
        batch = Batch(self._batch(step), self._target.table)
        noise = torch.Generator().manual_seed(o.seed * 1_000_003 + step)
        loss = self._learner.loss(batch, noise)
        torch.autograd.backward(loss)
        value, norm = float(loss.detach()), self._optimizer.step(rate, o.clip)
        if not (math.isfinite(value) and math.isfinite(norm)):
            raise DataError(
                f"the loss of update {step + 1} is {value} and the gradient's norm is {norm}; lower --learning-rate "
                f"(the last saved state is of update {(self._saves.steps() or [0])[-1]})"
            )
        pace = sum(batch.lengths) / (time.perf_counter() - began)
        return Progress(step + 1, value, norm, rate, pace, machine=self._machine)

    def _batch(self, step: int) -> list[Continuation]:
        """Return the continuations of an update, which depend only on the seed and the number of the update."""
        count = len(self._data)
        numbers = range(step * self._rows, (step + 1) * self._rows)
        return [self._data[self._order(n // count)[n % count]] for n in numbers]

    def _save(self, step: int) -> None:
        tensors: dict[str, torch.Tensor] = {f"weight:{name}": p for name, p in self._learner.weights().items()}
        tensors |= {f"optimizer:{name}": t for name, t in self._optimizer.state().items()}
        self._saves.write(step, tensors, {}, -1)

    def _resume(self) -> int:
        """Load the newest state, cut the log back to it, and return the number of its updates; 0 for a new run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path, steps = self._folder / LOG, self._saves.steps()
        if not steps:
            path.unlink(missing_ok=True)
            return 0
        tensors, _ = self._saves.read(steps[-1])
        with torch.no_grad():
            for name, parameter in self._learner.weights().items():
                parameter.copy_(tensors[f"weight:{name}"])
        prefix = "optimizer:"
        self._optimizer.load_state({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        if path.exists():  # later updates run again
            lines = path.read_text(encoding="utf-8").splitlines()[: steps[-1]]
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return steps[-1]


def _permutation(count: int, seed: int, epoch: int) -> list[int]:
    found: list[int] = np.random.default_rng([seed, epoch]).permutation(count).tolist()
    return found
