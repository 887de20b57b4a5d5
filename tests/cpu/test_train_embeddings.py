"""Diffusion over embeddings: it learns, a classifier guides it, and results follow from the seed."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest
import torch

from ridgeline.catalog.machines import hardware
from ridgeline.lab.experiment import Setup
from ridgeline.lab.experiments import embeddings
from ridgeline.train.embedding_noise import STEPS, EmbeddingDiffusion, kept


def two(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Return texts of two equal words out of four."""
    return np.repeat(rng.integers(0, 4, (rows, 1)), 2, axis=1)


def test_the_schedule_is_the_square_root_of_the_paper() -> None:
    assert abs(float(kept(0)) - (1 - sqrt(1e-4))) < 1e-6 and float(kept(STEPS)) == 0
    assert abs(float(kept(50)) - (1 - sqrt(0.25 + 1e-4))) < 1e-6


@pytest.mark.nightly
def test_pairs_of_equal_words_are_learned_and_guided() -> None:
    state = torch.get_rng_state()
    model = EmbeddingDiffusion(two, lambda ids: ids[:, 0] >= 3, 4, 2, 0, updates=150)
    assert torch.equal(torch.get_rng_state(), state)
    for clamped in (False, True):
        free, guided = (model.draw(200, 0, clamped=clamped, guided=guided) for guided in (False, True))
        for ids in (free, guided):
            assert (ids[:, 0] == ids[:, 1]).mean() > 0.9  # 0.25 of independent words
        assert len(np.unique(free)) == 4
        assert (guided[:, 0] == 3).mean() > 0.8 > 0.5 > (free[:, 0] == 3).mean()
    assert (free == model.draw(200, 0, clamped=True, guided=False)).all()


def test_what_chance_gives_is_what_drawing_finds() -> None:
    predicted = embeddings.predict(Setup(True, 0, "pocket", None, hardware("cpu-laptop")))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 8, (400_000, 8))
    assert abs((np.diff(ids, axis=1) >= 0).all(1).mean() - predicted["in_order"]) < 1e-4
    assert abs(embeddings._has_aim(embeddings._texts(rng, 100_000)).mean() - predicted["has_aim"]) < 0.01
