"""`ridgeline cheaper`: change and repair a model until it keeps latency limits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ridgeline.cli.flags import options as o
from ridgeline.cli.flags import training as t
from ridgeline.cli.flags.groups import grouped
from ridgeline.cli.option import option
from ridgeline.cli.plan import DEFAULT_HARDWARE
from ridgeline.cli.signals import Interrupted

if TYPE_CHECKING:
    from ridgeline.cli.show.training import Bars
    from ridgeline.compress.cheaper import Aim
    from ridgeline.train.ranks import Ranks

LONGEST = 512  # tokens of a training row, if none are given


_Model = Annotated[str, typer.Argument(help="Model to make cheaper: a folder, a Hugging Face hub id, or pocket.")]
_Slo = Annotated[
    str,
    option(
        "--slo",
        help="Latency limits of a request that is alone on the machine, by predicted cost: tpot=30ms (each token), "
        "ttft=200ms (the first one), e2e=5s (the whole answer), or several with commas.",
    ),
]
_Context = Annotated[
    int | None,
    option(
        "--context",
        help="Tokens per sequence, prompt and answer together; a quarter of them is the answer. Default: 4096, or the "
        "model's longest if that is shorter.",
    ),
]
_Hardware = Annotated[
    str, option("--hardware", help="Machine: h100, mi300x, rtx4090 ..., or local for this one. Default: local.")
]
_Tokens = Annotated[str, option("--tokens", help="Tokens of the repair, such as 3M. More repair more and take longer.")]
_Data = Annotated[
    list[str],
    option(
        "--data",
        help="Texts to repair with and to measure on: a text file, a .jsonl file with a text per row, a folder, or "
        "stdlib for Python's own library. Take texts like those that the model will read. May be given several times.",
    ),
]
_Out = Annotated[
    str,
    option("--out", help="Folder to write. It must not exist. Repeat the command to continue a run that was stopped."),
]
_Candidates = Annotated[
    int, option("--candidates", help="Changed models that are repaired for a short while. Default: 3.")
]
_Updates = Annotated[
    int, option("--updates", help="Updates of the short repair, after which the best one is chosen. Default: 100.")
]
_Quantize = Annotated[
    str | None,
    option("--quantize", help="Scheme of `ridgeline quantize` for the result, such as gptq-int4. Default: none."),
]
_Baseline = Annotated[
    str | None,
    option(
        "--baseline",
        help="random: also train a model of the same shape from random weights with the same tokens, which shows what "
        "the original's weights are worth. Default: none.",
    ),
]
_HeldOut = Annotated[
    float, option("--held-out", help="Share of the texts on which models are measured and not trained. Default: 0.05.")
]
_Repeat = Annotated[
    int, option("--repeat", help="Most times that the texts are read; raise it if they are too short. Default: 1.")
]
_Length = Annotated[
    int | None,
    t.run_option(
        "--sequence-length", least=2, help="Tokens of a sequence in training and calibration. Default: 512, or the "
        "longest context.",
    ),
]  # fmt: skip
_BatchTokens = Annotated[int, t.run_option("--batch-tokens", least=2, help="Tokens per update. Default: 4096.")]
_LearningRate = Annotated[
    float, t.run_option("--learning-rate", help="Peak learning rate of the repair. Default: 0.001.")
]
_Sequences = Annotated[
    int, t.run_option("--calibrate-sequences", least=1, help="Number of calibration sequences. Default: 128.")
]
_Seed = Annotated[int, t.run_option("--seed", help="Random seed. Default: 0.")]


@dataclass(eq=False, repr=False)
class CheaperFlags:
    """The model, the limits, the texts, and what is made."""

    model: _Model
    slo: _Slo
    tokens: _Tokens
    data: _Data
    out: _Out
    context: _Context = None
    hardware: _Hardware = DEFAULT_HARDWARE
    baseline: _Baseline = None
    json_output: o.JsonReport = False


@dataclass(eq=False, repr=False)
class CheaperRunFlags:
    """How to make it; the names are those of CheaperOptions."""

    candidates: _Candidates = 3
    updates: _Updates = 100
    quantize: _Quantize = None
    held_out: _HeldOut = 0.05
    repeat: _Repeat = 1
    sequence_length: _Length = None
    batch_tokens: _BatchTokens = 4096
    learning_rate: _LearningRate = 1e-3
    calibrate_sequences: _Sequences = 128
    seed: _Seed = 0
    threads: o.Threads = None


@grouped
def cheaper(*, what: CheaperFlags, run: CheaperRunFlags, device: o.Device = "auto") -> None:
    """Change and repair a model until it keeps latency limits, and report what that cost.

    The planner lists changes that keep the limits by predicted cost. A few of them are made and repaired for a short
    while, the best one in full. Every intermediate model is a complete checkpoint in the folder DIR.steps.
    """
    from ridgeline.errors import DataError, RequestError
    from ridgeline.ops.devices import training_device

    where = training_device(device)  # checks for torch, which the imports below need
    from ridgeline.cli.show.price import print_price
    from ridgeline.compress.cheaper import CheaperOptions
    from ridgeline.compress.cheaper import cheaper as make_cheaper
    from ridgeline.compress.prune.aims import parse_amount
    from ridgeline.train.data.corpus import read_corpus
    from ridgeline.train.ranks import Ranks

    if what.baseline not in (None, "random"):
        raise RequestError(f"--baseline is {what.baseline!r:.40}; use random, or leave it out")
    tokens = parse_amount("--tokens", what.tokens, "tokens", "3M")
    aim = _aim(what)
    longest = min(LONGEST, aim.deployment.spec.max_position_embeddings, run.batch_tokens)
    given = {**asdict(run), "sequence_length": run.sequence_length or longest}
    options = CheaperOptions(tokens=tokens, baseline=what.baseline is not None, **given)
    try:
        corpus = read_corpus(what.data)
        report = make_cheaper(what.model, aim, corpus, Path(what.out), options, _Show(), Ranks(where))
    except OSError as e:  # for example a full disk, or a path that is not a writable folder
        raise DataError(f"the output cannot be written: {e}; repeat the command to continue") from None
    except KeyboardInterrupt:
        raise Interrupted("repeat the command to continue") from None
    print_price(report, what.out, what.json_output)
    if not what.json_output:
        _Show().say(f"intermediate models: {what.out}.steps, which you may remove")


def _aim(what: CheaperFlags) -> Aim:
    """Return the limits, and the model on its machine."""
    from ridgeline.cli.flags.known import find_known_writer, local_gpu, precision_of
    from ridgeline.cli.plan import shape
    from ridgeline.compress.cheaper import Aim
    from ridgeline.cost.calibration import find_machine
    from ridgeline.load.hub import SMALL_FILES, find_model
    from ridgeline.plan.limits import Slo
    from ridgeline.plan.planner import Deployment

    slo = Slo.parse(what.slo)
    machine, note = find_machine(what.hardware, local_gpu)
    known = find_known_writer(str(find_model(what.model, files=SMALL_FILES)), on_cpu=machine.kind == "cpu")
    deployment = Deployment(known.spec, machine, precision_of(known, machine))
    load = shape(1, what.context, None, None, known.spec.max_position_embeddings)
    return Aim(deployment, load, slo, note)


class _Show:
    """Shows progress: lines, and one bar at a time on a terminal."""

    def say(self, line: str) -> None:
        from ridgeline.cli.show.report import say

        say(line)

    def steps(self) -> AbstractContextManager[Any]:
        from ridgeline.cli.show.steps import step_bar

        return step_bar()

    def training(self, ranks: Ranks) -> AbstractContextManager[Bars]:
        from ridgeline.cli.show.training import training_bars

        return training_bars(ranks)
