"""The lab: verdicts on faked measurements, records that are taken up again, and a page that needs no network."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from html.parser import HTMLParser
from math import comb
from pathlib import Path
from typing import Any

import lab_engine_fakes
import lab_fakes
import lab_model_fakes
import numpy as np
import pytest

import ridgeline.lab.experiments
from ridgeline.catalog.machines import hardware
from ridgeline.cli.main import main
from ridgeline.errors import RequestError
from ridgeline.lab import NAMES, Experiment, Record, Setup, Verdict, find, passes, run, run_all
from ridgeline.lab.claim import claims
from ridgeline.lab.experiment import Figure, Series, Untried
from ridgeline.lab.judgement import at_least, at_most, equal, within
from ridgeline.lab.page import counted, page

FOLDER = Path(ridgeline.lab.experiments.__file__).parent
SAID_WRONGLY = {25, 42}  # claims that arithmetic refutes
NEVER_TRIED = {10}  # claims whose experiment says what would be needed
SETUP = Setup(True, 0, "pocket", None, hardware("cpu-laptop"))
FAKED = lab_fakes.FAKED | lab_engine_fakes.FAKED | lab_model_fakes.FAKED


def experiment(**more: Any) -> Experiment:
    """Return an experiment on claim 1 that measures 2 where 2 is predicted."""
    made = Experiment(
        "toy", "A toy", (1,), lambda setup: {"x": 2}, lambda setup: {"x": 2.5},
        lambda predicted, measured: (within(1, measured["x"], 2, 3, "x was seen"),), "Nothing to read.",
        lambda predicted, measured: (Figure("Points", "x", "y", (Series("a", [(1.0, 2.0), (2.0, 4.0)], True),)),),
    )  # fmt: skip
    return replace(made, **more)


def test_every_claim_is_told_once_and_judged_by_one_experiment_at_most() -> None:
    assert list(claims()) == list(range(1, 48))
    assert all(c.text and c.source for c in claims().values())
    judged = [number for name in NAMES for number in find(name).claims]
    assert len(judged) == len(set(judged)) and set(judged) <= set(claims())
    files = {path.stem: path for path in FOLDER.glob("*.py") if path.stem != "__init__"}
    assert set(files) == set(NAMES)
    assert all(len(path.read_text("utf-8").splitlines()) <= 150 for path in files.values())
    text = (Path(__file__).parents[2] / "docs" / "lab.md").read_text("utf-8")
    headings = {"recall": "Associative recall"}  # the bare word has another meaning in this project's prose
    assert all(f"\n### {headings.get(name, name)}\n" in text and f"| `{name}` |" in text for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_verdicts_follow_from_the_numbers(name: str) -> None:
    predicted, good, bad, wrong = FAKED[name]
    found = find(name)
    held = found.judge(predicted, good)
    assert tuple(j.claim for j in held) == found.claims
    assert all((j.verdict is Verdict.holds) == (j.claim not in NEVER_TRIED) for j in held)
    assert {j.claim for j in found.judge(predicted, bad) if j.verdict is Verdict.differs} == wrong


def test_words_of_one_pass_do_not_know_of_each_other() -> None:
    predicted, good, *_ = FAKED["diffusion"]
    for right in ({"1": 0.2}, {"8": 0.99}, {"2": 0.9}):
        (judgement,) = find("diffusion").judge(predicted, {**good, "right": good["right"] | right})
        assert judgement.verdict is Verdict.differs
    texts = passes.texts_in_order()
    assert len(texts) == len({tuple(text) for text in texts}) == comb(15, 8) and (np.diff(texts, axis=1) >= 0).all()
    drawn = np.random.default_rng(0).choice(len(texts), (200_000, 8))
    alone = texts[drawn, np.arange(8)]  # each word comes from another text
    assert abs((np.diff(alone, axis=1) >= 0).all(1).mean() - passes.chance_of_one_pass()) < 0.003
    assert passes.share_in_order(8, 1) == 1


QUICK = {  # one fact that refutes a claim where nothing was trained
    "heads": {"pages": lab_model_fakes.HEADS | {"8": 4096}},
    "windows": {"recall": {"none": 0.5, "all": 0.5, "half": 0.4}},
    "layers": {"pages": [64, 64]},
}


@pytest.mark.parametrize("name", QUICK)
def test_verdicts_without_training_follow_from_the_other_numbers(name: str) -> None:
    predicted, good, *_ = FAKED[name]
    quick = {**good, "trained": lab_model_fakes.UNTRAINED}
    for facts, verdict in ((quick, Verdict.holds), (quick | QUICK[name], Verdict.differs)):
        (judgement,) = find(name).judge(predicted, facts)
        assert judgement.verdict is verdict and "need a run without --quick" in judgement.text


@pytest.mark.parametrize("name", lab_fakes.EXACT + lab_engine_fakes.EXACT + lab_model_fakes.EXACT)
def test_exact_items_hold_on_every_machine(name: str) -> None:
    for j in run(find(name), SETUP).judgements:
        assert (j.verdict is Verdict.holds) == (j.claim not in SAID_WRONGLY | NEVER_TRIED)


def test_limits_count_the_end_of_an_interval() -> None:
    assert at_least(1, 2.0, 1.5, "", (1.6, 2.4)).verdict is Verdict.holds
    assert at_least(1, 2.0, 1.5, "", (1.4, 2.6)).verdict is Verdict.differs
    assert at_most(1, 1.0, 1.5, "", (0.4, 1.6)).verdict is Verdict.differs
    assert equal(1, 3, 4, "").verdict is Verdict.differs


def test_a_prediction_is_kept_before_anything_is_measured(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def measure(setup: Setup) -> dict[str, Any]:
        seen.update(json.loads((tmp_path / "toy.json").read_text()))
        return {"x": 2.5}

    record = run(experiment(measure=measure), SETUP, tmp_path)
    assert seen["predicted"] == {"x": 2} and "measured" not in seen
    assert seen["predicted_at"] == record.predicted_at <= record.measured_at


def test_a_record_is_taken_up_again_only_for_the_same_setup(tmp_path: Path) -> None:
    first = run(experiment(), SETUP, tmp_path)
    never = experiment(measure=lambda setup: pytest.fail("it was measured before"))
    assert run(never, SETUP, tmp_path) == first
    assert run(experiment(), replace(SETUP, seed=1), tmp_path).setup["seed"] == 1
    for text in ("{", "[]", '{"format": 1}', json.dumps(first.to_json())[:-9]):
        (tmp_path / "toy.json").write_text(text)
        assert run(experiment(), SETUP, tmp_path).measured == {"x": 2.5}


def test_what_cannot_be_tried_says_what_is_needed(tmp_path: Path) -> None:
    def measure(setup: Setup) -> dict[str, Any]:
        raise Untried("this needs a GPU")

    for _ in range(2):  # the second time, the record is read back
        (judgement,) = run(experiment(measure=measure), SETUP, tmp_path).judgements
        assert (judgement.verdict, judgement.text) == (Verdict.untried, "this needs a GPU")


def test_a_refusal_ends_one_experiment_and_not_several(tmp_path: Path) -> None:
    def refuse(setup: Setup) -> dict[str, Any]:
        raise RequestError("the model has no windows")

    for part in ("predict", "measure"):
        refusing = experiment(**{part: refuse})
        with pytest.raises(RequestError, match="no windows"):
            run(refusing, SETUP)
        found = run_all([refusing, experiment(name="other")], SETUP, tmp_path / part, lambda record: None)
        assert [j.verdict for r in found for j in r.judgements] == [Verdict.untried, Verdict.holds]
        assert found[0].judgements[0].text == "the model has no windows"


class Links(HTMLParser):
    """Collects what a page would load, and the elements that it opened and did not close."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "link", "br", "use", "path"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag


def test_the_page_needs_no_network_and_has_the_data_of_its_figures() -> None:
    record = run(experiment(title="A <toy> & more"), SETUP)
    busy = replace(record, others=0.5)
    text = page((busy,), "not calibrated")
    links = Links()
    links.feed(text)
    assert not links.open and all(link.startswith("#") for link in links.loaded)
    assert "A &lt;toy&gt; &amp; more" in text and "other programs used 50% of the machine" in text
    assert '<td class="number">1</td><td class="number">2</td>' in text  # a point of the curve
    assert "prefers-color-scheme: dark" in text and "currentColor" in text and "#010203" not in text
    assert len(text) < 200_000
    assert counted(record.judgements) == "1 of 47 claims: 1 hold, 0 differ, 0 cannot be tried here"


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["ridgeline", "lab", *words])
    with pytest.raises(SystemExit) as caught:
        main()
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = call(monkeypatch, capsys, "35", "orca", "--quick", "--out", str(tmp_path / "lab"))
    assert status == 0 and out.count("Continuous batching against static batches") == 1
    assert max(map(len, out.splitlines())) <= 80
    assert sorted(path.name for path in (tmp_path / "lab").iterdir()) == ["lab.html", "lab.json", "orca.json"]
    (record,) = json.loads((tmp_path / "lab" / "lab.json").read_text())
    assert record["judgements"][0]["claim"] == 35
    status, out, _ = call(monkeypatch, capsys)
    assert status == 0 and "harmonic" not in out and "Jamba" in out
    status, out, _ = call(monkeypatch, capsys, "list", "--json")
    assert len(json.loads(out)) == 47


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("orka",), "did you mean orca"),
        (("48",), "no number of a claim"),
        (("list", "orca"), "`list` stands alone"),
        (("orka", "all"), "`all` stands alone"),
        (("orca", "--seed", "-1"), "--seed is -1"),
        (("orca", "--out", "/dev/null/x"), "cannot be written"),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = call(monkeypatch, capsys, *words)
    assert status == 2 and message in err and err.count("\n") == 1


def test_a_record_with_times_is_busy_above_a_tenth() -> None:
    record: Record = run(experiment(), SETUP)
    assert replace(record, others=0.11).is_busy and not replace(record, others=0.09).is_busy
    assert not replace(record, others=0.11, timed=False).is_busy
