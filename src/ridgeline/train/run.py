"""Train one model on prepared data: run the steps, take the best weights, and compute the cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from ridgeline.train.module import LanguageModel
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


def train(
    job: Job, shard: Shard, held_out: Shard | None, folder: Path, ranks: Ranks, on_start: OnStart,
    initial: Mapping[str, torch.Tensor] | None = None,
) -> Trained:  # fmt: skip
    """Train in `folder`, or continue the run there. initial: initial weights by the spec's names; None: random ones.

    on_start is called with the run, and returns a function that is called after every step.
    """
    spec, options = job.spec, job.options
    table = open_table(ranks.device)
    model = LanguageModel(
        spec, table, max(options.context, 1), seed=options.seed, dropout=options.dropout,
        checkpointing=options.activation_checkpointing,
    )  # fmt: skip
    if initial is not None:
        with torch.no_grad():
            for name, parameter in model.weights().items():
                parameter.copy_(initial[name])
    device = torch_device(ranks.device)
    peak, machine = measure_peak(device, options.precision), machine_name(device)
    per_byte = bytes_per_target(held_out) if held_out is not None else None
    run = Run(spec, options, flops_per_token(spec, options.context), peak, machine, per_byte)
    batches = Batches(
        shard, options.context, options.batch_tokens, options.seed, rank=ranks.rank, world_size=ranks.world_size
    )
    measured = held_out_batches(held_out, options) if held_out is not None else []
    facts = {"config": dict(job.config), **job.facts}
    trainer = Trainer(model, batches, measured, options, folder, facts, ranks, machine)
    best = trainer.run(on_start(run))
    log = read_log(folder / LOG)
    cost = cost_of(log, options.batch_tokens, run.flops_per_token, peak, machine)
    return Trained(run, trainer.weights_of(best), best, log, cost)


def held_out_batches(shard: Shard, options: TrainOptions) -> list[Batch]:
    """Return up to EVAL_TOKENS tokens of a shard in rows of the context, the same for every run with this seed."""
    rows = max(1, min(EVAL_TOKENS, shard.info.num_tokens) // options.context)
    batches = Batches(shard, options.context, options.context, options.seed)
    return [batches.batch(i) for i in range(rows)]


def bytes_per_target(shard: Shard) -> float:
    """Return the bytes of text per predicted token; the first token of each document is not predicted."""
    return shard.info.num_bytes / (shard.info.num_tokens - shard.info.num_documents)
