"""`ridgeline distill`: a student comes closer to its teacher, runs resume to the bit, and errors leave no folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cpu.doc_folder import CONFIG, write_model
from ridgeline.cli.main import app
from ridgeline.errors import DataError, RequestError, RidgelineError
from ridgeline.load.hub import find_model
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.distill import Distilled, DistillOptions, distill, parse_stages
from ridgeline.train.loop import Progress
from ridgeline.train.output import write_with_weights
from ridgeline.train.ranks import Ranks

OPTIONS = DistillOptions(
    tokens=1536, stages=parse_stages("layers=0.5,logits"), context=32, batch_tokens=64, learning_rate=3e-3,
    save_every=4, eval_every=6,
)  # fmt: skip
RANKS = Ranks("reference")


class Stop:
    """Shows nothing, and interrupts a run after a number of updates; a `Watch`."""

    def __init__(self, after: int | None = None) -> None:
        self.left, self.losses = after, list[float]()

    def say(self, line: str) -> None:
        pass

    def tokens(self, name: str, total: int) -> Any:
        return lambda tokens, facts="": None

    def run(self, name: str, run: Any) -> Any:
        def on_step(progress: Progress) -> None:
            self.losses.append(progress.loss)
            if self.left is not None:
                self.left -= 1
                if not self.left:
                    raise KeyboardInterrupt

        return on_step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a teacher, a student that is the teacher with noise, and a text."""
    write_model(tmp_path / "teacher")
    rewrite(tmp_path / "student", str(tmp_path / "teacher"), noise=0.1)
    rng = np.random.default_rng(0)
    words = ["one", "two", "three", "while", "(x)", "=", "\n    ", "return"]
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(words, 2000)))
    return tmp_path


def rewrite(out: Path, source: str, *, noise: float = 0.0, mlp: int | None = None) -> None:
    """Write a model again: with noise of a share of each matrix, or with the first neurons of its MLPs only."""
    loaded = load_model(source, LoadOptions(device="reference", dtype="float32"))
    rng, found, config = torch.Generator().manual_seed(0), {}, dict(loaded.checkpoint.config)
    for w in loaded.spec.weights():
        x = torch.as_tensor(loaded.model.weights[w.name]).float()
        if w.is_matrix:
            x = x + noise * x.std() * torch.randn(x.shape, generator=rng)
        if mlp and ".mlp." in w.name:
            x = (x[:, :mlp] if ".down." in w.name else x[:mlp]).contiguous()
        found[w.name] = x
    config["intermediate_size"] = mlp or config["intermediate_size"]
    out.mkdir()
    write_with_weights(out, find_model(source), config, found, "float32", [5, 6, 7, 8])


def run(folder: Path, out: str, options: DistillOptions = OPTIONS, watch: Any = None) -> Distilled:
    return distill(
        str(folder / "student"), str(folder / "teacher"), Corpus.from_paths([folder / "text.txt"]), folder / out,
        options, watch or Stop(), RANKS, dtype="float32",
    )  # fmt: skip


def test_a_student_comes_closer_to_its_teacher(folder: Path) -> None:
    found = run(folder, "out")
    assert found.after.kl.value < 0.5 * found.before.kl.value
    assert found.after.top1_agreement.value > found.before.top1_agreement.value
    names = {path.name for path in (folder / "out").iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "distill.json", "training"}
    logs = [(folder / "out" / "training" / f"{name}.jsonl").read_text() for name in ("1-layers", "2-logits")]
    assert [log.count("\n") for log in logs] == [12, 12]
    report = json.loads((folder / "out" / "distill.json").read_text())
    assert report["measured"]["after"]["kl"] == found.after.kl.value and report["tokens"] == 1536
    assert str(folder) not in json.dumps(report)
    assert not list(folder.glob(".*"))  # no working folder is left
    written = load_model(str(folder / "out"), LoadOptions(device="reference", dtype="float32"))
    assert written.spec == load_model(str(folder / "student"), LoadOptions(device="reference")).spec


@pytest.mark.parametrize("options", [OPTIONS, replace(OPTIONS, top_k=8, lora=2)], ids=["plain", "top-k and lora"])
def test_a_run_that_was_stopped_ends_as_one_run_to_the_bit(folder: Path, options: DistillOptions) -> None:
    whole = Stop()
    run(folder, "whole", options, whole)
    for stop in (3, 17):
        first, second = Stop(stop), Stop()
        with pytest.raises(KeyboardInterrupt):
            run(folder, "parts", options, first)
        assert not (folder / "parts").exists()
        run(folder, "parts", options, second)
        assert len(second.losses) >= 7 and second.losses == whole.losses[-len(second.losses) :]
        one, two = ((folder / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
        assert one == two
        (folder / "parts").rename(folder / f"parts {stop}")


def test_stages_train_what_they_should(folder: Path) -> None:
    def changed(options: DistillOptions, out: str) -> set[str]:
        run(folder, out, options)
        before, after = (
            load_model(str(folder / name), LoadOptions(device="reference", dtype="float32")).model.weights
            for name in ("student", out)
        )
        return {name for name in before if not np.array_equal(np.asarray(before[name]), np.asarray(after[name]))}

    layers = changed(replace(OPTIONS, stages=parse_stages("layers"), tokens=128), "a")
    assert layers and all(name.startswith("layers.") for name in layers)
    mixers = changed(replace(OPTIONS, stages=parse_stages("logits"), tokens=128, trained=("layers.*.mixer.*",)), "b")
    assert mixers and all(".mixer." in name for name in mixers)
    lora = changed(replace(OPTIONS, stages=parse_stages("logits"), tokens=128, lora=2), "c")
    assert lora and all(name.startswith("layers.") and not name.endswith("norm.weight") for name in lora)
    assert "embed.weight" in changed(replace(OPTIONS, stages=parse_stages("tokens"), tokens=128), "d")


def test_the_most_likely_tokens_are_kept_beside_the_result(folder: Path) -> None:
    options = replace(OPTIONS, stages=parse_stages("logits"), tokens=256, top_k=VOCABULARY)
    run(folder, "a", options)
    (kept,) = folder.glob("teacher-*")
    files = {path: path.stat().st_mtime_ns for path in kept.rglob("*.npz")}
    run(folder, "b", options)
    assert files == {path: path.stat().st_mtime_ns for path in kept.rglob("*.npz")}
    run(folder, "c", replace(options, top_k=0))
    a, c = (json.loads((folder / name / "distill.json").read_text())["measured"]["after"]["kl"] for name in "ac")
    assert a == pytest.approx(c, rel=1e-2)  # with all tokens kept, the loss is that of a streamed teacher


VOCABULARY: int = CONFIG["vocab_size"]


def test_pocket_with_half_of_its_mlps_improves_in_a_few_updates(tmp_path: Path) -> None:
    rewrite(tmp_path / "student", "pocket", mlp=352)
    source = Path(str(distill.__code__.co_filename)).parent
    options = DistillOptions(
        tokens=1024, stages=parse_stages("logits"), context=64, batch_tokens=256, learning_rate=1e-3
    )  # fmt: skip
    found = distill(
        str(tmp_path / "student"), "pocket", Corpus.from_paths([source]), tmp_path / "out", options, Stop(), RANKS
    )
    assert found.after.kl.value < 0.9 * found.before.kl.value
    assert found.teacher == "pocket" and found.student == "student"


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_the_list_of_stages() -> None:
    def shares(text: str) -> list[tuple[str, float]]:
        return [(stage.name, pytest.approx(stage.share)) for stage in parse_stages(text)]

    assert shares("logits") == [("logits", 1.0)]
    assert shares("layers,logits") == [("layers", 0.2), ("logits", 0.8)]
    assert shares("layers=0.5, streams ,logits") == [("layers", 0.5), ("streams", 0.2), ("logits", 0.3)]
    for text, words in (
        (
            "layers,layer",
            "'layer' is not a stage, or is repeated; stages are matrices, layers, streams, logits, tokens",
        ),
        ("logits,logits", "'logits' is not a stage, or is repeated"),
        ("", "'' is not a stage"),
        ("layers=x,logits", "the share 'x' is not a number"),
        ("layers=1,logits", "the shares are 1, 0; each must be above 0 and their sum 1"),
        ("layers=0.5,logits=0.6", "the shares are 0.5, 0.6"),
        ("layers=nan,logits", "the shares are nan, nan"),
    ):
        with pytest.raises(RequestError, match=words.replace("(", r"\(")):
            parse_stages(text)


def command(folder: Path, *extra: str, student: str = "student", teacher: str = "teacher") -> list[str]:
    flags = "--context 32 --batch-tokens 64 --save-every 4 --dtype float32".split()
    return [
        "distill", str(folder / student), "--teacher", str(folder / teacher), "--data", str(folder / "text.txt"),
        "--out", str(folder / "out"), *flags, *(extra or ("--tokens", "512")),
    ]  # fmt: skip


def refused(arguments: list[str]) -> str:
    with pytest.raises(RidgelineError) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_bad_input_is_one_clear_line_and_leaves_no_folder(folder: Path) -> None:
    assert "tokens to train on, which are fewer than the 9,000,000 of --tokens; give more text, --tokens" in refused(
        command(folder, "--tokens", "9000000")
    )
    assert "--repeat" in refused(command(folder, "--tokens", "100000", "--repeat", "2"))
    assert "batch_tokens (--batch-tokens) is 64; it must be a multiple of context (--context) 48" in refused(
        command(folder, "--tokens", "512", "--context", "48")
    )
    assert "context (--context) is 8192, and one of the models has only 4096 positions" in refused(
        command(folder, "--tokens", "512", "--context", "8192", "--batch-tokens", "8192")
    )
    assert "no weight that can train matches the pattern 'x'" in refused(
        command(folder, "--tokens", "512", "--train", "x")
    )
    assert "top_k (--top-k) is for stage logits" in refused(
        command(folder, "--tokens", "512", "--top-k", "3", "--stages", "layers")
    )
    assert "the student's vocabulary has 320 tokens and the teacher's 4,096" in refused(
        [*command(folder), "--teacher", "pocket"]
    )
    assert not list(folder.glob("*out*"))
    (folder / "out").mkdir()
    assert "out exists; name another folder with --out, or remove it" in refused(command(folder))


def test_a_teacher_with_other_tokens_is_refused(folder: Path) -> None:
    path = folder / "teacher" / "tokenizer.json"
    vocabulary = json.loads(path.read_text())
    ids = vocabulary["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    path.write_text(json.dumps(vocabulary))
    assert "in the student's vocabulary and 'b' in the teacher's; a teacher must have the vocabulary" in refused(
        command(folder)
    )


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(folder: Path) -> None:
    run_with = replace(OPTIONS, stages=parse_stages("logits"))
    watch = Stop(5)
    with pytest.raises(KeyboardInterrupt):
        run(folder, "out", run_with, watch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "ridgeline.train.objectives._Streamed.divergence", lambda self, logits, rows: logits.sum() * float("nan")
        )
        with pytest.raises(DataError, match=r"the loss of step 5 is nan .* \(the last good checkpoint is of step 4\)"):
            run(folder, "out", run_with)
    assert not (folder / "out").exists()
    assert run(folder, "out", run_with).after.kl.value < 1.0  # and the run continues from there


def test_a_full_disk_is_one_line_and_the_run_continues(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("ridgeline.train.saves.write_safetensors", "ridgeline.train.output.write_safetensors"):
        with monkeypatch.context() as patch:
            patch.setattr(name, full)
            assert "No space left on device" in refused(command(folder))
        assert not (folder / "out").exists()
    CliRunner().invoke(app, command(folder), catch_exceptions=False)
    assert (folder / "out" / "config.json").exists()


def test_ctrl_c_ends_with_one_line_and_no_folder(folder: Path) -> None:
    arguments = [sys.executable, "-m", "ridgeline", *command(folder, "--tokens", "3000", "--stages", "logits")]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    saves, patience = folder / ".out.unfinished" / "1-logits" / "checkpoints", time.monotonic() + 120
    while not list(saves.glob("step-*")) and process.poll() is None and time.monotonic() < patience:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert said.splitlines()[-1].startswith("ridgeline: interrupted") and "Traceback" not in said
    assert not (folder / "out").exists()


@pytest.mark.nightly
def test_two_ranks_distill_as_one_does(folder: Path) -> None:
    one = command(folder, "--tokens", "512")
    CliRunner().invoke(app, one, catch_exceptions=False)
    (folder / "out").rename(folder / "one")
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "ridgeline"]
    found = subprocess.run([*launch, *one], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    reports = [json.loads((folder / name / "distill.json").read_text()) for name in ("one", "out")]
    kl = [report["measured"]["after"]["kl"] for report in reports]
    assert kl[1] == pytest.approx(kl[0], rel=1e-3)
