"""Trees of drafts in the engine: answers, and all rows that stay in pages, are those without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pytest

from cpu.test_drafts import NEW_TOKENS, PROMPTS, SAMPLED, Answers, requests, serve
from cpu.test_drafts import loaded as stack
from oracle.mixers import LATENT, NORM, VOCAB, WIDTH
from ridgeline import LLM
from ridgeline.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.propose import Drafts
from ridgeline.runtime import runner, sampling
from ridgeline.runtime.load import LoadedModel
from ridgeline.runtime.moves import RowMover
from ridgeline.runtime.runner import DeviceRunner
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.spec import GatedMLP, Layer, ModelSpec, to_json, trees

NODES = 12
Proposer = Callable[[int, int, list[int]], Drafts]


@cache
def loaded(name: str) -> LoadedModel:
    if name != "latent":
        return stack(name)
    with TemporaryDirectory() as folder:
        layers = tuple(Layer(mixer, GatedMLP(48), NORM) for mixer in (LATENT, LATENT))
        config = {"model_type": "ridgeline", "spec": to_json(ModelSpec("drafts", VOCAB, WIDTH, 256, layers, NORM))}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return LLM(folder, load_format="dummy", skip_tokenizer_init=True, cache="off").loaded


def config_of(name: str, dtype: Any = "auto", **options: Any) -> EngineConfig:
    usual = {"max_num_seqs": 8, "block_size": 4, "num_speculative_tokens": NODES}
    spec = loaded(name).spec
    if name == "hybrid":
        usual["state_snapshot_tokens"] = 16
    given = EngineOptions(**{**usual, **options})
    return resolve(spec, 256, given, free_bytes=1 << 30, fixed_len=True, kv_cache_dtype=dtype)


@cache
def plain(name: str, options: tuple[tuple[str, Any], ...] = (), params: tuple[tuple[str, Any], ...] = ()) -> Answers:
    """Return the answers of an engine without drafts."""
    config = config_of(name, **dict(options))
    return serve(Engine(loaded(name), config), lambda *_: (), **dict(params))[0]


def random_trees(answers: Answers, seed: int = 0) -> Proposer:
    """Return a proposer of random trees that have some of the answer's next tokens on a random path."""
    rng = np.random.default_rng(seed)

    def propose(request: int, choice: int, tokens: list[int]) -> Drafts:
        wanted = answers[request, choice][len(tokens) :]
        size = int(rng.integers(0, NODES + 1))
        found: list[int] = []
        parents: list[int] = []
        right, depth = -1, 0  # the last node of the right path, and the length of that path
        for i in range(size):
            if depth < len(wanted) and rng.random() < 0.5:
                parents.append(right), found.append(wanted[depth])
                right, depth = i, depth + 1
            else:
                parents.append(int(rng.integers(-1, i)) if i else -1)
                lures = depth < len(wanted) and rng.random() < 0.4  # the right token after the wrong ones
                found.append(wanted[depth] if lures else int(rng.integers(VOCAB)))
        return Drafts(found, parents=parents)

    return propose


def as_pairs(values: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(values.items()))


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "greedy": ("attention", {}, {}),
    "pages of one token": ("attention", {"block_size": 1, "max_num_batched_tokens": 24}, {"temperature": 1.0}),
    "pages of 16 tokens": ("attention", {"block_size": 16, "max_num_batched_tokens": 40}, {}),
    "forks, penalties": ("attention", {"max_num_seqs": 16}, SAMPLED),
    "int8": ("attention", {"dtype": "int8"}, {"temperature": 0.8}),
    "fp8": ("attention", {"dtype": "fp8", "block_size": 16}, {}),
    "latents": ("latent", {}, {"temperature": 0.8}),
    "recurrent": ("hybrid", {}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_trees_change_nothing(case: str) -> None:
    name, options, params = CASES[case]
    wanted = plain(name, as_pairs(options), as_pairs(params))
    engine = Engine(loaded(name), config_of(name, **options))
    out, steps = serve(engine, random_trees(wanted), **params)
    stats = engine.stats()
    assert out == wanted
    assert steps < NEW_TOKENS and stats.accepted_tokens > 40
    assert (stats.untreed is not None) == (name == "hybrid")


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_preempted(how: Literal["recompute", "swap"]) -> None:
    name = "attention"
    wanted = plain(name)
    config = config_of(name, max_num_batched_tokens=24)
    few = tuple(g.most_pages(61 + NEW_TOKENS) + 3 for g in config.groups)
    host = tuple(4 * n if how == "swap" else 0 for n in few)
    engine = Engine(loaded(name), replace(config, num_pages=few, num_host_pages=host))
    engine._scheduler._swap_cost = (lambda num_tokens, num_bytes: how) if how == "swap" else None
    out, _ = serve(engine, random_trees(wanted))
    stats = engine.stats()
    assert out == wanted
    assert stats.preempted_swap if how == "swap" else stats.preempted_recompute
    assert stats.accepted_tokens > 10


def page_rows(engine: Engine, length: int) -> list[np.ndarray]:
    """Return all rows of the first `length` tokens of the only sequence, for each part of each layer."""
    (answer,) = engine._answers.values()
    found = []
    for g, group in enumerate(engine.config.groups):
        table = engine._runner._tables[g][answer.sequence.row]
        slots = np.arange(group.first_live_page(length) * group.page_tokens, length)
        for slot in group.slots:
            keys, values = (np.asarray(x) for x in engine._runner.arena.layer(slot.layer)[1])
            count, size, heads, row = keys.shape
            at, inside = table[slots // size], slots % size
            found.append(keys.reshape(count, heads, row, size)[at, :, :, inside])
            found.append(values.reshape(count, heads, size, row)[at, :, inside])
    return found


@pytest.mark.parametrize("size", [1, 4, 16])
def test_moved_rows_have_the_bits_of_plain_decoding(size: int) -> None:
    name, wanted = "attention", plain("attention")
    rows = []
    for propose in (None, random_trees(wanted, 3)):
        engine = Engine(loaded(name), config_of(name, block_size=size))
        engine.add(0, requests()[3])
        tokens: list[int] = []
        while len(tokens) < 18:
            tokens += [t for event in engine.step() for t in event.tokens]
            if propose:
                engine.propose(0, 0, propose(3, 0, tokens))
        (answer,) = engine._answers.values()
        rows.append((page_rows(engine, len(PROMPTS[3]) + 17), answer.sequence.planned))
    assert min(planned for _, planned in rows) >= len(PROMPTS[3]) + 17
    assert engine.stats().accepted_tokens >= 4
    for plain_rows, moved in zip(rows[0][0], rows[1][0], strict=True):
        np.testing.assert_array_equal(plain_rows, moved)


def test_a_prefix_after_accepted_branches_is_reused() -> None:
    name, wanted = "attention", plain("attention")
    engine = Engine(loaded(name), config_of(name))
    serve(engine, random_trees(wanted))
    request = requests()[4]
    first = wanted[4, 0]
    longer = replace(request, prompt_token_ids=[*PROMPTS[4], *first[:20]])
    answers = []
    for one in (engine, Engine(loaded(name), config_of(name))):
        one.add(9, longer)
        events = [event for _ in iter(lambda one=one: len(one), 0) for event in one.step()]  # type: ignore[misc]
        answers.append([t for event in events for t in event.tokens])
        cached = max(event.num_cached_tokens for event in events)
        assert (cached >= len(PROMPTS[4]) + 12) == (one is engine)
    assert answers[0] == answers[1]


# ---- deliberate bugs ------------------------------------------------------------------------------------------------


def nothing_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RowMover, "_move", lambda *args: None)


def moves_the_next_row(patch: pytest.MonkeyPatch) -> None:
    move = RowMover._move
    patch.setattr(RowMover, "_move", lambda self, rows, sources, targets: move(self, rows, sources - 1, targets))


def siblings_are_read(patch: pytest.MonkeyPatch) -> None:
    """Each draft reads the drafts before it."""
    patch.setattr(runner, "paths", lambda parents: trees.paths(range(-1, len(parents) - 1)))


def logits_of_another_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        sampling, "child_with", lambda parents, tokens, node, token: trees.child_with((), tokens, node, token)
    )


@pytest.mark.parametrize("bug", [nothing_moves, moves_the_next_row, siblings_are_read, logits_of_another_node])
def test_caught(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain("attention")
    bug(monkeypatch)
    try:
        out = serve(Engine(loaded("attention"), config_of("attention")), random_trees(wanted))[0]
    except ValueError as e:  # more tokens than the tree is deep
        assert "tokens from a step with" in str(e)
    else:
        assert out != wanted


# ---- recordings, limits, errors --------------------------------------------------------------------------------------


def test_recorded_and_unrecorded_steps_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = plain("attention")
    engine = Engine(loaded("attention"), config_of("attention"))
    serve(engine, random_trees(wanted))
    assert engine.stats().unrecorded is None
    assert any(is_tree for _, _, is_tree in engine._runner.graphs._graphs)
    monkeypatch.setattr(DeviceRunner, "_decode", lambda *args: None)
    assert serve(Engine(loaded("attention"), config_of("attention")), random_trees(wanted))[0] == wanted


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_greedy_answers_with_other_acceptance(acceptance: Literal["rejection", "typical"]) -> None:
    wanted = plain("attention")
    config = replace(config_of("attention"), draft_acceptance=acceptance)
    engine = Engine(loaded("attention"), config)
    assert serve(engine, random_trees(wanted))[0] == wanted
    assert engine.stats().accepted_tokens > 40


def test_trees_that_are_none() -> None:
    engine = Engine(loaded("attention"), config_of("attention"))
    engine.add(0, requests()[0])
    for parents in ([-1], [-1, 1], [-2, 0], [0, -1]):
        with pytest.raises(RequestError, match="each must be -1 or an earlier draft"):
            engine.propose(0, 0, Drafts([5, 6], parents=parents))
    with pytest.raises(RequestError, match="a tree has 64 drafts; at most 63 are possible"):
        engine.propose(0, 0, Drafts([5] * 64, parents=[-1] * 64))
    assert Drafts([1, 2, 3, 4], parents=[-1, -1, 0, 2]).chain() == Drafts([1, 3, 4])
    assert trees.as_parents([-1, 0, 1], 3) == ()
