"""bench/gpu.py without a GPU: every stage over tiny shapes, how a run goes on, and its report from invented lines."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
NAMES = ("gpu", "gpu_machine", "gpu_results", "gpu_kernels", "gpu_steps", "gpu_cases", "gpu_report", "gpu_tilings")


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in {*NAMES, "common"} - before:
        sys.modules.pop(name, None)


class Fake:
    """A device that takes 2, 3 and 4 ms for every run."""

    is_small, name, engine_device, device = False, "fake", "reference", torch.device("cpu")

    def clocks(self) -> dict[str, str]:
        return {"clocks.sm": "1980"}

    def copies(self, num_bytes: float) -> int:
        return 2

    def timed(self, runs: Any) -> Any:
        from gpu_machine import Times

        return Times([0.002, 0.003, 0.004], None)

    def free(self) -> None:
        pass


@pytest.mark.nightly
def test_every_stage_runs_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    command = [sys.executable, "bench/gpu.py", "--device", "interpreter", "--results", str(path)]
    first = subprocess.run([*command, *"1234567"], cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert {line["stage"] for line in lines} == {0, 1, 2, 3, 4, 5, 6, 7}
    for line in lines:
        assert line["gate"] and line["seconds"] > 0, line
        assert "failed" not in line
        assert line["stage"] == 0 or line["fraction"] is not None or "said" in line
    assert all(line["same"] for line in lines if "triton" in line["case"] and "best" not in line["case"])
    assert {line["case"] for line in lines if line["stage"] == 3 and 0 <= line["idle"] < 1}
    again = subprocess.run([*command, *"1234567", "--report"], cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 0 and ": 0 of " in again.stderr, again.stderr
    assert len(path.read_text().splitlines()) == len(lines)
    assert "ceilings: copy " in again.stdout and "product triton, int4-128, odd, M 3" in again.stdout


def runner(bench: Any, tmp_path: Path, ceilings: dict[str, float] | None = None) -> tuple[Any, Any]:
    results = bench.gpu_results.Results(tmp_path / "r.jsonl")
    found = bench.gpu.Runner(results, Fake(), "abc", 0.0, 1e9)
    found._bench = bench.gpu_steps.Bench(Fake(), ceilings or {"copy": 1e12, "bfloat16": 1e15})
    return found, results


def kernel(bench: Any, gate: Any, num_bytes: float = 0.0, flops: float = 0.0) -> Any:
    built = bench.gpu_kernels.Built([lambda: None], lambda: gate, num_bytes, flops)
    return bench.gpu_cases.Kernel("case", lambda machine: built)


def test_no_gate_no_time(bench: Any, tmp_path: Path) -> None:
    found, results = runner(bench, tmp_path)
    line = found.run(2, kernel(bench, bench.gpu_kernels.Gate(False, 2.0, 1.0)))
    assert (line["gate"], line["seconds"], line["error"], line["allowed"]) == (False, None, 2.0, 1.0)
    broken = found.run(2, bench.gpu_cases.Kernel("broken", lambda machine: 1 / 0))
    assert broken["failed"] == "ZeroDivisionError: division by zero" and broken["seconds"] is None
    assert results.has("abc", "fake", 2, "broken")


def test_the_fastest_tilings_are_written(bench: Any, tmp_path: Path) -> None:
    """A block needs true gates for all matrices, and must gain 2 % on the default one. Other GPUs keep their part."""
    t, tokens = bench.gpu_tilings, {"plain": (1, 64), "int8": (8,)}
    path = tmp_path / "tilings.json"
    shipped = json.loads((ROOT / "src/ridgeline/ops/triton/tilings.json").read_text())
    assert t.text_of(shipped) == (ROOT / "src/ridgeline/ops/triton/tilings.json").read_text()
    path.write_text(t.text_of({**shipped, "another": {"dense": {"1": [16, 128, 8, 3]}}}))
    lines = []
    for format, counts in tokens.items():
        for count in counts:
            kernel = "whole" if format == "int8" else "dense"
            default, found = t.tilings_of().block(kernel, "", count), list(t.candidates(kernel, count))
            assert default in found and len(set(found)) == len(found)
            for block in found:
                last = (0.5e-3, 0.7e-3) if format == "plain" else (0.5e-3, 0.99e-3)
                seconds = {found[-1]: last[0], found[-2]: last[1], default: 1e-3}.get(block, 0.99e-3)
                for matrix in t.MATRICES:
                    name, is_right = t.name_of(format, matrix, count, block), block != found[-1] or matrix != "o"
                    lines.append({**line(name, 7, 0.5, gate=is_right), "seconds": seconds if is_right else None})
    results = results_of(bench, tmp_path, *lines)
    assert t.write(results, "H200", bench.gpu_cases.TUNED, path) == 2
    written = json.loads(path.read_text())
    second = {n: list(t.candidates("dense", n))[-2] for n in (1, 64)}
    own = {str(n): [b.tokens, b.rows, *b.compiled] for n, b in second.items()}
    assert written == {**shipped, "another": {"dense": {"1": [16, 128, 8, 3]}}, "H200": {"dense bfloat16": own}}
    assert t.write(results_of(bench, tmp_path), "H200", bench.gpu_cases.TUNED, path) == 0
    assert "H200" not in json.loads(path.read_text())


@pytest.mark.parametrize(
    ("num_bytes", "flops", "ceiling", "fraction"), [(1.5e9, 1e9, "copy", 0.5), (1e6, 2.4e12, "bfloat16", 0.8)]
)
def test_a_fraction_is_that_of_the_nearer_ceiling(
    bench: Any, tmp_path: Path, num_bytes: float, flops: float, ceiling: str, fraction: float
) -> None:
    line = runner(bench, tmp_path)[0].run(2, kernel(bench, bench.gpu_kernels.Gate(True, 0.0, 1.0), num_bytes, flops))
    assert line["seconds"] == 0.003 and line["spread"] == pytest.approx([0.003, 0.0022, 0.0038])
    assert (line["ceiling"], line["fraction"]) == (ceiling, pytest.approx(fraction))
    assert line["clocks"] == [{"clocks.sm": "1980"}] * 2


def test_a_device_that_gives_up_ends_the_call_and_the_next_one_goes_on(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def illegal(machine: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    good = kernel(bench, bench.gpu_kernels.Gate(True, 0.0, 1.0))
    cases = {2: [good._replace(name="a"), bench.gpu_cases.Kernel("b", illegal), good._replace(name="c")]}
    monkeypatch.setattr(bench.gpu_machine, "Gpu", Fake)
    monkeypatch.setattr(bench.gpu_cases, "stages", lambda machine: cases)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.gpu.Runner, "measure_ceilings", lambda self: True)
    results = bench.gpu_results.Results(tmp_path / "r.jsonl")
    args = argparse.Namespace(stages=[2], device="cuda", only="", again=False, seconds=60.0)
    assert bench.gpu.measure(args, results) == 1
    assert bench.gpu.measure(args, bench.gpu_results.Results(tmp_path / "r.jsonl")) == 0
    texts = (tmp_path / "r.jsonl").read_text().splitlines()
    assert [(x["case"], x["gate"]) for x in map(json.loads, texts)] == [("a", True), ("b", False), ("c", True)]
    args.again, args.seconds = True, -1.0
    assert bench.gpu.measure(args, results) == 3  # no time is left, so no case begins


def test_a_machine_without_a_gpu_says_what_to_do(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--device interpreter"):
        bench.gpu.measure(argparse.Namespace(device="cuda"), None)


def test_gates_see_wrong_results(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    k = bench.gpu_kernels
    one, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert k.judge(one, one, 0.0).ok
    assert not k.judge(one * 1.1, one, 0.05).ok and not k.judge(nan, one, 1e9).ok
    assert not k.judge(one, one, 0.0, False).ok and k.judge(one, one, 0.0, False, exact=False).ok
    right = k.product(Fake(), "torchlib", "plain", 100, 257, 3).gate
    assert right().ok and right().error > 0
    from ridgeline.ops.torchlib import products

    def without_the_last_column(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x[:, :-1].float() @ weight[:, :-1].float().T

    monkeypatch.setattr(products, "multiply", without_the_last_column)
    assert not k.product(Fake(), "torchlib", "plain", 100, 257, 3).gate().ok


def test_outputs_are_poison_while_a_gate_runs(bench: Any) -> None:
    with bench.gpu_machine.poisoned():
        assert torch.empty(4).isnan().all() and torch.empty(2, dtype=torch.int64).tolist() == [2**63 - 1] * 2
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("intervals", "share"), [([(0, 1), (3, 4)], 0.5), ([(0, 4), (1, 2), (5, 6)], 1 / 6), ([(2, 4), (0, 3)], 0.0)]
)
def test_idle_time(bench: Any, intervals: list[tuple[float, float]], share: float) -> None:
    assert bench.gpu_machine.idle_share(intervals) == pytest.approx(share)


# ---- the report -----------------------------------------------------------------------------------------------------


def line(case: str, stage: int, fraction: float | None, seconds: float = 1e-3, **more: Any) -> dict[str, Any]:
    return {
        "commit": "new", "device": "H200", "stage": stage, "case": case, "gate": True, "seconds": seconds,
        "spread": [seconds] * 3, "fraction": fraction, "ceiling": "copy", "bytes": 4.3e9, "flops": 7.9e11,
        "error": 0.0, "allowed": 1.0, "same": True, **more,
    }  # fmt: skip


LINES = (
    line("copy", 0, None), line("bfloat16", 0, None),
    line("step llama 8B, plain, batch 1 at 512", 3, 0.83, idle=0.02),
    line("step llama 8B, fp8, batch 1 at 512", 3, 0.70, idle=0.04),
    line("step llama 8B, int8, batch 1 at 512", 3, 0.61, idle=0.01),
    line("attention triton, 1 x 4096, 4096 queries", 4, 0.5, gate=False, seconds=None),
    line("product torchlib, plain, o, M 1024", 1, 0.7, 0.92e-3), line("product triton, plain, o, M 1024", 2, 0.6, 1e-3),
    line("product triton, plain, o, M 1", 2, 0.4),
)  # fmt: skip


def results_of(bench: Any, tmp_path: Path, *lines: dict[str, Any]) -> Any:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return bench.gpu_results.Results(path)


def test_bars_take_the_worst_case(bench: Any, tmp_path: Path) -> None:
    found = {f.bar.name: (f.text(), f.verdict()) for f in bench.gpu_report.figures(LINES)}
    assert found["batch 1, bf16"] == ("0.83", "met")
    assert found["batch 1, fp8 and int8"] == ("0.61 (worst of 2)", "missed")
    assert found["batch 1, int4-128"] == ("", "not measured")
    assert found["attention of prompts"] == ("none; 1 wrong", "wrong")
    assert found["products of 1,024 tokens or more"] == ("0.92", "met")
    assert found["the GPU is idle, batch 1"] == ("0.04 (worst of 3)", "missed")
    text = bench.gpu_report.report(results_of(bench, tmp_path, *LINES), None)
    assert "ceilings: copy 4.3 TB/s, bfloat16 790 TFLOP/s" in text
    assert "WRONG: attention triton, 1 x 4096, 4096 queries" in text


def test_two_commits_are_compared_on_one_device(bench: Any, tmp_path: Path) -> None:
    name = "step llama 8B, plain, batch 1 at 512"
    old = line(name, 3, 0.7, 2e-3, commit="old")
    other = line(name, 3, 0.7, 9.0, commit="old", device="another")
    text = bench.gpu_report.report(results_of(bench, tmp_path, old, other, *LINES), "old")
    (row,) = [x.split() for x in text.splitlines() if x.startswith(name) and x.endswith("faster")]
    assert row[-6:] == ["2", "ms", "1", "ms", "0.500", "faster"]
    assert "no case of this device in common" in bench.gpu_report.report(results_of(bench, tmp_path, *LINES), "older")


def test_the_page_has_the_table_of_what_was_measured(bench: Any, tmp_path: Path) -> None:
    """The page of this commit has an empty table, since no GPU was at hand; a rehearsal does not fill it."""
    page = tmp_path / "gpu.md"
    text = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    rehearsed = [{**one, "device": "Triton's interpreter on x"} for one in LINES]
    for lines in ([], rehearsed):
        bench.gpu_report.write(results_of(bench, tmp_path, *lines), page)
        assert page.read_text(encoding="utf-8") == text
    bench.gpu_report.write(results_of(bench, tmp_path, *LINES), page)
    assert "| batch 1, bf16 | 0.80 | 0.83 |\n" in page.read_text(encoding="utf-8")
    bench.gpu_report.write(results_of(bench, tmp_path), page)
    assert page.read_text(encoding="utf-8") == text
    with pytest.raises(ValueError, match="has no table"):
        bench.gpu_report.write(results_of(bench, tmp_path), ROOT / "README.md")


def test_lines_of_other_programs_are_refused(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: commit is missing"):
        results_of(bench, tmp_path, {"case": "x"})


def test_every_bar_has_cases(bench: Any) -> None:
    """Names of bars are patterns over names of cases, so a case that is renamed must not lose its bar."""
    large = [
        SimpleNamespace(stage=s, name=c.name) for s, cases in bench.gpu_cases.stages(Fake()).items() for c in cases
    ]
    fake = [line(c.name, c.stage, 1.0, idle=0.0) for c in large]
    assert [f.bar.name for f in bench.gpu_report.figures(fake) if f.value is None] == []
    names = [c.name for c in large]
    assert len(set(names)) == len(names)
