"""`ridgeline simulate` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from calibrated import KEPT
from typer.testing import CliRunner

from ridgeline.cli.main import app
from ridgeline.cli.simulate import DeploymentFlags, deployment_of, step_sizes
from ridgeline.cost.calibration import save
from ridgeline.errors import RidgelineError

BASE = ["simulate", "Meta-Llama-3-8B", "--num-requests", "60", "--arrivals", "poisson:20", "--output-len", "20"]


def run(*more: str) -> str:
    result = CliRunner().invoke(app, [*BASE, *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_tables_json_and_a_picture(tmp_path: Path) -> None:
    text = run("--slo", "ttft=200ms", "--replicas", "2", "--routing", "least-loaded")
    for part in ("2 x h100, least-loaded", "60 requests with", "TTFT, with queueing", "goodput", "prefix hits"):
        assert part in text
    picture = tmp_path / "out.svg"
    found = json.loads(run("kv=fp8", "tp=2", "--json", "--plot", str(picture), "--length-cv", "1"))
    assert (
        found["requests"] == 60 and found["ttft_s"]["p99"] > 0 and found["arguments"]["changes"] == ["kv=fp8", "tp=2"]
    )
    assert "</svg>" in picture.read_text()
    over_time = found["timeline"]
    width = 2 * over_time["time_s"][0]
    at_work = sum(over_time["at_work"]) * width
    assert at_work == pytest.approx(found["utilization"] * found["duration_s"], rel=1e-9)
    assert sum(over_time["used_bytes"]) * width == pytest.approx(found["mean_used_bytes"] * at_work, rel=1e-9)
    assert sum(over_time["batch"]) * width == pytest.approx(found["mean_batch"] * at_work, rel=1e-9)


def test_times_to_expect() -> None:
    """They are longer than the roof, from p10 to p90, and `--every-step` gives the same."""
    found = [json.loads(run("--json", *more)) for more in ([], *(["--percentile", p] for p in ("p10", "p50", "p90")))]
    medians = [one["tpot_s"]["p50"] for one in found]
    assert medians == sorted(set(medians)) and "the p50 of those to expect: fitted to" in found[2]["times"]
    again = json.loads(run("--json", "--percentile", "p50", "--every-step"))
    assert {**found[2], "arguments": 0} == {**again, "arguments": 0}


def test_every_step_gives_the_same() -> None:
    fast, slow = (json.loads(run("--json", *more)) for more in ((), ("--every-step",)))
    assert {**fast, "arguments": 0} == {**slow, "arguments": 0}


def test_measured_step_times(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text('{"tokens": [1], "step_s": [0.5]}')
    found = json.loads(run("--json", "--step-times", str(path), "--arrivals", "closed:1", "--input-len", "5"))
    assert found["tpot_s"]["mean"] == found["ttft_s"]["mean"] == 0.5
    path.write_text('{"tokens": [1]}')
    with pytest.raises(RidgelineError, match="step_s"):
        run("--step-times", str(path))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--hardware", "h1000"], "did you mean h100"),
        (["--hardware", "tpu-v5e"], "narrower weights"),
        (["--arrivals", "poison:3"], "kinds are poisson"),
        (["--rate-scale", "-1"], "must be positive"),
        (["--slo", "tft=3"], "write NAME=TIME with ttft"),
        (["--plot", "x.gif"], "png or .svg"),
        (["--trace", "nowhere.csv"], "cannot be read"),
        (["ep=2"], "ep"),
        (["--input-len", "9000"], "no request fits"),
        (["--input-len", "-5"], "--input-len is -5; it must be at least 1"),
        (["--num-requests", "0"], "--num-requests is 0; it must be at least 1"),
        (["--replicas", "-1"], "--replicas -1; it must be at least 1"),
        (["--length-cv", "nan"], "--length-cv is nan"),
        (["--block-size", "-1"], "the page has -1"),
    ],
)
def test_bad_input_is_named(options: list[str], what: str) -> None:
    with pytest.raises(RidgelineError, match=what):
        run(*options)


@pytest.mark.parametrize("model", ["pocket", "smollm2-135m", "qwen2.5-0.5b"])
def test_a_calibrated_machine_has_the_settings_that_explain_chooses(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator took 256 sequences and 512 tokens, and so it predicted another engine than the one that runs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save(KEPT)
    runner, words = CliRunner(), ["--max-model-len", "1024"]
    shown = runner.invoke(app, ["explain", model, *words, "--json"], catch_exceptions=False)
    names = ("max_num_seqs", "max_num_batched_tokens")
    chosen = {one["name"]: int(one["value"]) for one in json.loads(shown.output)["settings"] if one["name"] in names}
    flags = DeploymentFlags(hardware="local")
    _, _, deployment = deployment_of(model, flags)
    assert deployment.chunk == chosen["max_num_batched_tokens"] != 512
    assert min(step_sizes(deployment).seqs, deployment.chunk) == chosen["max_num_seqs"]
    small = ["--num-requests", "3", "--input-len", "20", "--output-len", "4", "--hardware", "local"]
    text = runner.invoke(app, ["simulate", model, *words, *small], catch_exceptions=False).output
    asked = f"at most {chosen['max_num_seqs']} sequences and {chosen['max_num_batched_tokens']:,} tokens a step"
    assert asked in " ".join(text.split())
    own = [*small, "--max-num-seqs", "5", "--max-num-batched-tokens", "77"]
    assert "at most 5 sequences and 77 tokens" in " ".join(runner.invoke(app, ["simulate", model, *own]).output.split())
