"""`ridgeline prune`: keep the most important parts of a model, write it, and report the price."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.flags import changes as c
from ridgeline.cli.flags import options as o
from ridgeline.cli.option import option
from ridgeline.cli.show.steps import step_bar

_Model = Annotated[str, typer.Argument(help="The model to prune: a folder, a Hugging Face hub id, or pocket.")]
_Keep = Annotated[
    str | None,
    option(
        "--keep",
        help="Parts to keep, as shares or numbers: mlp=0.5,heads=0.75,layers=20. mlp: neurons of MLPs and of each "
        "expert; heads: query heads, with their keys and values where each has its own; kv_heads: KV heads with their "
        "query heads; layers; width: the hidden size; experts; state: heads or channels of state spaces. Default: all.",
    ),
]
_Params = Annotated[
    str | None,
    option(
        "--params",
        help="Most parameters of the result, such as 2B or 850M: mlp and width get the largest share, the same for "
        "both, with which the model is small enough, unless --keep gives one of them. Default: no limit.",
    ),
]
_Calibrate = Annotated[
    list[str] | None,
    option(
        "--calibrate",
        help="Text to measure importance with, and perplexity on a part of it that is held out: a text file, a .jsonl "
        "file with a text per row, or a folder. May be given several times. Default: none; only --importance weights "
        "and random need none.",
    ),
]
_Importance = Annotated[
    str,
    option(
        "--importance",
        help="Ranking of parts: activation (what they give on the text), weights (the norms of their weights) or "
        "random. The last two are baselines. Default: activation.",
    ),
]
_LayerScore = Annotated[
    str,
    option(
        "--layer-score",
        help="Ranking of layers: perplexity (of the model without the layer) or cosine (1 - the cosine of the stream "
        "before and after it), which takes no passes of its own. Default: perplexity.",
    ),
]
_Channels = Annotated[
    str,
    option(
        "--channels",
        help="How the stream gets narrower: components (it is rotated to its principal components, of which the first "
        "ones are kept), importance (the channels with the largest values are kept) or auto (components where the "
        "norms of the model allow it). Default: auto.",
    ),
]
_Sizes = Annotated[
    str,
    option(
        "--sizes",
        help="uniform: a part has one size in all layers. by-layer: as many neurons and KV heads in all, more where "
        "they matter more; the folder then has a config of Ridgeline's own. Default: uniform.",
    ),
]
_Residual = Annotated[
    str,
    option(
        "--residual",
        help="How what removed query heads gave is added to the others: fit (least squares on the text), minitron (its "
        "rule on weights) or none. Default: fit.",
    ),
]
_Sequences = Annotated[
    int, option("--calibrate-sequences", min=1, help="Number of calibration sequences. Default: 1024.")
]
_Length = Annotated[
    int | None,
    option("--sequence-length", min=2, help="Tokens of a calibration sequence. Default: 512, or the longest context."),
]
_LayerSequences = Annotated[
    int,
    option(
        "--layer-sequences",
        min=1,
        help="Number of sequences on which the removal of each layer is scored by perplexity. Default: 16.",
    ),
]
_Seed = Annotated[
    int, option("--seed", min=0, help="Random seed for the draw of sequences and random importance. Default: 0.")
]


def prune(
    model: _Model,
    out: c.Out,
    keep: _Keep = None,
    params: _Params = None,
    calibrate: _Calibrate = None,
    importance: _Importance = "activation",
    layer_score: _LayerScore = "perplexity",
    channels: _Channels = "auto",
    sizes: _Sizes = "uniform",
    residual: _Residual = "fit",
    format: c.Format = "auto",
    calibrate_sequences: _Sequences = 1024,
    sequence_length: _Length = None,
    layer_sequences: _LayerSequences = 16,
    seed: _Seed = 0,
    threads: o.Threads = None,
    json_output: o.JsonReport = False,
) -> None:
    """Keep the most important parts of a model, write it as a checkpoint, and report the price."""
    from ridgeline.cli.show.price import print_price  # which imports rich
    from ridgeline.compress.prune import Aims, parse_keep, prune
    from ridgeline.compress.prune.aims import parse_params
    from ridgeline.compress.prune.options import read_options

    options = read_options(
        importance=importance, layer_score=layer_score, channels=channels, sizes=sizes, residual=residual,
        format=format, sequences=calibrate_sequences, length=sequence_length, layer_sequences=layer_sequences,
        seed=seed, threads=threads,
    )  # fmt: skip
    with step_bar() as on_progress:
        report = prune(
            model, parse_keep(keep) if keep is not None else Aims(), out=out,
            params=None if params is None else parse_params(params), data=calibrate or (), options=options,
            on_progress=on_progress,
        )  # fmt: skip
    print_price(report, out, json_output)
