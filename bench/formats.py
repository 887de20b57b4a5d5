"""Check formats with the tools of others: python bench/formats.py --text FILES [--work DIR] [--only WORD ...]

Each tool is installed from the package registry with pinned versions into an environment of its own under --work
(bench/peer_envs.py); `--python TOOL=PATH` names one that exists. A tool that cannot be installed is skipped, with the
reason.

READ: the tool writes a file, and our reader must give the logits that the tool computes. WRITTEN: `ridgeline quantize`
writes a file, and the tool must give the logits of our reader. METHODS: our KL to the original on held-out text must be
at most 1.05 times that of the file that the tool made with the same calibration tokens. The cases are in
format_cases.py.

Files are kept under --work; those that exist are not made again. Prints a table, and one JSON line for each case.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from common import emit
from format_cases import KL, LOGITS, METHODS, READ, SHARE, WRITTEN, Case
from peer_envs import PeerError, ensure, versions_of
from rich.console import Console
from rich.table import Table

from ridgeline.compress import Options, quantize
from ridgeline.compress.compare import compare
from ridgeline.compress.data import Samples, read_samples
from ridgeline.errors import RidgelineError
from ridgeline.evals.divergence import divergences
from ridgeline.evals.scores import logit_blocks
from ridgeline.evals.windows import Batch
from ridgeline.load.hub import find_model
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadOptions, pass_model
from ridgeline.sample.logits import log_softmax

TOOLS = tuple(dict.fromkeys(case.tool for case in (*READ, *WRITTEN)))
DRIVER = Path(__file__).resolve().parent / "peer_drivers" / "drive_formats.py"
ROWS, LENGTH = 4, 64  # sequences whose logits are compared, and their tokens
CALIBRATION = Options(sequences=32, length=256, seed=0)
FEW = Options(sequences=16, length=64)  # for files of which only the format counts
HELD_OUT = 32_768  # tokens, as in `ridgeline quantize`
REPORT_WIDTH = 120  # in characters, if the output is no terminal


class Bench:
    """The files of a run, below one folder."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.work = args, args.work.resolve()
        self.model = find_model(args.model).resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.ids = self.work / "ids.npy"
        self.samples = self._samples()
        self.results: list[tuple[str, str, str]] = []  # name, result, remark

    def _samples(self) -> Samples:
        samples = read_samples(
            self.args.text, Tokenizer.from_folder(self.model), length=CALIBRATION.length or 0,
            count=CALIBRATION.sequences, held_out_tokens=HELD_OUT, seed=CALIBRATION.seed,
        )  # fmt: skip
        (self.work / "calibration.json").write_text(json.dumps([list(map(int, s)) for s in samples.calibration]))
        np.save(self.ids, np.array([d.token_ids[:LENGTH] for d in samples.held_out[:ROWS]]))
        return samples

    def cases(self, every: Iterable[Case]) -> list[Case]:
        """Return the cases whose name has one of the words of --only."""
        words = self.args.only
        return [case for case in every if not words or any(word.lower() in case.name.lower() for word in words)]

    def run(self) -> bool:
        """Run all cases. Return whether no bar is missed."""
        read, written = self.cases(READ), self.cases(WRITTEN)
        for case in written:
            self.write(case)
        errors = self.drive([*read, *written])
        for case in (*read, *written):
            self.check(case, errors.get(case.name))
        for method, (name, scheme) in METHODS.items():
            if any(case.name == name for case in read) and errors.get(name) == "":
                self.check_method(method, next(case for case in read if case.name == name), scheme)
        self.show()
        return not any(result == "missed" for _, result, _ in self.results)

    def folder(self, case: Case) -> Path:
        return self.work / "files" / case.folder

    def write(self, case: Case) -> None:
        """Write a file of ours."""
        if not self.folder(case).exists():
            arguments = dict(case.scheme)
            quantize(
                str(self.model), arguments.pop("scheme"), out=self.folder(case), data=self.args.text,
                options=FEW, **arguments,
            )  # fmt: skip

    def drive(self, cases: list[Case]) -> Mapping[str, str]:
        """Run the tasks of all tools, one process for each. Return the error of each case, empty if there is none."""
        errors: dict[str, str] = {}
        for tool in dict.fromkeys(case.tool for case in cases):
            own = [case for case in cases if case.tool == tool]
            jobs = [job for case in own for job in self.jobs(case)]
            try:
                found = self.drive_tool(tool, jobs)
            except PeerError as e:
                found = {case.name: f"skipped: {e}" for case in own}
            for case in own:
                parts = [found.get(case.name, "the tool ended early"), found.get(case.name + LOAD, "")]
                errors[case.name] = next((part for part in parts if part), "")
        return errors

    def jobs(self, case: Case) -> list[dict[str, Any]]:
        """Return the jobs of a case, each with the mark whether it is done."""
        folder, logits = self.folder(case), self.logits(case)
        common = {
            "model": str(self.model), "folder": str(folder), "ids": str(self.ids), "logits": str(logits),
            "products": str(self.products(case)), "calibration": str(self.work / "calibration.json"),
            "options": dict(case.options),
        }  # fmt: skip
        is_read = logits.exists()
        out = [{"name": case.name, "do": case.task, "done": folder.exists() if case.load else is_read, **common}]
        if case.load:
            out.append({"name": case.name + LOAD, "do": case.load, "done": is_read, **common})
        return out

    def logits(self, case: Case) -> Path:
        """Return the file of the tool's logits."""
        return self.work / "files" / f"{case.folder}.npy"

    def products(self, case: Case) -> Path:
        """Return the file of the logits of the tool's own products, where these are not the ones that are compared."""
        return self.logits(case).with_suffix(".products.npy")

    def drive_tool(self, tool: str, jobs: list[dict[str, Any]]) -> Mapping[str, str]:
        found = {job["name"]: "" for job in jobs if job["done"]}
        left = [job for job in jobs if not job["done"]]
        if not left:
            return found
        python = self.args.python.get(tool) or ensure(self.work, tool)
        task, results = self.work / f"{tool}.json", self.work / f"{tool}.jsonl"
        task.write_text(json.dumps(left))
        results.unlink(missing_ok=True)
        with (self.work / f"{tool}.log").open("w") as log:
            # Some tools leave files in the current folder.
            command = [python, str(DRIVER), str(task), str(results)]
            subprocess.run(command, stdout=log, stderr=log, check=False, cwd=self.work)
        lines = results.read_text().splitlines() if results.exists() else []
        return found | {line["name"]: line["error"] for line in map(json.loads, lines)}

    def check(self, case: Case, error: str | None) -> None:
        """Compare our logits of a file with the tool's."""
        if error:
            result = "skipped" if error.startswith("skipped") else "theirs" if case.theirs else "missed"
            self.tell(case.name, result, f"{case.theirs}: {error}" if case.theirs else error)
            return
        try:
            own = self.own_logits(case, case.activations)
        except RidgelineError as e:
            self.tell(case.name, "missed", f"our reader: {e}")
            return
        wanted = np.load(self.logits(case))
        off, kl = float(np.abs(own - wanted).max()), kl_of(wanted, own)
        is_good = off <= LOGITS if case.bar == "logits" else kl <= KL
        values = {"largest_difference": off, "kl": kl}
        if self.products(case).exists():
            as_stored = self.own_logits(case, None) if case.activations else own
            values["kl_of_its_products"] = kl_of(np.load(self.products(case)), as_stored)
            is_good &= values["kl_of_its_products"] <= KL
        result = "equal" if is_good else "theirs" if case.theirs else "missed"
        self.tell(case.name, result, ", ".join(f"{name} {value:.1e}" for name, value in values.items()), **values)

    def own_logits(self, case: Case, activations: str | None) -> Any:
        """Return our logits. The reference rounds activations as the file says; the kernels take some of them exactly.

        activations: how they are taken; None: as the file says.
        """
        ids = np.load(self.ids)
        is_rounded = case.bar == "KL" or (case.activations is not None and activations is None)
        options = LoadOptions(device="reference" if is_rounded else "cpu", activations=activations)
        rows = [list(map(int, row)) for row in ids]
        batch = Batch(rows, np.arange(ids.size), np.zeros(ids.size, np.int64))
        model = pass_model(str(self.folder(case)), options)
        return np.concatenate(list(logit_blocks(model, batch))).reshape(*ids.shape, -1)

    def check_method(self, method: str, case: Case, scheme: str) -> None:
        """Compare our KL with that of the tool's file, on held-out text."""
        target = self.work / "files" / f"{scheme}-floats"
        if not target.exists():
            quantize(
                str(self.model), scheme, out=target, data=self.args.text, group=case.options["group_size"],
                format="floats", options=CALIBRATION,
            )  # fmt: skip
        options = LoadOptions(device="cpu")
        others = {"theirs": self.folder(case), "ours": target}
        found = compare(
            pass_model(str(self.model), options),
            {name: pass_model(str(folder), options) for name, folder in others.items()}, self.samples.held_out,
        )  # fmt: skip
        theirs, ours = (found.others[name].kl.value for name in others)  # type: ignore[union-attr]
        result = "equal" if ours <= SHARE * theirs else "missed"
        remark = f"KL {ours:.4f}, {case.name} {theirs:.4f}: {ours / theirs:.2f} of theirs"
        self.tell(f"{method}: our KL against theirs", result, remark, ours=ours, theirs=theirs)

    def tell(self, name: str, result: str, remark: str, **values: Any) -> None:
        self.results.append((name, result, remark))
        emit(f"formats: {name}", result != "missed", result=result, remark=remark, **values)

    def show(self) -> None:
        console = Console(stderr=True)
        table = Table("case", "result", "remark", title=f"formats, with {versions_of(TOOLS)}")
        for row in self.results:
            table.add_row(*row)
        Console(stderr=True, width=None if console.is_terminal else REPORT_WIDTH).print(table)


LOAD = ", loaded"  # follows the name of a case in its second job


def kl_of(wanted: Any, found: Any) -> float:
    """Return the mean KL(wanted || found) of logits [..., vocabulary]."""
    p, q = (log_softmax(x.reshape(-1, x.shape[-1])) for x in (wanted, found))
    return float(divergences(p, q).mean())


def tool_of(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    return name, str(Path(path).absolute())  # not resolved: a link shows which environment it is


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--work", type=Path, default=Path("build/formats"))
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--python", type=tool_of, action="append", default=[])
    args = parser.parse_args()
    args.python = dict(args.python)
    sys.exit(not Bench(args).run())


if __name__ == "__main__":
    main()
