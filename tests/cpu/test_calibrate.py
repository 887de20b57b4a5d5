"""Calibration: fits against known answers, and predicted steps and runs against the engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from calibrated import KEPT, RATES, kept_with
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cli import calibrate as cli_calibrate
from ridgeline.cli.main import main
from ridgeline.cost.calibration import calibration_path, load, save, this_machine
from ridgeline.cost.operations import Slice
from ridgeline.measure.calibrate import SIZES, read_at_least, read_sizes
from ridgeline.measure.predict import Asked, calibrated_machine, predict, run_steps
from ridgeline.measure.probes import PROBES, Sample, fit_terms, nonnegative
from ridgeline.measure.quiet import OthersLoad
from ridgeline.measure.steps import Steps, load_random
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import Attention, GatedMLP, Layer, Mamba, ModelSpec, RMSNorm, Rope
from ridgeline.spec.rates import Curve

NORM = RMSNorm()
TINY = ModelSpec(
    "tiny", 64, 32, 2048,
    (Layer(Attention(2, 1, 16, 0.25, Rope(16)), GatedMLP(48), NORM), Layer(Mamba(64, 4, 4, 2), None, NORM)), NORM,
)  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_random(TINY, device="cpu")


@dataclass
class FakeDriver:
    """A fake driver of kernels with a number of threads, which is all that a prediction reads."""

    threads: int


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save an invented calibration of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save(KEPT)


@given(st.integers(0, 10_000))
def test_the_least_squares_are_the_best(seed: int) -> None:
    """By Kuhn and Tucker's conditions, no coefficient is negative, increasing a zero one would not improve the fit, and
    the others are at their optimum.
    """
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(12, 5)), rng.normal(size=12)
    x = nonnegative(a, b)
    gradient = a.T @ (a @ x - b)
    assert (x >= 0).all()
    assert (gradient >= -1e-8).all() and (np.abs(gradient * x) <= 1e-8).all()


def test_terms_are_found_again_though_some_steps_were_disturbed() -> None:
    rng, true = np.random.default_rng(0), {"a step": 2e-4, "a layer": 3e-5, "a token": 0.0}
    samples = []
    for i in range(40):
        terms = {"a step": 1.0, "a layer": float(rng.integers(1, 30)), "a token": float(rng.integers(1, 500))}
        seconds = 1e-3 + sum(true[name] * amount for name, amount in terms.items())
        samples.append(Sample("x", terms, 1e-3, seconds * (3 if i % 10 == 0 else 1)))
    found = fit_terms(samples)
    assert found["a step"] == pytest.approx(2e-4, rel=0.05) and found["a layer"] == pytest.approx(3e-5, rel=0.05)
    assert found["a token"] < 1e-7


def test_steps_report_their_work(loaded: LoadedModel) -> None:
    steps = Steps(loaded, 3, 100)
    timed = steps.run([40, 40, 40], 4)
    assert timed[0].batch == (Slice(3, 40, 40, 1),) and not timed[0].is_decode
    assert [t.batch for t in timed[1:]] == [(Slice(3, 1, n, 1),) for n in (41, 42, 43)]
    assert all(t.is_decode and t.seconds > 0 for t in timed[1:])


def test_a_context_that_is_filled_is_as_long_as_one_that_is_computed(loaded: LoadedModel) -> None:
    steps = Steps(loaded, 2, 700, chunk=1400)
    timed = steps.decodes(2, 600, 5)
    assert len(timed) >= 5 and timed[0].batch == (Slice(2, 1, 601, 1),)
    for pages in steps._engine._runner.arena.pages:
        assert np.asarray(pages).any(axis=1).sum() >= 2  # the pages contain data


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 90), st.integers(1, 6)), min_size=1, max_size=6), st.integers(1, 4))
def test_the_predicted_steps_are_the_engines(loaded: LoadedModel, asked: list[tuple[int, int]], most: int) -> None:
    """Compare the tokens of each step, the sampled tokens, and the number of steps. All prompts end in the same way,
    because the state snapshots are far apart.
    """
    plain = ModelSpec("plain", 64, 32, 2048, (TINY.layers[0],), NORM)
    steps = Steps(_once(plain), most, 128, chunk=64)
    most += 1
    new = asked[0][1]
    timed = steps.run([prompt for prompt, _ in asked], new)
    expected = [batch for batch, _ in run_steps([Asked(prompt, new) for prompt, _ in asked], most, 64)]

    def shape(batch: tuple[Slice, ...]) -> tuple[int, int, int]:
        return (
            sum(s.count for s in batch), sum(s.count * s.tokens for s in batch), sum(s.count * s.sampled for s in batch)
        )  # fmt: skip

    assert [shape(batch) for batch in expected] == [shape(t.batch) for t in timed]


MADE: dict[str, LoadedModel] = {}


def _once(spec: ModelSpec) -> LoadedModel:
    if spec.family not in MADE:
        MADE[spec.family] = load_random(spec, device="cpu")
    return MADE[spec.family]


def test_a_prediction_has_every_figure(loaded: LoadedModel) -> None:
    config = Steps(loaded, 2, 100).config
    found = predict(loaded, config, [Asked(50, 5), Asked(20, 1)], *this_machine())
    assert len(found.ttft_s) == len(found.tpot_s) == 2 and found.tpot_s[1] is None
    assert found.elapsed_s >= max(found.ttft_s) > 0 and found.tpot_s[0] and found.tpot_s[0] > 0
    assert found.memory_bytes > loaded.weight_bytes and "calibrate" in found.note


@pytest.mark.usefixtures("calibrated")
def test_a_calibration_serves_as_many_threads_as_it_was_measured_with() -> None:
    machine, note = calibrated_machine(FakeDriver(RATES.threads))
    assert machine is not None and machine.rates == RATES and "2026-11-22" in note
    machine, note = calibrated_machine(FakeDriver(RATES.threads + 1))
    assert machine is None and "2 threads, but this run has 3" in note and "--threads" in note


def test_without_a_calibration_nothing_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine, note = calibrated_machine(FakeDriver(2))
    assert machine is None and note.startswith("no prediction: ") and "ridgeline calibrate" in note
    assert calibrated_machine(None)[0] is None


@pytest.mark.parametrize("known", [False, True])
def test_generate_shows_an_error_of_prediction_only_where_it_predicts(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if known:
        save(kept_with(1))
    monkeypatch.setattr(sys, "argv", ["ridgeline", "generate", "-v", "--threads", "1", "--max-tokens", "4", "import "])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == 0
    assert ("TPOT, mean" in said) is known
    assert ("no prediction: this machine is not calibrated; run `ridgeline calibrate`" in said) is not known
    assert bool(re.search(r"[-+]\d+%", said)) is known


def test_nothing_comes_from_memory_faster_than_it_is_read() -> None:
    far = read_at_least(Curve((1.0, 4.0, 64.0), (5e-11, 5e-11, 1e-11)), 1e-10)
    assert far.values == (1e-10, 5e-11, 1e-11)


@pytest.mark.parametrize(
    ("cache", "memory", "largest"), [(0, 64, 256), (32, 64, 256), (480, 64, 1920), (480, 4, 1024), (480, 0.5, 256)]
)
def test_memory_is_read_beyond_the_last_cache(cache: int, memory: float, largest: int) -> None:
    """Reading covers four times the last cache, at most a quarter of the memory. cache, largest: MiB. memory: GiB."""
    sizes = read_sizes(cache << 20, int(memory * 2**30))
    assert sizes[: len(SIZES)] == SIZES
    assert sizes[-1] == largest << 20


def test_the_load_of_other_programs_is_measured() -> None:
    load = OthersLoad()
    assert 0 <= load.share() < 100


def test_probes_have_every_kind_of_mixer() -> None:
    from ridgeline.spec.recurrent import RecurrentMixer

    kinds = {type(layer.mixer) for probe in PROBES.values() for layer in probe.spec.layers}
    missing = [kind.__name__ for kind in RecurrentMixer.__args__ if kind not in kinds]
    assert not missing


def test_explain_shows_every_setting(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["ridgeline", "explain", "pocket", "--max-num-seqs", "7", "--json"])
    with pytest.raises(SystemExit):
        main()
    found = json.loads(capsys.readouterr().out)
    settings = {s["name"]: s for s in found["settings"]}
    assert settings["max_num_seqs"]["value"] == "7" and settings["max_num_seqs"]["reason"] == "as given"
    assert all(s["reason"] and s["override"] for s in found["settings"])
    assert {"max_model_len", "block_size", "num_pages", "swap_space_bytes"} <= set(settings)
    assert "not calibrated" in found["machine"]


def test_calibrate_shows_nothing_that_was_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: object
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["ridgeline", "calibrate", "--show"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and "has not been calibrated" in capsys.readouterr().err


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ridgeline", "calibrate", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_a_busy_measurement_is_said_and_not_kept(
    calibrated: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = replace(KEPT, others=0.4, date="2026-12-01")
    monkeypatch.setattr(cli_calibrate, "_measure", lambda: busy)
    assert run(monkeypatch) == 0 and load() == KEPT
    said = " ".join(capsys.readouterr().err.split())
    assert "other programs used 40% of this machine, and 0% during the one of 2026-11-22, which stays" in said
    monkeypatch.setattr(cli_calibrate, "_measure", lambda: replace(busy, others=0.01, speed_change=0.3))
    assert run(monkeypatch) == 0 and load() == replace(busy, others=0.01, speed_change=0.3)
    assert "speed changed by 30%" in capsys.readouterr().err


def test_parts_are_measured_again_alone(
    calibrated: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OthersLoad, "share", lambda self: 0.0)
    assert run(monkeypatch, "--only", "attention-fp8", "--device", "cpu") == 0
    found = load()
    assert found is not None and set(found.rates.attention) == {"float32", "fp8"}
    assert replace(found.rates, attention=RATES.attention) == RATES and found.date != KEPT.date
    assert run(monkeypatch, "--only", "int8,x", "--device", "cpu") == 2 and load() == found
    assert "--only 'x': take memory, float32," in capsys.readouterr().err
    assert run(monkeypatch, "--only", "int8", "--show") == 2
    calibration_path().unlink()
    assert run(monkeypatch, "--only", "int8", "--device", "cpu") == 2
    assert "without --only first" in capsys.readouterr().err


@pytest.mark.nightly
def test_calibrate_measures_this_machine(tmp_path: object) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path), "PATH": "", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "ridgeline", "calibrate", "--json", "--plot", f"{tmp_path}/c.svg"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(v >= 0 for v in found["rates"]["terms"].values())
