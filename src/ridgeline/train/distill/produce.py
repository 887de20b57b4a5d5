"""Distill a model: read both, train the student in stages, measure it, and write its folder.

While a run lasts, its data, logs and checkpoints are in a hidden folder beside the one that it will write. So the
folder is complete or absent, and a run that was stopped continues.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ridgeline.archs import OUR_MODEL_TYPE
from ridgeline.errors import DataError, RequestError, RidgelineError
from ridgeline.evals import Divergence, Document, measure_divergence
from ridgeline.load.fingerprint import model_fingerprint
from ridgeline.load.gguf.paths import is_gguf
from ridgeline.load.hub import BUILT_IN, MODEL_FILES, find_model
from ridgeline.load.tokenizer import Tokenizer, has_tokenizer
from ridgeline.load.weights import StoredWeights
from ridgeline.measure.rate import measure_rate, rate_notes
from ridgeline.nn import Model
from ridgeline.ops import open_table
from ridgeline.ops.devices import training_device
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model
from ridgeline.spec import to_json
from ridgeline.train.cost import flops_per_token
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.distill.data import DistillData, Encoder, prepare_data
from ridgeline.train.distill.level import Levels
from ridgeline.train.distill.options import STAGES, DistillOptions
from ridgeline.train.distill.stored import StoredTeacher
from ridgeline.train.loop import LOG
from ridgeline.train.mixing import MixingDivergence, check_mixing, mixing_names
from ridgeline.train.module import LanguageModel
from ridgeline.train.objectives import (
    LogitDivergence,
    ModelTeacher,
    Objective,
    StreamDistance,
    Teacher,
    check_widths,
)
from ridgeline.train.output import StoredType, write_with_weights
from ridgeline.train.ranks import Ranks
from ridgeline.train.run import SILENT, Aim, Job, Trained, Watch, train

REPORT, TRAINING = "distill.json", "training"
MEASURED_TOKENS = 16_384  # held-out tokens on which the student is measured before and after
SAMPLE_TOKENS = 100  # tokens on which the written folder is compared with the trained student


@dataclass(frozen=True, slots=True)
class Distilled:
    """Result of a run. before, after: the student compared with its teacher on held-out tokens. seconds: time of the
    updates. flops: operations of student and teacher. differences: largest difference of a logit of the written folder,
    by the program that read it. rates: tokens per second that student and teacher decode on this machine, as measured;
    rate_notes: remarks about them.
    """

    student: str
    teacher: str
    tokens: int
    seconds: float
    flops: float
    before: Divergence
    after: Divergence
    differences: Mapping[str, float]
    options: DistillOptions
    rates: Mapping[str, float | None]
    rate_notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers."""
        measured = {"before": self.before, "after": self.after}
        return {
            "student": self.student, "teacher": self.teacher, "tokens": self.tokens, "seconds": self.seconds,
            "flops": self.flops, "options": asdict(self.options), "teacher_measured": self.after.original.to_json(),
            "measured": {name: {**d.to_json(), **d.other.to_json()} for name, d in measured.items()},
            "differences": dict(self.differences), "measured_tokens_per_s": dict(self.rates),
            "notes": list(self.rate_notes),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Return a line for the student before and after, and for the teacher."""
        found = [
            f"{name}: KL {d.kl.value:.4g} nats, top-1 agreement {d.top1_agreement.value:.1%}, perplexity "
            f"{d.other.perplexity.value:.4g}"
            for name, d in (("before", self.before), ("after", self.after))
        ]
        original = self.after.original
        rates = ", ".join(f"{name} {rate:,.0f} tok/s" for name, rate in self.rates.items() if rate is not None)
        return [
            *found,
            f"teacher: perplexity {original.perplexity.value:.4g} on {original.num_tokens:,} held-out tokens",
            *((f"measured decode of one sequence: {rates}",) if rates else ()),
            *(f"note: {note}" for note in self.rate_notes),
        ]


def distill(
    student: str, teacher: str, corpus: Corpus, out: Path, options: DistillOptions, watch: Watch = SILENT,
    ranks: Ranks | None = None, *, dtype: StoredType = "bfloat16",
) -> Distilled:  # fmt: skip
    """Train a student until it predicts what its teacher does, and write it to a new folder.

    A run that was stopped continues if it is called again; on a CPU, its result is that of one run, to the bit.

    Args:
        student: A folder or a hub id with weights to begin from.
        teacher: A folder, a GGUF file, a hub id or a built-in model with the vocabulary of the student.
        out: The folder to write, which must not exist.
        ranks: Processes that train together; None: this one alone.
        dtype: Type of the stored weights.

    Raises:
        RequestError, DataError, CheckpointError, DeviceError: each with one line. `out` is absent then.
    """
    if out.is_symlink() or out.exists():
        raise RequestError(f"{out} exists; name another folder with --out, or remove it")
    together, work = ranks or Ranks(training_device("auto")), working_folder(out)
    try:
        return _Run(student, teacher, corpus, out, options, watch, together, dtype).distill()
    except RidgelineError:
        if together.is_first and not any(work.glob("*/checkpoints/*")):  # there is nothing to continue from
            shutil.rmtree(work, ignore_errors=True)
        raise


def working_folder(out: Path) -> Path:
    """Return the hidden folder of a run that will write `out`."""
    return out.resolve().with_name(f".{out.resolve().name}.unfinished")


class _Run:
    """A run with both models in memory, in float32."""

    def __init__(
        self, student: str, teacher: str, corpus: Corpus, out: Path, options: DistillOptions, watch: Watch,
        ranks: Ranks, dtype: StoredType,
    ) -> None:  # fmt: skip
        self._names, self._out, self._options, self._watch = (student, teacher), out, options, watch
        self._ranks, self._dtype = ranks, dtype
        self._work = working_folder(out)
        self._table = open_table(ranks.device)
        self._student, self._teacher = self._load(student), self._load(teacher)
        check_student(student, self._student)
        _check_pair(self._student, self._teacher)
        _check_context(options.context, self._student, self._teacher)
        if "matrices" in (stage.name for stage in options.stages):
            check_mixing(self._student.spec, self._teacher.spec, options.trained)
        if {"layers", "streams"}.intersection(stage.name for stage in options.stages):
            check_widths(self._student.spec, self._teacher.spec)
        self._data = prepare_data(
            corpus, self._work / "data", Encoder.of(self._student.checkpoint), ranks, tokens=options.tokens,
            held_out=options.held_out, repeat=options.repeat, seed=options.seed,
        )  # fmt: skip

    def _load(self, name: str) -> LoadedModel:
        return load_model(name, LoadOptions(device=self._ranks.device, dtype="float32"), table=self._table)

    def distill(self) -> Distilled:
        documents = held_out_documents(self._data, self._options.context)
        before = self._measured(self._student, documents)
        weights = cast("Mapping[str, torch.Tensor]", self._student.model.weights)
        levels = Levels.of(self._student.spec, weights)
        initial: Mapping[str, torch.Tensor] = levels.raised({w.name: weights[w.name] for w in levels.spec.weights()})
        done: list[Trained] = []
        for i in range(len(self._options.stages)):
            done.append(self._stage(i, levels, initial))
            initial = done[-1].weights
        differences = self._write(levels.lowered(initial))
        after = self._measured(self._load(str(self._work / "model")), documents)
        cost = [stage.cost for stage in done]
        rates, notes = self._rates()
        found = Distilled(
            student=_shown(self._names[0]), teacher=_shown(self._names[1]), tokens=sum(c.tokens for c in cost),
            seconds=sum(c.seconds for c in cost), flops=sum(c.flops for c in cost), before=before, after=after,
            differences=differences, options=self._options, rates=rates, rate_notes=notes,
        )  # fmt: skip
        self._finish(found)
        return found

    def _stage(self, index: int, levels: Levels, initial: Mapping[str, torch.Tensor]) -> Trained:
        options, name = self._options, self._options.stages[index].name
        trained = options.trained_in(index)
        if name == "matrices" and not options.trained:
            trained = mixing_names(self._student.spec)
        facts = {
            "models": [model_fingerprint(find_model(name), MODEL_FILES, size=8) for name in self._names],
            "texts": self._data.key, "stages": [list(s) for s in options.stages[: index + 1]],
            "trained": list(trained), "adapters": options.adapters_in(index), "top_k": options.top_k,
            "tokens": options.tokens,
        }  # fmt: skip
        config = dict(self._student.checkpoint.config)
        if levels.factors:
            config = {"model_type": OUR_MODEL_TYPE, "spec": to_json(levels.spec)}
        job = Job(config, options.of_stage(index), facts)
        passes = flops_per_token(self._teacher.spec, options.context) / 3 if name != "tokens" else 0.0
        aim = Aim(self._objective(name), trained, options.adapters_in(index), initial, more_flops=passes)
        label = f"stage {index + 1} of {len(options.stages)}, {name}"
        self._watch.say(f"{label}: {STAGES[name].description}")
        return train(
            job, self._data.train, self._data.held_out, self._work / f"{index + 1}-{name}", self._ranks,
            lambda run: self._watch.run(label, run), aim,
        )  # fmt: skip

    def _objective(self, name: str) -> Callable[[LanguageModel], Objective]:
        teacher = self._teacher.model
        if name == "tokens":
            return Objective
        if name == "logits":
            return lambda model: LogitDivergence(model, self._distributions(teacher))
        if name == "matrices":
            return lambda model: MixingDivergence(model, teacher)
        return lambda model: StreamDistance(model, teacher, apart=name == "layers")

    def _distributions(self, teacher: Model) -> Teacher:
        if not self._options.top_k:
            return ModelTeacher(teacher)
        count = min(self._options.top_k, teacher.spec.vocab_size)
        key = model_fingerprint(
            find_model(self._names[1]), MODEL_FILES, size=8, context=self._options.context, count=count
        )
        folder = self._out.resolve().with_name(f"teacher-{key}")
        return StoredTeacher(folder, self._options.context, count, lambda: teacher)

    def _measured(self, loaded: LoadedModel, documents: Sequence[Document]) -> Divergence:
        done = self._watch.tokens("measuring", sum(d.num_scored for d in documents))
        return measure_divergence(self._teacher, loaded, documents, context=self._options.context, on_tokens=done)

    def _rates(self) -> tuple[dict[str, float | None], tuple[str, ...]]:
        """Measure how fast student and teacher decode; the other ranks measure nothing."""
        if not self._ranks.is_first:
            return {}, ()
        folders = {"student": self._work / "model", "teacher": find_model(self._names[1])}
        context = self._options.context
        prompt = max(1, context * 3 // 4)
        found = {name: measure_rate(str(path), prompt, context - prompt, None) for name, path in folders.items()}
        rates = {name: None if rate is None else rate.tokens_per_s for name, rate in found.items()}
        return rates, rate_notes(found, context)

    def _write(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, float]:
        """Write and check the model in the working folder; the other ranks wait."""
        differences: Mapping[str, float] = {}
        if self._ranks.is_first:
            checkpoint, sample = self._student.checkpoint, self._data.train.document(0)[:SAMPLE_TOKENS].tolist()
            folder = self._work / "model"
            shutil.rmtree(folder, ignore_errors=True)
            differences = write_with_weights(folder, checkpoint.folder, checkpoint.config, weights, self._dtype, sample)
        self._ranks.wait()
        return differences

    def _finish(self, found: Distilled) -> None:
        """Add the report and the logs, give the folder its name, and remove the working folder."""
        self._ranks.wait()
        if not self._ranks.is_first:
            return
        folder = self._work / "model"
        (folder / REPORT).write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
        (folder / TRAINING).mkdir()
        for log in sorted(self._work.glob(f"*/{LOG}")):
            shutil.copyfile(log, folder / TRAINING / f"{log.parent.name}.jsonl")
        folder.rename(self._out)
        shutil.rmtree(self._work, ignore_errors=True)


def held_out_documents(data: DistillData, context: int) -> list[Document]:
    """Return held-out documents, cut into pieces of at most `context` tokens, with MEASURED_TOKENS tokens at most."""
    found: list[Document] = []
    left, shard = MEASURED_TOKENS, data.held_out
    for i in range(shard.info.num_documents):
        ids = shard.document(i)[:left].tolist()
        left -= len(ids)
        found += [Document(ids[at : at + context]) for at in range(0, len(ids), context)]
        if left <= 0:
            break
    return [d for d in found if d.num_scored]


def check_student(name: str, student: LoadedModel) -> None:
    """Raise RequestError for a student whose weights cannot train or be written."""
    if is_gguf(student.checkpoint.folder):
        raise RequestError(f"{name} is a GGUF file; a student is a folder with a config.json and safetensors")
    if not has_tokenizer(student.checkpoint.folder):
        raise RequestError(f"{name} has no tokenizer, and --data is text; add a tokenizer.json to its folder")
    weights = student.model.weights
    if student.checkpoint.quantization or (isinstance(weights, StoredWeights) and weights.formats.by_name):
        raise RequestError(f"{name} is quantized, so its weights cannot train; name the checkpoint it was made from")


def _check_pair(student: LoadedModel, teacher: LoadedModel) -> None:
    """Raise DataError unless a token has the same meaning for both models."""
    own, other = student.spec.vocab_size, teacher.spec.vocab_size
    if own != other:
        raise DataError(
            f"the student's vocabulary has {own:,} tokens and the teacher's {other:,}; a teacher must have the "
            "vocabulary of its student"
        )
    if not has_tokenizer(teacher.checkpoint.folder):
        return
    one, two = (Tokenizer.from_folder(m.checkpoint.folder) for m in (student, teacher))
    for token in range(min(one.vocab_size, two.vocab_size)):
        first, second = one.token_name(token), two.token_name(token)
        if first != second:
            raise DataError(
                f"token {token} is {first!r} in the student's vocabulary and {second!r} in the teacher's; a teacher "
                "must have the vocabulary of its student"
            )


def _check_context(context: int, student: LoadedModel, teacher: LoadedModel) -> None:
    longest = min(student.max_model_len, teacher.max_model_len)
    if context > longest:
        raise RequestError(f"context (--context) is {context}, and one of the models has only {longest} positions")


def _shown(model: str) -> str:
    """Return the model's name without a local path, because reports are published."""
    is_path = model not in BUILT_IN and Path(model).exists()
    return Path(model).resolve().name if is_path else model
