"""Each command that runs a model refuses draft tokens that nobody proposes, in one line."""

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
