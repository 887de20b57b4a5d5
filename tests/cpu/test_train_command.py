"""`ridgeline train` as a user runs it: its output, its errors, two ranks, and a run that is killed at any moment."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ridgeline import LLM
from ridgeline.archs import spec_from_config
from ridgeline.cli.main import app
from ridgeline.errors import RidgelineError
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope, to_json
from ridgeline.train import save_tokenizer, train_bpe

NORM = RMSNorm(1e-6)
FLAGS = [
    "--batch-tokens", "256", "--context", "64", "--eval-every", "4", "--save-every", "4", "--warmup-steps", "4",
    "--held-out", "0.3", "--precision", "float32",
]  # fmt: skip


def mixer(**fields: Any) -> Attention:
    return Attention(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "scale": 8**-0.5, "rope": Rope(8)} | fields)


def spec(*mixers: Attention, vocab: int = 300, **fields: Any) -> ModelSpec:
    layers = tuple(Layer(m, GatedMLP(48), NORM) for m in mixers)
    return ModelSpec("tiny", vocab, 32, 128, layers, NORM, **{"tie_word_embeddings": True} | fields)


SPEC = spec(mixer(qk_norm=NORM), mixer(qk_norm=NORM))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = ["one", "two", "three", "four", "while", "(x)", "=", "\n    ", "return", "é"]
    for i in range(24):
        text = f"document {i}: " + " ".join(rng.choice(words, 120))
        (folder / f"{i}.txt").write_text(text, encoding="utf-8")
    return folder


def arguments(tmp_path: Path, data: Path, described: Any = None, out: str = "out", *extra: str) -> list[str]:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(to_json(SPEC) if described is None else described), encoding="utf-8")
    return ["train", str(path), "--data", str(data), "--out", str(tmp_path / out), *FLAGS, *extra]


def run(arguments: list[str]) -> str:
    """Run the command and return its output. Raises what the command raises."""
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def log(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "training" / "log.jsonl").read_text().splitlines()]
    return [{k: line[k] for k in ("step", "loss", "held_out")} for line in lines]


def test_a_folder_that_both_programs_load(tmp_path: Path, data: Path) -> None:
    said = run(arguments(tmp_path, data, None, "out", "--epochs", "3"))
    out = tmp_path / "out"
    assert "(ridgeline)" in said and "(transformers)" in said and "bits per byte" in said
    names = {path.name for path in out.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "README.md", "loss.png", "training",
    }  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["dtype"] == "bfloat16"
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(str(out))
    llm = LLM(str(out), dtype="float32")
    ids = tokenizer("while one = two é").input_ids
    assert ids == llm.encode("while one = two é")
    (ours,) = llm.logits([ids])
    with torch.no_grad():
        np.testing.assert_allclose(ours, theirs(torch.tensor([ids])).logits[0].numpy(), atol=1e-4)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "while one = two é"
    assert llm.generate("one")[0].outputs[0].text
    card = (out / "README.md").read_text()
    assert str(tmp_path) not in card and "manifest" in card.lower()


@pytest.mark.parametrize(
    ("made", "model_type"),
    [
        (spec(mixer()), "llama"),
        (spec(mixer(qk_norm=NORM), tie_word_embeddings=False), "qwen3"),
        (spec(mixer(window=8), mixer(window=8)), "mistral"),
        (spec(mixer(qkv_bias=True)), "qwen2"),
        (spec(mixer(window=8), mixer()), "ridgeline"),
        (spec(mixer(softcap=20.0)), "ridgeline"),
    ],
)  # fmt: skip
def test_a_spec_gets_the_config_that_others_know_where_there_is_one(
    tmp_path: Path, data: Path, made: ModelSpec, model_type: str
) -> None:
    said = run(arguments(tmp_path, data, to_json(made)))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == model_type
    assert spec_from_config(config).layers == made.layers
    assert ("(transformers)" in said) == (model_type != "ridgeline")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[5], pytest.param([3, 8], marks=pytest.mark.nightly)], ids=["once", "twice"])
def test_a_killed_run_is_resumed(kills: list[int], tmp_path: Path, data: Path) -> None:
    """SIGKILL after some lines of the log; the losses equal those of an undisturbed run to the bit."""
    flags = ("--epochs", "6", "--dropout", "0.1")
    run(arguments(tmp_path, data, None, "whole", *flags))
    whole = log(tmp_path / "whole")
    command = [sys.executable, "-m", "ridgeline", *arguments(tmp_path, data, None, "killed", *flags)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    path = tmp_path / "killed" / "training" / "log.jsonl"
    for lines in kills:
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while time.monotonic() < until and (not path.exists() or path.read_text().count("\n") < lines):
            assert process.poll() is None, "the run ended before it was killed"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    assert log(tmp_path / "killed") == whole
    assert (tmp_path / "killed" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


@pytest.mark.nightly
def test_two_ranks_train_as_one_does(tmp_path: Path, data: Path) -> None:
    run(arguments(tmp_path, data, None, "one", "--epochs", "3", "--micro-tokens", "64"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ridgeline"]
    flags = arguments(tmp_path, data, None, "two", "--epochs", "3", "--micro-tokens", "64")
    found = subprocess.run([*command, *flags], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    one, two = log(tmp_path / "one"), log(tmp_path / "two")
    assert len(one) == len(two) > 8
    for a, b in zip(one, two, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert (a["held_out"] is None) == (b["held_out"] is None)
    assert two[-1]["held_out"] == pytest.approx(one[-1]["held_out"], rel=1e-4)


def refused(arguments: list[str]) -> str:
    with pytest.raises(RidgelineError) as caught:
        run(arguments)
    return str(caught.value)


def test_bad_input_is_one_clear_line(tmp_path: Path, data: Path) -> None:
    def given(described: Any = None, *extra: str) -> list[str]:
        return arguments(tmp_path, data, described, "bad", *extra)

    heads = to_json(SPEC)
    heads["layers"][0]["layer"]["mixer"]["num_kv_heads"] = 3
    assert "num_heads 4 is not a multiple of num_kv_heads 3" in refused(given(heads))
    config = {"model_type": "llama", "vocab_size": 300, "hidden_size": 30, "intermediate_size": 8,
              "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
    assert "hidden_size" in refused(given(config))
    assert "no room for 256 bytes" in refused(given(to_json(spec(mixer(), vocab=200))))
    assert "--context is 256, but the model has only 128 positions" in refused(given(None, "--context", "256"))
    assert "multiple of" in refused(given(None, "--batch-tokens", "100"))
    assert "precision is 'int8'; use float32 or bfloat16" in refused(given(None, "--precision", "int8"))
    for option, value, allowed in (
        ("--learning-rate", "nan", "from 0 to 1000"), ("--dropout", "1.5", "from 0 to 1"), ("--seed", "-1", "from 0"),
        ("--decay-share", "2", "from 0 to 1"), ("--epochs", "inf", "at most 1,000,000"),
    ):  # fmt: skip
        assert allowed in refused(given(None, option, value)), option
    for option in ("--batch-tokens", "--context", "--micro-tokens"):  # errors of the option parser
        assert CliRunner().invoke(app, given(None, option, "0")).exit_code == 2
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refused(arguments(tmp_path, data, None, "file"))
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.bin"
    empty.write_text("")
    binary.write_bytes(b"\x00\xff\xfe")
    for path, word in ((empty, "is empty"), (binary, "is not UTF-8 text"), (tmp_path / "none", "does not exist")):
        flags = given()
        flags[flags.index("--data") + 1] = str(path)
        assert word in refused(flags)
    assert "above 0" in refused(given(None, "--epochs", "0"))
    assert "less than one batch" in refused(given(None, "--batch-tokens", "65536"))
    assert "data is missing" in refused(["train", str(tmp_path / "spec.json"), "--out", "x"])
    assert "use pocket" in refused(["train", "--recipe", "bread"])
    assert "leave out data" in refused(["train", "--recipe", "pocket", "--data", "x"])


def test_another_spec_or_corpus_does_not_go_on(tmp_path: Path, data: Path) -> None:
    run(arguments(tmp_path, data))
    wider = to_json(spec(mixer(qk_norm=NORM), mixer(qk_norm=NORM), mixer(qk_norm=NORM)))
    assert "config.num_hidden_layers was 2, is 3" in refused(arguments(tmp_path, data, wider))
    assert "options.seed was 0, is 1" in refused(arguments(tmp_path, data, None, "out", "--seed", "1"))
    (data / "3.txt").write_text("something else", encoding="utf-8")
    assert "3.txt has another text" in refused(arguments(tmp_path, data))


def test_data_of_another_corpus_or_tokenizer_is_never_taken(tmp_path: Path, data: Path) -> None:
    """After a kill at any moment, the manifest is written first, and the other files must belong to it."""
    run(arguments(tmp_path, data))
    prepared = tmp_path / "out" / "training" / "data"
    shutil.rmtree(tmp_path / "out" / "training" / "checkpoints")
    shutil.rmtree(prepared / "held-out")  # the state of a run that was killed between the two shards
    (data / "3.txt").write_text("something else", encoding="utf-8")
    assert "3.txt has another text" in refused(arguments(tmp_path, data))
    other = tmp_path / "tokenizer"
    save_tokenizer(train_bpe(["another text altogether"] * 3, 300), other)
    run(arguments(tmp_path, data, None, "new"))
    assert "made with another tokenizer" in refused(arguments(tmp_path, data, None, "new", "--tokenizer", str(other)))
    said = run(arguments(tmp_path, data, None, "given", "--tokenizer", str(other)))
    assert "of the model's 300 stay unused" in said
    written = tmp_path / "given" / "tokenizer.json"
    assert json.loads(written.read_text())["model"] == json.loads((other / "tokenizer.json").read_text())["model"]


def test_a_disk_that_is_full_leaves_the_last_checkpoint(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ridgeline.train.saves as saves

    write, calls = saves.write_safetensors, []

    def full(path: Path, tensors: Any) -> None:
        calls.append(path)
        if len(calls) > 1:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        write(path, tensors)

    monkeypatch.setattr(saves, "write_safetensors", full)
    assert "No space left" in refused(arguments(tmp_path, data))
    assert [p.name for p in (tmp_path / "out" / "training" / "checkpoints").iterdir()] == ["step-0000004"]
    monkeypatch.undo()
    run(arguments(tmp_path, data))
    assert log(tmp_path / "out")[-1]["held_out"] is not None
