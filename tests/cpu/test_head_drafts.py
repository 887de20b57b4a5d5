"""Heads in the engine: answers stay as they are, and drafts are those of a pass over the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from cpu.test_draft_model import serve, tight
from cpu.test_drafts import DRAFTS, NEW_TOKENS, PROMPTS, Answers, loaded, plain, requests
from oracle.mixers import FULL, NORM, VOCAB, WIDTH
from ridgeline import SamplingParams
from ridgeline.engine import Engine
from ridgeline.errors import CheckpointError
from ridgeline.load.heads import HeadFile, write_head
from ridgeline.load.safetensors import HostTensor
from ridgeline.nn.heads import MedusaHead
from ridgeline.runtime.drafter import Ask
from ridgeline.runtime.eagle_drafter import FORGOTTEN, EagleDrafter
from ridgeline.runtime.features import Features
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.heads import LoadedHead, load_head
from ridgeline.runtime.load import LoadedModel, LoadOptions
from ridgeline.runtime.load_draft import load_draft
from ridgeline.runtime.medusa_drafter import MedusaDrafter
from ridgeline.runtime.step import DenseStep
from ridgeline.sample.rejection import Draft
from ridgeline.sample.sampler import NoiseKey
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.spec import GatedMLP
from ridgeline.spec.heads import Eagle3Spec, EagleSpec, HeadSpec, MedusaSpec
from ridgeline.spec.workspace import feature_rows

HOW = ("", "chunks", "recompute", "swap", "unrecorded")
NIGHTLY_TARGETS = (("medusa", "mamba"), ("medusa", "hybrid"), ("eagle", "mamba"))
SMALL = 61  # tokens that the head with a table proposes
_EAGLE: dict[str, Any] = {
    "hidden_size": WIDTH, "vocab_size": VOCAB, "attention": FULL, "mlp": GatedMLP(24), "norm": NORM,
    "max_position_embeddings": 256,
}  # fmt: skip
SPECS: dict[str, tuple[str, HeadSpec]] = {
    "medusa": ("medusa", MedusaSpec(hidden_size=WIDTH, vocab_size=VOCAB, draft_vocab_size=VOCAB, num_heads=DRAFTS)),
    "eagle": ("eagle", EagleSpec(**_EAGLE, draft_vocab_size=VOCAB, own_embedding=False)),
    "eagle3": ("eagle3", Eagle3Spec(**_EAGLE, draft_vocab_size=SMALL, aux_layers=(0, 1, 2))),
}


@cache
def head_of(name: str, target: str = "attention") -> LoadedHead:
    """Return a random head that was written to a folder and read from it."""
    rng = np.random.default_rng(3)
    format, spec = SPECS[name]
    weights = {
        w.name: HostTensor((rng.normal(0, 1, w.shape) / np.sqrt(w.shape[-1])).astype(np.float32), "float32")
        for w in spec.weights()
    }
    vocabulary = np.sort(rng.permutation(VOCAB)[:SMALL]) if spec.has_table else None
    with TemporaryDirectory() as folder:
        write_head(Path(folder), HeadFile(spec, weights, vocabulary), format)
        return load_head(Path(folder), loaded(target))


def settings(head: str, target: str = "attention", **options: Any) -> EngineConfig:
    usual = {"max_num_seqs": 8, "block_size": 4, "state_snapshot_tokens": 16, "num_speculative_tokens": DRAFTS}
    return resolve(
        loaded(target).spec, 256, EngineOptions(**usual | options), free_bytes=1 << 30, fixed_len=True,
        draft=SPECS[head][1],
    )  # fmt: skip


def expected(
    head: LoadedHead, target: LoadedModel, tokens: list[int], depth: int, lost: Sequence[tuple[int, int]] = ()
) -> list[int]:
    """Return the greedy drafts after some tokens, from dense passes over all of them.

    lost: ranges of rows that read features of zeros.
    """
    memory, module = target.table.memory, head.head
    aux = module.spec.aux(len(target.spec.layers))
    stream = target.model.forward(DenseStep.build([tokens[:-1]], memory), aux=aux)
    if isinstance(module, MedusaHead):
        last = np.asarray(target.model.hidden(stream))[-1:]
        return [int(np.argmax(memory.get(x)[0])) for x in module.logits(last, depth)]
    features = np.array(module.fuse(stream.aux if aux else [target.model.hidden(stream)]))
    for start, end in lost:
        features[start:end] = 0.0
    read, drafts = list(tokens[1:]), list[int]()
    for _ in range(depth):
        found = module.feature(module.forward(DenseStep.build([read], memory), features))
        best = int(np.argmax(memory.get(module.logits(found))[-1]))
        drafts.append(best if head.file.vocabulary is None else int(head.file.vocabulary[best]))
        read.append(drafts[-1])
        features = np.concatenate([features, np.asarray(found)[-1:]])
    return drafts


def watched(engine: Engine, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Collect the tokens and the drafts of each draft call, and verify other drafts, of which any number is right."""
    drafter, found = engine._runner.drafter, list[tuple[list[int], list[int]]]()
    assert isinstance(drafter, EagleDrafter | MedusaDrafter)
    rng, draft = np.random.default_rng(1), drafter.draft
    following = {tuple(prompt): answers[i, 0] for i, prompt in enumerate(PROMPTS)}

    def noted(asks: list[Ask], **options: Any) -> list[list[Draft]]:
        out = []
        for ask, drafts in zip(asks, draft(asks, **options), strict=True):
            found.append((list(ask.tokens), [one.token for one in drafts]))
            prompt = next(p for p in sorted(following, key=len, reverse=True) if tuple(ask.tokens[: len(p)]) == p)
            rest = following[prompt][len(ask.tokens) - len(prompt) :]
            good = int(rng.integers(0, DRAFTS + 1))
            tokens = [t if i < good else (t + 1) % VOCAB for i, t in enumerate(rest[: ask.depth])]
            out.append([Draft(token) for token in tokens])
        return out

    monkeypatch.setattr(drafter, "draft", noted)
    return found


def share_right(head: str, found: list[tuple[list[int], list[int]]], lost: Sequence[tuple[int, int]] = ()) -> float:
    """Return the share of draft calls whose drafts are those of dense passes. lost: as in `expected`."""
    same = [
        drafts == expected(head_of(head), loaded("attention"), tokens, len(drafts), lost) for tokens, drafts in found
    ]
    assert len(same) > 10
    return sum(same) / len(same)


def open_engine(head: str, monkeypatch: pytest.MonkeyPatch, how: str = "", **options: Any) -> Engine:
    """Return an engine with few tokens in a step, few pages, or no recordings, as `how` says."""
    config = settings(head, max_num_batched_tokens=24 if how in ("chunks", "recompute", "swap") else 512, **options)
    config = tight(config, how) if how in ("recompute", "swap") else config
    engine = Engine(loaded("attention"), config, draft=head_of(head))
    engine._scheduler._swap_cost = (lambda num_tokens, num_bytes: how) if how == "swap" else None
    if how == "unrecorded":
        drafter: Any = engine._runner.drafter
        own = drafter._passes if head == "medusa" else drafter._rounds._passes
        for passes in (engine._runner.graphs._passes, own):
            monkeypatch.setattr(passes, "refusal", "not in this test")
    return engine


@pytest.mark.parametrize(
    ("head", "how"),
    [
        pytest.param(head, how, marks=() if how in daily else pytest.mark.nightly)
        for head, daily in (("medusa", ("", "swap")), ("eagle", HOW), ("eagle3", ("", "unrecorded")))
        for how in HOW
    ],
)
def test_drafts_are_those_of_a_pass_over_the_whole_sequence(
    head: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(head, monkeypatch, how)
    found = watched(engine, plain("attention"), monkeypatch)
    assert serve(engine, rounds=2) == plain("attention")
    stats = engine.stats()
    assert stats.accepted_tokens > 50
    if how in ("recompute", "swap"):
        assert stats.preempted_swap if how == "swap" else stats.preempted_recompute
    # A sequence that was swapped out has rows that read zeros.
    assert share_right(head, [x for x in found if x[1]][::2]) >= (0.5 if how == "swap" else 1.0)
    assert sum(1 for _, drafts in found if drafts) > 0.9 * len(found)


def features_are_late(patch: pytest.MonkeyPatch) -> None:
    """Keep the feature of the token before."""
    keep = Features.keep
    patch.setattr(Features, "keep", lambda self, works, tokens, x: keep(self, works, tokens, np.roll(x, 1, axis=0)))


def drafts_stay(patch: pytest.MonkeyPatch) -> None:
    """Take the rows of drafts, which read the head's own features, for rows that read the target's."""

    def computed(self: EagleDrafter, span: Any, rounds: int) -> None:
        held = self._features.of(span.sequence, span.row)
        if held is not None:
            held.first = max(held.first, span.start + len(span.tokens) + rounds - 1)

    patch.setattr(EagleDrafter, "_computed", computed)


def chunks_are_left_out(patch: pytest.MonkeyPatch) -> None:
    chunk = EagleDrafter._chunk
    patch.setattr(EagleDrafter, "_chunk", lambda *args: chunk(*args)._replace(tokens=[], features=np.zeros(0, int)))


def other_streams(patch: pytest.MonkeyPatch) -> None:
    """Read the streams by the convention of SGLang, one layer later."""
    patch.setattr(Eagle3Spec, "aux", lambda self, num_layers: (1, 2, 0))


@pytest.mark.parametrize(
    ("head", "bug"),
    [("medusa", features_are_late), ("eagle", features_are_late), ("eagle", drafts_stay),
     ("eagle3", chunks_are_left_out), ("eagle3", other_streams)],
)  # fmt: skip
def test_a_bug_in_the_features_costs_only_drafts(head: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        engine = open_engine(head, monkeypatch)
        found = watched(engine, plain("attention"), monkeypatch)
        assert serve(engine) == plain("attention")
    assert share_right(head, [x for x in found if x[1]][::2]) < 0.9


@pytest.mark.parametrize("acceptance", ["same", "rejection", "typical"])
@pytest.mark.parametrize("head", SPECS)
def test_sampled_answers_with_a_head(head: str, acceptance: str) -> None:
    """Only `same` gives the answers without drafts; every one of them gives answers of the right length."""
    engine = Engine(loaded("attention"), settings(head, draft_acceptance=acceptance, max_num_seqs=16),
                    draft=head_of(head))  # fmt: skip
    params = {"temperature": 1.0, "n": 2, "top_k": 20}
    found = serve(engine, rounds=2, **params)
    assert engine.stats().draft_tokens > 100
    if acceptance == "same":
        assert found == plain("attention", **params)
    assert all(len(tokens) == NEW_TOKENS for tokens in found.values())


@pytest.mark.parametrize("first", [0, 3])
def test_rows_wait_until_their_features_would_be_lost(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a request without drafts run later if it had drafts before. Otherwise the older ones read zeros."""
    engine = open_engine("eagle", monkeypatch)
    found, lost = list[tuple[list[int], list[int]]](), list[tuple[int, int]]()
    drafter: Any = engine._runner.drafter
    draft, steps = drafter.draft, 0

    def noted(asks: list[Ask], **options: Any) -> list[list[Draft]]:
        if first <= steps < 120:
            return [[] for _ in asks]
        for gaps in drafter._gaps.values():
            lost.extend(gaps.ranges)
        out: list[list[Draft]] = draft(asks, **options)
        found.extend((list(ask.tokens), [x.token for x in drafts]) for ask, drafts in zip(asks, out, strict=True))
        return out

    monkeypatch.setattr(drafter, "draft", noted)
    params = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    engine.add(0, GenerationRequest(PROMPTS[1], params, (NoiseKey(0, 0),)))
    while len(engine):
        engine.step()
        steps += 1
    assert lost == ([] if first else [(len(PROMPTS[1]) - 1, len(PROMPTS[1]) - 1 + 2 * FORGOTTEN)])
    assert share_right("eagle", [x for x in found if len(x[0]) > 100], lost) == 1.0


@pytest.mark.parametrize(
    ("head", "target"),
    [("eagle", "hybrid"), *(pytest.param(*x, marks=pytest.mark.nightly) for x in NIGHTLY_TARGETS)],
)
def test_a_target_with_recurrent_layers_takes_chains_of_a_head(head: str, target: str) -> None:
    engine = Engine(loaded(target), settings(head, target), draft=head_of(head, target))
    assert serve(engine, rounds=2) == plain(target)
    assert engine.stats().draft_tokens > 100


def test_a_head_that_cannot_take_features_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = open_engine("eagle", monkeypatch)
    monkeypatch.setattr(Features, "keep", lambda *args: {}["no such feature"])
    out: Answers = {}
    for i, request in enumerate(requests()):
        engine.add(i, request)
    while len(engine):
        for event in engine.step():
            out.setdefault((event.request, event.choice), []).extend(event.tokens)
    assert out == plain("attention")
    assert "no such feature" in (engine.stats().unproposed or "")


def test_a_head_that_fails_or_says_nan_costs_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, bad in (("fails", ValueError("no such kernel")), ("nan", None)):
        engine = open_engine("medusa", monkeypatch, "unrecorded")
        drafter: Any = engine._runner.drafter

        def logits(hidden: Any, count: int, bad: Exception | None = bad) -> Any:
            if bad is not None:
                raise bad
            return [np.full((len(hidden), VOCAB), np.nan, np.float32)] * count

        monkeypatch.setattr(drafter._head, "logits", logits)
        out: Answers = {}
        for i, request in enumerate(requests()):
            engine.add(i, request)
        while len(engine):
            for event in engine.step():
                out.setdefault((event.request, event.choice), []).extend(event.tokens)
        assert out == plain("attention"), module
        assert engine.stats().draft_tokens == 0
        assert ("no such kernel" in (engine.stats().unproposed or "")) == (bad is not None)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (replace(SPECS["medusa"][1], hidden_size=WIDTH * 2), "hidden size 64"),
        (replace(SPECS["eagle"][1], vocab_size=VOCAB + 1, draft_vocab_size=VOCAB + 1), "vocabulary of 98"),
        (replace(SPECS["eagle3"][1], aux_layers=(0, 1, 3)), r"auxiliary layers \[0, 1, 3\]"),
    ],
)
def test_a_head_of_another_model_is_refused(spec: HeadSpec, said: str, tmp_path: Path) -> None:
    weights = {w.name: HostTensor(np.zeros(w.shape, np.float32), "float32") for w in spec.weights()}
    table = np.arange(SMALL) if spec.has_table else None
    write_head(tmp_path, HeadFile(spec, weights, table), spec.kind)
    with pytest.raises(CheckpointError, match=said):
        load_draft(str(tmp_path), loaded("attention"), None, LoadOptions())


def test_features_take_the_bytes_that_are_planned() -> None:
    for head, (_, spec) in SPECS.items():
        config = settings(head, max_num_seqs=7, max_num_batched_tokens=100)
        engine = Engine(loaded("attention"), config, draft=head_of(head))
        drafter: Any = engine._runner.drafter
        tokens = 0 if head == "medusa" else 100
        assert drafter._features.array.shape == (feature_rows(7 + 1, DRAFTS, tokens), spec.hidden_size)
