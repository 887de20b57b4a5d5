"""Compare Ridgeline with its peers on the same random weights: python bench/peers.py [--shapes S,M] [--peers a,b]

Each peer is installed from the package registry, with pinned versions, into an environment of its own under --work; the
models are converted there; both are kept. For each case, all contenders are loaded, warmed up and run in the order
A B C A B C. Each round also measures the machine's limits with our kernels; figures are medians over rounds. Prompts
are token ids, decoding is greedy and never ends early, and no two runs share a prompt. Each contender is a process.

Results are appended to --results. A case with a result is skipped unless --again is given, so an interrupted run can be
continued. `--report` only prints the tables, `--markdown FILE` also writes them.

The gate of our lines: the engine's tokens equal those of naive sampling over whole histories with the same weights,
and in fp32 those of transformers. For peers, `same_tokens` is the number of leading tokens of the first round that
equal ours in the same kind: a wrong conversion has none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import peer_shapes
from common import commit, emit
from peer_envs import PeerError, ensure_ours, installed_bytes
from peer_report import Results, markdown, show
from peer_run import STATE_NUMBER_BYTES, Fleet, Limits, Prepared, Process, prompts, rounds_of
from peer_table import (
    CASES,
    CONTENDERS,
    LOAD,
    OURS,
    PEERS,
    SIZE,
    SIZE_MB,
    STARTUP,
    STARTUPS,
    Contender,
)
from rich.console import Console

REPORT_WIDTH = 160  # in characters, if the output is no terminal
GATE = "gate"
GATE_PROMPT, GATE_TOKENS = 24, 8


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work
        self.results = Results(args.results)
        self.console = Console(stderr=True)
        self.run_id = time.strftime("%Y-%m-%dT%H:%M:%S")
        wanted = {OURS, *args.peers}
        kinds = args.kinds
        self.contenders = [c for c in CONTENDERS if c.peer in wanted and c.kind in kinds]

    def say(self, text: str) -> None:
        self.console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {text}", highlight=False)

    def save(self, shape: str, case: str, contender: Contender | None, gate: bool, **values: Any) -> None:
        who = {"contender": contender.name, "peer": contender.peer, "kind": contender.kind} if contender else {}
        self.results.add(emit(f"peers {case}", gate, shape=shape, what=case, run=self.run_id, **who, **values))

    def shape(self, shape: str) -> None:
        """Measure every case of a shape that is missing."""
        todo = [case for case in (GATE, *CASES, LOAD) if case in self.args.cases and self.missing(shape, case)]
        if not todo:
            return
        peer_shapes.make_model(shape, self.work / "models" / shape / "hf")
        ready = self.prepare(shape, todo)
        for case in todo:
            self.say(f"{shape} {case}: {', '.join(p.contender.name for p in ready)}")
            if case == GATE:
                self.gate(shape, ready)
            elif case == LOAD:
                self.load(shape, ready)
            else:
                self.case(shape, case, ready)

    def missing(self, shape: str, case: str) -> bool:
        there = self.results.contenders(shape, case)
        wanted = {c.name for c in self.contenders if case != GATE or c.peer == OURS}
        return self.args.again or not wanted <= there

    def prepare(self, shape: str, cases: list[str]) -> list[Prepared]:
        ready = []
        for contender in self.contenders:
            try:
                self.say(f"{shape}: {contender.name}")
                ready.append(Prepared(self.work, shape, contender))
            except PeerError as e:
                for case in cases:
                    self.failed(shape, case, contender, e)
        return ready

    def failed(self, shape: str, case: str, contender: Contender, error: PeerError) -> None:
        self.say(f"[red]{contender.name}: {error}[/]")
        self.save(shape, case, contender, False, error=str(error))

    def case(self, shape: str, case: str, ready: list[Prepared]) -> None:
        limits, fleet = Limits(self.args.threads), Fleet(self.args.threads)
        replies: dict[str, list[dict[str, Any]]] = {}
        versions: dict[str, str] = {}
        try:
            for number, prepared, reply in rounds_of(fleet, ready, shape, case, self.args.rounds, limits):
                name = prepared.contender.name
                if isinstance(reply, PeerError):
                    self.failed(shape, case, prepared.contender, reply)
                    replies.pop(name, None)
                    continue
                replies.setdefault(name, []).append(reply)
                versions[name] = fleet.get(prepared).version
                self.say(f"  round {number + 1} {name}: {json.dumps(figures(shape, case, reply))}")
        finally:
            fleet.stop()
        dense = {p.contender.kind: replies.get(p.contender.name) for p in ready if p.contender.peer == OURS}
        for prepared in ready:
            name, kind = prepared.contender.name, prepared.contender.kind
            if mine := replies.get(name):
                self.save(
                    shape, case, prepared.contender, self.results.gate(shape, prepared.contender),
                    **medians(shape, case, prepared, mine, limits), limits=limits.medians(), rounds=len(mine),
                    same_tokens=same(mine[0], (dense.get(kind) or mine)[0]), version=versions[name],
                )  # fmt: skip

    def load(self, shape: str, ready: list[Prepared]) -> None:
        """Measure whole processes: the time to load a model, and the peak memory after a prompt of 128 tokens."""
        found: dict[str, list[tuple[float, int]]] = {}
        for number in range(self.args.rounds):
            for prepared in ready:
                name = prepared.contender.name
                try:
                    process = Process(prepared, self.args.threads)
                    try:
                        process.run(prompts(shape, "decode", number), 17)
                        found.setdefault(name, []).append((process.load_s, process.peak_bytes()))
                    finally:
                        process.stop()
                except PeerError as e:
                    if number == 0:
                        self.failed(shape, LOAD, prepared.contender, e)
        for prepared in ready:
            if mine := found.get(prepared.contender.name):
                self.save(
                    shape, LOAD, prepared.contender, self.results.gate(shape, prepared.contender),
                    load_s=round(median(s for s, _ in mine), 2), peak_mb=round(median(b for _, b in mine) / 1e6),
                    bits_per_weight=round(prepared.bits_per_weight, 2), rounds=len(mine),
                )  # fmt: skip

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

    def ours(self) -> None:
        """Measure an installation as a user has it: its size, and the time from process start to first token."""
        wanted = [case for case in (SIZE, STARTUP) if case in self.args.cases]
        if not wanted:
            return
        try:
            folder = ensure_ours(self.work, commit())
        except PeerError as e:
            self.say(f"[red]{e}[/]")
            return
        if SIZE in wanted:
            size = round(installed_bytes(folder) / 1e6, 1)
            self.save("", SIZE, None, (folder / "bin" / "ridgeline").exists(), installed_mb=size, limit=SIZE_MB)
        for shape, form, limit in STARTUPS if STARTUP in wanted else ():
            self.startup(folder, shape, form, limit)

    def startup(self, folder: Path, shape: str, form: str, limit: float) -> None:
        """Measure a process that prints one token, until it ends, which is slightly later than its token."""
        command = [str(folder / "bin" / "ridgeline"), "generate", "Once upon a time", "--max-tokens", "1"]
        if shape:
            command += ["-m", str(peer_shapes.make_model(shape, self.work / "models" / shape / "hf"))]
        command += ["--weights", form] if form else []
        times = []
        with tempfile.TemporaryDirectory() as elsewhere:  # so that the installed package is imported, not the sources
            for _ in range(self.args.rounds + 1):  # the first run warms the page cache
                start = time.perf_counter()
                done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, check=False)
                times.append(time.perf_counter() - start)
        error = {"error": done.stderr.strip()[-300:]} if done.returncode else {}
        values = {"seconds": round(median(times[1:]), 3), "limit": limit, **error}
        self.save(shape, STARTUP, None, not done.returncode, weights=form or "as stored", **values)


def figures(shape: str, case: str, reply: dict[str, Any]) -> dict[str, float]:
    """Return the figures of one run by the names of results."""
    first = reply["first_s"]
    if case == "prefill":
        return {"tokens_per_s": round(CASES[case].prompt / first, 2)}
    if case == "decode":
        return {"tokens_per_s": round(reply["tokens_per_s"], 2), "first_token_ms": round(1e3 * first, 2)}
    return {"tokens_per_s": round(reply["tokens_per_s"], 2)}


def medians(shape: str, case: str, prepared: Prepared, replies: list[dict[str, Any]], limits: Limits) -> dict[str, Any]:
    each = [figures(shape, case, reply) for reply in replies]
    values: dict[str, Any] = {name: round(median(f[name] for f in each), 2) for name in each[0]}
    values["all"] = [f["tokens_per_s"] for f in each]
    values["bits_per_weight"] = round(prepared.bits_per_weight, 2)
    if case == "decode":
        size = CASES[case]
        context = size.prompt + size.tokens[shape] / 2
        state = STATE_NUMBER_BYTES if prepared.contender.peer == OURS else 2
        read = prepared.bits_per_weight / 8 * peer_shapes.num_params(shape)
        read += state * context * peer_shapes.state_numbers(shape)
        shares = [f["tokens_per_s"] * read / 1e9 / r["read_gb_s"] for f, r in zip(each, limits.rounds, strict=True)]
        values["read_share"] = round(median(shares), 3)
    else:
        operations = 2 * peer_shapes.products(shape, CASES[case].prompt if case == "prefill" else 1)
        peak = "int8_gop_s" if prepared.contender.kind in ("int8", "int4") else "fp32_gflop_s"
        shares = [f["tokens_per_s"] * operations / 1e9 / r[peak] for f, r in zip(each, limits.rounds, strict=True)]
        values["peak_share"] = round(median(shares), 3)
    return values


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
    every = (SIZE, STARTUP, GATE, *CASES, LOAD)
    parser.add_argument(
        "--shapes", default="S,M,L", type=split("SML"), help="shapes to measure, separated by commas; default: S,M,L"
    )
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        type=split(PEERS),
        help=f"peers, separated by commas; default: all of {', '.join(PEERS)}",
    )
    kinds = ("int8", "int4", "bf16", "fp32")
    parser.add_argument(
        "--kinds",
        default=",".join(kinds),
        type=split(kinds),
        help=f"kinds, separated by commas; default: all of {', '.join(kinds)}",
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
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
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
        bench.ours()
        for shape in args.shapes:
            bench.shape(shape)
    show(bench.results, Console(width=None if sys.stdout.isatty() else REPORT_WIDTH))
    if args.markdown:
        args.markdown.write_text(markdown(bench.results), encoding="utf-8")


if __name__ == "__main__":
    main()
