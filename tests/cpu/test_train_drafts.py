"""Training of drafts: they learn what a target says, resume to the bit, and are written as folders that load."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cpu.doc_folder import VOCABULARY, write_lines, write_model
from ridgeline.cli.main import app
from ridgeline.errors import CheckpointError, DataError, DeviceError, RidgelineError
from ridgeline.load.heads import open_head, read_head
from ridgeline.nn import Model
from ridgeline.nn.heads import build_head
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.spec import Attention, GatedMLP, Layer, ModelSpec, RMSNorm, Rope
from ridgeline.spec.cards import measured_acceptance
from ridgeline.spec.heads import MedusaSpec
from ridgeline.train import Document
from ridgeline.train.drafts import DraftOptions
from ridgeline.train.drafts.attention import open_training
from ridgeline.train.drafts.batch import Batch, Target
from ridgeline.train.drafts.continuations import Continuation
from ridgeline.train.drafts.learners import EagleLearner, Learner, MedusaLearner, ModelLearner
from ridgeline.train.drafts.loop import DraftTrainer
from ridgeline.train.drafts.measure import measure_draft
from ridgeline.train.drafts.output import write_trained_head
from ridgeline.train.drafts.prompts import cut_texts, draw_prompts
from ridgeline.train.drafts.shapes import aux_layers, draft_spec, frequent_tokens, head_spec

VOCAB, WIDTH, PROMPT, LENGTH = 24, 32, 3, 20
NORM = RMSNorm(1e-6)
MIXER = Attention(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25, rope=Rope(16))
SPEC = ModelSpec("toy", VOCAB, WIDTH, 64, (Layer(MIXER, GatedMLP(32), NORM),) * 2, NORM)
ORDER = np.random.default_rng(0).permutation(VOCAB)  # the toy says ORDER[t] after t


def toy(vocabulary: np.ndarray | None = None) -> Target:
    """Return a target whose next token depends on the last one alone: its layers add nothing to the embedding."""
    rng, table = np.random.default_rng(1), open_training("reference")
    weights: dict[str, Any] = {}
    for w in SPEC.weights():
        is_silent = w.name.endswith(("mixer.o.weight", "mlp.down.weight"))
        weights[w.name] = torch.zeros(w.shape) if is_silent else torch.ones(w.shape)
    embedding = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    head = np.zeros_like(embedding)
    head[ORDER] = 0.3 * embedding
    weights |= {"embed.weight": torch.from_numpy(embedding), "head.weight": torch.from_numpy(head)}
    return Target(Model(SPEC, weights, table, 64), table, vocabulary)


def said(count: int, seed: int = 0) -> list[Continuation]:
    """Return what the toy says after prompts of random tokens; lengths differ."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(count):
        ids = rng.integers(0, VOCAB, PROMPT).tolist()
        while len(ids) < LENGTH - int(rng.integers(0, 4)):
            ids.append(int(ORDER[ids[-1]]))
        found.append(Continuation(np.array(ids), PROMPT))
    return found


def options(kind: Any, **fields: Any) -> DraftOptions:
    chosen = {"train_tokens": 10_000, "batch_tokens": 160, "learning_rate": 3e-2, "warmup_steps": 5, "depth": 3}
    return DraftOptions(kind=kind, **{**chosen, "save_every": 10, "weight_decay": 0.0, **fields})


def learner(o: DraftOptions, target: Target) -> Learner:
    if o.kind == "draft":
        return ModelLearner(draft_spec(SPEC), target, LENGTH, o.seed)
    spec: Any = head_spec(o, SPEC)
    return MedusaLearner(spec, target) if o.kind == "medusa" else EagleLearner(spec, target, o.practised, o.seed)


def at_night(*kinds: str) -> list[Any]:
    return [pytest.param(kind, marks=pytest.mark.nightly) for kind in kinds]


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["medusa", "eagle", *at_night("eagle3", "draft")])
def test_a_draft_learns_a_target_that_is_certain(kind: str, tmp_path: Path) -> None:
    target, o = toy(), options(kind, draft_steps=3 if kind == "eagle3" else None)
    own, held_out = learner(o, target), said(8, seed=1)
    before = measure_draft(own, target, held_out, 3)
    DraftTrainer(own, target, said(32), o, tmp_path, {}).run()
    after, seen = measure_draft(own, target, held_out, 3), losses(tmp_path)
    assert np.mean(seen[-5:]) < 0.5 * np.mean(seen[:5])
    assert before.shares[2] < 0.5
    assert after.shares[2] > 0.95
    assert after.acceptance.tokens_per_verification.value > 3.8
    assert f"{after.acceptance.tokens_per_verification.value:.2f}" in after.lines()[1]
    if kind == "medusa":  # the best token of each head is right, so no other one is
        assert all(len(row) == 10 and row[0] > 0.95 and sum(row) <= 1 for row in after.accuracies)
        assert len(after.accuracies) == 3 and before.accuracies[2][0] < 0.5
    else:
        assert after.accuracies == ()


class Stop(Exception):
    pass


@pytest.mark.parametrize("kind", ["eagle", *at_night("medusa", "draft")])
def test_a_stopped_run_resumes_to_the_bit(kind: str, tmp_path: Path) -> None:
    o = options(kind, train_tokens=1_600, save_every=4)

    def run(folder: Path, until: int = 10**9) -> Learner:
        target = toy()
        own = learner(o, target)

        def on_step(progress: Any) -> None:
            if progress.step == until:
                raise Stop

        DraftTrainer(own, target, said(32), o, folder, {"target": "toy"}).run(on_step)
        return own

    whole = run(tmp_path / "whole")
    with pytest.raises(Stop):
        run(tmp_path / "stopped", until=6)
    resumed = run(tmp_path / "stopped")
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    for name, weight in whole.weights().items():
        assert torch.equal(weight, resumed.weights()[name]), name
    with pytest.raises(DataError, match=r"target was 'toy', is 'other'"):
        DraftTrainer(resumed, toy(), said(32), o, tmp_path / "whole", {"target": "other"}).run()


def test_a_reduced_vocabulary_has_the_tokens_that_were_said_most(tmp_path: Path) -> None:
    o = options("eagle3", draft_vocab=5, train_tokens=160)
    spec = head_spec(o, SPEC)
    some = [Continuation(np.array([1, 2, *[7, 3, 9] * 3, 20, 20, 11, 11, 4]), 2)]
    vocabulary = frequent_tokens(spec, some)
    assert vocabulary is not None
    assert vocabulary.tolist() == [3, 7, 9, 11, 20]
    target = toy(vocabulary)
    own = EagleLearner(spec, target, 2, 0)  # type: ignore[arg-type]
    assert own.weights()["head.weight"].shape == (5, WIDTH)
    DraftTrainer(own, target, said(4), o, tmp_path / "run", {}).run()
    write_trained_head(tmp_path / "head", spec, own.weights(), vocabulary, "toy", "float32", 3)
    found = read_head(tmp_path / "head")
    assert found.vocabulary is not None
    assert found.vocabulary.tolist() == vocabulary.tolist()


@pytest.mark.parametrize("kind", ["medusa", "medusa-shared", "eagle", "eagle3"])
def test_a_written_head_has_the_logits_of_the_trained_one(kind: str, tmp_path: Path) -> None:
    o, target = options(kind.split("-")[0], shared_head=kind.endswith("shared")), toy()
    spec, own = head_spec(o, SPEC), learner(o, target)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in own.weights().values():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    write_trained_head(tmp_path, spec, own.weights(), None, "toy", "float32", 3)
    file = open_head(tmp_path, SPEC)
    assert file.spec == spec
    arrays: Any = {name: torch.from_numpy(np.array(w.data)) for name, w in file.weights.items()}
    head: Any = build_head(spec, arrays, target.model, target.table, 64)
    batch = Batch(said(3), target.table)
    hidden, streams = target.read(batch, spec.aux(2))
    with torch.no_grad():
        if isinstance(spec, MedusaSpec):
            assert isinstance(own, MedusaLearner)
            for number, found in enumerate(head.logits(hidden)):
                assert torch.equal(found, own._logits(hidden, number))
        else:
            assert isinstance(own, EagleLearner)
            (features,) = own._outputs(batch, streams or [hidden], 1)
            again = replace(batch.step(), token_ids=batch.following)
            found = head.feature(head.forward(again, head.fuse(streams or [hidden])))
            assert torch.equal(found, features)
            assert torch.equal(head.logits(found), own._logits(features))


def test_prompts_come_from_their_part_of_each_text() -> None:
    documents = [Document("a", "x" * 900 + "y" * 100), Document("b", "first line\n" * 90 + "z" * 110)]
    train, held_out = cut_texts(documents, 0.1)
    assert [len(text) for text in train] == [900, 990]
    assert held_out == ["y" * 100, "z" * 110]
    assert set("".join(draw_prompts(held_out, 20, 0))) <= {"y", "z"}
    found = draw_prompts(train, 50, 0)
    assert found == draw_prompts(train, 50, 0) != draw_prompts(train, 50, 1)
    assert all(piece.startswith(("x", "first")) for piece in found)
    with pytest.raises(DataError, match="no text to hold out: 1 characters"):
        cut_texts([Document("a", "x")], 0.1)


def test_streams_of_models_of_any_depth() -> None:
    assert aux_layers(32) == (2, 16, 29)
    assert aux_layers(4) == (1, 2, 4)
    assert aux_layers(1) == (1,)


# ---- the command -----------------------------------------------------------------------------------------------------

FLAGS = [
    "--train-tokens", "200", "--continuation-tokens", "120", "--output-len", "12", "--batch-tokens", "64", "--depth",
    "2", "--save-every", "2", "--warmup-steps", "1",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "tiny")
    write_lines(tmp_path / "texts.jsonl", [{"text": f"This is text {i}. " * 30} for i in range(4)])
    return tmp_path


def arguments(folder: Path, kind: str, *extra: str, out: str = "out") -> list[str]:
    given = ["--draft-for", str(folder / "tiny"), "--kind", kind, "--data", str(folder / "texts.jsonl")]
    return ["train", *given, "--out", str(folder / out), *FLAGS, *extra]


def run(arguments: list[str]) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(arguments: list[str]) -> str:
    with pytest.raises(RidgelineError) as caught:
        run(arguments)
    return str(caught.value)


def test_each_kind_is_a_folder_with_a_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_kinds(folder, ("medusa",), monkeypatch)


@pytest.mark.nightly
def test_other_kinds_are_folders_with_cards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_kinds(folder, ("eagle", "eagle3", "draft", "medusa"), monkeypatch)


def check_kinds(folder: Path, kinds: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_model(str(folder / "tiny"), LoadOptions(device="reference", dtype="float32"))
    for kind in kinds:
        report = run(arguments(folder, kind, out=kind))
        assert "tokens a verification with 2 drafts" in report
        assert "drafts right" in report
        out = folder / kind
        card = (out / "README.md").read_text()
        assert "The first 2 drafts are right" in card
        assert str(folder) not in card
        assert len(measured_acceptance(out)) == 2  # the planner reads it
        if kind == "draft":
            assert load_model(str(out), LoadOptions(device="reference")).spec.vocab_size == VOCABULARY
        else:
            head = open_head(out, target.spec)
            assert head.spec.kind == kind
            assert [len(row) for row in head.accuracies] == ([10, 10] if kind == "medusa" else [])
        # Later kinds read what the first one made.
        monkeypatch.setattr("ridgeline.train.drafts.continuations.LLM", None)
    assert len(list(folder.glob("continuations-*"))) == 1
    assert "done" in run(arguments(folder, "medusa", out="medusa"))  # nothing is left to train


def test_continuations_of_a_stopped_run_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ridgeline.train.drafts.continuations as module

    monkeypatch.setattr(module, "PART", 4)
    write, parts = module._write, []

    def stops(path: Path, part: Any) -> None:
        parts.append(path.name)
        if len(parts) == 2:
            raise KeyboardInterrupt
        write(path, part)

    monkeypatch.setattr(module, "_write", stops)
    assert CliRunner().invoke(app, arguments(folder, "medusa")).exit_code == 130
    run(arguments(folder, "medusa"))
    assert parts == ["part-00000.npz", "part-00001.npz", "part-00001.npz", "part-00002.npz", "held-out.npz"]
    (made,) = folder.glob("continuations-*")
    (made / "part-00001.npz").write_bytes(b"damaged")
    assert "remove it to make these continuations again" in refused(arguments(folder, "eagle", out="other"))


def test_bad_input_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(folder, "medusa")
    assert "use medusa, eagle, eagle3, draft" in refused(arguments(folder, "dflash"))
    assert "kind is missing" in refused([*given[:3], *given[5:]])
    assert "data is missing" in refused([*given[:5], *given[7:]])
    assert "out is missing" in refused([*given[:7], *given[9:]])
    assert "--kind is for drafts; add --draft-for" in refused([given[0], *given[3:]])
    assert "--epochs does not apply to --draft-for" in refused([*given, "--epochs", "2"])
    assert "--recipe does not apply" in refused([*given, "--recipe", "pocket"])
    assert "draft_steps does not apply to kind medusa" in refused([*given, "--draft-steps", "2"])
    assert "draft_vocab does not apply to kind eagle;" in refused(arguments(folder, "eagle", "--draft-vocab", "9"))
    assert "describes a draft model" in refused([given[0], str(folder / "tiny" / "config.json"), *given[1:]])
    assert "depth is 65; it must be from 1 to 64" in refused([*given, "--depth", "65"])
    assert "learning_rate is nan" in refused([*given, "--learning-rate", "nan"])
    assert "does not exist" in refused([*given, "--data", str(folder / "none")])
    assert "no such folder" in refused([*given[:2], str(folder / "none"), *given[3:]])
    assert "draft_vocab is 999, and the model has 320" in refused(arguments(folder, "eagle3", "--draft-vocab", "999"))
    config = json.loads((folder / "tiny" / "config.json").read_text())
    for name, value, word in (
        ("vocab_size", 300, "a vocabulary of 300 tokens, and the model has 320"),
        ("max_position_embeddings", 8, "has 8 positions"),
    ):
        (folder / "spec.json").write_text(json.dumps({**config, name: value}))
        small = arguments(folder, "draft")
        assert word in refused([small[0], str(folder / "spec.json"), *small[1:]])
    (folder / "out").mkdir(exist_ok=True)
    (folder / "taken").mkdir()
    (folder / "taken" / "file").write_text("")
    assert "exists already" in refused(arguments(folder, "medusa", out="taken"))
    assert "is a file" in refused(arguments(folder, "medusa", out="texts.jsonl"))
    devices = importlib.import_module("ridgeline.ops.devices")  # `ridgeline.ops.devices` is also a function
    with monkeypatch.context() as patched:
        patched.setattr(devices, "has_torch", lambda: False)
        with pytest.raises(DeviceError, match="needs torch"):
            run(given)
    (folder / "tiny" / "tokenizer_config.json").unlink()
    with pytest.raises((RidgelineError, CheckpointError), match=r"no tokenizer_config\.json"):
        run(arguments(folder, "draft"))
