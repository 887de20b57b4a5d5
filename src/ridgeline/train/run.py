"""Train one model on prepared data: run the steps, take the best weights, and compute the cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from ridgeline.archs import spec_from_config
from ridgeline.ops import open_table
from ridgeline.ops.reference.backend import torch_device
from ridgeline.spec import ModelSpec
from ridgeline.train.cost import TrainingCost, cost_of, flops_per_token, machine_name, measure_peak
from ridgeline.train.curve import read_log
from ridgeline.train.data.batches import Batch, Batches
from ridgeline.train.data.shards import Shard
from ridgeline.train.loop import LOG, Progress, Trainer, TrainOptions
from ridgeline.train.masked import check_trains, copies, objective_of
from ridgeline.train.module import LanguageModel
from ridgeline.train.objectives import Objective, freeze
from ridgeline.train.ranks import Ranks

OnStep = Callable[[Progress], None]
OnStart = Callable[["Run"], OnStep]
EVAL_TOKENS = 65_536  # held-out tokens for the evaluations during a run


@dataclass(frozen=True, slots=True)
class Job:
    """A model to train. config: its config.json. facts: other facts that identify the run (corpus,
    tokenizer), as JSON.
    """

    config: Mapping[str, Any]
    options: TrainOptions
    facts: Mapping[str, Any]

    @property
    def spec(self) -> ModelSpec:
        return spec_from_config(self.config)


@dataclass(frozen=True, slots=True)
class Aim:
    """Describe what a run makes small, and how.

    objective: makes the objective of the model; by default its own (`masked.objective_of`). trained: patterns of the
    names of the weights that train. adapters: rank of the low-rank terms that train instead of the matrices; 0: none.
    initial: initial weights by the spec's names; None: random ones. more_flops: operations for a token besides those of
    the model, such as a teacher's.
    """

    objective: Callable[[LanguageModel], Objective] = objective_of
    trained: Sequence[str] = ("*",)
    adapters: int = 0
    initial: Mapping[str, torch.Tensor] | None = None
    more_flops: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Facts that are known when a run starts. bytes_per_token: mean of the held-out texts; None if there are none."""

    spec: ModelSpec
    options: TrainOptions
    flops_per_token: float
    peak_flops_per_s: float
    machine: str
    bytes_per_token: float | None


@dataclass(frozen=True, slots=True)
class Trained:
    """The result of a run. weights: float32, by the spec's names, of the step with the best held-out loss, or of the
    last step.
    """

    run: Run
    weights: Mapping[str, torch.Tensor]
    step: int
    log: list[Progress]
    cost: TrainingCost


class Watch(Protocol):
    """Receives the progress of a run."""

    def say(self, line: str) -> None:
        """Print a line."""

    def run(self, name: str, run: Run) -> OnStep:
        """Announce a run. The returned function is called after every step."""

    def tokens(self, name: str, total: int) -> Any:
        """Announce other long work, measured in tokens. The returned function is called with numbers of tokens."""


class Silent:
    """Shows no progress; a `Watch`."""

    def say(self, line: str) -> None:
        """Print nothing."""

    def run(self, name: str, run: Run) -> OnStep:
        """Return a function that does nothing."""
        return lambda progress: None

    def tokens(self, name: str, total: int) -> Callable[..., None]:
        """Return a function that does nothing."""
        return lambda tokens, facts="": None


SILENT = Silent()


def train(
    job: Job, shard: Shard, held_out: Shard | None, folder: Path, ranks: Ranks, on_start: OnStart, aim: Aim = Aim(),
) -> Trained:  # fmt: skip
    """Train in `folder`, or continue the run there.

    on_start is called with the run, and returns a function that is called after every step.
    """
    spec, options = job.spec, job.options
    check_trains(spec, options.context)
    table = open_table(ranks.device)
    model = LanguageModel(
        spec, table, options.context + 1, seed=options.seed, dropout=options.dropout,
        checkpointing=options.activation_checkpointing, adapters=aim.adapters,
    )  # fmt: skip
    if aim.initial is not None:
        model.load(aim.initial)
    freeze(model, aim.trained)
    device = torch_device(ranks.device)
    peak, machine = measure_peak(device, options.precision), machine_name(device)
    per_byte = bytes_per_target(held_out) if held_out is not None else None
    flops = copies(spec) * flops_per_token(spec, options.context) + aim.more_flops
    run = Run(spec, options, flops, peak, machine, per_byte)
    batches = Batches(
        shard, options.context, options.batch_tokens, options.seed, rank=ranks.rank, world_size=ranks.world_size
    )
    measured = held_out_batches(held_out, options) if held_out is not None else []
    facts = {"config": dict(job.config), **job.facts}
    trainer = Trainer(model, batches, measured, options, folder, facts, ranks, machine, aim.objective(model))
    best = trainer.run(on_start(run))
    log = read_log(folder / LOG)
    cost = cost_of(log, options.batch_tokens, run.flops_per_token, peak, machine)
    return Trained(run, model.merged(trainer.weights_of(best)), best, log, cost)


def held_out_batches(shard: Shard, options: TrainOptions) -> list[Batch]:
    """Return up to EVAL_TOKENS tokens of a shard in rows of the context, the same for every run with this seed."""
    rows = max(1, min(EVAL_TOKENS, shard.info.num_tokens) // options.context)
    batches = Batches(shard, options.context, options.context, options.seed)
    return [batches.batch(i) for i in range(rows)]


def bytes_per_target(shard: Shard) -> float:
    """Return the bytes of text per predicted token; the first token of each document is not predicted."""
    return shard.info.num_bytes / (shard.info.num_tokens - shard.info.num_documents)
