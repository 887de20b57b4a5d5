"""Train a draft for a model: make continuations, train on them, write the folder, measure it, write its card."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch

from ridgeline.errors import DataError, RequestError
from ridgeline.load.fingerprint import model_fingerprint
from ridgeline.load.hub import BUILT_IN, MODEL_FILES, find_model
from ridgeline.ops.devices import training_device
from ridgeline.ops.reference.backend import torch_device
from ridgeline.ops.table import CPU, REFERENCE
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model
from ridgeline.spec import ModelSpec
from ridgeline.spec.heads import HeadSpec, MedusaSpec
from ridgeline.train.cost import machine_name
from ridgeline.train.curve import draw_curve, read_log
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.drafts.attention import open_training
from ridgeline.train.drafts.batch import Target
from ridgeline.train.drafts.card import DraftFacts, draft_card
from ridgeline.train.drafts.continuations import Continuations, Wanted, make_continuations
from ridgeline.train.drafts.learners import EagleLearner, Learner, MedusaLearner, ModelLearner
from ridgeline.train.drafts.loop import DraftTrainer
from ridgeline.train.drafts.measure import DraftQuality, measure_draft
from ridgeline.train.drafts.options import DraftOptions
from ridgeline.train.drafts.output import check_tokenizer, stored, write_draft_model, write_trained_head
from ridgeline.train.drafts.shapes import Vocabulary, check_draft_spec, draft_spec, frequent_tokens, head_spec
from ridgeline.train.loop import LOG, Progress
from ridgeline.train.output import StoredType
from ridgeline.train.run import SILENT

TRAINING, CURVE, CARD = "training", "loss.png", "README.md"
SAMPLE_TOKENS = 100  # tokens on which a written draft model is compared with the trained one


class Watch(Protocol):
    """Receives the progress of a run."""

    def say(self, line: str) -> None:
        """Print a line."""

    def tokens(self, name: str, total: int) -> Callable[..., None]:
        """Announce long work, measured in tokens. The returned function is called with numbers of tokens, and may be
        given a text `facts` to show beside them.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Draft:
    """A draft that is to be trained. spec: description of a head or of a small model."""

    learner: Learner
    target: Target
    spec: HeadSpec | ModelSpec
    vocabulary: Vocabulary | None


def train_draft(
    model: str, corpus: Corpus, out: Path, options: DraftOptions, watch: Watch = SILENT, *, device: str = "auto",
    dtype: StoredType = "bfloat16", spec: ModelSpec | None = None,
) -> DraftQuality:  # fmt: skip
    """Train a draft for a model and write its folder; return how often its drafts are right on held-out text.

    A run that was interrupted continues from its newest saved state; on a CPU, the folder is that of one run, to the
    bit. Continuations are kept beside `out`, and other drafts of the model with these texts use them too.

    Args:
        model: A folder, a GGUF file, a hub id or a built-in model.
        corpus: Texts from which prompts are cut.
        out: Folder to write.
        device: As `ridgeline.ops.devices.training_device` takes it.
        dtype: Type of the stored weights.
        spec: Description of a small model, for kind draft only; None: `shapes.draft_spec`.

    Raises:
        RequestError, DataError, CheckpointError, DeviceError: each with one line.
    """
    where = training_device(device)
    if spec is not None and options.kind != "draft":
        raise RequestError(f"a spec describes a draft model, and the kind is {options.kind}; leave out the spec")
    _check_folder(out)
    table = open_training(where)
    loaded = load_model(model, LoadOptions(device=where, dtype="float32"), table=table)
    if options.kind == "draft":
        check_tokenizer(loaded)
    said = _continuations(model, where, corpus, out, options, watch)
    draft = _build(loaded, said, options, spec)
    folder, name = out / TRAINING, _name(model)
    facts = {
        "target": model_fingerprint(find_model(model), MODEL_FILES, size=8), "continuations": said.folder.name,
        "spec": repr(draft.spec), "dtype": dtype,
    }  # fmt: skip
    trainer = DraftTrainer(
        draft.learner, draft.target, said.train, options, folder, facts, machine_name(torch_device(where))
    )
    _run(trainer, draft, options, watch)
    weights = draft.learner.weights()
    if isinstance(draft.spec, ModelSpec):
        sample = said.train[0].ids[:SAMPLE_TOKENS].tolist()
        write_draft_model(out, draft.spec, weights, loaded, dtype, sample)
    else:
        write_trained_head(out, draft.spec, weights, draft.vocabulary, name, dtype, options.depth)
    quality = _measure(draft, said, options, dtype, watch)
    _write_card(out, name, draft, corpus, said, options, dtype, quality, watch)
    for line in quality.lines():
        watch.say(line)
    watch.say(f"done: {out}")
    return quality


def _check_folder(out: Path) -> None:
    """Raise DataError for a folder with files that no earlier run of this kind has made."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; give a folder to write")
    if out.exists() and any(out.iterdir()) and not (out / TRAINING).exists():
        raise DataError(f"{out} exists already, and has no run to continue; give another folder")


def _continuations(
    model: str, device: str, corpus: Corpus, out: Path, options: DraftOptions, watch: Watch
) -> Continuations:
    wanted = Wanted(
        options.continuation_tokens, options.output_len, options.held_out, options.held_out_prompts, options.seed
    )
    # Our own kernels write faster than torch does on a CPU.
    engine = CPU if device == REFERENCE else device
    done = watch.tokens("continuing", options.continuation_tokens)
    said = make_continuations(model, engine, corpus, wanted, out.resolve().parent, done)
    watch.say(f"{len(said.train):,} continuations with {said.num_tokens:,} tokens: {said.folder.name}")
    return said


def _build(loaded: LoadedModel, said: Continuations, options: DraftOptions, spec: ModelSpec | None) -> _Draft:
    if options.kind == "draft":
        small, longest = spec or draft_spec(loaded.spec), max(len(c.ids) for c in (*said.train, *said.held_out))
        check_draft_spec(small, loaded.spec, longest)
        target = Target(loaded.model, loaded.table)
        return _Draft(ModelLearner(small, target, longest, options.seed), target, small, None)
    head = head_spec(options, loaded.spec)
    vocabulary = frequent_tokens(head, said.train)
    target = Target(loaded.model, loaded.table, vocabulary)
    learner: Learner
    if isinstance(head, MedusaSpec):
        learner = MedusaLearner(head, target)
    else:
        learner = EagleLearner(head, target, options.practised, options.seed)
    return _Draft(learner, target, head, vocabulary)


def _run(trainer: DraftTrainer, draft: _Draft, options: DraftOptions, watch: Watch) -> None:
    count = sum(p.numel() for p in draft.learner.weights().values())
    watch.say(
        f"{options.kind}: {count / 1e6:,.2f} M parameters, {trainer.steps:,} updates of about "
        f"{options.batch_tokens:,} tokens"
    )
    done = watch.tokens(options.kind, options.train_tokens)

    shown = [0]  # tokens that the bar has counted

    def on_step(p: Progress) -> None:
        facts = f"loss {p.loss:.3f}, {p.tokens_per_s:,.0f} tokens/s"
        due = round(options.train_tokens * p.step / trainer.steps)
        done(due - shown[0], facts)  # after a resumption, the first update shows the earlier ones too
        shown[0] = due
        if p.step % options.save_every == 0:
            watch.say(f"{options.kind} {p.step:,}/{trainer.steps:,}: {facts}")

    trainer.run(on_step)


@torch.no_grad()
def _measure(
    draft: _Draft, said: Continuations, options: DraftOptions, dtype: StoredType, watch: Watch
) -> DraftQuality:
    """Measure the draft with its weights as they are stored."""
    rounded: Mapping[str, Any] = stored(draft.learner.weights(), dtype)
    for name, parameter in draft.learner.weights().items():
        parameter.copy_(rounded[name])
    done = watch.tokens("measuring", sum(len(c.ids) for c in said.held_out))
    return measure_draft(draft.learner, draft.target, said.held_out, options.depth, done)


def _write_card(
    out: Path, name: str, draft: _Draft, corpus: Corpus, said: Continuations, options: DraftOptions,
    dtype: StoredType, quality: DraftQuality, watch: Watch,
) -> None:  # fmt: skip
    log = read_log(out / TRAINING / LOG)
    curve = None
    if find_spec("matplotlib") is None:
        watch.say(f"{CURVE} was not drawn: it needs matplotlib (pip install 'ridgeline[plot]')")
    else:
        draw_curve(log, options.batch_tokens, None, f"{options.kind} for {name}", out / CURVE)
        curve = CURVE
    facts = DraftFacts(
        name=out.resolve().name, target=name, options=options, dtype=dtype, quality=quality, curve=curve,
        num_params=sum(p.numel() for p in draft.learner.weights().values()), source=corpus.source,
        license=corpus.license, continuations=len(said.train), continuation_tokens=said.num_tokens, steps=len(log),
        seconds=sum(options.batch_tokens / p.tokens_per_s for p in log),
        machine="; ".join(dict.fromkeys(p.machine for p in log)),
    )  # fmt: skip
    partial = out / f".{CARD}.partial"
    partial.write_text(draft_card(facts), encoding="utf-8")
    partial.replace(out / CARD)


def _name(model: str) -> str:
    """Return the model's name without a local path, because cards are published."""
    is_path = model not in BUILT_IN and Path(model).exists()
    return Path(model).resolve().name if is_path else model
