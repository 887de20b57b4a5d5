"""Associative recall: the sequences, a model that copies, one that knows nothing, and the command."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ridgeline import LLM
from ridgeline.cli.main import app
from ridgeline.errors import RequestError
from ridgeline.evals import measure_recall, num_recall_tokens, recall_tokens
from ridgeline.evals.recall import draw_sequence, num_sequences
from ridgeline.nn import Model
from ridgeline.ops import open_table
from ridgeline.runtime.load import LoadedModel
from ridgeline.spec import Attention, Layer, ModelSpec, RMSNorm, Rope

VOCAB = 200


class Fake:
    """A model whose logits after each token are given by a function of the tokens up to it."""

    def __init__(self, scores: Any, max_model_len: int = 700) -> None:
        spec = SimpleNamespace(vocab_size=VOCAB, require_autoregressive=lambda purpose: None)
        self.spec, self.max_model_len = spec, max_model_len
        self.table = SimpleNamespace(memory=SimpleNamespace(get=np.asarray, integers=np.asarray))
        self.model, self._scores = self, scores

    def dense_step(self, sequences: Any) -> Any:
        return sequences

    def forward(self, sequences: Any) -> Any:
        return [ids[: i + 1] for ids in sequences for i in range(len(ids))]

    def logits(self, stream: Any, rows: Any) -> Any:
        return np.stack([self._scores(stream[row]) for row in rows])


def copying(ids: list[int]) -> np.ndarray:
    """Predict the token that followed the last token where it was read before."""
    found = np.zeros(VOCAB, np.float32)
    found[ids[ids.index(ids[-1]) + 1]] = 1.0
    return found


def guessing(ids: list[int]) -> np.ndarray:
    return np.random.default_rng(ids).normal(size=VOCAB).astype(np.float32)


def test_a_sequence_asks_for_each_pair_once() -> None:
    ids = draw_sequence(range(10, 60), 8, 20, np.random.default_rng(0)).tolist()
    pairs, between, asked = ids[:16], ids[16:36], ids[36:]
    known = dict(zip(pairs[::2], pairs[1::2], strict=True))
    assert len(set(pairs)) == 16 and not set(pairs) & set(between)
    assert dict(zip(asked[::2], asked[1::2], strict=True)) == known
    assert asked[::2] != pairs[::2]


def test_a_model_that_copies_has_a_recall_of_1_and_one_that_guesses_that_of_chance() -> None:
    copier: Any = Fake(copying)
    found = measure_recall(copier, range(VOCAB), (7,), batch_tokens=500)
    assert found.mean == found.mean_exact == 1.0
    assert [(c.pairs, c.distance) for c in found.cells] == [(n, d) for n in (4, 8, 16, 32) for d in (0, 64, 256, 512)]
    guesser: Any = Fake(guessing)
    for cell in measure_recall(guesser, range(VOCAB), (7,)).cells:
        assert cell.accuracy is not None and cell.num_queries >= 256
        error = (cell.chance * (1 - cell.chance) / cell.num_queries) ** 0.5
        assert abs(cell.accuracy.value - cell.chance) < 4 * error


def copying_model() -> LoadedModel:
    """Return a model of two attention layers that finds the value of every key: an induction head, built by hand.

    The stream has four parts: the token, the token before it, the answer, and a constant. The first layer attends to
    the position before, where the scores of all rotations have their maximum, and copies its token. The second one
    finds the position whose token before is the current token (Olsson et al., arXiv:2209.11895), and answers with its
    token.
    """
    width, head = 3 * VOCAB + 1, 256
    rope = Rope(64, 1e4)
    mixers = [Attention(1, 1, head, scale=1.0, rope=rope), Attention(1, 1, head, scale=1.0, rope=None)]
    norm = RMSNorm(1e-6)
    spec = ModelSpec("copier", VOCAB, width, 700, tuple(Layer(m, None, norm) for m in mixers), norm)
    weights = {w.name: np.ones(w.shape) if "norm" in w.name else np.zeros(w.shape) for w in spec.weights()}
    one = np.eye(VOCAB)
    token, before, answer = (slice(i * VOCAB, (i + 1) * VOCAB) for i in range(3))
    weights["embed.weight"][:, token], weights["embed.weight"][:, -1] = one, 1.0
    weights["head.weight"][:, answer] = one
    angles = 1e4 ** -(np.arange(32) / 32)
    first = {"q": np.concatenate([np.cos(angles), -np.sin(angles)]), "k": np.repeat([1.0, 0.0], 32)}
    for name, values in first.items():
        weights[f"layers.0.mixer.{name}.weight"][:64, -1] = values
    for layer, (reads, writes) in enumerate(((token, before), (token, answer))):
        weights[f"layers.{layer}.mixer.v.weight"][:VOCAB, reads] = one
        weights[f"layers.{layer}.mixer.o.weight"][writes, :VOCAB] = one
    weights["layers.1.mixer.q.weight"][:VOCAB, token] = one
    weights["layers.1.mixer.k.weight"][:VOCAB, before] = one
    table = open_table("cpu")
    arrays: Any = {name: np.ascontiguousarray(x, np.float32) for name, x in weights.items()}
    checkpoint: Any = None
    return LoadedModel(Model(spec, arrays, table, 700), checkpoint, table, 700, frozenset())


def test_an_induction_head_finds_every_value() -> None:
    found = measure_recall(copying_model(), range(VOCAB), (7,))
    assert found.mean == found.mean_exact == 1.0 and len(found.measured) == 16


def test_only_the_values_of_the_sequence_count_for_accuracy() -> None:
    """A model that finds the value, but prefers a token outside of the sequence, has no exact hit."""

    def hesitating(ids: list[int]) -> np.ndarray:
        found = copying(ids)
        found[0] = 2.0
        return found

    model: Any = Fake(hesitating)
    found = measure_recall(model, range(1, VOCAB), pairs=(4,), distances=(0, 9))
    assert (found.mean, found.mean_exact) == (1.0, 0.0)


def test_a_short_context_leaves_cells_out() -> None:
    model: Any = Fake(copying, max_model_len=100)
    read: list[int] = []
    found = measure_recall(model, range(VOCAB), on_tokens=read.append)
    assert [c.accuracy is None for c in found.cells] == [
        4 * n + d > 100 for n in (4, 8, 16, 32) for d in (0, 64, 256, 512)
    ]
    assert sum(read) == num_recall_tokens(100)
    assert all(c.num_queries == c.pairs * num_sequences(c.pairs) for c in found.measured)
    short: Any = Fake(copying, max_model_len=15)
    with pytest.raises(RequestError, match="no sequence of the recall test fits the model's context of 15 tokens"):
        measure_recall(short, range(VOCAB))
    with pytest.raises(RequestError, match="recall of 32 pairs needs 66 different tokens, and there are 65"):
        measure_recall(model, range(65))


def test_random_weights_have_the_recall_of_chance_and_pocket_more() -> None:
    def measured(**options: Any) -> Any:
        llm = LLM("pocket", cache="off", **options)
        assert llm.tokenizer is not None
        tokens = recall_tokens(llm.tokenizer, llm.loaded.spec.vocab_size)
        texts = [llm.tokenizer.decode([i]) for i in tokens]
        assert len(tokens) > 1000 and all(text.removeprefix(" ").isalpha() for text in texts)
        return measure_recall(llm.loaded, tokens, llm.tokenizer.encode(""), pairs=(4,), distances=(0,)).cells[0]

    cell = measured(load_format="dummy")
    assert abs(cell.accuracy.value - 0.25) < 4 * (0.25 * 0.75 / 256) ** 0.5
    assert measured().accuracy.value > 0.5


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.evals.recall.measure_recall.__kwdefaults__", {
        **measure_recall.__kwdefaults__, "pairs": (4,), "distances": (0, 2000),
    })  # fmt: skip
    result = CliRunner().invoke(app, ["evaluate", "pocket", "--recall"], catch_exceptions=False)
    assert result.exit_code == 0 and "recall, model" in result.output and "distance 2000" in result.output
    command = ["evaluate", "pocket", "--recall", "--against", "pocket", "--json"]
    report = json.loads(CliRunner().invoke(app, command, catch_exceptions=False).stdout)
    assert report["recall"]["cells"][0]["pairs"] == 4 and report["recall"]["cells"][1]["accuracy"] is None
    # The original's keys and values are in float32.
    assert report["recall"]["recall"] == pytest.approx(report["original_recall"]["recall"], abs=0.02)
    with pytest.raises(RequestError, match="there is nothing to measure: give --text, --recall or --tasks"):
        CliRunner().invoke(app, ["evaluate", "pocket"], catch_exceptions=False)
