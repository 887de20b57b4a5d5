"""`ridgeline train`: train a model from a spec and texts, or repeat the recipe of the built-in pair."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags import training as t
from ridgeline.cli.flags.blocks import BlocksFlags, check_blocks_flags, read_lengths
from ridgeline.cli.flags.drafts import DraftFlags, check_draft_flags, draft_options
from ridgeline.cli.flags.groups import grouped
from ridgeline.cli.option import option
from ridgeline.cli.show.training import training_bars

if TYPE_CHECKING:
    from ridgeline.spec import ModelSpec
    from ridgeline.train.loop import TrainOptions
    from ridgeline.train.output import StoredType
    from ridgeline.train.ranks import Ranks

DEFAULT_CONTEXT, DEFAULT_BATCH, DEFAULT_RATE = 1024, 8192, 4e-3
BLOCKS_CONTEXT, BLOCKS_BATCH, BLOCKS_RATE = 256, 4096, 2e-3  # with --diffusion-from
MOST_EPOCHS = 1_000_000


_Spec = Annotated[
    str | None,
    typer.Argument(
        help="Description of the model: Ridgeline's own JSON or a config.json. Default: none; with --kind draft, a "
        "small decoder."
    ),
]
_Data = Annotated[
    list[str] | None,
    option(
        "--data",
        help="Training texts: a text file, a .jsonl file, a folder, or stdlib for Python's own library. "
        "May be given several times. Default: none; required without --recipe.",
    ),
]
_Out = Annotated[
    str | None,
    option(
        "--out",
        help="Folder to write. Repeat the command to continue a run that was stopped. "
        "Default: NAME-recipe with --recipe; required without it.",
    ),
]
_Recipe = Annotated[
    str | None,
    option("--recipe", help="Train the built-in models again instead: pocket. Default: none."),
]
_Tokenizer = Annotated[
    str | None,
    option("--tokenizer", help="Folder with a tokenizer.json. Default: one is learned from the texts."),
]
_HeldOut = Annotated[
    float,
    option(
        "--held-out",
        help="Share of documents kept out of training to measure the loss; with --draft-for, share of each text that "
        "only gives prompts to measure with. Default: 0.05.",
    ),
]
_License = Annotated[
    str | None, option("--license", help="License of the texts, for the model card. Default: not stated.")
]
_Epochs = Annotated[float, t.run_option("--epochs", help="Number of passes over the texts. Default: 1.")]
_Context = Annotated[
    int | None,
    t.run_option(
        "--context",
        least=1,
        help="Tokens of a training row. Default: the model's longest context, at most 1024; "
        "with --diffusion-from half of it, at most 256.",
    ),
]
_BatchTokens = Annotated[
    int | None,
    t.run_option(
        "--batch-tokens",
        least=1,
        help="Tokens per optimizer update. Default: 8192; with --draft-for 2048, with --diffusion-from 4096.",
    ),
]
_LearningRate = Annotated[
    float | None,
    t.run_option(
        "--learning-rate", help="Peak learning rate. Default: 0.004; with --draft-for and --diffusion-from 0.002."
    ),
]
_WarmupSteps = Annotated[
    int, t.run_option("--warmup-steps", help="Updates in which the learning rate rises to its peak. Default: 50.")
]
_DecayShare = Annotated[
    float,
    t.run_option("--decay-share", help="Share of the run in which the learning rate falls to 0. Default: 0.4."),
]
_WeightDecay = Annotated[float, t.run_option("--weight-decay", help="Weight decay of the matrices. Default: 0.1.")]
_Dropout = Annotated[
    float, t.run_option("--dropout", help="Dropout rate; raise it if there are many epochs. Default: 0.")
]
_Patience = Annotated[
    int,
    t.run_option(
        "--patience",
        help="Stop after this many evaluations without a lower held-out loss; 0: never stop early. Default: 0.",
    ),
]
_EvalEvery = Annotated[
    int, t.run_option("--eval-every", help="Updates between two evaluations on the held-out texts. Default: 100.")
]
_SaveEvery = Annotated[
    int, t.run_option("--save-every", help="Updates between two saved states of the run. Default: 100.")
]
_Seed = Annotated[
    int, t.run_option("--seed", help="Random seed for initial weights, data order and dropout. Default: 0.")
]


@dataclass(eq=False, repr=False)
class ModelFlags:
    """The model to train, its texts, and its folder."""

    spec: _Spec = None
    data: _Data = None
    out: _Out = None
    recipe: _Recipe = None
    tokenizer: _Tokenizer = None
    held_out: _HeldOut = 0.05
    license: _License = None
    dtype: t.Dtype = "bfloat16"


@dataclass(eq=False, repr=False)
class RunFlags:
    """How to train; the names are those of TrainOptions, except for epochs."""

    epochs: _Epochs = 1.0
    context: _Context = None
    batch_tokens: _BatchTokens = None
    micro_tokens: t.MicroTokens = None
    learning_rate: _LearningRate = None
    warmup_steps: _WarmupSteps = 50
    decay_share: _DecayShare = 0.4
    weight_decay: _WeightDecay = 0.1
    clip: t.Clip = 1.0
    dropout: _Dropout = 0.0
    patience: _Patience = 0
    eval_every: _EvalEvery = 100
    save_every: _SaveEvery = 100
    seed: _Seed = 0
    precision: t.Precision = "auto"
    activation_checkpointing: t.ActivationCheckpointing = False


@grouped
def train(
    *, model: ModelFlags, draft: DraftFlags, blocks: BlocksFlags, run: RunFlags, device: o.Device = "auto"
) -> None:
    """Train a model from scratch on the modules that serve it, or train the built-in pair again with --recipe pocket.

    With --draft-for, train a draft for speculative decoding on what a model says. With --diffusion-from, train a model
    to fill blocks of tokens, as a diffusion language model.

    The output folder loads in Ridgeline, and in transformers if it has the architecture.
    """
    from ridgeline.errors import DataError

    try:
        if check_blocks_flags(blocks, model, draft):
            _blocks(blocks, model, run, device)
        elif check_draft_flags(draft, model, run):
            _draft(draft, model, run, device)
        elif model.recipe is not None:
            _recipe(model.recipe, model, device)
        else:
            _spec(model, run, device)
    except OSError as e:  # for example a full disk, or a path that is not a writable folder
        raise DataError(f"the output cannot be written: {e}") from None


def _recipe(name: str, model: ModelFlags, where: str) -> None:
    from ridgeline.errors import RequestError
    from ridgeline.ops.devices import training_device

    device = training_device(where)  # checks for torch, which the imports below need
    from ridgeline.compress.prune.given import prune_to
    from ridgeline.train.pocket.pair import produce_pair
    from ridgeline.train.pocket.recipe import Recipe
    from ridgeline.train.ranks import open_ranks

    for other in ("spec", "data", "tokenizer"):
        if getattr(model, other):
            raise RequestError(f"--recipe {name} fixes the model and the texts; leave out {other}")
    wanted, out = Recipe.read(name), Path(model.out or f"{name}-recipe")
    with open_ranks(device) as ranks, training_bars(ranks) as watch:
        produce_pair(wanted, out, ranks, watch, prune_to)


def _spec(model: ModelFlags, run: RunFlags, where: str) -> None:
    from ridgeline.archs import spec_from_config
    from ridgeline.errors import RequestError
    from ridgeline.ops.devices import training_device

    device = training_device(where)  # checks for torch, which the imports below need
    from ridgeline.train.data.corpus import read_corpus
    from ridgeline.train.data.folder import check_room, prepare
    from ridgeline.train.pocket.produce import DATA, TRAINING, Output, job_of, produce
    from ridgeline.train.ranks import open_ranks
    from ridgeline.train.spec_file import read_config

    if not model.spec:
        raise RequestError("spec is missing: give a SPEC.json, or --recipe pocket")
    if not model.data:
        raise RequestError("data is missing: give --data")
    if not model.out:
        raise RequestError("out is missing: give --out FOLDER")
    if model.dtype not in ("bfloat16", "float32"):
        raise RequestError(f"--dtype is {model.dtype}; use bfloat16 or float32")
    config, out = read_config(Path(model.spec)), Path(model.out)
    tokenizer = _tokenizer(model.tokenizer)
    with open_ranks(device) as ranks, training_bars(ranks) as watch:
        watch.say("reading the texts, and looking for functions that occur in several of them")
        corpus = read_corpus(model.data, model.license)
        output = Output(folder=out, ranks=ranks, license=model.license, dtype=cast("StoredType", model.dtype))
        data = prepare(
            corpus, out / TRAINING / DATA, spec_from_config(config).vocab_size, ranks=ranks,
            held_out_share=model.held_out, tokenizer=tokenizer, say=watch.say,
        )  # fmt: skip
        options = _options(run, spec_from_config(config), data.train.info.num_tokens, ranks)
        job = job_of(config, options, data)
        check_room(data.train, job.options.batch_tokens)
        produce(out.resolve().name, job, data, output, watch, "Trained with `ridgeline train`.")


def _blocks(blocks: BlocksFlags, model: ModelFlags, run: RunFlags, where: str) -> None:
    from ridgeline.errors import RequestError
    from ridgeline.ops.devices import training_device

    device = training_device(where)  # checks for torch, which the imports below need
    from ridgeline.train.blocks import train_blocks
    from ridgeline.train.data.corpus import read_corpus
    from ridgeline.train.ranks import open_ranks

    if model.dtype not in ("bfloat16", "float32"):
        raise RequestError(f"--dtype is {model.dtype}; use bfloat16 or float32")
    lengths = read_lengths(blocks.block_lengths)
    with open_ranks(device) as ranks, training_bars(ranks) as watch:

        def options(spec: ModelSpec, num_tokens: int) -> TrainOptions:
            rate = BLOCKS_RATE if run.learning_rate is None else run.learning_rate
            context = run.context or min(BLOCKS_CONTEXT, spec.max_position_embeddings // 2)
            wanted = replace(run, context=context, learning_rate=rate, batch_tokens=run.batch_tokens or BLOCKS_BATCH)
            return _options(wanted, spec, num_tokens, ranks)

        found = train_blocks(
            str(blocks.diffusion_from), read_corpus(model.data or [], model.license), Path(str(model.out)), options,
            watch, ranks, lengths=lengths, mask_token=blocks.mask_token, held_out=model.held_out,
            dtype=cast("StoredType", model.dtype),
        )  # fmt: skip
        for line in (*found.lines(), f"done: {model.out}"):
            watch.say(line)


def _draft(draft: DraftFlags, model: ModelFlags, run: RunFlags, where: str) -> None:
    from ridgeline.errors import RequestError
    from ridgeline.ops.devices import training_device

    device = training_device(where)  # checks for torch, which the imports below need
    from ridgeline.archs import spec_from_config
    from ridgeline.train.data.corpus import read_corpus
    from ridgeline.train.drafts import train_draft
    from ridgeline.train.ranks import open_ranks
    from ridgeline.train.spec_file import read_config

    options = draft_options(draft, model, run)
    spec = None if model.spec is None else spec_from_config(read_config(Path(model.spec)))
    with open_ranks(device) as ranks, training_bars(ranks) as watch:
        if ranks.world_size > 1:
            raise RequestError("a draft is trained by one process; start ridgeline without torchrun")
        corpus = read_corpus(model.data or [], model.license)
        train_draft(
            str(draft.draft_for), corpus, Path(str(model.out)), options, watch, device=device,
            dtype=cast("StoredType", model.dtype), spec=spec,
        )  # fmt: skip


def _tokenizer(folder: str | None) -> Any:
    from ridgeline.load.tokenizer_files import read_folder

    return None if folder is None else read_folder(Path(folder)).backend


def _options(run: RunFlags, spec: ModelSpec, num_tokens: int, ranks: Ranks) -> TrainOptions:
    """Return the training options; missing ones are derived from the model, the data and the device."""
    from ridgeline.errors import RequestError
    from ridgeline.train.data.batches import whole_rows
    from ridgeline.train.loop import TrainOptions

    batch = run.batch_tokens or DEFAULT_BATCH
    context = run.context or min(DEFAULT_CONTEXT, spec.max_position_embeddings, batch)
    if context > spec.max_position_embeddings:
        raise RequestError(
            f"--context is {context}, but the model has only {spec.max_position_embeddings} positions; lower it"
        )
    if not 0 < run.epochs <= MOST_EPOCHS:
        raise RequestError(f"--epochs is {run.epochs}; it must be above 0 and at most {MOST_EPOCHS:,}")
    precision = run.precision
    if precision == "auto":
        precision = "float32" if ranks.on_host else "bfloat16"
    names = {f.name for f in fields(TrainOptions)}
    return TrainOptions(
        **{name: value for name, value in asdict(run).items() if name in names}
        | {
            "steps": max(1, round(run.epochs * num_tokens / batch)),
            "context": context,
            "batch_tokens": batch,
            "learning_rate": DEFAULT_RATE if run.learning_rate is None else run.learning_rate,
            "micro_tokens": run.micro_tokens or whole_rows(batch // ranks.world_size, context, DEFAULT_BATCH),
            "precision": precision,
        }
    )
