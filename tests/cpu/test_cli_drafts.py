"""Drafts on the command line: who proposes them, and what is refused in one line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from ridgeline.cli.main import main

BATCH = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "pocket", "prompt": "x"}}


@pytest.mark.parametrize("command", [
    "generate x", "chat -m pocket", "bench latency -m pocket", "bench throughput -m pocket", "bench replay -m pocket",
    "run-batch requests.jsonl -o out.jsonl",
])  # fmt: skip
def test_drafts_without_a_proposer_are_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("requests.jsonl").write_text(json.dumps(BATCH) + "\n")
    monkeypatch.setattr(sys, "argv", ["ridgeline", *command.split(), "--num-speculative-tokens", "3"])
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(SystemExit) as caught:
        main()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1
    assert "--num-speculative-tokens) is 3, but nothing proposes draft tokens" in error


def test_looked_up_drafts_are_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for flags in ([], ["--speculative", "ngram"], ["--speculative", "ngram", "--num-speculative-tokens", "2"]):
        command = ["generate", "def add(a, b):", "--max-tokens", "60", "--temperature", "0", "--verbose", *flags]
        monkeypatch.setattr(sys, "argv", ["ridgeline", *command])
        with pytest.raises(SystemExit) as caught:
            main()
        assert not caught.value.code
        found.append(capsys.readouterr())
    assert found[0].out == found[1].out == found[2].out
    assert "drafts:" not in found[0].err
    reports = [" ".join(each.err.split()) for each in found]
    assert "drafts: ngram, depth " in reports[1] and "% reaching depths 1 to 4" in reports[1]
    assert "tokens a verification, " in reports[2] and "% reaching depths 1 to 2" in reports[2]
    assert all("; tokens as without drafts" in " ".join(each.err.split()) for each in found[1:])


@pytest.mark.parametrize(("flags", "words"), [
    ("--speculative ./magic", "is './magic': no such folder: ./magic; it must be auto, off, ngram, or a draft model"),
    ("--speculative ngram --num-speculative-tokens 0", "so that no draft may run; set it to 1 or more"),
    ("--draft-acceptance always", "--draft-acceptance) is 'always'; it must be same or rejection or typical"),
    ("--speculative ngram --cache off", "is ngram, but cache='off' verifies no drafts; leave one of them out"),
])  # fmt: skip
def test_settings_that_do_not_go_together(
    flags: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ridgeline", "generate", "x", *flags.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.count("\n") == 1 and words in error
