"""Models that learn associative recall: the sequences, and a model that learns from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ridgeline.errors import RequestError
from ridgeline.lab import mqar
from ridgeline.lab.two_forms import largest_error
from ridgeline.spec import Attention, GatedConvolution
from ridgeline.train.recall import first_tokens, sequences, train_first, train_recall

MODEL = mqar.small((GatedConvolution(mqar.WIDTH, 3), Attention(2, 2, 32, 32**-0.5)), 8)


def test_each_key_is_asked_for_once_and_has_one_value() -> None:
    ids = sequences(np.random.default_rng(0), 100, 5, 11)
    assert ids.shape == (100, 20) and ids.min() == 0 and ids.max() == 10
    for row in ids:
        told, asked = row[:10].reshape(5, 2), row[10:].reshape(5, 2)
        assert len(set(row[:10].tolist())) == 10
        assert dict(told.tolist()) == dict(asked.tolist())
    assert (ids[:, :10] != ids[:, 10:]).any()


def test_attention_learns_to_recall_and_the_result_follows_from_the_seed() -> None:
    threads = torch.get_num_threads()
    before, after = (train_recall(MODEL, 2, 3e-3, updates, 0) for updates in (0, 150))
    assert before < 0.3 and after > 0.8  # chance is 1 in 8; a model that knows the values is right every second time
    assert train_recall(MODEL, 2, 3e-3, 5, 1) == train_recall(MODEL, 2, 3e-3, 5, 1)
    assert torch.get_num_threads() == threads


def test_the_last_token_asks_for_the_first_one() -> None:
    ids, targets = first_tokens(np.random.default_rng(0), 50, 9, 16)
    assert ids[:, 0].max() < 8 <= ids[:, 1:].min() and ids.max() == 15
    assert (targets[:, -1] == ids[:, 0]).all() and (targets[:, :-1] == -1).all()
    assert train_first(MODEL, 4, 3e-3, 60, 0) > 0.8  # chance is 1 in 4


def test_results_are_kept_and_torch_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = mqar.recalled(MODEL, 2, 3e-3, 1, 0)
    monkeypatch.setattr("ridgeline.train.recall.train_recall", lambda *a: pytest.fail("it was trained before"))
    assert mqar.recalled(MODEL, 2, 3e-3, 1, 0) == first

    def refuse(what: str) -> None:
        raise RequestError("torch is missing")

    monkeypatch.setattr(mqar, "require_torch", refuse)
    with pytest.raises(RequestError, match="torch is missing"):
        mqar.recalled(MODEL, 2, 3e-3, 1, 0)


def test_a_state_space_is_a_convolution_and_a_recurrence() -> None:
    assert largest_error(0, 1) < 1e-4
