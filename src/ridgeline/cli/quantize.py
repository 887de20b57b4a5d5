"""`ridgeline quantize`: quantize a model with calibration data, and report what was lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.option import option
from ridgeline.cli.show.steps import step_bar

if TYPE_CHECKING:
    from ridgeline.compress import Report

_Model = Annotated[str, typer.Argument(help="The model to quantize: a folder, a Hugging Face hub id, or pocket.")]
_Scheme = Annotated[
    str,
    option(
        "--scheme",
        help="How codes are chosen: METHOD-TYPE with method rtn (round to nearest), clip, awq, gptq, qat (the codes of "
        "gptq, trained), smooth or keep, and type int8, int6, int5, int4, int3, int2 or fp8; or llm.int8; or fp8 with "
        "a scale for each row, fp8-tensor, fp8-block. Or a type of GGUF files: q4_k, q6_k, q8_0, q4_0, f16, bf16. "
        "Examples: awq-int4, gptq-int3, q4_k.",
    ),
]
_Out = Annotated[str, option("--out", help="Folder to write. It must not exist.")]
_Calibrate = Annotated[
    list[str] | None,
    option(
        "--calibrate",
        help="Text to calibrate with and to measure on: a text file, a .jsonl file with a text per row, or a folder. "
        "Take text like that which the model will read. May be given several times. Default: none; only rtn, fp8, "
        "llm.int8 and the types of GGUF files need none. q4_k and q6_k are better with text.",
    ),
]
_Group = Annotated[
    int | None,
    option(
        "--group",
        help="Columns that share a scale; 0: one scale for each row. Fewer columns lose less and take more bytes. "
        "Default: 32; for int8 and fp8 a row; for fp8-block 128, which is also its number of rows.",
    ),
]
_Symmetric = Annotated[
    bool | None,
    option(
        "--symmetric/--asymmetric",
        help="Whether groups have no zero points. Default: --symmetric for int8 and fp8, otherwise --asymmetric.",
    ),
]
_Activations = Annotated[
    str | None,
    option(
        "--activations",
        help="How products take their inputs: exact, int8 or fp8 (rounded for each token), outliers (int8 with large "
        "values exact). Default: int8 for smooth-int8, outliers for llm.int8, otherwise exact.",
    ),
]
_Keep = Annotated[
    float | None,
    option(
        "--keep",
        help="Share of the columns of each matrix that keep-TYPE stores in 16 bits: those with the largest inputs. "
        "From 0.001 to 0.01 in the paper. Default: 0.01.",
    ),
]
_Bits = Annotated[
    float | None,
    option(
        "--bits",
        help="Bits of a weight on average, from 2 to 8, without scales. Parts of the model that suffer more get more "
        "bits. Default: all matrices get those of --scheme.",
    ),
]
_Format = Annotated[
    str | None,
    option(
        "--format",
        help="Format of the checkpoint: compressed-tensors, awq, gptq, gptq_v2, bitsandbytes, gguf (one file for "
        "llama.cpp), or floats, which every program reads. Default: the first one that can hold the matrices.",
    ),
]
_Sequences = Annotated[
    int, option("--sequences", min=1, help="Number of calibration sequences. More take more time. Default: 128.")
]
_Length = Annotated[
    int | None,
    option("--sequence-length", min=2, help="Tokens of a calibration sequence. Default: 512, or the longest context."),
]
_Seed = Annotated[
    int, option("--seed", min=0, help="Random seed for the draw of sequences and the order of training. Default: 0.")
]
_TrainTokens = Annotated[
    int | None,
    option(
        "--train-tokens",
        min=1,
        help="Tokens on which qat trains codes; a text that has fewer is repeated. More lose less and take more time. "
        "Default: 1000000.",
    ),
]


def quantize(
    model: _Model,
    scheme: _Scheme,
    out: _Out,
    calibrate: _Calibrate = None,
    group: _Group = None,
    symmetric: _Symmetric = None,
    activations: _Activations = None,
    keep: _Keep = None,
    bits: _Bits = None,
    format: _Format = None,
    sequences: _Sequences = 128,
    sequence_length: _Length = None,
    seed: _Seed = 0,
    train_tokens: _TrainTokens = None,
    threads: o.Threads = None,
    json_output: o.JsonReport = False,
) -> None:
    """Quantize a model, write it as a checkpoint, and report what was lost.

    Repeat the command to continue a run that was interrupted.
    """
    from ridgeline import compress

    options = compress.Options(sequences, sequence_length, seed, bits, threads, train_tokens=train_tokens)
    with step_bar() as on_progress:
        report = compress.quantize(
            model, scheme, out=out, data=calibrate or (), group=group, symmetric=symmetric, activations=activations,
            keep=keep, format=format, options=options, on_progress=on_progress,
        )  # fmt: skip
    if json_output:
        import json

        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        _print(report, out)


def _print(report: Report, out: str) -> None:
    from ridgeline.cli.show.quantized import parts
    from ridgeline.cli.show.report import say
    from ridgeline.cli.show.tables import screen, show

    show(screen(), *parts(report), f"written to {out}")
    for remark in report.remarks():
        say(f"note: {remark}")
