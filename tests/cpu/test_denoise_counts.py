"""How many tokens a pass of a diffusion model keeps, against joint distributions that are known."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from ridgeline.diffusion import Denoiser
from ridgeline.diffusion.commit import above, shares, surest, within_entropy, within_factor
from ridgeline.diffusion.confidence import Laws, entropy
from ridgeline.diffusion.edit import MAX_EDIT_PASSES, is_settled, replaced
from ridgeline.sample.logit_rows import LogitRows
from ridgeline.sample.sampler import NoiseKey, SampleRow
from ridgeline.sched.work import Work
from ridgeline.spec import MaskedDiffusion
from ridgeline.spec.request import SamplingParams

A, B, MASK = range(3)
NEVER = -60.0  # a logit of no chance


def test_shares_are_nearly_equal_and_none_is_empty() -> None:
    for masked in range(1, 40):
        for passes in range(1, 50):
            found = shares(masked, passes)
            assert sum(found) == masked
            assert len(found) == min(masked, passes)
            assert max(found) - min(found) <= 1
            assert min(found) >= 1
    assert shares(7, 3) == [3, 2, 2]


def test_a_threshold_keeps_at_least_one() -> None:
    assert above([0.2, 0.5, 0.4], 0.9) == [1]
    assert sorted(above([0.95, 0.5, 0.9], 0.9)) == [0, 2]
    assert within_factor([0.2, 0.5], 0.1) == [1]
    assert within_factor([0.99, 0.5, 0.98], 0.2) == [0, 2]
    assert surest([0.5, 0.7, 0.7], 2) == [1, 2]
    assert within_entropy([2.0, 1.0], 0.0) == [1]
    assert within_entropy([0.5, 0.0, 0.3], 0.3) == [1, 2, 0]


def joint_of(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Return a random joint distribution of n positions with `size` tokens each, mostly with one likely outcome."""
    joint = rng.dirichlet(np.full(size**n, rng.choice([0.01, 0.03, 0.1]))).reshape((size,) * n)
    return np.asarray(joint)


def marginals(joint: np.ndarray) -> list[np.ndarray]:
    """Return the distribution of each position by itself."""
    return [joint.sum(axis=tuple(a for a in range(joint.ndim) if a != i)) for i in range(joint.ndim)]


@pytest.mark.parametrize("rule", ["factor", "threshold"])
def test_kept_tokens_are_the_likeliest_together(rule: str) -> None:
    """Fast-dLLM's theorem 1 by brute force: n tokens that are each unsure by at most e, where (n + 1) e <= 1.

    A factor of 1 keeps as many as the theorem allows. A threshold keeps as many where n is the number of all positions.
    """
    rng, several = np.random.default_rng(0), 0
    for _ in range(3000):
        n, size = int(rng.integers(2, 5)), int(rng.integers(2, 4))
        joint = joint_of(rng, n, size)
        best = [int(p.argmax()) for p in marginals(joint)]
        chances = [float(p.max()) for p in marginals(joint)]
        kept = within_factor(chances, 1.0) if rule == "factor" else above(chances, 1 - 1 / (n + 1))
        if len(kept) == 1:
            continue  # the likeliest token is kept whatever it is
        several += 1
        among = joint.sum(axis=tuple(i for i in range(n) if i not in kept))
        assert [best[i] for i in sorted(kept)] == [int(i) for i in np.unravel_index(among.argmax(), among.shape)]
    assert several > 500


def test_beyond_the_theorem_kept_tokens_may_be_unlikely_together() -> None:
    """A factor of 3 keeps more than the theorem allows, and the brute force sees it."""
    rng, wrong = np.random.default_rng(1), 0
    for _ in range(2000):
        joint = joint_of(rng, 3, 3)
        best = [int(p.argmax()) for p in marginals(joint)]
        kept = within_factor([float(p.max()) for p in marginals(joint)], 3.0)
        among = joint.sum(axis=tuple(i for i in range(3) if i not in kept))
        wrong += [best[i] for i in sorted(kept)] != [int(i) for i in np.unravel_index(among.argmax(), among.shape)]
    assert wrong > 20


def answers(
    params: SamplingParams, count: int, sees: Callable[[Sequence[int]], tuple[int, int]], *, mask_logit: float = NEVER
) -> list[tuple[tuple[int, ...], int]]:
    """Return answers of two tokens that must differ, and their passes.

    sees: returns, from the tokens of the block, the other token as the model sees it at each position. The model wants
    the opposite of it, and A or B with equal chance if it is the mask token.
    """
    found = []
    for choice in range(count):
        row = SampleRow.start(params, [A, A], NoiseKey(7, choice), ())
        denoiser = Denoiser(MaskedDiffusion(MASK), 2, row, 2, 4)
        tokens: tuple[int, ...] = ()
        while not tokens:
            block = denoiser.open_block([A, A])
            logits = np.full((2, 3), NEVER, np.float32)
            for at, other in enumerate(sees(block)):
                logits[at, [A, B] if other == MASK else [B if other == A else A]] = 0.0
            logits[:, MASK] = mask_logit
            tokens = denoiser.take(LogitRows.of(logits), Work(0, 0, 0, 2, block, True, 2, 2)).tokens
        found.append((tokens, denoiser.passes))
    return found


def edited(is_second_sure: bool, count: int) -> list[tuple[tuple[int, ...], int]]:
    """Return answers of two tokens that must differ, and their passes: drawn in one pass, and then edited.

    The model is never sure of the first token, unless `is_second_sure` is false: then both want to be the other one's
    opposite.
    """
    params = SamplingParams(max_tokens=2, temperature=1.0, denoising_passes=1, edit_threshold=0.9)
    return answers(params, count, lambda block: (MASK if is_second_sure else block[1], block[0]))


def test_editing_mends_what_one_pass_did_wrong() -> None:
    """Half of the pairs are invalid after the first pass; one pass mends each, and another one finds nothing."""
    count = 400
    found = edited(True, count)
    assert {tokens for tokens, _ in found} == {(A, B), (B, A)}
    assert {passes for _, passes in found} == {2, 3}
    assert abs(sum(passes == 3 for _, passes in found) - count / 2) < 4 * np.sqrt(count / 4)


def test_tokens_that_contradict_each_other_change_in_turn_and_the_block_still_ends() -> None:
    found = edited(False, 50)
    assert {passes for tokens, passes in found if tokens[0] != tokens[1]} == {2}
    assert {passes for tokens, passes in found if tokens[0] == tokens[1]} == {1 + MAX_EDIT_PASSES}


def test_only_likely_other_tokens_replace_known_ones() -> None:
    assert replaced([5, 6, 7, 8], [5, 9, 9, 9], [1.0, 0.8, 0.5, 0.4], 0.5) == [1]
    assert replaced([5], [6], [0.01], 0.0) == [0]
    assert not is_settled(had_masks=True, changed=False, passes=0)
    assert is_settled(had_masks=False, changed=False, passes=1)
    assert not is_settled(had_masks=False, changed=True, passes=1)


def entropy_of(p: np.ndarray) -> float:
    held = p[p > 0]
    return float(-(held * np.log(held)).sum())


def test_an_entropy_bound_bounds_the_divergence_from_the_joint() -> None:
    """By brute force: the divergence of the joint distribution of kept tokens from the product of their marginals."""
    rng, several, close = np.random.default_rng(0), 0, 0
    for _ in range(2000):
        n, size, bound = int(rng.integers(2, 5)), int(rng.integers(2, 4)), float(rng.choice([0.0, 0.1, 0.5]))
        joint = joint_of(rng, n, size)
        own = [entropy_of(p) for p in marginals(joint)]
        kept = within_entropy(own, bound)
        assert kept[0] == int(np.argmin(own))
        among = joint.sum(axis=tuple(i for i in range(n) if i not in kept))
        divergence = sum(own[i] for i in kept) - entropy_of(among)
        assert divergence <= bound + 1e-9
        several += len(kept) > 1
        close += divergence > bound / 2 > 0
    assert several > 500
    assert close > 20


def test_an_entropy_bound_keeps_the_tokens_that_transformers_keeps() -> None:
    generation = importlib.import_module("transformers.models.diffusion_gemma.generation_diffusion_gemma")
    generator = torch.Generator().manual_seed(0)
    for bound in (0.05, 0.5, 3.0):
        logits = 4 * torch.randn(20, 12, 9, generator=generator, dtype=torch.float64)
        config = generation.EntropyBoundSamplerConfig(entropy_bound=bound)
        sampler = generation.EntropyBoundSampler(config, 12, 9, 10)
        sampler.accept_canvas(torch.zeros(20, 12).long(), torch.ones(20, 12).long(), logits, 0)
        logprobs = torch.log_softmax(logits, -1).numpy()
        for rows, kept in zip(logprobs, sampler.accepted_token_mask, strict=True):
            own = (-entropy(Laws.of(rows), np.zeros(12, np.int64), np.zeros(12))).tolist()
            assert sorted(within_entropy(own, bound)) == kept.nonzero().flatten().tolist()


def pairs(passes: int, count: int) -> list[tuple[int, ...]]:
    """Return answers of two tokens from the joint distribution {AB, BA}, each with probability one half.

    Logits are those of an exact model: a position is A or B with equal chance, or the other one's opposite.
    """
    params = SamplingParams(max_tokens=2, temperature=1.0, denoising_passes=passes, remasking="random")
    found = answers(params, count, lambda block: (block[1], block[0]), mask_logit=1.0)  # never taken, but the likeliest
    assert {taken for _, taken in found} == {passes}
    return [tokens for tokens, _ in found]


def test_one_pass_gives_invalid_pairs_at_the_predicted_rate_and_two_give_none() -> None:
    count = 800
    invalid = sum(a == b for a, b in pairs(1, count))
    assert abs(invalid - count / 2) < 4 * np.sqrt(count / 4)  # tokens of one pass are independent
    valid = pairs(2, count)
    assert set(valid) == {(A, B), (B, A)}
    assert abs(valid.count((A, B)) - count / 2) < 4 * np.sqrt(count / 4)
