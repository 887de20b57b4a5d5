"""`ridgeline bench`: its report, and its least times compared with counts that are computed differently."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from calibrated import kept_with

from ridgeline.archs import spec_from_config
from ridgeline.cli.main import main
from ridgeline.cost.calibration import save
from ridgeline.cost.operations import Slice, operations
from ridgeline.cost.precision import Precision
from ridgeline.measure import Roof, Spread, measure_roof
from ridgeline.ops import open_table

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
SMALL = ("--input-len", "20", "--output-len", "6")
Done = CompletedProcess[str]
Run = Callable[..., Done]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: Path) -> Run:
    """Run `bench` on random weights, with the roofline of an invented machine."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("ridgeline.measure.measure_roof", lambda table: Roof(1e9, 1e10))
    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def call(*args: object) -> Done:
        command = ["ridgeline", "bench", *map(str, args), "-m", str(model), "--load-format", "dummy"]
        monkeypatch.setattr(sys, "argv", command)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return Done(args, int(caught.value.code or 0), captured.out, captured.err)

    return call


def report(found: Done) -> dict[str, Any]:
    """Return the one JSON line, which must be the only output."""
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.count("\n") == 1
    value: dict[str, Any] = json.loads(found.stdout)
    keys = "benchmark model weight_dtype weight_format arguments machine roof engine reasons measured"
    assert list(value) == keys.split()
    assert {"cpu", "cores", "torch"} <= set(value["machine"])
    return value


def ordered(spread: dict[str, float]) -> bool:
    return 0 < spread["median"] <= spread["p90"] <= spread["p99"] and spread["mean"] > 0


def test_latency_as_json(run: Run) -> None:
    value = report(run("latency", "--batch-size", 3, *SMALL, "--num-iters", 3, "--json"))
    assert (value["benchmark"], value["arguments"]["batch_size"]) == ("latency", 3)
    assert value["engine"]["max_num_seqs"] == 256
    assert value["reasons"]["max_num_seqs"]
    measured = value["measured"]
    assert all(ordered(measured[name]) for name in ("latency_s", "ttft_s", "tpot_s"))
    mean = {name: measured[name]["mean"] for name in ("latency_s", "ttft_s", "tpot_s")}
    assert 0 < 5 * mean["tpot_s"] < mean["latency_s"]  # each sequence is measured from its own first token
    assert measured["predicted"] is None  # this machine is not calibrated
    assert measured["output_tokens_per_s"] == pytest.approx(3 * 6 / mean["latency_s"])
    least = {name: measured[f"roofline_{name}"] for name in ("latency_s", "ttft_s", "tpot_s")}
    assert least["ttft_s"] + 5 * least["tpot_s"] == pytest.approx(least["latency_s"])
    # Operation by operation: the prompts in one step, then one token of each sequence in five more steps.
    steps = [Slice(3, 20, 20), *(Slice(3, 1, 20 + i) for i in range(1, 6))]
    spec, precision = spec_from_config(CONFIG), Precision("float32", "float32", "float32")
    done = [op for s in steps for op in operations(spec, [s], precision)]
    seconds = sum(op.layers * max(op.bytes / 1e9, op.flops / 1e10) for op in done)
    assert least["latency_s"] == pytest.approx(seconds)


def test_the_prediction_of_a_calibrated_machine(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ("latency", "--batch-size", 2, *SMALL, "--num-iters", 1, "--threads", 1)
    assert "no prediction: this machine is not calibrated; run `ridgeline calibrate`" in run(*command).stdout
    save(kept_with(1))
    predicted = report(run(*command, "--json"))["measured"]["predicted"]
    assert predicted["tpot_s"] > 0 and predicted["elapsed_s"] > predicted["ttft_s"] > 0 and predicted["note"]
    assert "predictions: calibrated on 2026-11-22" in run(*command).stdout
    assert "total time, predicted" in run("throughput", "--num-prompts", 3, *SMALL, "--threads", 1).stdout


def test_latency_as_text(run: Run) -> None:
    found = run("latency", "--batch-size", 2, *SMALL, "--num-iters", 1, "--num-iters-warmup", 0)
    assert (found.returncode, found.stderr) == (0, "")
    assert "2 sequences at once, 20 tokens in and 6 out; 1 times" in found.stdout
    assert "reads 1.0 GB/s, computes 10 GFLOP/s (measured)" in found.stdout
    assert all(name in found.stdout for name in ("whole batch", "TTFT, last sequence", "TPOT", "roofline"))
    assert max(map(len, found.stdout.splitlines()[1:])) <= 100


def test_a_single_token_has_no_time_per_token(run: Run) -> None:
    measured = report(run("latency", "--output-len", 1, "--num-iters", 1, "--input-len", 4, "--json"))["measured"]
    assert (measured["tpot_s"], measured["roofline_tpot_s"]) == (None, None)
    assert "TPOT" not in run("latency", "--output-len", 1, "--num-iters", 1, "--input-len", 4).stdout


@pytest.mark.parametrize("mode", [(), ("--batching", "static"), ("--cache", "off")], ids=" ".join)
def test_throughput_as_json(mode: tuple[str, ...], run: Run) -> None:
    args = ("throughput", "--num-prompts", 12, *SMALL, "--max-num-seqs", 4, "--json", *mode)
    value = report(run(*args))
    measured = value["measured"]
    assert (measured["num_requests"], measured["prompt_tokens"], measured["output_tokens"]) == (12, 240, 72)
    assert measured["requests_per_s"] == pytest.approx(12 / measured["elapsed_s"])
    assert measured["total_tokens_per_s"] == pytest.approx(312 / measured["elapsed_s"])
    assert ordered(measured["ttft_s"])
    assert ordered(measured["tpot_s"])
    assert measured["roofline_s"] > 0
    if "off" in mode:
        assert (measured["pages"], value["engine"]) == (None, {})
        return
    pages = measured["pages"]
    assert 0 < pages["mean_running"] <= 4
    assert 0 < pages["mean_used_pages"] <= pages["peak_used_pages"] == 8 <= pages["num_pages"]
    assert 0 < pages["waste"] < 0.5
    assert (pages["hit_rate"], pages["preemptions"]) == (0, 0)


def test_throughput_of_a_data_set(run: Run, tmp_path: Path) -> None:
    ids = list(range(40))
    rows = [{"prompt_token_ids": [*ids, i]} for i in range(4)] + [
        {"prompt_token_ids": [5], "sampling_params": {"max_tokens": 2}}
    ]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    args = ("throughput", "--dataset", tmp_path / "d.jsonl", "--output-len", 4, "--max-num-seqs", 1)
    measured = report(run(*args, "--json"))["measured"]
    assert (measured["prompt_tokens"], measured["output_tokens"]) == (4 * 41 + 1, 4 * 4 + 2)
    assert measured["pages"]["hit_rate"] == pytest.approx(3 * 32 / 165)
    few = run(*args, "--num-prompts", 2).stdout
    assert f"2 requests of {tmp_path}/d.jsonl" in few
    assert all(part in few for part in ("at the roofline", "requests/s", "TTFT", "pages in use", "prefix cache"))
    many = run(*args, "--num-prompts", 6)
    assert (many.returncode, "--num-prompts is 6" in many.stderr, "only 5 prompts" in many.stderr) == (2, True, True)


def test_invalid_fits_are_refused(run: Run, tmp_path: Path) -> None:
    found = run("latency", "--input-len", 90, "--output-len", 7)
    assert (found.returncode, found.stdout, found.stderr.count("\n")) == (2, "", 1)
    (tmp_path / "d.jsonl").write_text('{"prompt_token_ids": [1]}\n{"prompt_token_ids": [300]}\n')
    found = run("throughput", "--dataset", tmp_path / "d.jsonl", "--output-len", 2)
    assert "d.jsonl:2: token id 300" in found.stderr


# ---- figures -------------------------------------------------------------------------------------------------------


def test_a_spread_is_numpys() -> None:
    values = [3.0, 1.0, 2.0, 10.0]
    assert Spread.of(values) == Spread(4.0, 2.5, float(np.percentile(values, 90)), float(np.percentile(values, 99)))
    assert Spread.of([]) is None


def test_the_roofline_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rates are between a slow and a fast machine, which is enough to notice a wrong unit."""
    monkeypatch.setattr("ridgeline.measure.machine.READ_BYTES", 1 << 26)
    monkeypatch.setattr("ridgeline.measure.machine.BUDGET_S", 0.1)
    roof = measure_roof(open_table("reference"))
    assert 1e9 < roof.read_bytes_per_s < 1e12
    assert 1e9 < roof.flops_per_s < 1e13
    assert roof.reads is not None and roof.reads.values[-1] == roof.read_bytes_per_s
    assert list(roof.reads.values) == sorted(roof.reads.values, reverse=True)
