"""Trees of drafts of heads: answers stay as they are, and each node is that of a dense pass over its path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpu.test_draft_model import serve
from cpu.test_drafts import NEW_TOKENS, PROMPTS, Answers, loaded, plain
from cpu.test_head_drafts import HOW, SPECS, head_of, open_engine, settings
from oracle.mixers import VOCAB
from ridgeline import SamplingParams
from ridgeline.engine import Engine
from ridgeline.errors import RequestError
from ridgeline.nn.heads import MedusaHead
from ridgeline.runtime import eagle_tree, growth
from ridgeline.runtime.drafter import Ask
from ridgeline.runtime.eagle_tree import EagleTrees
from ridgeline.runtime.features import Features
from ridgeline.runtime.medusa_tree import ACCURACIES, MedusaTrees, tree_paths
from ridgeline.runtime.step import DenseStep
from ridgeline.sample.rejection import Draft
from ridgeline.sample.sampler import NoiseKey, SampleRow
from ridgeline.sample.tree import Grown, expand
from ridgeline.settings import EngineOptions, check_tree
from ridgeline.spec import trees
from ridgeline.spec.workspace import feature_rows

WIDTH, NODES = 3, 10
SMALL = 2, 4  # width and nodes with few pages
CLOSE = 1e-4  # scores that differ by less may come in another order
Path = tuple[int, ...]
Called = tuple[list[int], int, list[Draft]]  # known tokens, most drafts, and drafts of a call


class Dense:
    """Passes over whole sequences, as a head's drafts after some tokens are defined."""

    def __init__(self, head: str, tokens: Sequence[int]) -> None:
        self.head, self.target, self.tokens = head_of(head), loaded("attention"), list(tokens)
        self.memory, self.module = self.target.table.memory, self.head.head
        aux = self.module.spec.aux(len(self.target.spec.layers))
        stream = self.target.model.forward(DenseStep.build([self.tokens[:-1]], self.memory), aux=aux)
        given = stream.aux if aux else [self.target.model.hidden(stream)]
        self.features = np.asarray(given[0] if isinstance(self.module, MedusaHead) else self.module.fuse(given))
        self._seen: dict[Path, tuple[np.ndarray, np.ndarray]] = {}

    def after(self, path: Path) -> tuple[np.ndarray, np.ndarray]:
        """Return the log probabilities [vocabulary] after a path, and the features that a row after it would read.

        A row of a draft reads what the row of its parent left.
        """
        if path not in self._seen:
            assert not isinstance(self.module, MedusaHead)
            features = self.after(path[:-1])[1] if path else self.features
            step = DenseStep.build([[*self.tokens[1:], *path]], self.memory)
            found = self.module.feature(self.module.forward(step, features))
            logits = np.asarray(self.memory.get(self.module.logits(found)))[-1].astype(np.float64)
            if self.head.file.vocabulary is not None:
                wide = np.full(VOCAB, -np.inf)
                wide[self.head.file.vocabulary] = logits
                logits = wide
            features = np.concatenate([features, np.asarray(found)[-1:]])
            self._seen[path] = logits - np.log(np.exp(logits).sum()), features
        return self._seen[path]


def eagle_scores(dense: Dense, count: int, width: int) -> dict[Path, float]:
    """Return the nodes of EAGLE-2's tree before the best are kept, with the logs of products of confidences."""
    scores: dict[Path, float] = {(): 0.0}
    frontier: list[Path] = [()]
    for _ in range(trees.head_levels(width, count)):
        below: dict[Path, float] = {}
        for path in frontier:
            found = dense.after(path)[0]
            for token in np.argsort(-found)[:width].tolist():
                below[(*path, token)] = scores[path] + float(found[token])
        scores |= below
        frontier = sorted(below, key=lambda path: -below[path])[:width]
    del scores[()]
    return scores


def paths_of(drafts: Sequence[Draft]) -> list[Path]:
    found: list[Path] = []
    for draft in drafts:
        assert draft.parent is not None
        found.append((*(found[draft.parent] if draft.parent >= 0 else ()), draft.token))
    return found


def is_right(head: str, called: Called, width: int) -> bool:
    """Return whether a call's drafts are the best nodes by dense passes, the best ones first."""
    tokens, size, drafts = called
    dense, found = Dense(head, tokens), paths_of(drafts)
    if isinstance(dense.module, MedusaHead):
        logits = [dense.memory.get(x)[0] for x in dense.module.logits(dense.features[-1:], len(ACCURACIES))]
        tops = [np.argsort(-x).tolist() for x in logits]
        wanted = tree_paths(ACCURACIES, dense.module.spec.num_heads, width, size)
        return found == [tuple(tops[d][rank] for d, rank in enumerate(path)) for path in wanted]
    scores = eagle_scores(dense, size, width)
    best = sorted(scores.values(), reverse=True)[:size]
    return len(found) == len(set(found)) == size and all(
        path in scores and abs(scores[path] - wanted) < CLOSE for path, wanted in zip(found, best, strict=True)
    )


def watched(engine: Engine, answers: Answers, monkeypatch: pytest.MonkeyPatch) -> list[Called]:
    """Collect the draft calls, and verify other trees, which have some of the answer's tokens on a random path."""
    drafter, found, rng = engine._runner.drafter, list[Called](), np.random.default_rng(1)
    assert isinstance(drafter, EagleTrees | MedusaTrees)
    draft = drafter.draft
    following = {tuple(prompt): answers[i, 0] for i, prompt in enumerate(PROMPTS)}

    def noted(asks: list[Ask], **options: Any) -> list[list[Draft]]:
        out = []
        for ask, drafts in zip(asks, draft(asks, **options), strict=True):
            found.append((list(ask.tokens), ask.depth, drafts))
            prompt = next(p for p in sorted(following, key=len, reverse=True) if tuple(ask.tokens[: len(p)]) == p)
            rest = following[prompt][len(ask.tokens) - len(prompt) :]
            tree, right, depth = list[Draft](), -1, 0
            for i in range(ask.depth):
                if depth < len(rest) and rng.random() < 0.3:
                    tree.append(Draft(rest[depth], parent=right))
                    right, depth = i, depth + 1
                else:
                    tree.append(Draft(int(rng.integers(VOCAB)), parent=int(rng.integers(-1, i)) if i else -1))
            out.append(tree)
        return out

    monkeypatch.setattr(drafter, "draft", noted)
    return found


def share_right(head: str, found: Sequence[Called], width: int = WIDTH) -> float:
    """Return the share of calls with drafts whose drafts are right, of every third one."""
    some = [is_right(head, called, width) for called in [x for x in found if x[2]][::3]]
    assert len(some) > 10
    return sum(some) / len(some)


def tree_engine(head: str, monkeypatch: pytest.MonkeyPatch, how: str = "") -> Engine:
    """Return an engine with trees; with small ones where pages are few, because a larger tree takes pages ahead."""
    size = SMALL if how in ("recompute", "swap") else (WIDTH, NODES)
    return open_engine(head, monkeypatch, how, draft_tree=size[0], num_speculative_tokens=size[1])


@pytest.mark.parametrize(
    ("head", "how"),
    [
        pytest.param(head, how, marks=() if how in daily else pytest.mark.nightly)
        for head, daily in (("medusa", ("chunks",)), ("eagle", ("chunks", "swap")), ("eagle3", ("",)))
        for how in HOW
    ],
)
def test_drafts_are_those_of_dense_passes(head: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tree_engine(head, monkeypatch, how)
    found = watched(engine, plain("attention"), monkeypatch)
    assert serve(engine, rounds=2) == plain("attention")
    stats = engine.stats()
    assert stats.accepted_tokens > 50 and stats.drafts.in_trees > 20 and stats.untreed is None
    if how in ("recompute", "swap"):
        assert stats.preempted_swap if how == "swap" else stats.preempted_recompute
    # A sequence that was swapped out has rows that read zeros.
    if head != "medusa":
        drafter: Any = engine._runner.drafter
        assert bool(drafter._tree_rows._graphs) == (how != "unrecorded")
    width = SMALL[0] if how in ("recompute", "swap") else WIDTH
    assert share_right(head, found, width) >= (0.5 if how == "swap" else 1.0)
    assert sum(1 for *_, drafts in found if drafts) > 0.9 * len(found)


# ---- deliberate bugs ------------------------------------------------------------------------------------------------


def features_stay(patch: pytest.MonkeyPatch) -> None:
    """Leave the features of accepted drafts in the order of the tree."""
    patch.setattr(Features, "settle", lambda *args: None)


def siblings_are_read(patch: pytest.MonkeyPatch) -> None:
    """Let each row of the head read all rows before it."""
    patch.setattr(eagle_tree, "paths", lambda parents: trees.paths(range(-1, len(parents) - 1)))


def scores_are_not_multiplied(patch: pytest.MonkeyPatch) -> None:
    def grown(tree: Grown, log_probs: np.ndarray, width: int) -> Grown:
        return expand(replace(tree, scores=np.zeros_like(tree.scores)), log_probs, width)

    patch.setattr(growth, "expand", grown)


def features_of_the_level_before(patch: pytest.MonkeyPatch) -> None:
    """Let each row read what the row before it left, as in a chain."""
    places = EagleTrees._places

    def wrong(self: EagleTrees, growing: Any) -> Any:
        for tree in growing:
            tree.parents = list(range(-1, len(tree.parents) - 1))
        return places(self, growing)

    patch.setattr(EagleTrees, "_places", wrong)


@pytest.mark.parametrize(
    ("head", "bug"),
    [("medusa", features_stay), ("eagle", features_stay), ("eagle", siblings_are_read),
     ("eagle3", scores_are_not_multiplied),
     pytest.param("eagle", features_of_the_level_before, marks=pytest.mark.nightly)],
)  # fmt: skip
def test_a_bug_costs_only_drafts(
    head: str, bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        engine = tree_engine(head, monkeypatch)
        found = watched(engine, plain("attention"), monkeypatch)
        assert serve(engine) == plain("attention")
    assert share_right(head, found) < 0.9


# ---- sampled answers, settings, limits -------------------------------------------------------------------------------


@pytest.mark.parametrize("acceptance", ["same", "rejection", "typical"])
@pytest.mark.parametrize("head", ["medusa", "eagle", pytest.param("eagle3", marks=pytest.mark.nightly)])
def test_sampled_answers(head: str, acceptance: str) -> None:
    """Only `same` gives the answers without drafts; every one of them gives answers of the right length."""
    config = settings(
        head, draft_acceptance=acceptance, max_num_seqs=16, draft_tree=WIDTH, num_speculative_tokens=NODES
    )
    engine = Engine(loaded("attention"), config, draft=head_of(head))
    params = {"temperature": 1.0, "n": 2, "top_k": 20}
    found = serve(engine, rounds=2, **params)
    assert engine.stats().drafts.in_trees > 20
    if acceptance == "same":
        assert found == plain("attention", **params)
    assert all(len(tokens) == NEW_TOKENS for tokens in found.values())


def test_broken_logits_cost_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree ends before the level whose logits are NaN."""
    engine = tree_engine("eagle", monkeypatch, "unrecorded")
    drafter: Any = engine._runner.drafter
    chain = drafter._chain
    run, calls = chain.run, [0]

    def broken(*args: Any) -> Any:
        passed, calls[0] = run(*args), calls[0] + 1
        return passed._replace(logits=np.full_like(passed.logits, np.nan)) if calls[0] % 4 == 0 else passed

    monkeypatch.setattr(chain, "run", broken)
    assert serve(engine) == plain("attention")
    assert calls[0] > 20 and engine.stats().draft_tokens


@pytest.mark.parametrize("head", ["medusa", "eagle"])
def test_the_size_of_trees_is_chosen(head: str) -> None:
    config = settings(head, draft_tree=WIDTH, num_speculative_tokens=NODES, draft_depth="chosen")
    engine = Engine(loaded("attention"), config, draft=head_of(head))
    assert serve(engine, rounds=2) == plain("attention")
    assert engine.stats().draft_tokens


@pytest.mark.parametrize("head", ["medusa", "eagle"])
def test_a_target_with_recurrent_layers_takes_chains(head: str) -> None:
    config = settings(head, "hybrid", draft_tree=WIDTH)
    engine = Engine(loaded("hybrid"), config, draft=head_of(head, "hybrid"))
    assert serve(engine) == plain("hybrid")
    stats = engine.stats()
    assert stats.draft_tokens and not stats.drafts.in_trees and "recurrent layers" in (stats.untreed or "")
    shown = next(s for s in config.settings() if s.name == "draft_tree")
    assert shown.value == "1" and "a chain instead of 3: the model has recurrent layers" in shown.reason


def test_trees_that_nothing_proposes_are_refused() -> None:
    for given, said in (
        (EngineOptions(draft_tree=4), "--speculative off proposes no trees"),
        (EngineOptions(draft_tree=4, speculative="auto"), "--speculative auto proposes no trees"),
        (EngineOptions(draft_tree=4, speculative="ngram"), "--speculative ngram proposes no trees"),
        (EngineOptions(draft_tree=17, speculative="x"), "draft_tree is 17; it must be a whole number from 1 to 16"),
        (EngineOptions(draft_tree=2, speculative="x", num_speculative_tokens=64), "a tree .* has at most 63 drafts"),
    ):
        with pytest.raises(RequestError, match=said):
            check_tree(given)
    with pytest.raises(RequestError, match="the draft model small proposes no trees"):
        check_tree(EngineOptions(draft_tree=2, speculative="small"), loaded("attention").spec)
    for name in SPECS:
        check_tree(EngineOptions(draft_tree=2, speculative="x"), SPECS[name][1])


@pytest.mark.parametrize("name", SPECS)
def test_features_take_the_bytes_that_are_planned(name: str) -> None:
    """An EAGLE head's rows for a wide tree are more than the drafts that are verified."""
    config = settings(name, max_num_seqs=7, max_num_batched_tokens=100, draft_tree=4, num_speculative_tokens=6)
    drafter: Any = Engine(loaded("attention"), config, draft=head_of(name))._runner.drafter
    kept, tokens = (6, 0) if name == "medusa" else (trees.head_rows(4, 6), 100)
    assert drafter._features.array.shape == (feature_rows(7 + 1, kept, tokens), SPECS[name][1].hidden_size)
    small = settings(name, max_num_seqs=7, max_num_batched_tokens=100, num_speculative_tokens=6)
    more = feature_rows(7 + 1, kept, tokens) - feature_rows(7 + 1, 6, tokens)
    planned = config.workspace_bytes - small.workspace_bytes
    assert planned >= 4 * more * SPECS[name][1].hidden_size if more else planned >= 0


def test_rounds_that_did_not_run_are_not_counted() -> None:
    """Otherwise the rule of depths would learn that a round of the heads takes no time."""
    config = settings("medusa", draft_tree=WIDTH, num_speculative_tokens=NODES)
    engine = Engine(loaded("attention"), config, draft=head_of("medusa"))
    drafter = engine._runner.drafter
    assert isinstance(drafter, MedusaTrees)
    drafter.rounds = 4  # an earlier call ran so many
    row = SampleRow.start(SamplingParams(temperature=0), [1], NoiseKey(0, 0), ())
    assert drafter.draft([Ask(10**6, 0, [1, 2, 3], 2, row)]) == [[]]  # a sequence whose last state is not kept
    assert drafter.rounds == 0


def test_paths_have_falling_ranks() -> None:
    """A token is tried after the better ones, whatever was counted; a head without counts is like the last one."""
    found = tree_paths([[0.2, 0.3, 0.1]], heads=2, width=2, size=9)
    assert found == ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1))
    assert tree_paths([[0.2, 0.3, 0.1]], heads=2, width=2, size=3) == found[:3]
    assert tree_paths([[0.2, 0.0]], heads=1, width=2, size=3) == ((0,), (1,))  # never right, but there is room for it
