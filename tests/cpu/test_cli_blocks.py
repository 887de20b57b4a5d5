"""The commands on block diffusion models, as a user gives them: `inspect`, `chat`, and the rows of `doctor`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cpu.pocket_blocks import MASK, write_pocket_blocks
from oracle.ours import FULL, LENGTH, MLP, NORM, WIDTH, write
from ridgeline import LLM, SamplingParams
from ridgeline.cli.doctor import op_rows
from ridgeline.cli.main import app
from ridgeline.errors import RequestError
from ridgeline.load.conversation import Conversation
from ridgeline.ops import open_table
from ridgeline.spec import Layer, MaskedDiffusion, ModelSpec, WholeSequence

Command = Callable[..., list[str]]
SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("blocks")
    write_pocket_blocks(path, SIZE)
    (path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return str(path)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs a command with lines as its input, and returns its stdout and stderr."""

    def run(*words: str, lines: str = "") -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        app(list(words), standalone_mode=False)
        return list(capsys.readouterr())

    return run


def test_inspect_says_how_answers_are_filled(folder: str, command: Command, tmp_path: Path) -> None:
    out, _ = command("inspect", folder)
    said = " ".join(out.split())
    assert f"mask token {MASK:,}; logits are for the token after a position" in said
    assert f"a token sees its own block of {SIZE}, and all blocks before it" in said
    assert f"passes at most {SIZE} for a block" in said
    found = json.loads(command("inspect", folder, "--json")[0])["diffusion"]
    assert found == {"sight": "Blocks", "block": SIZE, "mask_token": MASK, "predicts_next": True}
    layer = Layer(FULL.seeing(WholeSequence()), MLP, NORM)
    write(ModelSpec("whole", 64, WIDTH, LENGTH, (layer,), NORM, diffusion=MaskedDiffusion(5)), tmp_path)
    said = " ".join(command("inspect", str(tmp_path))[0].split())
    assert "a token sees all tokens of its sequence" in said
    assert "logits are for the token at the same position" in said
    assert "--block-length fills it in blocks" in said
    assert json.loads(command("inspect", "pocket", "--json")[0])["diffusion"] is None
    assert "a token sees" not in command("inspect", "pocket")[0]


def test_a_conversation_with_blocks(folder: str, command: Command) -> None:
    """Turns are those of Python, the flags of passes act, and `/stats` counts the passes."""
    options = ("--max-tokens", "22", "--temperature", "0", "--confidence-threshold", "0.2")
    out, err = command("chat", "-m", folder, *options, lines="def add(a, b):\nand then\n/stats\n")
    llm = LLM(folder)
    params = SamplingParams(max_tokens=22, temperature=0, confidence_threshold=0.2)
    talk, texts = Conversation(llm.frontend.tokenizer()), []
    for line in ("def add(a, b):", "and then"):
        (answer,) = llm.generate([talk.ask(line)], params)
        talk.answered(answer.outputs[0].token_ids, answer.outputs[0].text)
        texts.append(f"{answer.outputs[0].text}\n")
    assert out == "".join(texts)
    assert answer.num_passes < len(answer.outputs[0].token_ids)
    assert f"passes         {answer.num_passes}, " in err
    assert " 0 from the prefix cache" not in err


def test_flags_of_the_other_kind_fail_before_the_first_turn(folder: str, command: Command) -> None:
    with pytest.raises(RequestError, match="repetition_penalty needs the tokens before a token"):
        command("chat", "-m", folder, "--repetition-penalty", "1.1", lines="hello\n")
    with pytest.raises(RequestError, match="confidence_threshold needs a diffusion model"):
        command("chat", "-m", "pocket", "--confidence-threshold", "0.5", lines="hello\n")


def test_doctor_says_which_backend_serves_blocks() -> None:
    for device, backend in (("cpu", "cpu"), ("reference", "reference")):
        rows = op_rows(open_table(device))
        found = {row["case"]: row for row in rows if row["op"] == "attention"}
        assert {found[case]["backend"] for case in ("blocks", "whole sequence")} == {backend}
    assert found["blocks"]["refusals"]["sdpa"] == "supports causal attention only"
