"""Run a recipe from start to end: train the target and its draft."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from ridgeline.archs import spec_from_config
from ridgeline.errors import DataError
from ridgeline.ops import OpsTable
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.spec import ModelSpec
from ridgeline.train.card import Row
from ridgeline.train.cost import TrainingCost
from ridgeline.train.data.batches import Batch, Batches
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.data.folder import TrainingData, prepare
from ridgeline.train.data.shards import Shard
from ridgeline.train.pocket.continuations import hash_of, write_continuations
from ridgeline.train.pocket.functions import write_functions
from ridgeline.train.pocket.produce import DATA, TRAINING, Output, finish, job_of
from ridgeline.train.pocket.recipe import KeptParts, ModelRecipe, Recipe, Stage, StageData
from ridgeline.train.ranks import Ranks
from ridgeline.train.run import Aim, Job, Trained, Watch, train

LICENSE = "PSF-2.0"  # license of the texts
SUMMARY = "A small model of Python that ships inside Ridgeline, trained only on Python's standard library."
DRAFT_SUMMARY = "The draft of {}, for speculative decoding. In its last stage it was trained on texts written by {}."
START = "pruned from {}: layers {} (from 0), in each the KV heads {} with their query heads; smaller hidden size"
DESCRIBED: Mapping[StageData, str] = {
    "corpus": "the training texts",
    "functions": "the training texts, and {functions:,} functions of them as separate documents",
    "headers": "the training texts and {functions:,} functions, half of them with separately encoded headers",
    "code": "the training texts and {functions:,} functions without comments and docstrings, headers as before",
    "continuations": "{continuations:,} greedy continuations by the target of prompts from the training texts",
}


# Computes the weights of a draft from the target: `compress.prune.given.prune_to`. The command passes it in, because
# `compress` imports this package.
PruneTo = Callable[[ModelSpec, Mapping[str, Any], ModelSpec, KeptParts, Batch, OpsTable], Mapping[str, Any]]


def produce_pair(recipe: Recipe, out: Path, ranks: Ranks, watch: Watch, prune_to: PruneTo) -> None:
    """Train the recipe's target in `out/NAME` and its draft in `out/NAME-draft`.

    prune_to: computes the weights with which a draft begins. Raises DataError for another Python version.
    """
    if (version := platform.python_version()) != recipe.python:
        raise DataError(
            f"the recipe {recipe.name} needs the standard library of Python {recipe.python}, but this is Python "
            f"{version}: use that version, or train on this library with --data stdlib"
        )
    folder = out / recipe.name / TRAINING / DATA
    watch.say("reading the standard library, and looking for functions that occur in several of its files")
    data = prepare(
        Corpus.stdlib(), folder, recipe.vocab_size, ranks=ranks, held_out_share=recipe.held_out_share,
        seed=recipe.split_seed, pinned=recipe.corpus_hash, say=watch.say,
    )  # fmt: skip
    target = Output(folder=out / recipe.name, ranks=ranks, license=LICENSE, dtype="bfloat16")
    maker = _Maker(recipe, data, target, watch, prune_to)
    maker.make(recipe.target, replace(target, sampling=recipe.target.sampling), SUMMARY)
    draft = replace(target, folder=out / f"{recipe.name}-draft", sampling=recipe.draft.sampling)
    maker.make(recipe.draft, draft, DRAFT_SUMMARY.format(recipe.name, recipe.name))


@dataclass(frozen=True, slots=True)
class _Maker:
    """Trains both models of a recipe. target: output of the first one."""

    recipe: Recipe
    data: TrainingData
    target: Output
    watch: Watch
    prune_to: PruneTo

    def make(self, model: ModelRecipe, output: Output, summary: str) -> None:
        """Run all stages of a model, and write its folder."""
        name, done = output.folder.name, []
        weights = self._pruned(model) if model.prune else None
        for i, stage in enumerate(model.stages):
            label = name if len(model.stages) == 1 else f"{name}, stage {i + 1} of {len(model.stages)}"
            done.append(self._stage(model, stage, output, i, label, weights))
            weights = done[-1].weights
        job, trained = job_of(model.config, model.stages[-1].options, self.data), _joined(done)
        finish(name, job, trained, self.data, output, self.watch, summary, tuple(self._rows(model)))

    def _stage(
        self, model: ModelRecipe, stage: Stage, output: Output, index: int, label: str,
        weights: Mapping[str, torch.Tensor] | None,
    ) -> Trained:  # fmt: skip
        shard, job = self._shard(stage.data), job_of(model.config, stage.options, self.data)
        folder, facts = output.folder / TRAINING, dict(job.facts)
        if index:
            folder /= f"stage-{index + 1}"
            facts["stage_data"] = shard.info.corpus_hash
        elif model.prune:
            facts["start"] = {"target": hash_of(self.target), "data": shard.info.corpus_hash, **asdict(model.prune)}
        job = Job(job.config, job.options, facts)
        # The last stage of a draft does not aim at the texts of the corpus, so held-out texts do not measure it.
        measured = None if stage.data == "continuations" else self.data.held_out
        return train(
            job, shard, measured, folder, output.ranks, lambda run: self.watch.run(label, run), Aim(initial=weights)
        )

    def _pruned(self, model: ModelRecipe) -> Mapping[str, torch.Tensor]:
        """Return the initial weights of a model that is pruned from the target."""
        assert model.prune is not None
        stage, size = model.stages[0], model.prune.tokens
        large = load_model(str(self.target.folder), LoadOptions(device=self.target.ranks.device, dtype="float32"))
        batch = Batches(self._shard(stage.data), stage.options.context, size, stage.options.seed).batch(0)
        small = spec_from_config(model.config)
        found = self.prune_to(large.spec, large.model.weights, small, model.prune, batch, large.table)
        put: Any = large.table.memory.put
        placed: dict[str, torch.Tensor] = {name: put(x, "float32", "float32") for name, x in found.items()}
        return placed

    def _shard(self, kind: StageData) -> Shard:
        if kind == "corpus":
            return self.data.train
        folder = self.data.folder / kind
        if kind != "continuations":
            return self._first_writes(lambda: write_functions(folder, self.data, self.recipe.functions, kind))
        asked = self.recipe.continuations
        done = self.watch.tokens("continuing", asked.num_prompts * asked.new_tokens)
        return self._first_writes(lambda: write_continuations(self.target, self.data, folder, asked, done))

    def _first_writes(self, write: Callable[[], Shard]) -> Shard:
        """Let the first rank write the shard; the other ranks then open it."""
        ranks = self.target.ranks
        if not ranks.is_first:
            ranks.wait()
        shard = write()
        if ranks.is_first:
            ranks.wait()
        return shard

    def _rows(self, model: ModelRecipe) -> list[Row]:
        asked = {
            "functions": self.recipe.functions.num_functions, "continuations": self.recipe.continuations.num_prompts
        }  # fmt: skip
        rows = []
        if model.prune:
            of = self.target.folder.name
            rows.append(("Start", START.format(of, *(_listed(x) for x in (model.prune.layers, model.prune.kv_heads)))))
        for i, stage in enumerate(model.stages, 1):
            o, rate = stage.options, "peak rate" if stage.options.decay_share else "constant rate"
            text = f"{o.steps:,} steps on {DESCRIBED[stage.data].format(**asked)}; {rate} {o.learning_rate:g}"
            rows.append((f"Stage {i}", text))
        return rows


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _joined(parts: list[Trained]) -> Trained:
    """Join the stages of a run: the weights of the last one, the logs in sequence, and the sums of the costs."""
    last, starts = parts[-1], [0, *accumulate(len(part.log) for part in parts)]
    log = [replace(p, step=p.step + start) for part, start in zip(parts, starts, strict=False) for p in part.log]
    planned = sum(part.run.options.steps for part in parts)
    falling = last.run.options.decay_share * last.run.options.steps / planned
    options = replace(parts[0].run.options, steps=planned, decay_share=falling)
    costs = [part.cost for part in parts]
    machines = list(dict.fromkeys(c.machine for c in costs))
    peaks = [c.peak_flops_per_s for c in costs]
    cost = TrainingCost(
        sum(c.tokens for c in costs), sum(c.flops for c in costs), sum(c.seconds for c in costs),
        peaks[-1] if len(machines) == 1 and None not in peaks else None, "; ".join(machines),
    )  # fmt: skip
    return Trained(replace(parts[0].run, options=options), last.weights, starts[-2] + last.step, log, cost)
