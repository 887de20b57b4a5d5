"""Compare ways to repair changed models at equal cost: python bench/cheaper.py MODEL --text FILES --out DIR

For each --change, three contenders have the same shape: `kl` (the changed weights, distilled from the original), `ce`
(the changed weights, trained on the texts alone) and `random` (random weights, trained on the texts). The learning
rate of each contender is swept once, with the first seed and --sweep-tokens. Then each is trained on --tokens with
every seed, and `random-cost` on as many tokens as cost the operations of `kl`, those of the teacher included.

Each case appends a JSON line to DIR/results.jsonl. A case that has one is not run again, and a case that was stopped
goes on where it was. At the end, and with --report alone, a table is printed, and two pictures are drawn: quality
against predicted cost, and associative recall against bytes of state. The gate of a line: its perplexity is finite.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cheaper_report import draw, table
from common import emit

from ridgeline.cli.flags.known import find_known, precision_of
from ridgeline.compress.cheaper.measure import Measure
from ridgeline.compress.cheaper.report import ORIGINAL
from ridgeline.compress.cheaper.texts import divide
from ridgeline.compress.convert import ConvertOptions, convert
from ridgeline.compress.folder import whole_folder
from ridgeline.compress.prune import PruneOptions, parse_keep, prune
from ridgeline.compress.prune.aims import WORDS, parse_amount
from ridgeline.cost.calibration import find_machine
from ridgeline.load.hub import find_model
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.plan.planner import Deployment, Load
from ridgeline.train.cost import flops_per_token
from ridgeline.train.data.batches import whole_rows
from ridgeline.train.data.corpus import read_corpus
from ridgeline.train.distill import DistillOptions, distill, parse_stages
from ridgeline.train.output import write_random

CONTENDERS = ("kl", "ce", "random")
STAGES = {"kl": "logits", "ce": "tokens", "random": "tokens", "random-cost": "tokens"}
MOST_MICRO, HELD_OUT = 8192, 4096  # tokens of a training pass, and of the measurements of `prune` and `convert`


@dataclass(frozen=True, slots=True)
class Case:
    """A training run. kind: one of STAGES. rate: peak learning rate."""

    change: str
    kind: str
    seed: int
    tokens: int
    rate: float

    @property
    def key(self) -> str:
        return f"{self.change} {self.kind} seed {self.seed} tokens {self.tokens} rate {self.rate:g}"


class Bench:
    """The results so far, and everything that a case needs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._out = args, Path(args.out)
        self._out.mkdir(parents=True, exist_ok=True)
        self.path = self._out / "results.jsonl"
        self._source = find_model(args.model)
        self._texts = divide(
            read_corpus(args.text), self._out / "texts", Tokenizer.from_folder(self._source), held_out=args.held_out,
            length=args.length, seed=0,
        )  # fmt: skip
        self._load = Load(1, args.length * 3 // 4, args.length - args.length * 3 // 4)
        self._measure = Measure(self._source, self._texts.held_out, self._load, args.threads)
        self._machine = find_machine(args.hardware)[0]

    @property
    def lines(self) -> dict[str, dict[str, Any]]:
        """Return the results by case."""
        if not self.path.is_file():
            return {}
        found = [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        return {line["case"]: line for line in found}

    def _figures(self, case: str, name: str, folder: Path, **facts: Any) -> dict[str, Any]:
        """Measure a model and append its line, unless there is one."""
        if (known := self.lines.get(case)) is not None:
            return known
        found = find_known(str(folder))
        deployment = Deployment(found.spec, self._machine, precision_of(found, self._machine))
        figures = self._measure.figures(name, folder, deployment, True, lambda *_: None)
        line = emit(case, math.isfinite(figures["perplexity"]), **facts, **figures)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def original(self) -> dict[str, Any]:
        return self._figures(ORIGINAL, ORIGINAL, self._source, change="", kind=ORIGINAL)

    def made(self, change: str) -> Path:
        """Return the changed model before repair, and measure it."""
        args, target = self._args, self._out / change / "made"
        if not target.exists():
            common: dict[str, Any] = {
                "sequences": args.sequences, "length": args.length, "threads": args.threads,
                "held_out_tokens": HELD_OUT,
            }  # fmt: skip
            data = [self._texts.training]
            if change.partition("=")[0] in WORDS and not change.startswith("kv_heads"):
                prune(args.model, parse_keep(change), out=target, data=data, options=PruneOptions(**common))
            else:
                convert(args.model, change, out=target, data=data, options=ConvertOptions(**common))
        self._figures(f"{change} made", "made", target, change=change, kind="made")
        return target

    def run(self, case: Case) -> dict[str, Any]:
        """Train and measure a case, unless it was."""
        args, made = self._args, self.made(case.change)
        target = self._out / case.change / case.key.replace(" ", "-")
        if case.key not in self.lines and not target.exists():
            start = made
            if case.kind.startswith("random"):
                start = self._out / case.change / f"random-{case.seed}"
                if not start.exists():
                    with whole_folder(start) as folder:
                        write_random(folder, made, case.seed)
            options = DistillOptions(
                tokens=case.tokens, stages=parse_stages(STAGES[case.kind]), held_out=args.held_out, repeat=args.repeat,
                context=args.length, batch_tokens=args.batch_tokens, learning_rate=case.rate, seed=case.seed,
                micro_tokens=whole_rows(args.batch_tokens, args.length, MOST_MICRO),
            )  # fmt: skip
            distill(str(start), args.model, read_corpus([str(self._texts.training)]), target, options, dtype="float32")
        trained = {} if case.key in self.lines else json.loads((target / "distill.json").read_text(encoding="utf-8"))
        facts = {name: trained.get(name) for name in ("seconds", "flops")}
        return self._figures(
            case.key, case.kind, target, change=case.change, kind=case.kind, seed=case.seed, tokens=case.tokens,
            rate=case.rate, **facts,
        )  # fmt: skip

    def best_rate(self, change: str, kind: str) -> float:
        """Return the rate with the lowest perplexity, with the first seed and few tokens."""
        args = self._args
        if len(args.rates) == 1:
            return float(args.rates[0])
        tried = [self.run(Case(change, kind, args.seeds[0], args.sweep_tokens, rate)) for rate in args.rates]
        return float(min(tried, key=lambda line: line["perplexity"])["rate"])

    def equal_cost_tokens(self, change: str) -> int:
        """Return the tokens that the student alone reads with the operations that `kl` needs."""
        args = self._args
        specs = [find_known(str(path)).spec for path in (self._out / change / "made", self._source)]
        student, teacher = (flops_per_token(spec, args.length) for spec in specs)
        return round(args.tokens * (student + teacher / 3) / student)  # a pass forward is a third of an update


def compare(bench: Bench, args: argparse.Namespace) -> None:
    """Run all cases."""
    bench.original()
    for change in args.change:
        bench.made(change)
        rates = {kind: bench.best_rate(change, kind) for kind in CONTENDERS}
        for seed in args.seeds:
            for kind in CONTENDERS:
                bench.run(Case(change, kind, seed, args.tokens, rates[kind]))
            if args.equal_cost:
                tokens = bench.equal_cost_tokens(change)
                bench.run(Case(change, "random-cost", seed, tokens, rates["random"]))


def numbers(kind: type, text: str) -> Sequence[Any]:
    return [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--change", action="append", help="such as mlp=0.5,width=0.75 or kv_heads=1; several times")
    parser.add_argument("--tokens", default=1_500_000, type=lambda text: parse_amount("--tokens", text, "tokens", "1M"))
    parser.add_argument("--sweep-tokens", type=int, default=300_000)
    parser.add_argument("--rates", type=lambda text: numbers(float, text), default=(3e-4, 1e-3, 3e-3))
    parser.add_argument("--seeds", type=lambda text: numbers(int, text), default=(0, 1, 2))
    parser.add_argument("--no-equal-cost", dest="equal_cost", action="store_false")
    parser.add_argument("--hardware", default="local")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--held-out", type=float, default=0.05)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--report", action="store_true", help="only print and draw what was measured")
    args = parser.parse_args()
    args.change = args.change or ["mlp=0.5"]
    if len(args.rates) > 1 and args.sweep_tokens >= args.tokens:
        parser.error(f"--sweep-tokens {args.sweep_tokens} must be fewer than --tokens {args.tokens}")
    bench = Bench(args)
    if not args.report:
        compare(bench, args)
    lines = list(bench.lines.values())
    print(table(lines))
    draw(lines, Path(args.out))


if __name__ == "__main__":
    main()
