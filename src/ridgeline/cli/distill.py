"""`ridgeline distill`: train a model until it predicts what another one does."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags import training as t
from ridgeline.cli.flags.groups import grouped
from ridgeline.cli.option import option
from ridgeline.cli.show.training import training_bars

if TYPE_CHECKING:
    from ridgeline.train.distill import DistillOptions
    from ridgeline.train.output import StoredType
    from ridgeline.train.ranks import Ranks

DEFAULT_CONTEXT = 512
MOST_MICRO = 8192  # tokens of a forward pass, if none are given


_Student = Annotated[
    str, typer.Argument(help="Model to train: a folder with weights to begin from, or a Hugging Face hub id.")
]
_Teacher = Annotated[
    str,
    option(
        "--teacher",
        help="Model to imitate: a folder, a GGUF file, a Hugging Face hub id, or pocket. It must have the vocabulary "
        "of the student.",
    ),
]
_Data = Annotated[
    list[str],
    option(
        "--data",
        help="Training texts: a text file, a .jsonl file with a text per row, a folder, or stdlib for Python's own "
        "library. Take texts like those that the model will read. May be given several times.",
    ),
]
_Tokens = Annotated[
    str,
    option("--tokens", help="Tokens to train on in all stages together, such as 3M. More repair more and take longer."),
]
_Out = Annotated[
    str,
    option(
        "--out",
        help="Folder to write. It must not exist. Repeat the command to continue a run that was stopped.",
    ),
]
_Stages = Annotated[
    str,
    option(
        "--stages",
        help="Stages in their order, with their shares of the tokens: layers (each layer imitates the teacher's on the "
        "teacher's inputs), streams (the stream after each layer), logits (KL from the teacher's distributions), "
        "tokens (cross-entropy, without the teacher). A stage without a share gets 0.2, the last one the rest. Use "
        "logits alone for a student of another hidden size. Default: layers,logits.",
    ),
]
_Train = Annotated[
    list[str] | None,
    option(
        "--train",
        help="Pattern of the names of the weights that train, such as 'layers.*.mixer.*', which leaves MLPs as they "
        "are. May be given several times. Default: all; in stages layers and streams those of layers.",
    ),
]
_Lora = Annotated[
    int,
    option(
        "--lora",
        help="Rank of low-rank terms that train in the last stage instead of all weights, and are added to them at the "
        "end. Takes less memory; 0: all weights train. Default: 0.",
    ),
]
_TopK = Annotated[
    int,
    option(
        "--top-k",
        help="Number of the teacher's most likely tokens to keep on disk, beside --out, for later runs with these "
        "texts; all others count as one. Use it to train several students. 0: nothing is kept. Default: 0.",
    ),
]
_HeldOut = Annotated[
    float, option("--held-out", help="Share of the texts that measures the model and does not train it. Default: 0.05.")
]
_Repeat = Annotated[
    int,
    option("--repeat", help="Most times that the texts are read; raise it if they are too short. Default: 1."),
]
_Context = Annotated[
    int | None,
    t.run_option(
        "--context",
        least=2,
        help="Tokens of a training row. Raise it for models that must remember more. Default: the longest context of "
        "both models, at most 512.",
    ),
]
_BatchTokens = Annotated[int, t.run_option("--batch-tokens", least=2, help="Tokens per update. Default: 4096.")]
_LearningRate = Annotated[
    float,
    t.run_option(
        "--learning-rate",
        help="Peak learning rate; lower it if the loss rises or is not finite. Default: 0.001.",
    ),
]
_DecayShare = Annotated[
    float,
    t.run_option("--decay-share", help="Share of each stage in which the learning rate falls to 0. Default: 0.6."),
]
_WeightDecay = Annotated[float, t.run_option("--weight-decay", help="Weight decay of the matrices. Default: 0.")]
_EvalEvery = Annotated[
    int, t.run_option("--eval-every", help="Updates between two measurements on the held-out texts. Default: 100.")
]
_SaveEvery = Annotated[
    int,
    t.run_option(
        "--save-every",
        help="Updates between two saved states of the run; 0: each stage has 20 of them. Default: 0.",
    ),
]
_Seed = Annotated[
    int, t.run_option("--seed", help="Random seed for the order of the texts and what is held out. Default: 0.")
]


@dataclass(eq=False, repr=False)
class DistillFlags:
    """The models, the texts, and what is trained."""

    student: _Student
    teacher: _Teacher
    data: _Data
    tokens: _Tokens
    out: _Out
    stages: _Stages = "layers,logits"
    train: _Train = None
    lora: _Lora = 0
    top_k: _TopK = 0
    held_out: _HeldOut = 0.05
    repeat: _Repeat = 1
    dtype: t.Dtype = "bfloat16"
    json_output: o.JsonReport = False


@dataclass(eq=False, repr=False)
class DistillRunFlags:
    """How to train; the names are those of DistillOptions."""

    context: _Context = None
    batch_tokens: _BatchTokens = 4096
    micro_tokens: t.MicroTokens = None
    learning_rate: _LearningRate = 1e-3
    decay_share: _DecayShare = 0.6
    weight_decay: _WeightDecay = 0.0
    clip: t.Clip = 1.0
    eval_every: _EvalEvery = 100
    save_every: _SaveEvery = 0
    seed: _Seed = 0
    precision: t.Precision = "auto"
    activation_checkpointing: t.ActivationCheckpointing = False


@grouped
def distill(*, what: DistillFlags, run: DistillRunFlags, device: o.Device = "auto") -> None:
    """Train a model until it predicts what another one does, its teacher.

    The student begins from its weights, such as those that a change of a model left. The output folder has the files of
    the student with new weights, and a report.
    """
    from ridgeline.errors import DataError, RequestError
    from ridgeline.ops.devices import training_device

    where = training_device(device)  # checks for torch, which the imports below need
    from ridgeline.train.data.corpus import read_corpus
    from ridgeline.train.distill import distill as distill_model
    from ridgeline.train.ranks import open_ranks

    if what.dtype not in ("bfloat16", "float32"):
        raise RequestError(f"--dtype is {what.dtype}; use bfloat16 or float32")
    try:
        with open_ranks(where) as ranks, training_bars(ranks) as watch:
            options = _options(what, run, ranks)
            found = distill_model(
                what.student, what.teacher, read_corpus(what.data), Path(what.out), options, watch, ranks,
                dtype=cast("StoredType", what.dtype),
            )  # fmt: skip
            for line in () if what.json_output else (*found.lines(), f"written to {what.out}"):
                watch.say(line)
    except OSError as e:  # for example a full disk, or a path that is not a writable folder
        raise DataError(f"the output cannot be written: {e}") from None
    if what.json_output and ranks.is_first:
        import json

        print(json.dumps(found.to_json(), indent=2, allow_nan=False))


def _options(what: DistillFlags, run: DistillRunFlags, ranks: Ranks) -> DistillOptions:
    """Return the options; missing ones are derived from the models and the device."""
    from ridgeline.compress.prune.aims import parse_amount
    from ridgeline.load.checkpoint import open_checkpoint
    from ridgeline.load.hub import SMALL_FILES, find_model
    from ridgeline.train.data.batches import whole_rows
    from ridgeline.train.distill import DistillOptions, parse_stages

    tokens = parse_amount("--tokens", what.tokens, "tokens", "3M")
    specs = [open_checkpoint(find_model(name, files=SMALL_FILES)).spec for name in (what.student, what.teacher)]
    longest = min(spec.max_position_embeddings for spec in specs)
    context = run.context or min(DEFAULT_CONTEXT, longest, run.batch_tokens)
    precision = run.precision
    if precision == "auto":
        precision = "float32" if ranks.on_host else "bfloat16"
    given = {
        "tokens": tokens, "stages": parse_stages(what.stages), "trained": tuple(what.train or ()),
        "lora": what.lora, "top_k": what.top_k, "held_out": what.held_out, "repeat": what.repeat, "context": context,
        "precision": precision,
        "micro_tokens": run.micro_tokens or whole_rows(run.batch_tokens // ranks.world_size, context, MOST_MICRO),
    }  # fmt: skip
    return DistillOptions(**{**asdict(run), **given})
