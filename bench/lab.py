"""Run every claim again, and summarize what became of them: python bench/lab.py [--quick] [--out lab] [--names A B]

Prints a line for each experiment, with its verdicts, its seconds and what other programs used meanwhile, and a line
with all of them. Experiments that the folder has already are not run again. The gate: exact claims are as arithmetic
says. `--figures FOLDER` also writes the figures, those of the docs. With --sweep it tries the learning rates of the
experiments that train, with a seed that they do not use:

    python bench/lab.py --sweep mqar
    python bench/lab.py --sweep repair
    python bench/lab.py --sweep bytes
    python bench/lab.py --sweep embeddings
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from common import emit

from ridgeline.cost.calibration import this_machine
from ridgeline.lab import NAMES, Record, Setup, Verdict, find, run_all, scratch
from ridgeline.lab.experiments import embeddings, recall, repair
from ridgeline.lab.figures import svg
from ridgeline.lab.mqar import recalled, remembered
from ridgeline.lab.page import page
from ridgeline.lab.repair import repaired
from ridgeline.spec.folders import write_whole

EXACT = {7: "holds", 14: "holds", 25: "differs", 35: "holds", 41: "holds", 42: "differs", 43: "holds"}
GRAY = "#808080"
RATES, SEED = (1e-3, 3e-3, 1e-2), 100
STARTS = {"repaired": ("logits", False), "scratch": ("tokens", True)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("lab"))
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--figures", type=Path, help="also write the figures as SVG files, those of the docs")
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--sweep", choices=tuple(SWEEPS))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    args = parser.parse_args()
    machine, note = this_machine()
    setup = Setup(args.quick, 0, args.model, args.threads, machine)
    if args.sweep:
        SWEEPS[args.sweep](setup, args.rates)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    records = run_all([find(name) for name in args.names], setup, args.out, show)
    write_whole(args.out / "lab.html", page(records, note))
    if args.figures:
        draw(records, args.figures)
    verdicts = {j.claim: j.verdict for record in records for j in record.judgements}
    emit(
        "all", all(verdicts.get(n, said) == said for n, said in EXACT.items()), quick=args.quick,
        seconds=round(sum(record.seconds for record in records)),
        repeat=[record.name for record in records if record.is_busy],
        **{verdict.name: sorted(n for n, found in verdicts.items() if found is verdict) for verdict in Verdict},
    )  # fmt: skip


def draw(records: list[Record], folder: Path) -> None:
    """Write each figure with a gray that can be read on light and on dark pages: NAME.svg, NAME-2.svg."""
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        for number, figure in enumerate(record.figures, 1):
            name = record.name if number == 1 else f"{record.name}-{number}"
            write_whole(folder / f"{name}.svg", svg(figure).replace("currentColor", GRAY))


def show(record: Record) -> None:
    """Print the verdicts of one experiment."""
    verdicts = {j.claim: str(j.verdict) for j in record.judgements}
    emit(
        record.name, all(EXACT.get(n, found) == found for n, found in verdicts.items()), verdicts=verdicts,
        numbers={j.claim: j.effect for j in record.judgements}, seconds=round(record.seconds, 1),
        others=round(record.others, 2), busy=record.is_busy,
    )  # fmt: skip


def sweep_recall(setup: Setup, rates: list[float]) -> None:
    """Print the recall of each small model after half of its updates, for each rate."""
    for name, recipe in recall.MODELS.items():
        for rate in rates:
            start = time.process_time()
            found = recalled(recipe.spec, recall.PAIRS, rate, recipe.updates // 2, SEED)
            seconds = round(time.process_time() - start, 1)
            emit(f"sweep of recall: {name}", True, rate=rate, recall=found, processor_s=seconds)
    spec, _, updates = recall.FIRST
    for rate in rates:
        found = remembered(spec, recall.LENGTH, rate, updates // 2, SEED)
        emit("sweep of recall: the first token", True, rate=rate, recall=found)


def sweep_repair(setup: Setup, rates: list[float]) -> None:
    """Print the perplexity after training from both starts on few tokens, for each rate."""
    for name, (stages, drawn) in STARTS.items():
        for rate in rates:
            start = time.process_time()
            found = repaired(setup, "heads", repair.QUICK_TOKENS, SEED, stages, drawn=drawn, rate=rate)
            before, after = found["perplexity"]
            seconds = round(time.process_time() - start, 1)
            emit(f"sweep of repair: {name}", after < before, rate=rate, before=before, after=after, processor_s=seconds)


def sweep_bytes(setup: Setup, rates: list[float]) -> None:
    """Print the loss of each form of small models after half of its updates, for each rate."""
    for name in scratch.FORMS:
        for rate in rates:
            start = time.process_time()
            found = scratch.loss_of(name, SEED, rate=rate, updates=scratch.UPDATES // 2)
            seconds = round(time.process_time() - start, 1)
            emit(f"sweep of bytes: {name}", True, rate=rate, loss=round(found, 4), processor_s=seconds)


def sweep_embeddings(setup: Setup, rates: list[float]) -> None:
    """Print the share of texts in order after half of the updates, for each rate."""
    from ridgeline.train.embedding_noise import UPDATES

    for rate in rates:
        start = time.process_time()
        found = embeddings.drawn(SEED, rate=rate, updates=UPDATES // 2)
        shares = {name: own["in_order"] for name, own in found.items()}
        seconds = round(time.process_time() - start, 1)
        emit("sweep of embeddings", True, rate=rate, in_order=shares, processor_s=seconds)


SWEEPS = {"mqar": sweep_recall, "repair": sweep_repair, "bytes": sweep_bytes, "embeddings": sweep_embeddings}


if __name__ == "__main__":
    main()
