"""`ridgeline convert`: convert a model to a cheaper architecture, write it, and report the price."""

from __future__ import annotations

from typing import Annotated

import typer

from ridgeline.cli.flags import changes as c
from ridgeline.cli.flags import options as o
from ridgeline.cli.option import option
from ridgeline.cli.show.steps import step_bar

_Model = Annotated[str, typer.Argument(help="The model to convert: a folder, a Hugging Face hub id, or pocket.")]
_To = Annotated[
    str,
    option(
        "--to",
        help="The new architecture, in the words of `plan`: kv_heads=2, cla=2, mla=64+16, window=256:3, "
        "hybrid=mamba2:3, linear=64:1 or linear=hedgehog:64:1.",
    ),
]
_Pool = Annotated[
    str,
    option(
        "--pool",
        help="How a group of neighboring KV heads becomes one: mean, first or random. The last two are baselines. "
        "Default: mean.",
    ),
]
_Tie = Annotated[
    str,
    option(
        "--tie",
        help="How layers come to share keys and values: mean (of their matrices) or fit (of what these give on the "
        "text, by least squares). Default: mean.",
    ),
]
_Rotate = Annotated[
    str,
    option(
        "--rotate",
        help="Which numbers of keys stay rotated in latent attention: contribution (those that matter most on the "
        "text) or uniform (as many of each frequency, which more programs support). Default: contribution.",
    ),
]
_Keep = Annotated[
    str,
    option(
        "--keep",
        help="Which layers keep their attention beside recurrent ones: search (those that lose most without it, as "
        "measured), pattern (the last of each group, as in `plan`), or layers such as 1,3. Default: search.",
    ),
]
_Start = Annotated[
    str,
    option(
        "--start",
        help="Start of recurrent layers: attention takes its matrices, fitted to the text, and random is a baseline. "
        "Default: attention.",
    ),
]
_Calibrate = Annotated[
    list[str] | None,
    option(
        "--calibrate",
        help="Text to measure on what was lost: a text file, a .jsonl file with a text per row, or a folder. May be "
        "given several times. Default: none, and only the price is reported.",
    ),
]
_Sequences = Annotated[
    int,
    option(
        "--calibrate-sequences",
        min=1,
        help="Number of sequences on which windows, recurrent layers and --tie fit are measured. Default: 8.",
    ),
]
_Length = Annotated[
    int | None, option("--sequence-length", min=2, help="Tokens of a sequence. Default: 512, or the longest context.")
]
_Seed = Annotated[
    int, option("--seed", min=0, help="Random seed of the held-out part, --pool random and --start random. Default: 0.")
]


def convert(
    model: _Model,
    to: _To,
    out: c.Out,
    pool: _Pool = "mean",
    tie: _Tie = "mean",
    rotate: _Rotate = "contribution",
    keep: _Keep = "search",
    start: _Start = "attention",
    calibrate: _Calibrate = None,
    format: c.Format = "auto",
    calibrate_sequences: _Sequences = 8,
    sequence_length: _Length = None,
    seed: _Seed = 0,
    threads: o.Threads = None,
    json_output: o.JsonReport = False,
) -> None:
    """Convert a model to a cheaper architecture, write it as a checkpoint, and report the price."""
    from ridgeline.cli.show.price import print_price  # which imports rich
    from ridgeline.compress.convert import convert
    from ridgeline.compress.convert.options import read_options

    options = read_options(
        pool=pool,
        tie=tie,
        rotate=rotate,
        keep=keep,
        start=start,
        format=format,
        sequences=calibrate_sequences,
        length=sequence_length,
        seed=seed,
        threads=threads,
    )
    with step_bar() as on_progress:
        report = convert(model, to, out=out, data=calibrate or (), options=options, on_progress=on_progress)
    print_price(report, out, json_output)
