"""Tables at every width: every number is complete, and a column that is left out is named.

The oracle is the same table without a width limit, without the columns that the output says are missing.
"""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ridgeline.cli import bench, bench_serve, calibrate, doctor, evaluate, inspect, simulate, verify
from ridgeline.cli.flags import settings
from ridgeline.cli.plan import shape
from ridgeline.cli.show import beside, plan_denoise, plan_tables, tables
from ridgeline.cli.show.tables import UNLIMITED, Column, Line, Table

WIDTHS = (60, 80, 100, 140)
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
WITH_UNIT = re.compile(r"\d (?:[kMGT]?i?B|ms|us|s|x)\b")


def numbers(lines: Iterable[str]) -> Counter[str]:
    return Counter(n for line in lines for n in NUMBER.findall(line))


def check(table: Table, width: int) -> None:
    """Check that every number of a table is complete at a width, and that its columns are shown or named."""
    lines = [line.plain for line in table.lines(width)]
    dropped = table.dropped(width)
    if dropped:
        start = next(i for i, line in enumerate(lines) if line.startswith("Not shown: "))
        said = " ".join(lines[start:])
        assert all(name and name in said for name in dropped)
        needed = int(re.search(r"A width of (\d+) columns shows every column", said)[1])  # type: ignore[index]
        assert needed > width and not table.dropped(needed) and not table.layout(needed).records
        lines = lines[:start]
    kept = [i for i, column in enumerate(table.columns) if column.name not in dropped or not dropped]
    whole = Table(
        table.title, [table.columns[i] for i in kept], table.has_header, [tuple(r[i] for i in kept) for r in table.rows]
    )
    expected = [line.plain for line in whole.lines(UNLIMITED)]
    found, wanted = numbers(lines), numbers(expected)
    if table.layout(width).records:  # every record shows the names of columns
        cells = numbers(cell.plain for row in table.rows for cell in row)
        assert all(found[n] >= count for n, count in cells.items()), (cells - found, width)
        assert set(found) <= set(wanted)
    else:
        assert found == wanted, (width, found - wanted, wanted - found)
        units = Counter(u for line in lines for u in WITH_UNIT.findall(line))
        assert units == Counter(u for line in expected for u in WITH_UNIT.findall(line))
    longest = max((len(word) for line in expected for word in tables._WORDS.findall(line)), default=0)
    assert not [line for line in lines if len(line) > max(width, longest + 2 * tables.INDENT)]


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Return the parts that a function passes to `show`, instead of printing them."""

    def call(printer: Callable[..., None], *args: Any) -> list[Any]:
        parts: list[Any] = []
        monkeypatch.setattr(tables, "show", lambda console, *given: parts.extend(given))
        monkeypatch.setattr(plan_tables, "show", lambda console, *given: parts.extend(given))
        printer(*args)
        monkeypatch.undo()
        return parts

    return call


def every_width(parts: Iterable[Any]) -> int:
    """Check all tables and lines that a function prints, and return the number of its tables."""
    found = list(parts)
    for width in WIDTHS:
        for part in found:
            if isinstance(part, Table):
                check(part, width)
            else:
                line = part if isinstance(part, Line) else Line(part)
                pieces, text = [t.plain for t in line.lines(width)], [t.plain for t in line.lines(UNLIMITED)]
                assert numbers(pieces) == numbers(text) and " ".join(" ".join(pieces).split()) == " ".join(
                    " ".join(text).split()
                )
    return sum(isinstance(part, Table) for part in found)


def test_random_tables() -> None:
    draw = random.Random(0)
    for _ in range(100):
        columns = [
            Column(f"c{i} per {draw.randrange(10**6):,} s", draw.random() < 0.6, draw.random() < 0.3,
                   draw.choice([None, i, 100 - i]))
            for i in range(draw.randint(1, 9))
        ]  # fmt: skip
        table = Table(draw.choice(["", "a title of 1,234,567 ms"]), columns, draw.random() < 0.8)
        for _ in range(draw.randint(0, 4)):
            words = ("", "a sentence of words", f"{draw.random() * 10 ** draw.randint(0, 14):,.3f} ms",
                     f"{draw.randrange(10**12):,} GiB", f"{draw.random():.3e}", "a-b-c 12.5 % x")  # fmt: skip
            table.add_row(*(" ".join(draw.choices(words, k=draw.randint(1, 3))).strip() for _ in columns))
        for width in (*WIDTHS, draw.randint(30, 150)):
            check(table, width)


def test_a_column_that_is_cut_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table("", (Column("change", right=False), Column("batch"), Column("tokens")))
    table.add_row("x" * 50, "96", "4,096")
    check(table, 60)
    monkeypatch.setattr(Table, "_least", lambda self, i: 1)  # like a library that crops its cells
    monkeypatch.setattr(tables, "wrapped", lambda text, width, later=None: [text[:width]])
    with pytest.raises(AssertionError):
        check(table, 60)


LONG = 1_234_567.891


def spread() -> Any:
    return SimpleNamespace(mean=LONG, median=LONG + 1, p50=LONG + 1, p90=LONG + 2, p95=LONG + 3, p99=LONG + 4, max=LONG)


def planned(model: str, hardware: str, *changes: str, **given: Any) -> dict[str, Any]:
    """Return a report of `ridgeline plan` with the largest numbers that it may have to print."""
    from ridgeline.cli import plan
    from ridgeline.plan.compare import compare

    options = {"hardware": hardware, "link": None, "weights": None, "kv": None, "activations": None, "page": 16,
               "scheme": {"replicas": 1, "tp": 1, "ep": 1, "pp": 1}}  # fmt: skip
    known, note, deployment = plan._deployment(model, options)
    load = shape(given.get("batch", 4096), given.get("context"), None, None, deployment.spec.max_position_embeddings)
    rows = compare(deployment, load, changes) if changes else ()
    out = plan.OutputFlags(slo=given.get("slo"), explain=True)
    return plan._report(known.name, deployment, load, out, rows) | {"times": note}


def test_plan(printed: Callable[..., list[Any]]) -> None:
    for hardware in ("h100", "cpu-laptop"):
        parts = printed(plan_tables.show_plan, planned("deepseek-v3", hardware))
        assert every_width(parts) == (6 if hardware == "h100" else 5)  # the h100 has expected times, too
    compared = printed(plan_tables.show_plan, planned("mistral-7b", "h100", "kv_heads=32", "tp=8", "weights=int4"))
    assert every_width(compared) == 3
    ranking = next(part for part in compared if isinstance(part, Table))
    assert not {"change", "tokens/s", "memory"} & set(ranking.dropped(60))
    promised = printed(plan_tables.show_plan, planned("llama-3.1-70b", "h200", slo="ttft=1s,tpot=50ms"))
    assert every_width(promised) == 2
    setting = next(part for part in promised if isinstance(part, Table))
    at_80 = "\n".join(line.plain for line in setting.lines(80))
    assert re.search(r"^--tp 4 .* 64 .*4,096 ", at_80, re.MULTILINE)


def test_plan_of_a_diffusion_model(printed: Callable[..., list[Any]]) -> None:
    from ridgeline.cli import plan

    options = {"hardware": "h100", "link": None, "weights": None, "kv": None, "activations": None, "page": 16,
               "scheme": {"replicas": 1, "tp": 1, "ep": 1, "pp": 1}}  # fmt: skip
    known, note, deployment = plan._deployment("llada-8b", options)
    load = shape(1024, 4096, None, None, deployment.spec.max_position_embeddings)
    parts = printed(plan_denoise.plan_denoiser, known.name, deployment, load, note, (), {"changes": False}, False)
    assert every_width(parts) == 3


def test_simulate_and_bench_serve(printed: Callable[..., list[Any]]) -> None:
    from ridgeline.sim.metrics import Report

    values = {f.name: spread() if f.name.endswith("ts_s") or f.name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")
              else 123_456_789_012 for f in fields(Report)}  # fmt: skip
    report = Report(
        **{
            **values,
            "slo": SimpleNamespace(ttft_s=1.5, tpot_s=0.03, e2e_s=12_345.0),
            "attainment": 0.98765,
            "drafts": None,
        }
    )
    chosen = SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=8192, num_pages=(1_234_568, 9_876_544),
                             groups=(SimpleNamespace(name="full"), SimpleNamespace(name="window")))  # fmt: skip
    bare = SimpleNamespace(speculation=None)
    found = SimpleNamespace(report=report, first_refusal="the prompt's 123,456 tokens are too many")
    assert every_width(printed(simulate._print, "a title, poisson:8", "times", found, chosen, bare)) == 2
    measured = SimpleNamespace(report=report, at_once=12_345, lateness_s=0.012, failures={"timeout": 12_345},
                               without_usage=12_345)  # fmt: skip
    assert every_width(printed(bench_serve._print, "x at http://127.0.0.1:8000", measured, report, "times")) == 2


def test_bench() -> None:
    predicted = SimpleNamespace(elapsed_s=LONG, ttft_s=[LONG], tpot_s=[LONG], note="as measured on 2026-11-22")
    latency = SimpleNamespace(
        latency_s=spread(), ttft_s=spread(), tpot_s=spread(), roofline_latency_s=LONG, roofline_ttft_s=LONG,
        roofline_tpot_s=LONG, output_tokens_per_s=LONG,
    )  # fmt: skip
    pages = SimpleNamespace(mean_running=LONG, mean_used_pages=LONG, peak_used_pages=123_456_789, num_pages=123_456_789,
                            swaps=12_345, waste=0.123, hit_rate=0.456, preemptions=123_456)  # fmt: skip
    through = SimpleNamespace(
        elapsed_s=LONG, roofline_s=12_345.6, requests_per_s=LONG, output_tokens_per_s=LONG, total_tokens_per_s=LONG,
        ttft_s=spread(), tpot_s=spread(), pages=pages,
    )  # fmt: skip
    guess: Any = predicted
    assert every_width(bench._latency_tables(latency, guess, guess.note)) == 1  # type: ignore[arg-type]
    assert every_width(bench._throughput_tables(through, guess, guess.note)) == 3  # type: ignore[arg-type]
    rows = [beside.Beside("in all", LONG, LONG * 3, LONG / 7), beside.Beside("memory", 1e12, 1.5e12, None, "bytes")]
    assert every_width([beside.beside_table(rows)]) == 1


def test_evaluate_and_verify(printed: Callable[..., list[Any]]) -> None:
    def estimate(value: float) -> Any:
        return SimpleNamespace(value=value, standard_error=value / 1000)

    p: Any = SimpleNamespace(
        num_tokens=123_456_789, num_bytes=1_234_567_890, num_documents=12_345, context=131_072, stride=65_536,
        nll_per_token=estimate(12.3456), perplexity=estimate(LONG), bits_per_byte=estimate(1.2345),
        tokens_per_s=LONG, num_computed_tokens=987_654_321, seconds=LONG,
    )  # fmt: skip
    d: Any = SimpleNamespace(
        original=p, kl=estimate(1.234e-5), kl_median=1.23e-7, kl_p99=4.56e-3, nll_difference=estimate(-1.234e-5),
        top1_agreement=SimpleNamespace(value=0.98765, low=0.98123, high=0.99234),
    )  # fmt: skip
    assert every_width(printed(evaluate._print, "a model", p, d)) == 2
    observed = SimpleNamespace(describe=lambda case: "1,234 of 5,678 tokens were drafted and 901 taken")
    case = SimpleNamespace(axis="preemption", value="123 pages, swap, 7 others", impossible="")
    share = SimpleNamespace(equal=1_234_567, total=1_234_568)
    result = SimpleNamespace(
        case=case, verdict="near tie", observed=observed, greedy=share, sampled=share, seconds=LONG
    )
    report: Any = SimpleNamespace(results=[result] * 2)
    assert every_width([verify.matrix_table(report)]) == 1


def test_calibrate_doctor_inspect_and_settings(printed: Callable[..., list[Any]]) -> None:
    from ridgeline.archs import spec_from_config
    from ridgeline.catalog.models import published
    from ridgeline.cli.flags.known import StoredMatrices
    from ridgeline.cli.show.matrices import MatrixRow, matrix_table
    from ridgeline.settings import EngineOptions, resolve
    from ridgeline.spec.quant import AS_STORED
    from ridgeline.spec.storage import STORAGES

    class Curve:
        points = (1 << 20, 1 << 24, 1 << 28, 1 << 30, 1 << 32)

        def at(self, position: float) -> float:
            return 123_456_789_012.0 + position

    passes = SimpleNamespace(near=SimpleNamespace(points=(1, 2, 4, 16, 64, 256), at=lambda r: 1.2e-14),
                             far=SimpleNamespace(at=lambda r: 3.4e-14))  # fmt: skip
    curves = {"1": Curve(), "64": Curve()}
    rates: Any = SimpleNamespace(threads=64, read=curves, copy=curves, products={"bfloat16": passes},
                                 attention={"float32": passes}, terms={"step": 1.234e-5})  # fmt: skip
    assert every_width(calibrate.tables(rates)) == 4
    refusals = {"cpu": "a window of 4,096 tokens is more than 1,234 rows", "torch": "head_dim 257"}
    rows = [{"op": "quantized_linear", "case": "int4-128", "backend": "reference", "refusals": refusals}]
    assert every_width([doctor.ops_table("ops on cuda:0", rows), doctor.facts_table("machine", doctor.machine())]) == 2
    row = {"scheme": "gptq-int4, groups of 128", "format": "int4-128-asym-exact", "served by": "dequantized",
           "refused by": "cpu: kernels have no layout for int4-128-asym-exact; numpy: is composed"}  # fmt: skip
    matrices = [MatrixRow(f"layers.{i}.mlp.experts.down.weight", "int4-128-asym-exact", "nf4-64", 123_456_789, 4.15625,
                          "composed") for i in (0, 1, 2, 30)]  # fmt: skip
    assert every_width([doctor.schemes_table("schemes on cpu", [row]), matrix_table(matrices)]) == 2
    spec = spec_from_config(published()["deepseek-ai/DeepSeek-V3"]["config"])
    report = inspect.describe(spec, "bfloat16", None, StoredMatrices(AS_STORED), STORAGES["bfloat16"])
    assert every_width(printed(inspect._print, "deepseek-v3", spec, report, STORAGES["bfloat16"])) == 1
    config = resolve(spec, 131_072, EngineOptions(), kv_cache_dtype="auto", free_bytes=1 << 45, fixed_len=True,
                     fraction=0.9)  # fmt: skip
    config = replace(config, num_pages=tuple(123_456_789 for _ in config.num_pages))
    assert every_width(settings.settings_tables("engine", config, 1 << 44)) == 2


@pytest.mark.parametrize(("columns", "width"), [(None, UNLIMITED), ("60", 60)])
def test_a_pipe_obeys_columns(monkeypatch: pytest.MonkeyPatch, columns: str | None, width: int) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if columns is None:
        monkeypatch.delenv("COLUMNS", raising=False)
    else:
        monkeypatch.setenv("COLUMNS", columns)
    assert tables.screen().width == width


def test_printed_cells_are_never_cropped() -> None:
    console = Console(file=io.StringIO(), width=20, highlight=False)
    word = "x" * 50
    tables.show(console, word, Table("", (Column("a"),), rows=[]), f"1,234 {word}")
    assert console.file.getvalue().split() == [word, "a", "1,234", word]  # type: ignore[attr-defined]
