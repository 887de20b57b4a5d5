"""The training loop. A step depends only on its number (batch, rate, noise), so a run resumes exactly where
it stopped.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from ridgeline.errors import DataError
from ridgeline.train.data.batches import Batch, Batches
from ridgeline.train.module import LanguageModel
from ridgeline.train.optimizer import Optimizer, OptimizerName, learning_rate
from ridgeline.train.ranges import check_ranges
from ridgeline.train.ranks import Ranks
from ridgeline.train.saves import Saves

LOG = "log.jsonl"
_RANGES = {
    "learning_rate": (0.0, 1e3), "warmup_steps": (0, 10**9), "decay_share": (0.0, 1.0), "final_rate": (0.0, 1.0),
    "weight_decay": (0.0, 1e3), "clip": (0.0, 1e9), "dropout": (0.0, 1.0), "patience": (0, 10**9),
    "seed": (0, 2**32 - 1),
}  # fmt: skip
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How to train.

    steps: number of updates. batch_tokens: tokens per update. micro_tokens: tokens per forward and backward pass.
    learning_rate: peak rate, reached after warmup_steps; over the last decay_share of all steps it falls to final_rate
    times the peak. eval_every, save_every: in steps. patience: number of evaluations without a lower held-out loss
    after which the run ends; 0: no limit. precision: type of matrix products and attention (torch's autocast); weights,
    sums and the optimizer stay in float32. activation_checkpointing: keep only the residual stream between layers for
    the backward pass, and compute everything else again.
    """

    steps: int = 1000
    batch_tokens: int = 8192
    micro_tokens: int = 8192
    context: int = 1024
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    decay_share: float = 0.3
    final_rate: float = 0.0
    weight_decay: float = 0.1
    clip: float = 1.0
    optimizer: OptimizerName = "muon"  # measured: bench/train.py
    dropout: float = 0.0
    seed: int = 0
    eval_every: int = 100
    save_every: int = 100
    patience: int = 0
    precision: Precision = "float32"
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.precision not in get_args(Precision):
            raise DataError(f"precision is {self.precision!r}; use {' or '.join(get_args(Precision))}")
        for name in ("steps", "batch_tokens", "micro_tokens", "context", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise DataError(f"{name} is {getattr(self, name)}; it must be at least 1")
        check_ranges(self, _RANGES, DataError)
        if self.batch_tokens % self.micro_tokens or self.micro_tokens % self.context:
            raise DataError(
                f"batch_tokens {self.batch_tokens} must be a multiple of micro_tokens {self.micro_tokens}, and "
                f"micro_tokens a multiple of context {self.context}"
            )


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a run, as logged. loss: nats per token. held_out: loss on held-out text, if it was measured at this
    step.

    machine: description of the machine that computed it; a run may continue on another machine.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens_per_s: float
    held_out: float | None = None
    machine: str = ""


class Trainer:
    """One run in a folder, which holds log.jsonl and checkpoints/."""

    def __init__(
        self, model: LanguageModel, train: Batches, held_out: list[Batch], options: TrainOptions, folder: Path,
        run: dict[str, Any], ranks: Ranks, machine: str = "", objective: nn.Module | None = None,
    ) -> None:  # fmt: skip
        """train: this rank's batches. held_out: batches for measuring only, equal on all ranks. run: facts that must be
        unchanged for the run to resume. machine: description of the machine, for the log. objective: has the model in
        it, and is called as the model to give the loss (`train.objectives`); None: the model's own cross-entropy.
        """
        self._model, self._train, self._held_out, self.options = model, train, held_out, options
        self._folder, self._ranks, self._machine = folder, ranks, machine
        self._replica = ranks.replicate(objective or model)
        trained = {name: p for name, p in model.weights().items() if p.requires_grad}
        self._optimizer = Optimizer(trained, options.optimizer, options.weight_decay)
        given = {name: value for name, value in asdict(options).items() if name != "steps"}  # a run may be extended
        self._saves = Saves(folder / "checkpoints", {**run, "options": given})
        self._best: tuple[float, int] = (math.inf, -1)
        self._device = next(model.parameters()).device

    def run(self, on_step: Callable[[Progress], None] = lambda progress: None) -> int:
        """Train to the end, from the newest checkpoint if there is one. Returns the step with the best weights.

        Raises DataError if the loss is not finite; the last good checkpoint stays.
        """
        start = self._resume()
        log = self._folder / LOG if self._ranks.is_first else Path(os.devnull)
        with log.open("a", encoding="utf-8") as file:
            for progress in self._steps(start):
                file.write(json.dumps(asdict(progress)) + "\n")
                file.flush()
                on_step(progress)
        return self._best[1] if self._held_out else self._saves.steps()[-1]

    def weights_of(self, step: int) -> dict[str, torch.Tensor]:
        """Return the weights of a checkpoint, by the spec's names."""
        tensors, _ = self._saves.read(step)
        return {k.removeprefix("weight:"): v for k, v in tensors.items() if k.startswith("weight:")}

    def _steps(self, start: int) -> Iterator[Progress]:
        o = self.options
        for step in range(start, o.steps):
            began = time.perf_counter()
            rate = learning_rate(
                step, o.steps, o.learning_rate, o.warmup_steps, math.ceil(o.decay_share * o.steps), o.final_rate
            )
            loss = self._gradients(step)
            norm = self._optimizer.step(rate, o.clip)
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise DataError(
                    f"the loss of step {step + 1} is {loss} and the gradient's norm is {norm}; lower --learning-rate "
                    f"(the last good checkpoint is of step {(self._saves.steps() or [0])[-1]})"
                )
            pace = o.batch_tokens / (time.perf_counter() - began)
            done = step + 1
            held_out = self.evaluate() if self._held_out and (done % o.eval_every == 0 or done == o.steps) else None
            over = held_out is not None and self._is_over(done, held_out)
            # The log is written first, so that no checkpoint is ahead of it.
            yield Progress(done, loss, norm, rate, pace, held_out, self._machine)
            if done % o.save_every == 0 or done == o.steps or over or self._best[1] == done:
                self._save(done)
            if over:
                return

    def _gradients(self, step: int) -> float:
        """Compute the gradients of the mean loss over the step's batch, and return that loss."""
        # The seed depends on the step, so that dropout's noise does too.
        torch.manual_seed(self.options.seed * 1_000_003 + step)
        self._model.train()
        parts = self._train.micro_batches(step, self.options.micro_tokens)
        count = self._ranks.total(_num_targets(parts))
        total = 0.0
        for i, part in enumerate(parts, 1):
            with self._ranks.local(self._replica) if i < len(parts) else nullcontext():
                loss = self._loss(part) / count
                torch.autograd.backward(loss * self._ranks.world_size)  # DistributedDataParallel averages over ranks
            total += float(loss.detach())
        return self._ranks.total(total)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the loss on the held-out batches, in nats per token."""
        self._model.eval()
        mine = self._held_out[self._ranks.rank :: self._ranks.world_size]
        return self._ranks.total(sum(float(self._loss(batch)) for batch in mine)) / _num_targets(self._held_out)

    def _loss(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the losses over a batch's targets, in nats."""
        ids, positions, targets = (
            torch.from_numpy(x).to(self._device) for x in (batch.token_ids, batch.positions, batch.targets)
        )
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self.options.precision == "bfloat16"):
            loss: torch.Tensor = self._replica(ids, positions, batch.lengths, targets)
        return loss

    def _is_over(self, step: int, held_out: float) -> bool:
        if held_out < self._best[0]:
            self._best = held_out, step
        return 0 < self.options.patience <= (step - self._best[1]) // self.options.eval_every

    def _save(self, step: int) -> None:
        tensors: dict[str, torch.Tensor] = {f"weight:{name}": p for name, p in self._model.weights().items()}
        tensors |= {f"optimizer:{name}": t for name, t in self._optimizer.state().items()}
        best = self._best if self._best[1] >= 0 else None
        if self._ranks.is_first:
            self._saves.write(step, tensors, {"best": best}, self._best[1])
        self._ranks.wait()

    def _resume(self) -> int:
        """Load the newest checkpoint, cut the log back to it, and return its step; 0 for a new run."""
        self._folder.mkdir(parents=True, exist_ok=True)
        steps = self._saves.steps()
        if not steps:
            (self._folder / LOG).unlink(missing_ok=True)
            self._ranks.wait()  # no rank may save a step before all ranks have found the folder empty
            return 0
        tensors, facts = self._saves.read(steps[-1])
        with torch.no_grad():
            for name, parameter in self._model.weights().items():
                parameter.copy_(tensors[f"weight:{name}"])
        prefix = "optimizer:"
        self._optimizer.load_state({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        self._best = tuple(facts["best"]) if facts["best"] else (math.inf, -1)
        if self._ranks.is_first:
            _cut_log(self._folder / LOG, steps[-1])
        self._ranks.wait()
        return steps[-1]


def _num_targets(batches: list[Batch]) -> int:
    return sum(int((batch.targets >= 0).sum()) for batch in batches)


def _cut_log(path: Path, step: int) -> None:
    """Keep the lines up to a step. Later or incomplete lines are removed, because those steps run again."""
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("".join(f"{line}\n" for line in lines[:step]), encoding="utf-8")
