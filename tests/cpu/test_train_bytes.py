"""Small models of bytes: what they learn, and that results follow from the arguments and are kept."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ridgeline.catalog.machines import hardware
from ridgeline.lab import scratch
from ridgeline.lab.experiment import Setup
from ridgeline.train.text_bytes import LENGTH, train_bytes

SPEC = scratch.FORMS["1 key head"].spec
SETUP = Setup(False, 0, "pocket", None, hardware("cpu-laptop"))


def test_bytes_of_a_repeated_text_are_learned() -> None:
    text = b"two words, " * 60
    before, after = (train_bytes(SPEC, text, text, 3e-3, updates, 0) for updates in (0, 25))
    assert before == pytest.approx(math.log(256), abs=0.3) and after < 0.5
    assert train_bytes(SPEC, text, text, 3e-3, 2, 1) == train_bytes(SPEC, text, text, 3e-3, 2, 1)


def test_losses_are_kept_for_each_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    trained: list[int] = []

    def train(*given: object) -> float:
        trained.append(int(str(given[-1])))
        return float(trained[-1])

    monkeypatch.setattr("ridgeline.train.text_bytes.train_bytes", train)
    for _ in range(2):
        assert scratch.losses(SETUP, ["latents"]) == {"latents": [0.0, 1.0, 2.0]}
    assert trained == [0, 1, 2]
    own, other = scratch._texts()
    assert min(len(own), len(other)) > LENGTH and other[:1000] not in own


def test_forms_differ_in_mixers_and_have_the_state_that_their_names_say() -> None:
    state = {name: form.spec.state_elements(1024) for name, form in scratch.FORMS.items()}
    whole = state["4 key heads"]
    assert [round(whole / state[n], 1) for n in ("2 key heads", "1 key head", "latents", "pairs of layers")] == [
        2,
        4,
        4,
        2,
    ]
    assert state["windows"] < state["windows, 1 global"] < whole / 3
    assert len({(len(f.spec.layers), f.spec.hidden_size, f.spec.layers[0].mlp) for f in scratch.FORMS.values()}) == 1
