"""Compare Ridgeline with its peers on the same random weights: python bench/peers.py [--shapes S,M] [--peers a,b]

Each peer is installed from the package registry, with pinned versions, into an environment of its own under --work; the
models are converted there; both are kept. For each case, all contenders are loaded, warmed up and run in the order
A B C A B C. A peer runs in each of the settings that may help on this kind of machine (SETTINGS in peer_table.py), and
its best figure counts. Each round also measures the machine's limits with our kernels, when it begins and when it ends.
Rounds in which they were low are left out (peer_rounds.py); figures are medians over the others. Prompts are token ids,
decoding is greedy and never ends early, and no two runs share a prompt. Each contender is a process.

Results are appended to --results, with the kind of the machine. A case with a result of this kind is skipped unless
--again is given, so an interrupted run can be continued. `--report` only prints the tables. `--markdown FILE` also
writes those of every kind of machine in --results; in a file with the line `MARK` of peer_report.py, below this line.

    python bench/peers.py --report --results bench/peer_results.jsonl --markdown docs/peers.md

The gate of our lines: the engine's tokens equal those of naive sampling over whole histories with the same weights,
and in fp32 those of transformers. For peers, `same_tokens` is the number of leading tokens of the first round that
equal ours in the same kind: a wrong conversion has none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import peer_own
import peer_shapes
from common import emit
from peer_envs import PeerError
from peer_report import Results, markdown, show, written
from peer_run import Fleet, Limits, Prepared, Process, prompts, random_ids, rounds_of
from peer_table import (
    CASES,
    KINDS,
    LOAD,
    MEMORY,
    OURS,
    PEERS,
    PRODUCTS,
    PROMPTS,
    RESIDENT,
    RESIDENT_CASE,
    RESIDENT_PEERS,
    RESIDENT_PROMPTS,
    SIZE,
    STARTUP,
    Case,
    Contender,
    contenders_on,
    cpu_flags,
    machine_of,
)
from rich.console import Console

REPORT_WIDTH = 160  # in characters, if the output is no terminal
GATE = "gate"
GATE_PROMPT, GATE_TOKENS = 24, 8
MEASURED = {**CASES, LOAD: MEMORY, RESIDENT: RESIDENT_CASE, GATE: Case(1, GATE_PROMPT, GATE_TOKENS)}
TOLD = ("avx", "amx", "fma", "f16c", "asimd", "i8mm", "bf16", "sve")  # features that a result names begin with these


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work
        self.results = Results(args.results)
        self.flags = cpu_flags()
        self.machine = machine_of(self.flags).name
        self.section = self.results.of(self.machine)
        self.console = Console(stderr=True)
        self.run_id = time.strftime("%Y-%m-%dT%H:%M:%S")
        wanted = {OURS, *args.peers}
        self.contenders = [c for c in contenders_on(self.machine) if c.peer in wanted and c.kind in args.kinds]

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {text}", highlight=False, markup=True)

    def save(self, shape: str, case: str, contender: Contender | None, gate: bool, **values: Any) -> None:
        names = ("peer", "kind", "setting", "base")
        who = {n: getattr(contender, n) for n in names} | {"contender": contender.name} if contender else {}
        what = {"machine_kind": self.machine, "shape": shape, "what": case, "run": self.run_id}
        flags = [flag for flag in self.flags if flag.startswith(TOLD)]
        self.results.add(emit(f"peers {case}", gate, **what, **who, **values, flags=flags))

    def shape(self, shape: str) -> None:
        """Measure every case of a shape that is missing."""
        todo = [
            case for case in (GATE, *CASES, LOAD, RESIDENT) if case in self.args.cases and self.missing(shape, case)
        ]
        if not todo:
            return
        peer_shapes.make_model(shape, self.work / "models" / shape / "hf")
        ready, fleet = self.prepare(shape, todo), Fleet(self.args.threads)
        try:
            for case in todo:
                mine = [p for p in ready if self.wanted(shape, case, p.contender)]
                self.say(f"{shape} {case}: {', '.join(p.contender.name for p in mine)}".replace("[", r"\["))
                if case in CASES:
                    self.case(shape, case, mine, fleet)
                    continue
                fleet.stop()
                {GATE: self.gate, LOAD: self.load, RESIDENT: self.resident}[case](shape, mine)
        finally:
            fleet.stop()

    def wanted(self, shape: str, case: str, contender: Contender) -> bool:
        """Return whether a contender is measured in a case of a shape."""
        only = {RESIDENT: RESIDENT_PEERS}.get(case, (OURS, *PEERS))
        return MEASURED[case].has(shape, contender.kind) and contender.peer in only

    def missing(self, shape: str, case: str) -> bool:
        wanted = {c.name for c in self.contenders if self.wanted(shape, case, c) and (case != GATE or c.peer == OURS)}
        return bool(wanted) and (self.args.again or not wanted <= self.section.contenders(shape, case))

    def prepare(self, shape: str, cases: list[str]) -> list[Prepared]:
        ready = []
        for contender in self.contenders:
            if not CASES["decode"].has(shape, contender.kind):
                continue
            try:
                self.say(f"{shape}: {contender.name}".replace("[", r"\["))
                ready.append(Prepared(self.work, shape, contender))
            except PeerError as e:
                for case in (case for case in cases if self.wanted(shape, case, contender)):
                    self.failed(shape, case, contender, e)
                if not cases:
                    self.complain(contender, e)
        return ready

    def failed(self, shape: str, case: str, contender: Contender, error: PeerError) -> None:
        self.complain(contender, error)
        self.save(shape, case, contender, False, error=str(error))

    def complain(self, contender: Contender, error: PeerError) -> None:
        self.console.print(f"{contender.name}: {error}", style="red", highlight=False, markup=False)

    def case(self, shape: str, case: str, ready: list[Prepared], fleet: Fleet) -> None:
        limits = Limits(self.args.threads)
        replies: dict[str, list[dict[str, Any]]] = {}
        versions: dict[str, str] = {}
        for number, prepared, reply in rounds_of(fleet, ready, shape, case, self.args.rounds, limits):
            name = prepared.contender.name
            if isinstance(reply, PeerError):
                self.failed(shape, case, prepared.contender, reply)
                replies.pop(name, None)
                continue
            replies.setdefault(name, []).append(reply)
            versions[name] = fleet.get(prepared, CASES[case].room(shape)).version
            text = f"  round {number + 1} {name}: {json.dumps(figures(shape, case, reply))}"
            self.say(text.replace("[", r"\["))
        plain = [p.contender for p in ready if p.contender.peer == OURS and not p.contender.setting]
        dense = {contender.kind: replies.get(contender.name) for contender in plain}
        for prepared in ready:
            name, kind = prepared.contender.name, prepared.contender.kind
            if mine := replies.get(name):
                each = [{**figures(shape, case, r), "limits": limits.around(n)} for n, r in enumerate(mine)]
                self.save(
                    shape, case, prepared.contender, self.section.gate(shape, prepared.contender),
                    **work_of(shape, case, prepared), rounds=each, version=versions[name],
                    same_tokens=same(mine[0], (dense.get(kind) or mine)[0]),
                )  # fmt: skip

    def load(self, shape: str, ready: list[Prepared]) -> None:
        """Measure whole processes: the time to load a model, and the peak memory after a prompt of 128 tokens."""

        def figures_of(process: Process, number: int) -> dict[str, float]:
            process.run(random_ids(shape, MEMORY, number), MEMORY.answer(shape))
            return {"load_s": round(process.load_s, 2), "peak_mb": round(process.peak_bytes() / 1e6)}

        self.processes(shape, LOAD, ready, self.args.rounds, figures_of)

    def resident(self, shape: str, ready: list[Prepared]) -> None:
        """Measure the memory of a process after many prompts. One round is enough, because nothing is timed."""

        def figures_of(process: Process, number: int) -> dict[str, float]:
            for prompt in range(RESIDENT_PROMPTS):
                process.run(random_ids(shape, RESIDENT_CASE, prompt), RESIDENT_CASE.answer(shape))
            return {"resident_mb": round(process.resident_bytes() / 1e6)}

        self.processes(shape, RESIDENT, ready, 1, figures_of)

    def processes(
        self, shape: str, case: str, ready: list[Prepared], rounds: int,
        figures_of: Callable[[Process, int], dict[str, float]],
    ) -> None:  # fmt: skip
        """Start a process of each contender in each round, and save its figures."""
        found: dict[str, list[dict[str, float]]] = {}
        for number in range(rounds):
            for prepared in ready:
                try:
                    process = Process(prepared, self.args.threads)
                    try:
                        found.setdefault(prepared.contender.name, []).append(figures_of(process, number))
                    finally:
                        process.stop()
                except PeerError as e:
                    if number == 0:
                        self.failed(shape, case, prepared.contender, e)
        for prepared in ready:
            if mine := found.get(prepared.contender.name):
                gate, bits = self.section.gate(shape, prepared.contender), round(prepared.bits_per_weight, 2)
                self.save(shape, case, prepared.contender, gate, rounds=mine, bits_per_weight=bits)

    def gate(self, shape: str, ready: list[Prepared]) -> None:
        ids = [row[:GATE_PROMPT] for row in prompts(shape, "batch8", 0)[:2]]
        for prepared in ready:
            if prepared.contender.peer != OURS:
                continue
            try:
                tokens = {how: self.tokens(prepared, ids, how) for how in ("", "naive")}
                if prepared.contender.kind == "fp32":
                    other = next((p for p in ready if p.contender.name == "transformers fp32"), None)
                    tokens |= {"transformers": self.tokens(other, ids, "")} if other else {}
                equal = all(t == tokens[""] for t in tokens.values())
                self.save(shape, GATE, prepared.contender, equal, compared=sorted(k for k in tokens if k))
            except PeerError as e:
                self.failed(shape, GATE, prepared.contender, e)

    def tokens(self, prepared: Prepared, ids: list[list[int]], how: str) -> Any:
        process = Process(prepared, self.args.threads, how)
        try:
            return process.run(ids, GATE_TOKENS)["tokens"]
        finally:
            process.stop()


def figures(shape: str, case: str, reply: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one run by the names of results."""
    first = reply["first_s"]
    if case in PROMPTS:
        return {"tokens_per_s": round(CASES[case].prompt / first, 2)}
    if case == "decode":
        return {"tokens_per_s": round(reply["tokens_per_s"], 2), "first_token_ms": round(1e3 * first, 2)}
    return {"tokens_per_s": round(reply["tokens_per_s"], 2)}


def work_of(shape: str, case: str, prepared: Prepared) -> dict[str, Any]:
    """Return what a token costs: the bytes that it reads where one sequence decodes, else its operations."""
    bits = prepared.bits_per_weight
    if case == "decode":
        context = CASES[case].prompt + CASES[case].answer(shape) // 2
        read = bits / 8 * peer_shapes.num_active_params(shape) + peer_shapes.state_bytes(shape, context)
        return {"bits_per_weight": round(bits, 2), "read_bytes": round(read)}
    tokens = CASES[case].prompt if case in PROMPTS else 1
    peak = "int8_gop_s" if prepared.contender.kind in ("int8", "int4") else "fp32_gflop_s"
    operations = 2 * round(peer_shapes.products(shape, tokens))
    return {"bits_per_weight": round(bits, 2), "operations": operations, "peak": peak}


def same(reply: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the number of leading tokens that are equal, as a mean over sequences."""
    counts = []
    for mine, theirs in zip(reply["tokens"], other["tokens"], strict=True):
        differ = [i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
        counts.append(differ[0] if differ else len(mine))
    return round(sum(counts) / len(counts), 2)


def split(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return an option's type: some of these words, separated by commas."""
    return lambda text: [checked(word, known) for word in text.split(",") if word]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = (SIZE, STARTUP, PRODUCTS, GATE, *CASES, LOAD, RESIDENT)
    shapes = tuple(peer_shapes.CONFIGS)
    parser.add_argument(
        "--shapes",
        default=",".join(shapes),
        type=split(shapes),
        help=f"shapes to measure, separated by commas; default: all of {', '.join(shapes)}",
    )
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        type=split(PEERS),
        help=f"peers, separated by commas; default: all of {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--kinds",
        default=",".join(KINDS),
        type=split(KINDS),
        help=f"kinds, separated by commas; default: all of {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--cases",
        default=",".join(every),
        type=split(every),
        help=f"cases, separated by commas; default: all of {', '.join(every)}",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="measure only one round")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "ridgeline-peers")
    parser.add_argument("--results", type=Path, help="file for the results; default: results.jsonl in --work")
    parser.add_argument("--again", action="store_true", help="measure cases again that have a result")
    parser.add_argument("--prepare", action="store_true", help="install the peers and convert the models, then stop")
    parser.add_argument("--report", action="store_true", help="only print the tables of the results")
    parser.add_argument("--markdown", type=Path, help="also write the tables of all machines to this file")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.results = args.results or args.work / "results.jsonl"
    args.rounds = 1 if args.quick else args.rounds
    return args


def checked(word: str, known: Any) -> str:
    if word not in known:
        raise argparse.ArgumentTypeError(f"{word!r} is not one of {', '.join(known)}")
    return word


def main() -> None:
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    if args.prepare:
        for shape in args.shapes:
            peer_shapes.make_model(shape, args.work / "models" / shape / "hf")
            bench.prepare(shape, [])
        return
    if not args.report:
        peer_own.measure(bench)
        for shape in args.shapes:
            bench.shape(shape)
    show(bench.results, Console(width=None if sys.stdout.isatty() else REPORT_WIDTH))
    if args.markdown:
        args.markdown.write_text(written(args.markdown, markdown(bench.results)), encoding="utf-8")


if __name__ == "__main__":
    main()
