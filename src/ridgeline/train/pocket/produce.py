"""Turn prepared data into a finished model folder: train, write, read back, evaluate, write the card.

A folder holds the model's own files, and in `training/` the data, log.jsonl and checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.archs import OUR_MODEL_TYPE
from ridgeline.archs.write import CLASSES
from ridgeline.evals import Document, Perplexity, measure_perplexity
from ridgeline.ops import open_table
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.spec.sight import BEYOND
from ridgeline.train.bound import measure_bound
from ridgeline.train.card import CardFacts, Row, model_card
from ridgeline.train.curve import draw_curve
from ridgeline.train.data.folder import TrainingData
from ridgeline.train.data.manifest import HELD_OUT
from ridgeline.train.loop import TrainOptions
from ridgeline.train.masked import BlockDenoising
from ridgeline.train.module import LanguageModel
from ridgeline.train.output import StoredType, write_model
from ridgeline.train.ranks import Ranks
from ridgeline.train.run import Job, Trained, Watch, bytes_per_target, held_out_batches, train

TRAINING, DATA = "training", "data"
EVALUATED_TOKENS = 2_000_000  # most held-out tokens in the final evaluation
CURVE = "loss.png"
SAMPLE_TOKENS = 200  # tokens on which the written folder is compared with the trained model
NO_TRANSFORMERS = "transformers is not installed: the written model was compared with Ridgeline's own loader only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where and how a model is written. license: license of the model, if known. dtype: type of the stored weights.
    sampling: default sampling parameters, for generation_config.json.
    """

    folder: Path
    ranks: Ranks
    license: str | None
    dtype: StoredType
    sampling: Mapping[str, Any] = field(default_factory=dict)


def produce(name: str, job: Job, data: TrainingData, output: Output, watch: Watch, summary: str) -> None:
    """Train a model on prepared data, and write its folder."""
    folder = output.folder / TRAINING
    trained = train(job, data.train, data.held_out, folder, output.ranks, lambda run: watch.run(name, run))
    finish(name, job, trained, data, output, watch, summary)


def finish(
    name: str, job: Job, trained: Trained, data: TrainingData, output: Output, watch: Watch, summary: str,
    rows: tuple[Row, ...] = (),
) -> None:  # fmt: skip
    """Write the folder of a trained model, check it, evaluate it and write its card. rows: further rows about its
    training.
    """
    if output.ranks.is_first:
        side = data.held_out or data.train
        longest = side.document(int(np.argmax(np.diff(side.offsets))))
        sample = longest[: min(SAMPLE_TOKENS, job.options.context)].tolist()
        end = side.info.end_of_text_id
        errors = write_model(
            output.folder, job.config, trained.weights, data.folder, end, output.dtype, sample, output.sampling
        )
        watch.say("largest difference of a logit, read back: " + ", ".join(f"{e:.1e} ({p})" for p, e in errors.items()))
        if "transformers" not in errors and job.config.get("model_type") != OUR_MODEL_TYPE:
            watch.say(NO_TRANSFORMERS)
        is_diffusion = trained.run.spec.diffusion is not None
        bounds = tuple(_bounds(trained, data, output, watch)) if data.held_out and is_diffusion else ()
        perplexity = _evaluate(output, data, watch) if data.held_out and not is_diffusion else None
        curve = _draw(name, trained, output.folder, watch)
        facts = _card(name, trained, data, output, summary, rows, bounds, perplexity, curve)
        _replace(output.folder / "README.md", model_card(facts))
        watch.say(f"done: {output.folder}")
    output.ranks.wait()


def job_of(config: Mapping[str, Any], options: TrainOptions, data: TrainingData) -> Job:
    """Return the job of a run on prepared data."""
    return Job(config, options, {"corpus": data.manifest.hash, "tokenizer": data.train.info.tokenizer_hash})


def _evaluate(output: Output, data: TrainingData, watch: Watch) -> Perplexity:
    """Evaluate on the held-out side, or on its first documents with at most EVALUATED_TOKENS tokens."""
    assert data.held_out is not None
    loaded = load_model(str(output.folder), LoadOptions(device=output.ranks.device, dtype="float32"))
    documents: list[Document] = []
    total = 0
    sizes = [entry.num_bytes for entry in data.manifest.entries if entry.side == HELD_OUT]
    for i, size in enumerate(sizes):
        ids = data.held_out.document(i)[:-1].tolist()  # without the final <|endoftext|>
        if documents and total + len(ids) > EVALUATED_TOKENS:
            break
        documents.append(Document(ids, size))
        total += len(ids)
    found = measure_perplexity(loaded, documents, on_tokens=watch.tokens("evaluating", total - len(documents)))
    bits = found.bits_per_byte
    assert bits is not None
    watch.say(
        f"held out: {bits.value:.4f} bits per byte, perplexity {found.perplexity.value:.3f} over {found.num_tokens:,} "
        f"tokens of {len(documents):,} documents"
    )
    return found


def _bounds(trained: Trained, data: TrainingData, output: Output, watch: Watch) -> Iterator[Row]:
    """Yield a row of the card for each length of blocks that a diffusion model was trained with."""
    assert data.held_out is not None
    spec, options = trained.run.spec, trained.run.options
    model = LanguageModel(spec, open_table(output.ranks.device), options.context + 1).eval()
    model.load(trained.weights)
    objective, rows = BlockDenoising(model), held_out_batches(data.held_out, options)
    done = watch.tokens("evaluating", len(rows) * options.context * len(objective.sizes))
    for size in objective.sizes:
        bits = measure_bound(objective, size, rows, bytes_per_target(data.held_out), done)
        what = "whole sequences" if size >= BEYOND else f"blocks of {size}"
        yield f"Bits per byte, upper bound, {what}", f"{bits.value:.4f}"
        watch.say(f"held out: at most {bits.value:.4f} bits per byte with {what}")


def _draw(name: str, trained: Trained, folder: Path, watch: Watch) -> str | None:
    """Draw the loss curve and return its file name; without matplotlib, say so and return None."""
    if find_spec("matplotlib") is None:
        watch.say(f"{CURVE} was not drawn: it needs matplotlib (pip install 'ridgeline[plot]')")
        return None
    run = trained.run
    draw_curve(trained.log, run.options.batch_tokens, run.bytes_per_token, name, folder / CURVE)
    return CURVE


def _card(
    name: str, trained: Trained, data: TrainingData, output: Output, summary: str, rows: tuple[Row, ...],
    bounds: tuple[Row, ...], perplexity: Perplexity | None, curve: str | None,
) -> CardFacts:  # fmt: skip
    run, cost, bits = trained.run, trained.cost, perplexity.bits_per_byte if perplexity else None
    evaluation: dict[str, Any] = {}
    if perplexity and bits:
        evaluation = {
            "bits_per_byte": bits.value, "bits_per_byte_error": bits.standard_error,
            "perplexity": perplexity.perplexity.value, "perplexity_error": perplexity.perplexity.standard_error,
            "evaluated_tokens": perplexity.num_tokens, "eval_context": perplexity.context,
            "eval_stride": perplexity.stride,
        }  # fmt: skip
    is_code = all(entry.name.endswith(".py") for entry in data.manifest.entries)
    return CardFacts(
        name=name, summary=summary, spec=run.spec, manifest=data.manifest, license=output.license,
        language="code" if is_code else None, in_transformers=run.spec.family in CLASSES, dtype=output.dtype,
        train_tokens=data.train.info.num_tokens, options=run.options, steps=len(trained.log),
        tokens_seen=cost.tokens, training_rows=rows, kept_step=trained.step, flops=cost.flops, seconds=cost.seconds,
        machine=cost.machine, peak_flops_per_s=cost.peak_flops_per_s, utilization=cost.utilization,
        held_out_tokens=data.held_out.info.num_tokens if data.held_out else None,
        held_out_share=data.held_out_share or None, split_seed=data.split_seed, curve=curve, evaluation_rows=bounds,
        **evaluation,
    )  # fmt: skip


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
