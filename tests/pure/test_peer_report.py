"""Reports of bench/peers.py from fixed results: the kinds of machines, which rounds count, settings, and goals."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("peer_shapes", "peer_table", "peer_rounds", "peer_results", "peer_report")
FULL = {"read_gb_s": 40.0, "fp32_gflop_s": 200.0, "int8_gop_s": 800.0}
GB = 1_000_000_000


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Return the modules of the report by their names without `peer_`."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield SimpleNamespace(**{name.removeprefix("peer_"): importlib.import_module(name) for name in NAMES})
    for name in set(NAMES) - before:
        sys.modules.pop(name, None)


def line(contender: str, kind: str, rounds: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """Return a result of S on a machine with AVX2."""
    base, _, setting = contender.partition(" [")
    return {
        "machine": "two cores", "commit": "abc", "correct": True, "machine_kind": "avx2", "shape": "S",
        "what": "decode", "run": "2026-11-24T10:00:00", "contender": contender, "base": base, "kind": kind,
        "peer": base.split()[0], "setting": setting.rstrip("]"), "rounds": rounds, **more,
    }  # fmt: skip


def speeds(*values: float, limits: dict[str, float] | None = None) -> list[dict[str, Any]]:
    return [{"tokens_per_s": value, "limits": [limits or FULL, limits or FULL]} for value in values]


def results(bench: Any, tmp_path: Path, *lines: dict[str, Any]) -> Any:
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return bench.results.Results(path)


def goals(bench: Any, found: Any, machine: str = "avx2", shape: str = "S", **notes: Any) -> dict[tuple[str, str], Any]:
    """Return the cells of each goal after its figure and type, by these two."""
    rows = bench.report.numbered(found.of(machine), bench.results.Notes(notes), shape)
    return {(row[0], row[1]): row[2:] for row in rows}


@pytest.mark.parametrize(
    ("flags", "name", "column"),
    [
        ("avx2 fma avx512bw avx512_vnni amx_tile amx_int8 amx_bf16", "amx", "amx"),
        ("avx2 fma avx512bw avx512_vnni amx_tile amx_int8", "avx512-vnni", "avx512-vnni"),
        ("avx2 fma avx512bw", "avx512", "avx512-vnni"),
        ("sse2 avx2 fma", "avx2", "avx512-vnni"),
        ("asimd i8mm", "other", "avx512-vnni"),
    ],
)
def test_kinds_of_machines(bench: Any, flags: str, name: str, column: str) -> None:
    found = bench.table.machine_of(flags.split())
    assert (found.name, found.goals) == (name, column)


def test_settings_belong_to_kinds_of_machines(bench: Any) -> None:
    for machine, wanted in {
        "amx": {"", "bf16", "f32", "rounded tokens"},
        "avx512-vnni": {"", "f32"},
        "avx2": {""},
    }.items():
        there = {c.setting for c in bench.table.contenders_on(machine) if c.base == "openvino int8"}
        assert there == wanted
    for contender in bench.table.contenders_on("amx"):
        assert contender.how.machines == () or "amx" in contender.how.machines


def test_rounded_tokens_are_a_setting_of_bf16_alone(bench: Any) -> None:
    """Rounded attention is one of int8 and int4, and of bf16 only beside rounded tokens."""
    bf16, codes = {"rounded tokens", "rounded tokens and attention"}, {"rounded attention"}
    unit = {f"matrix unit, {name}" for name in bf16} | {"matrix unit"}
    for machine, floats, quantized in (
        ("amx", bf16 | unit, codes | {"matrix unit", "matrix unit, rounded attention"}),
        ("avx512-vnni", bf16, codes),
        ("avx2", set(), set()),
    ):
        ours = [c for c in bench.table.contenders_on(machine) if c.peer == "ridgeline"]
        assert {c.setting for c in ours if c.kind == "bf16"} - {""} == floats
        assert all("rounded tokens" not in c.setting for c in ours if c.kind != "bf16")
        for kind in ("int8", "int4"):
            assert {c.setting for c in ours if c.kind == kind} - {""} == quantized
        assert all("rounded" not in c.setting for c in ours if c.kind == "fp32")
    options = {c.name: c.how.options for c in bench.table.contenders_on("avx512-vnni") if c.peer == "ridgeline"}
    assert options["ridgeline bf16 [rounded tokens]"] == {"activations": "bf16"}
    assert options["ridgeline bf16 [rounded tokens and attention]"] == {"activations": "bf16", "attention": "bf16"}
    assert options["ridgeline int8 [rounded attention]"] == {"attention": "bf16"}


def test_shapes_have_the_published_sizes(bench: Any) -> None:
    """SmolLM2-135M, Qwen3-0.6B, Llama-3.2-1B, granite-3.1-1b-a400m and mamba2-130m; two others are about 0.5B."""
    sizes = {
        "S": 134_515_008,
        "M": 596_049_920,
        "L": 1_235_814_400,
        "granite-moe": 1_334_628_352,
        "mamba2": 128_989_632,
    }
    for shape, size in sizes.items():
        assert bench.shapes.num_params(shape) == size
    for shape in ("qwen3-next", "gpt-oss"):
        assert 4.5e8 < bench.shapes.num_params(shape) < 5.5e8
        assert bench.shapes.num_active_params(shape) < 2.5e8
    assert bench.shapes.num_active_params("M") == bench.shapes.num_params("M")
    # Keys and values of 16 bits: 2 x 30 layers x 3 heads of 64 numbers for each of 100 tokens.
    assert bench.shapes.state_bytes("S", 100) == 2 * 100 * 2 * 30 * 3 * 64


@pytest.mark.parametrize(
    ("name", "far", "near"), [("read_gb_s", 0.79, 0.81), ("read_gb_s", 1.26, 1.24), ("fp32_gflop_s", 0.79, 0.81)]
)
@pytest.mark.parametrize("edge", [0, 1])
def test_a_round_with_other_limits_is_left_out(
    bench: Any, tmp_path: Path, name: str, far: float, near: float, edge: int
) -> None:
    """Only the limits decide: too far from those of the run, when the round begins or when it ends."""
    slow, fair = FULL | {name: far * FULL[name]}, FULL | {name: near * FULL[name]}
    rounds = speeds(100, 300, 110, 20)
    rounds[1]["limits"][edge] = slow
    rounds[2]["limits"][edge] = fair
    section = results(bench, tmp_path, line("ridgeline int8", "int8", rounds)).of("avx2")
    (found,) = section.lines()
    assert found["tokens_per_s"] == 100 and found["count"] == 3, "a slow program is no reason, and round 2 is left out"
    (text,) = section.left_out()
    assert text.startswith("S decode, round 2: ") and bench.rounds.RULED[name].format(slow[name], FULL[name]) in text


def test_the_limits_to_compare_with_are_those_of_the_run(bench: Any, tmp_path: Path) -> None:
    half = {name: value / 2 for name, value in FULL.items()}
    own = line("ridgeline int8", "int8", speeds(50, limits=half), run="2026-11-25T10:00:00")
    same = line("llama.cpp Q8_0", "int8", speeds(80, 80), run="2026-11-25T10:00:00", what="batch8")
    earlier = line("llama.cpp Q8_0", "int8", speeds(80))
    assert not list(results(bench, tmp_path, own, earlier).of("avx2").left_out())
    found = results(bench, tmp_path, own, same)
    assert len(list(found.of("avx2").left_out())) == 1, "another case of the run"
    row = bench.report.shape_rows(found.of("avx2"), "S")[0]
    assert row[0] == "ridgeline int8" and "left out" in row
    assert goals(bench, found) == {}, "no round counts, so there is no figure"


def test_cases_without_times_have_no_limits(bench: Any, tmp_path: Path) -> None:
    (found,) = results(
        bench, tmp_path, line("ridgeline int8", "int8", [{"resident_mb": 300}], what="resident")
    ).of("avx2").lines()  # fmt: skip
    assert found["resident_mb"] == 300 and not found["left_out"]


def test_shares_are_ratios_within_a_round(bench: Any, tmp_path: Path) -> None:
    rounds = speeds(20, 20)
    rounds[0]["limits"] = [FULL | {"read_gb_s": 38.0}, FULL | {"read_gb_s": 42.0}]
    rounds[1]["limits"] = [FULL, FULL]
    found = results(bench, tmp_path, line("ridgeline int8", "int8", rounds, read_bytes=1.5 * GB)).of("avx2").lines()[0]
    assert found["read_share"] == pytest.approx(0.75)
    prompt = line("ridgeline int8", "int8", speeds(20), what="prefill", operations=10 * GB, peak="int8_gop_s")
    assert results(bench, tmp_path, prompt).of("avx2").lines()[0]["peak_share"] == pytest.approx(0.25)


def test_the_best_of_a_peers_settings_counts(bench: Any, tmp_path: Path) -> None:
    found = results(
        bench, tmp_path,
        line("ridgeline int8", "int8", speeds(150), what="prefill"),
        line("openvino int8", "int8", speeds(70), what="prefill", version="1"),
        line("openvino int8 [f32]", "int8", speeds(100), what="prefill", version="1"),
        line("openvino int8", "int8", speeds(30)), line("openvino int8 [f32]", "int8", speeds(20)),
    )  # fmt: skip
    row = next(r for r in bench.report.shape_rows(found.of("avx2"), "S") if r[0] == "openvino int8 (1)")
    assert "100" in row and "30.0" in row and "70" not in row
    assert goals(bench, found)["prompt of 512: tokens/s", "int8"] == [
        "150", "openvino int8 [f32]", "100", "1.50", ">= 1.3", "met",
    ]  # fmt: skip


def test_goals_are_met_or_missed(bench: Any, tmp_path: Path) -> None:
    first = [{"first_token_ms": 40.0}], [{"first_token_ms": 50.0}]
    found = results(
        bench, tmp_path,
        line("ridgeline int8", "int8", speeds(120), what="batch8"),
        line("llama.cpp Q8_0", "int8", speeds(100), what="batch8"),
        line("llama.cpp Q4_0", "int4", speeds(500), what="batch8"),
        line("ridgeline int4", "int4", speeds(119), what="batch8", run="2026-11-25T10:00:00"),
        line("ridgeline int8", "int8", first[0]), line("openvino int8", "int8", first[1]),
        line("ridgeline int8", "int8", [{"resident_mb": 109}], what="resident", correct=False),
        line("llama.cpp Q8_0", "int8", [{"resident_mb": 100}], what="resident"),
    )  # fmt: skip
    rows = goals(bench, found, causes=[{"cases": ["batch8"], "kinds": ["int8"], "text": "Why."}])
    eight = ("8 sequences: tokens/s", "int8")
    assert rows[eight] == ["120", "llama.cpp Q8_0", "100", "1.20", ">= 1.8", "missed: cause 1"]
    assert rows["8 sequences: tokens/s", "int4"] == ["119", "none in the same run", "", "", ">= 1.8", ""]
    assert rows["first token of 128: ms", "int8"][-3:] == ["1.25", ">= 1.4", "missed: the cause is not known yet"]
    assert rows["MB after 200 prompts", "int8"][-3:] == ["1.09", "<= 1.1", "met, gate not passed"]
    assert goals(bench, found)[eight][-1] == "missed: the cause is not known yet"


@pytest.mark.parametrize(("read", "verdict"), [(1.86, "met: 93% of the read limit"), (1.8, "missed: the cause")])
def test_a_share_of_the_read_limit_meets_a_goal_of_decode(
    bench: Any, tmp_path: Path, read: float, verdict: str
) -> None:
    found = results(
        bench, tmp_path, line("ridgeline int8", "int8", speeds(20), read_bytes=read * GB),
        line("llama.cpp Q8_0", "int8", speeds(19)),
    )  # fmt: skip
    rows = goals(bench, found)
    assert rows["decode: tokens/s", "int8"][-1].startswith(verdict)
    assert rows["decode: share of the read limit", "int8"][-1].startswith(verdict.partition(":")[0])


def test_each_kind_of_machine_has_its_column_of_goals(bench: Any, tmp_path: Path) -> None:
    lines = [
        line(name, "int8", speeds(value), what="prefill", machine_kind=kind)
        for kind in ("amx", "avx512-vnni", "avx2") for name, value in (("ridgeline int8", 140), ("openvino int8", 100))
    ]  # fmt: skip
    found, figure = results(bench, tmp_path, *lines), ("prompt of 512: tokens/s", "int8")
    assert goals(bench, found, "amx")[figure][-2:] == [">= 1.5", "missed: the cause is not known yet"]
    assert goals(bench, found, "avx512-vnni")[figure][-2:] == [">= 1.3", "met"]
    assert goals(bench, found, "avx2")[figure][-2:] == [">= 1.3", "met"]
    assert "because this kind has no goals of its own" in bench.report.facts(found.of("avx2"))
    assert "because" not in bench.report.facts(found.of("amx"))


def test_cells_without_this_build_are_empty_beside_an_earlier_one(bench: Any, tmp_path: Path) -> None:
    key = {"shape": "M", "case": "prefill", "value": "tokens_per_s", "kind": "int8"}
    notes = bench.results.Notes({"about": ["About."], "earlier": [{**key, "figures": ["675", "1,064", "0.63"]}]})
    text = bench.report.markdown(results(bench, tmp_path), {m.name: notes for m in bench.table.MACHINES})
    assert "## AMX\n\nThe goals are those of AMX.\n\nAbout.\n\n### M: goals" in text
    assert "| prompt of 512: tokens/s | int8 |  |  |  |  | >= 1.5 |  | 675 | 1,064 | 0.63 |" in text


def test_a_program_that_fails_is_named_with_its_reason(bench: Any, tmp_path: Path) -> None:
    failed = {"correct": False, "error": "no such architecture", "shape": "mamba2"}
    lines = [line("ctranslate2 int8", "int8", [], what=case, **failed) for case in ("decode", "prefill")]
    section = results(bench, tmp_path, *lines, line("ridgeline int8", "int8", speeds(9), shape="mamba2")).of("avx2")
    assert list(section.errors()) == ["mamba2 ctranslate2 int8: no such architecture (decode, prefill)"]
    assert bench.report.shape_rows(section, "mamba2")[1][:3] == ["ctranslate2 int8", "failed", "failed"]


def test_results_of_an_older_version_are_refused(bench: Any, tmp_path: Path) -> None:
    old = {key: value for key, value in line("ridgeline int8", "int8", []).items() if key != "machine_kind"}
    with pytest.raises(ValueError, match=r"line 1: no machine_kind, so an older version wrote it; move the file"):
        results(bench, tmp_path, old)


def test_the_page_holds_the_tables_of_the_kept_results(bench: Any, tmp_path: Path) -> None:
    """`python bench/peers.py --report --results bench/peer_results.jsonl --markdown docs/peers.md` writes them."""
    page = ROOT / "docs" / "peers.md"
    text = bench.report.markdown(bench.results.Results(ROOT / "bench" / "peer_results.jsonl"))
    assert page.read_text(encoding="utf-8") == bench.report.written(page, text)
    assert bench.report.written(tmp_path / "new.md", text) == text
