"""Whole blocks of experts by kernels: compared with the reference's primitives in float64, in any batch, with their
choices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.ops import api
from ridgeline.ops.reference.primitives import route as reference_route
from ridgeline.ops.stages import MLPBlock
from ridgeline.spec import MLP, ClampedSwiGLU, ExpertGroups, GatedMLP, IdentityExperts, MoE, Ungated

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels of csrc/ are not built")
from cpu.instruction_sets import fingerprint_under  # noqa: E402
from cpu.test_kernels_stages import RMS, WIDTH, Cpu, compare, draw, rng, same_bits  # noqa: E402

SIZES = (1, 63, 100, 257)
CASES = {
    "plain": MoE(7, 3, 70),
    "over all": MoE(6, 2, 33, "gelu_tanh", normalize=False, scale=2.5),
    "biases": MoE(6, 3, 20, ClampedSwiGLU(1.7, 0.5), router_bias=True, bias=True),
    "no gates": MoE(6, 2, 20, Ungated("relu2"), bias=True),
    "shared": MoE(40, 6, 20, shared=GatedMLP(33)),
    "shared, gated": MoE(8, 2, 20, shared=GatedMLP(33), shared_gate=True),
    "groups": MoE(24, 4, 20, scores="sigmoid", choice_bias=True, groups=ExpertGroups(4, 2, "best_two"), scale=2.0,
                  shared=GatedMLP(33)),
    "best groups": MoE(20, 4, 20, groups=ExpertGroups(10, 3, "best"), normalize=False),
    "latent": MoE(8, 3, 20, Ungated("relu2"), scores="sigmoid", latent_size=40, shared=MLP(33, "relu2")),
    "latent, shared gate": MoE(8, 3, 20, latent_size=40, shared=GatedMLP(33), shared_gate=True),
    "one": MoE(1, 1, 20),
}  # fmt: skip
by_case = pytest.mark.parametrize("name", CASES)


def arrays_of(case: MoE) -> dict[str, np.ndarray]:
    found = {w.name: draw(*w.shape, key=i, scale=w.shape[-1] ** -0.5) for i, w in enumerate(case.weights(WIDTH))}
    return found | {"norm.weight": 1 + draw(WIDTH, key=99, scale=0.1)}


@pytest.mark.parametrize("tokens", SIZES)
@by_case
def test_a_block_is_its_definition(name: str, tokens: int) -> None:
    case, arrays = CASES[name], arrays_of(CASES[name])
    residual, delta = draw(tokens, WIDTH), draw(tokens, WIDTH, key=1)
    compare(api.MLP_BLOCK, MLPBlock(case, RMS, 0.5), arrays, (residual, delta), size=600)
    compare(api.MLP_BLOCK, MLPBlock(case, None, 1.0), arrays, (residual, None), size=600)


@by_case
def test_a_block_in_any_batch(name: str) -> None:
    case = MLPBlock(CASES[name], RMS, 1.0)
    arrays, residual, delta = arrays_of(CASES[name]), draw(530, WIDTH), draw(530, WIDTH, key=1)
    whole = Cpu().stage(api.MLP_BLOCK, case, arrays)(residual, delta)
    for threads in (1, 2, 4):
        run = Cpu(threads).stage(api.MLP_BLOCK, case, arrays)
        for begin, end in ((0, 1), (7, 8), (500, 510), (1, 34), (3, 3), (0, 530)):
            found = run(residual[begin:end], delta[begin:end])
            assert same_bits(found, tuple(a[begin:end] for a in whole))


@by_case
def test_a_token_that_is_not_finite_harms_no_other(name: str) -> None:
    run = Cpu(2).stage(api.MLP_BLOCK, MLPBlock(CASES[name], RMS, 1.0), arrays_of(CASES[name]))
    residual = draw(9, WIDTH)
    clean, others = run(residual, None)[1], [0, 1, 2, 3, 5, 6, 7, 8]
    for bad in (np.inf, np.nan):
        residual[4, 3] = bad
        dirty = run(residual, None)[1]
        assert np.array_equal(dirty[others], clean[others])
        assert not np.isfinite(dirty[4]).all()


@pytest.mark.parametrize("tokens", SIZES)
def test_experts_that_return_their_input(tokens: int) -> None:
    """Ids behind the last expert add share * x, which no other token changes; some tokens choose nothing else."""
    case = MoE(7, 4, 20, identity=IdentityExperts(5, 0.5))
    stacks = [draw(7, *shape, key=i) for i, shape in enumerate(((20, WIDTH), (20, WIDTH), (WIDTH, 20)))]
    ids = np.argsort(draw(tokens, 12, key=5), -1)[:, :4].astype(np.int64)
    ids[::3] = [7, 11, 9, 8]
    x, scores = draw(tokens, WIDTH), np.abs(draw(tokens, 4, key=6))
    named = {f"experts.{n}.weight": stack for n, stack in zip(("gate", "up", "down"), stacks, strict=True)}
    run = Cpu(2).stage(api.EXPERT_BLOCK, case, named)
    gate, up, down = (stack.astype(np.float64) for stack in stacks)
    wanted = np.zeros((tokens, WIDTH))
    for t, c in np.ndindex(tokens, 4):
        e, row = ids[t, c], x[t].astype(np.float64)
        raised = row * 0.5 if e >= 7 else down[e] @ (gate[e] @ row / (1 + np.exp(-gate[e] @ row)) * (up[e] @ row))
        wanted[t] += scores[t, c] * raised
    found = run(x, ids, scores)
    assert np.abs(found - wanted).max() <= 600 * 2.0**-24 * np.abs(wanted).max()
    for t in {0, tokens // 2, tokens - 1}:
        assert same_bits(run(x[t : t + 1], ids[t : t + 1], scores[t : t + 1]), found[t : t + 1])
    with pytest.raises(IndexError, match="expert 12 of 12"):
        run(x, np.full_like(ids, 12), scores)


def choose(case: MoE, logits: np.ndarray, bias: np.ndarray | None, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
    found: tuple[np.ndarray, np.ndarray] = Cpu(threads).primitive(api.ROUTE, case)(logits, bias)
    return found


@pytest.mark.parametrize("experts", [1, 2, 16, 33, 63, 100, 257])
def test_choices_ties_included(experts: int) -> None:
    """The logits are small whole numbers, and many of them are equal."""
    count = min(experts, 5)
    logits = rng(experts).integers(-2, 3, (100, experts)).astype(np.float32)
    bias = rng(1, experts).integers(-1, 2, experts).astype(np.float32)
    for scores in ("softmax", "sigmoid"):
        for normalize in (False, True):
            for given in (None, bias):
                case = MoE(experts, count, 8, scores=scores, normalize=normalize, choice_bias=given is not None)
                ids, weights = choose(case, logits, given, 2)
                more = () if given is None else (torch.from_numpy(given),)
                wanted = reference_route(case)(torch.from_numpy(logits), *more)
                assert np.array_equal(ids, wanted[0].numpy())
                np.testing.assert_allclose(weights, wanted[1].numpy(), rtol=2e-6, atol=1e-7)


def test_choices_of_values_that_are_not_finite() -> None:
    """NaN is the largest; infinities are ordered; an expert is chosen only once, whatever the others are."""
    inf, nan = np.inf, np.nan
    rows = [[0, nan, 1, inf], [-inf, -inf, -inf, 0], [-inf] * 4, [nan] * 4, [1, inf, inf, nan]]
    ids, _ = choose(MoE(4, 3, 8), np.array(rows, np.float32), None)
    assert ids.tolist() == [[1, 3, 2], [3, 0, 1], [0, 1, 2], [0, 1, 2], [1, 2, 3]]


def test_views_and_bad_arguments() -> None:
    case, wide = CASES["plain"], draw(9, 20)
    ids, weights = choose(case, wide[:, 3:10], None)
    assert same_bits((weights,), (choose(case, np.ascontiguousarray(wide[:, 3:10]), None)[1],))
    pool, out = kernels.Pool(1), np.empty((9, 3), np.float32)
    with pytest.raises(ValueError, match="multiple of the number of groups"):
        kernels.route(pool, 3, 2, False, False, True, 1.0, wide, None, ids, out)
    with pytest.raises(ValueError, match="k from 1 to the number of experts"):
        kernels.route(pool, 0, 0, False, False, True, 1.0, wide[:, :2], None, ids, out)
    with pytest.raises(ValueError, match="bias"):
        kernels.route(pool, 0, 0, False, False, True, 1.0, wide, wide[0, 1:], ids, out)


def fingerprint() -> bytes:
    """Return results that must not depend on the instruction set."""
    outputs: list[Any] = []
    for case in CASES.values():
        outputs += Cpu(2).stage(api.MLP_BLOCK, MLPBlock(case, RMS, 1.0), arrays_of(case))(draw(70, WIDTH), None)
    return np.concatenate([x.ravel() for x in outputs]).tobytes()


def test_instruction_sets_agree() -> None:
    assert fingerprint_under("avx2", "test_kernels_experts") == fingerprint()
