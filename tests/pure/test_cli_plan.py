"""`ridgeline plan`: figures, tables, JSON, pictures, and one-line errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_house import modules_after

from ridgeline.cli.main import main

ANSI = re.compile(r"\x1b\[[0-9;]*m")
Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
COMPARED = "kv_heads=32 mla=512+64 window=1024:5 cla=2 weights=int4 kv=fp8 replicas=4 tp=2 speculate=0.8:4".split()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command in this process, on an H100 unless it names another machine."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*given: str) -> Done:
        args = given if "--hardware" in given else (*given, "--hardware", "h100")
        monkeypatch.setattr(sys, "argv", ["ridgeline", "plan", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        status = caught.value.code
        assert isinstance(status, int | None)
        return Done(args, status or 0, ANSI.sub("", captured.out), ANSI.sub("", captured.err))

    return call


def test_the_issues_first_command(run: Run) -> None:
    done = run("meta-llama/Llama-2-13b", "--hardware", "h100", "--batch", "64", "--context", "1024")
    assert done.returncode == 0
    for text in ("13.02 B parameters", "26.03 GB", "53.69 GB", "does not fit in 80 GB; it fits with --batch 56", "TTFT",
                 "TPOT", "q+k+v", "state, 295.5 x", "without a cache"):  # fmt: skip
        assert text in done.stdout
    assert "GiB" not in done.stdout


def test_json_has_every_figure(run: Run) -> None:
    found = json.loads(run("mistral-7b", "--batch", "4", "--context", "4096", "--json").stdout)
    assert found["memory"]["pages_bytes"] == 2**31 + 2**21
    assert found["load"] == {"batch": 4, "prompt": 3072, "output": 1024, "context": 4096}
    step = found["decode"]
    assert step["seconds"] == pytest.approx(sum(op["seconds"] for op in step["operations"]))
    assert sum(step["by_cause"].values()) == pytest.approx(step["seconds"])
    t = found["time"]
    assert t["latency_s"] == pytest.approx(t["ttft_s"] + 1023 * t["tpot_s"])
    assert found["deployment"]["hardware"]["sources"]["bandwidth"].startswith("NVIDIA H100")


def test_comparison(run: Run) -> None:
    done = run("mistral-7b", "--batch", "4", "--context", "4096", "--compare", *COMPARED)
    lines = done.stdout.splitlines()
    first = [line.split()[0] for line in lines if line.strip()]
    for change in COMPARED:
        assert first.count(change) == 2  # once in the ranking and once in the trade-offs
    assert "3.36 tokens expected" in done.stdout
    ranked = json.loads(run("mistral-7b", "--batch", "4", "--context", "4096", "--compare", *COMPARED, "--json").stdout)
    assert ranked["compare"][0]["change"] == "replicas=4"
    for row in ranked["compare"]:
        band = row["expected_tokens_per_s"]
        assert band["p10"] <= band["p50"] <= band["p90"] <= row["time"]["tokens_per_s"]


def test_changes_without_compare_are_applied(run: Run) -> None:
    def sequence(*args: str) -> float:
        found: dict[str, Any] = json.loads(run("llama-3.1-8b", "--context", "1024", *args, "--json").stdout)
        return float(found["memory"]["sequence_bytes"])

    assert sequence("kv=fp8", "cla=2") == sequence("--kv", "fp8") / 2 == sequence() / 4


def test_promise(run: Run) -> None:
    kept = run("llama-3.1-70b", "--hardware", "h200", "--slo", "ttft=1s,tpot=50ms")
    assert "the cheapest first" in kept.stdout
    assert "--tp 4" in kept.stdout
    lost = json.loads(run("llama-3.1-8b", "--hardware", "l4", "--slo", "tpot=9ms", "--output", "64", "--prompt", "64",
                          "--json").stdout)["slo"]  # fmt: skip
    assert lost["settings"] == []
    assert not lost["closest"]["kept"]
    assert all(setting["kept"] for setting in lost["otherwise"])


def test_explain_shows_every_formula_with_its_numbers(run: Run) -> None:
    text = " ".join(run("mistral-7b", "--batch", "4", "--explain").stdout.split())
    for part in ("NVIDIA H100 SXM datasheet", "(4 x 256 + 1) pages x 2.097 MB = 2.15 GB", "2,048 numbers x 4,095",
                 "32 x max(", "TTFT 47.92 ms + 1,023 x TPOT 4.815 ms", "a step (CS336)"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(("args", "message"), [
    (("mistal-7b",), "did you mean mistral-7b"), (("mistral-7b", "--hardware", "h10"), "did you mean"),
    (("mistral-7b", "--batch", "0"), "--batch is 0; it must be at least 1"),
    (("mistral-7b", "--context", "-5"), "--context is -5"),
    (("mistral-7b", "--output", "40000"), "lower it to 32,767 at most"),
    (("mistral-7b", "--context", "99999"), "the model has 32,768 positions"),
    (("mistral-7b", "--context", "100", "--prompt", "60", "--output", "60"), "leave out one of the three"),
    (("mistral-7b", "--context", "100", "--prompt", "100"), "do not add up to a context of 100"),
    (("mistral-7b", "--weights", "int9"), "type 'int9' is not known"), (("mistral-7b", "--tp", "3"), "tp 2 does"),
    (("mistral-7b", "--compare"), "needs at least one change"), (("mistral-7b", "kv"), "write kv=fp8"),
    (("mistral-7b", "--link", "token-ring"), "unknown link 'token-ring'"),
    (("mistral-7b", "--slo", "tbt=3ms"), "write NAME=TIME"), (("mistral-7b", "--plot", "x.gif"), "end in .png or .svg"),
    (("mistral-7b", "--hardware", "m3-max", "--tp", "2"), "no link between devices"),
    (("mistral-7b", "--block-size", "0"), "at least 1"),
])  # fmt: skip
def test_invalid_values_give_one_line(run: Run, args: tuple[str, ...], message: str) -> None:
    done = run(*args)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_model_that_does_not_fit_gets_a_remedy(run: Run) -> None:
    assert "does not fit in 80 GB; it fits with --tp 2" in run("llama-3.1-70b").stdout
    assert "or --context" in run("mistral-7b", "--batch", "200").stdout


@pytest.mark.parametrize("name", ["plan.png", pytest.param("plan.svg", marks=pytest.mark.slow)])
def test_picture(run: Run, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / name
    assert run("deepseek-v2-lite", "--batch", "8", "--plot", str(out)).returncode == 0
    head = out.read_bytes()[:1000]
    assert head.startswith(b"\x89PNG") if name.endswith("png") else b"<svg" in head
    assert out.stat().st_size > 20_000
    assert "cannot be written" in run("gpt2", "--plot", str(tmp_path / "none" / name)).stderr


def test_no_torch_and_no_numpy_are_needed() -> None:
    code = "import sys; sys.argv = ['ridgeline', 'plan', 'deepseek-v3', '--json']\nfrom ridgeline.cli.main import app\n"
    loaded = modules_after(code + "app(standalone_mode=False)")
    assert not loaded & {"torch", "numpy", "transformers", "matplotlib"}


@pytest.mark.parametrize("hardware", ["cpu-laptop", "m4-max", "v5e", "mi300x"])
@pytest.mark.parametrize("model", ["pocket", "mamba-2.8b", "gemma-3-1b", "lfm2-1.2b"])
def test_any_model_on_any_machine(run: Run, model: str, hardware: str) -> None:
    found = json.loads(run(model, "--hardware", hardware, "--context", "256", "--json").stdout)
    assert found["memory"]["fits"]
    assert 0 < found["time"]["tpot_s"] < 1


def test_a_promise_at_a_given_batch(run: Run) -> None:
    """--batch was ignored beside --slo."""
    words = ("llama-3.1-70b", "--hardware", "h200", "--json", "--slo")
    found = json.loads(run(*words, "ttft=1s,tpot=50ms", "--batch", "32").stdout)["slo"]
    assert {s["batch"] for s in found["settings"]} == {32}
    assert {s["bound_by"] for s in found["settings"]} == {"--batch"}
    tight = json.loads(run(*words, "ttft=200ms,tpot=10ms", "--batch", "32").stdout)["slo"]
    assert tight["settings"] == [] and tight["closest"]["batch"] == 32 and not tight["closest"]["kept"]


def test_a_promise_survives_a_comparison(run: Run) -> None:
    """--slo was ignored beside --compare."""
    words = ("llama-3.1-8b", "--slo", "ttft=1s,tpot=50ms", "--compare", "kv=fp8", "weights=fp8", "tp=8")
    done = run(*words)
    assert "Cheapest setting of each change within ttft 1 s, tpot 50 ms at 90% confidence" in done.stdout
    found = json.loads(run(*words, "--json").stdout)
    rows = found["slo"]["changes"]
    assert {row["changed"] for row in rows} == {"", "kv=fp8", "weights=fp8", "tp=8"} and found["compare"]
    assert all(row["kept"] for row in rows)
    costs = [row["time"]["device_seconds_per_token"] for row in rows]
    assert costs == sorted(costs)
    alone = json.loads(run("llama-3.1-8b", "kv=fp8", *words[1:3], "--json").stdout)["slo"]["settings"][0]
    (same,) = [row for row in rows if row["changed"] == "kv=fp8"]
    assert same | {"changed": ""} == alone
    lost = json.loads(run("llama-3.1-8b", "--slo", "tpot=1ms", "--compare", "kv=fp8", "--json").stdout)["slo"]
    assert not any(row["kept"] for row in lost["changes"])
