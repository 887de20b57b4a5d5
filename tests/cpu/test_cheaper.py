"""The chain that makes a model cheaper: its candidates, its report, and that a stopped run ends with equal weights."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cpu.doc_folder import write_model
from ridgeline import LLM, SamplingParams
from ridgeline.catalog.machines import hardware
from ridgeline.cli.flags.known import find_known, precision_of
from ridgeline.cli.main import app
from ridgeline.compress import folder as folders
from ridgeline.compress.cheaper import KINDS, find_candidates
from ridgeline.compress.cheaper.report import losses, recovery_of
from ridgeline.compress.cheaper.steps import Steps
from ridgeline.compress.prune import parse_keep
from ridgeline.compress.prune.choose import uniform
from ridgeline.errors import RequestError, RidgelineError
from ridgeline.plan.changes import change
from ridgeline.plan.expected import ROOF
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Load, Planner
from ridgeline.plan.slo import kept

pytestmark = pytest.mark.usefixtures("short_rates")

LOAD = Load(1, 300, 100)
WORDS = (
    "--hardware", "cpu-laptop", "--context", "128", "--tokens", "512", "--updates", "2", "--batch-tokens", "128",
    "--sequence-length", "64", "--calibrate-sequences", "2", "--candidates", "2", "--held-out", "0.2", "--threads", "1",
)  # fmt: skip


def deployment_of(model: str, machine: str = "cpu-laptop") -> Deployment:
    known, found = find_known(model), hardware(machine)
    return Deployment(known.spec, found, precision_of(known, found))


def limit_of(model: str, share: float) -> float:
    """Return a share of the predicted TPOT of a model, in seconds."""
    return share * Planner(deployment_of(model)).figures(LOAD).served_tpot_s


# ---- candidates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_candidates_keep_the_limit_and_differ(share: float) -> None:
    slo = Slo(tpot_s=limit_of("pocket", share))
    found = find_candidates(deployment_of("pocket"), LOAD, slo)
    assert len({frozenset(one.words) for one in found}) == len(found) > 1
    for one in found:
        assert kept(slo, one.figures, ROOF)
        after = deployment_of("pocket")
        assert one.figures == Planner(Deployment(one.spec, after.hardware, after.precision)).figures(LOAD)
    assert found[0].harm == min(one.harm for one in found)
    assert not set(found[0].words) & set(found[1].words) or share < 0.5
    mild = found[0].words if share == 0.6 else {}
    assert not mild or found[0].harm == pytest.approx(sum(math.log(float(w.split("=")[1])) ** 2 for w in mild.values()))


def test_less_of_a_change_does_not_suffice() -> None:
    """No candidate is stronger than it must be: with one change weaker, or left out, the limit is missed."""
    slo = Slo(tpot_s=limit_of("pocket", 0.75))
    deployment = deployment_of("pocket")
    orders = {kind.name: list(kind.words(deployment.spec)) for kind in KINDS}
    found = [one for one in find_candidates(deployment, LOAD, slo) if set(one.words) <= {"mlp", "kv_heads"}]
    assert found
    for one in found:
        if (at := orders["mlp"].index(one.words["mlp"])) > 0:
            weaker = uniform(deployment.spec, parse_keep(orders["mlp"][at - 1]), range(len(deployment.spec.layers)))
            after = Deployment(weaker, deployment.hardware, deployment.precision)
            after = change(after, one.words["kv_heads"]).deployment if "kv_heads" in one.words else after
            assert not kept(slo, Planner(after).figures(LOAD), ROOF)


def test_commands_prune_before_they_convert() -> None:
    slo = Slo(tpot_s=limit_of("pocket", 0.4))
    for one in find_candidates(deployment_of("pocket"), LOAD, slo):
        names = [command for command, _ in one.commands]
        assert names == sorted(names, reverse=True) and names.count("prune") <= 1
        assert ",".join(words for _, words in one.commands) == str(one)
        assert one.stages == "logits" or not {"width", "mlp", "heads", "layers"} & set(one.words)


def test_limits_that_need_no_work_or_too_much() -> None:
    deployment = deployment_of("pocket")
    with pytest.raises(RequestError, match=r"keeps tpot=1 s as it is: tpot .* us predicted; there is nothing to make"):
        find_candidates(deployment, LOAD, Slo(tpot_s=1.0))
    with pytest.raises(RequestError, match=r"no candidate keeps tpot=1 ns: the closest, .*, has tpot .*, and the"):
        find_candidates(deployment, LOAD, Slo(tpot_s=1e-9))
    found = find_candidates(deployment_of("llama-3-8b", "h100"), Load(1, 6000, 2000), Slo(ttft_s=0.16, tpot_s=0.004))
    assert all(one.figures.served_ttft_s <= 0.16 and one.figures.served_tpot_s <= 0.004 for one in found)


# ---- the report -----------------------------------------------------------------------------------------------------


def test_recovery_is_a_share_of_the_distance_in_nats() -> None:
    models = {name: {"perplexity": math.exp(nats)} for name, nats in (("original", 2.0), ("repaired", 2.5))}
    assert recovery_of(models) is None
    assert recovery_of({**models, "random": {"perplexity": math.exp(4.0)}}) == pytest.approx(0.75)
    assert recovery_of({**models, "random": {"perplexity": math.exp(1.0)}}) is None


def test_losses_in_words() -> None:
    before = {"perplexity": 10.0, "recall_by_pairs": {"4": 0.9, "8": 0.97}}
    after = {"perplexity": 11.0, "recall_by_pairs": {"4": 0.88, "8": 0.84}}
    assert losses({"original": before, "repaired": after}, "repaired") == (
        "lost: perplexity 10 -> 11 (1.10 times), recall at 8 pairs 0.97 -> 0.84"
    )
    after["recall_by_pairs"] = {"4": 0.9, "8": 0.95}
    assert "less than 0.05 of recall" in losses({"original": before, "repaired": after}, "repaired")


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model and a text."""
    folder = tmp_path_factory.mktemp("cheaper")
    write_model(folder / "model")
    text = " ".join(f"{i * i % 97} apples and {i % 13} pears" for i in range(400))
    (folder / "text.txt").write_text(text)
    return folder


def words_of(place: Path, out: Path, *more: str, share: float = 0.7) -> list[str]:
    model = str(place / "model")
    limit = share * Planner(deployment_of(model)).figures(Load(1, 96, 32)).served_tpot_s
    return [
        "cheaper", model, "--slo", f"tpot={limit * 1e6:.6f}us", "--data", str(place / "text.txt"), *WORDS, "--out",
        str(out), *more,
    ]  # fmt: skip


def run(place: Path, out: Path, *more: str, share: float = 0.7) -> Any:
    return CliRunner().invoke(app, words_of(place, out, *more, share=share))


def in_process(place: Path, out: Path, patch: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own. patch: code that runs before it."""
    words = ["ridgeline", *words_of(place, out)]
    code = f"import sys\nfrom ridgeline.cli.main import main\n{patch}\nsys.argv = {words!r}\nmain()"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_a_chain_ends_with_a_model_a_report_and_models_that_serve(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "a" / "out"
    result = run(place, out, "--baseline", "random", "--quantize", "rtn-int8")
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads((out / "price_report.json").read_text())
    models = report["models"]
    assert list(models) == ["original", "changed", "repaired", "random", "rtn-int8"]
    assert models["repaired"]["params"] < models["original"]["params"]
    assert models["repaired"]["predicted_tokens_per_s"] > models["original"]["predicted_tokens_per_s"]
    assert all(0 <= model["recall"] <= 1 and model["measured_tokens_per_s"] > 0 for model in models.values())
    assert models["repaired"]["kl"] < models["changed"]["kl"]
    assert len(report["tried"]) == 2 and report["tried"][0]["kl"] <= report["tried"][1]["kl"]
    for line in ("limits: tpot=", "lost: perplexity", "verify: all tokens are equal", "tried: "):
        assert any(one.startswith(line) for one in report["results"]) and line in result.output
    shown = CliRunner().invoke(app, ["inspect", str(out)])
    assert "made by" in shown.output and "repaired on 512 tokens" in shown.output and "recall" in shown.output
    made = [path.parent for path in out.with_name("out.steps").rglob("model.safetensors")]
    assert len(made) >= 6
    for folder in (out, *made):
        answer = LLM(str(folder)).generate("apples", SamplingParams(max_tokens=2, temperature=0))
        assert len(answer[0].outputs[0].token_ids) == 2
    narrow = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["inspect", str(out)])
    assert max(map(len, narrow.output.splitlines())) <= 80
    with pytest.raises(RequestError, match="exists; name another folder"):
        raise run(place, out).exception


KILL = """
import os, signal
import ridgeline.train.loop as loop
write = loop.Trainer._save
def save(self, step):
    write(self, step)
    if step == 2 and "repaired.unfinished" in str(self._folder):
        os.kill(os.getpid(), signal.NUMBER)
loop.Trainer._save = save
"""


@pytest.mark.nightly
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_a_run_that_was_killed_goes_on_with_equal_weights(name: str, place: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / name, tmp_path / "whole"
    stopped = in_process(place, out, KILL.replace("NUMBER", name))
    assert not out.exists()
    if name == "SIGINT":
        assert stopped.returncode == 128 + signal.SIGINT
        assert stopped.stderr.splitlines()[-1] == "ridgeline: interrupted: repeat the command to continue"
    else:
        assert stopped.returncode == -signal.SIGKILL
    for folder in (out, whole):
        again = run(place, folder)
        assert again.exit_code == 0, (again.output, again.exception)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def fails(place: Path, out: Path, *more: str, share: float = 0.7) -> str:
    """Return the one line with which the command ends."""
    result = run(place, out, *more, share=share)
    assert isinstance(result.exception, RidgelineError), (result.output, result.exception)
    assert not out.exists()
    return str(result.exception)


def test_a_full_disk(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise OSError(ENOSPC, "No space left on device")

    monkeypatch.setattr(folders, "write_safetensors", full)
    monkeypatch.setattr("ridgeline.compress.cheaper.run._Chain._figures", lambda *given, **more: {"kl": 1.0})
    assert "free some space and repeat the command" in fails(place, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


BAD: dict[str, tuple[tuple[str, ...], str]] = {
    "a limit": (("--slo", "speed=3"), "write NAME=TIME with ttft, tpot, e2e"),
    "a machine": (("--hardware", "h1000"), "unknown hardware 'h1000'; did you mean"),
    "a number": (("--tokens", "many"), "--tokens many: write a number of tokens such as 3M"),
    "a baseline": (("--baseline", "zeros"), "--baseline is 'zeros'; use random"),
    "a scheme": (("--quantize", "awq-int1"), "awq-int1"),
    "candidates": (("--candidates", "0"), "candidates (--candidates) is 0; it must be from 1"),
    "rows": (("--batch-tokens", "100"), "must be a multiple of sequence_length (--sequence-length) 64"),
    "a short text": (("--tokens", "9M"), "are fewer than the 9,000,000 of --tokens; give more text"),
    "a context": (("--context", "9999"), "--context is 9,999, but the model has 4,096 positions"),
    "a text": (("--data", "missing.txt"), "missing.txt does not exist"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, place: Path, tmp_path: Path) -> None:
    words, message = BAD[name]
    assert message in fails(place, tmp_path / "out", *words)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_another_run(place: Path, tmp_path: Path) -> None:
    out, facts = tmp_path / "out", {"tokens": 1, "texts": "a"}
    steps = Steps(out, facts)
    with pytest.raises(RequestError, match="another run is making"):
        Steps(out, facts)
    steps.close()
    with pytest.raises(RequestError, match="belongs to another run: tokens was 1, is 2; use the same options"):
        Steps(out, {"tokens": 2, "texts": "a"})
    (steps.folder / ".x.partial").mkdir()
    count = 0

    def measure() -> dict[str, Any]:
        nonlocal count
        count += 1
        return {"kl": 1.0}

    again = Steps(out, facts)
    assert not (steps.folder / ".x.partial").exists()
    assert again.measured("a=1:2", measure) == again.measured("a=1:2", measure) == {"kl": 1.0} and count == 1
    again.remove_unless_useful()
    again.close()
    assert list(tmp_path.iterdir()) == []


# ---- the bench ------------------------------------------------------------------------------------------------------


def test_the_table_of_the_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Means and intervals of invented losses are those of the closed forms; the sweep is left out."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    from importlib import import_module

    bench: Any = import_module("cheaper_report")
    common = {
        "recall": 0.5,
        "kl": 0.1,
        "top1_agreement": 0.8,
        "predicted_tokens_per_s": 100,
        "state_bytes_per_token": 8,
    }
    lines: list[dict[str, Any]] = [{**common, "kind": "original", "change": "", "perplexity": math.exp(2.0)}]
    for kind, losses_ in (("kl", (2.4, 2.5, 2.6)), ("random", (4.0, 4.0, 4.0))):
        facts = {**common, "kind": kind, "change": "mlp=0.5", "rate": 0.001}
        lines += [{**facts, "tokens": 900, "perplexity": math.exp(loss)} for loss in losses_]
        lines.append({**facts, "tokens": 100, "perplexity": 1e6})
    rows = bench.table(lines).splitlines()
    half = 4.303 * 0.1 / math.sqrt(3)
    assert f"| mlp=0.5 | kl | 3 | 900 | 0.001 | 0.100 | 80.0% | 12.18 | 2.500 ± {half:.3f} | 0.50 |" in rows
    assert "| mlp=0.5 | recovery of kl | | | | | | | 0.75 | |" in rows
    bench.draw(lines, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"cheaper-quality.png", "cheaper-state.png"}
