"""Compare a mixture of experts, from the residual stream to the result that is added to it, with the plain definition.

The definition computes token by token and choice by choice in float64, and an expert is only a matrix product. Logits
are small whole numbers, so that many of them are exact ties. The matrices of an expert that no token chooses are NaN.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ridgeline.nn.binding import bind
from ridgeline.ops import api, open_table
from ridgeline.ops.stages import MLPBlock
from ridgeline.spec import ClampedSwiGLU, IdentityExperts, MoE, Ungated

WIDTH = 33
TABLE = open_table("reference")
CASES = {
    "over all": MoE(6, 2, 20, normalize=False),
    "over the chosen": MoE(6, 3, 20),
    "biases": MoE(6, 3, 20, router_bias=True, bias=True),
    "clamped": MoE(6, 2, 20, ClampedSwiGLU(1.3, 0.8), router_bias=True, bias=True),
    "no gates": MoE(6, 2, 20, Ungated("relu2"), bias=True),
    "inputs weighed": MoE(6, 3, 20, bias=True, weighs_inputs=True),
    "many": MoE(64, 8, 5),
    "one": MoE(1, 1, 20),
    "all of them": MoE(5, 5, 20),
    "some return their input": MoE(6, 4, 20, identity=IdentityExperts(3, 0.5)),
}


def drawn(case: MoE, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, dict[str, Tensor]]:
    """Return tokens [size, WIDTH] and weights. If experts can be idle, the last one is: its logit of -100 is the
    lowest.
    """
    rng = np.random.default_rng([size, case.num_experts])
    x = rng.integers(-1, 2, (size, WIDTH)).astype(np.float32)
    x[:, 0] = 1.0
    weights = {}
    for w in case.weights(WIDTH):
        if w.name.startswith("router"):
            value = rng.integers(-1, 2, w.shape) * (rng.random(w.shape) < 0.2)
        else:
            value = rng.normal(0.0, 0.3, w.shape)
        weights[w.name] = torch.from_numpy(value.astype(np.float32)).to(dtype if w.is_matrix else torch.float32)
    if case.num_experts_per_tok < case.num_experts:
        weights["router.weight"][case.num_experts - 1] = 0.0
        weights["router.weight"][case.num_experts - 1, 0] = -100.0
        for name in weights:
            if name.startswith("experts"):
                weights[name][-1] = torch.nan
    return torch.from_numpy(x), weights


def gated(case: MoE, *parts: np.ndarray) -> np.ndarray:
    if isinstance(case.activation, Ungated):
        (up,) = parts
        return np.maximum(up, 0.0) ** 2
    gate, up = parts
    if isinstance(case.activation, ClampedSwiGLU):
        limit = case.activation.limit
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit) + 1
        return gate / (1 + np.exp(-case.activation.alpha * gate)) * up
    return gate / (1 + np.exp(-gate)) * up


def plain(case: MoE, x: Tensor, weights: dict[str, Tensor]) -> tuple[np.ndarray, int]:
    """Return the sum for each token, and the number of choices that a tie decided."""
    w = {name: value.double().numpy() for name, value in weights.items()}
    out, ties = np.zeros(x.shape), 0
    for t, row in enumerate(x.double().numpy()):
        logits = w["router.weight"] @ row + w.get("router.bias", 0.0)
        order = sorted(range(case.choices), key=lambda e, logits=logits: (-logits[e], e))
        chosen, left = order[: case.num_experts_per_tok], order[case.num_experts_per_tok :]
        ties += bool(left) and logits[chosen[-1]] == logits[left[0]]
        powers = np.exp(logits - logits.max())
        total = powers[chosen].sum() if case.normalize else powers.sum()
        for e in chosen:
            if case.identity and e >= case.num_experts:
                out[t] += powers[e] / total * case.identity.share * row
                continue
            names = ("gate", "up", "down") if case.gated else ("up", "down")
            parts = {n: (w[f"experts.{n}.weight"], w.get(f"experts.{n}.bias")) for n in names}
            *raised, (matrix, bias) = parts.values()
            share = powers[e] / total
            before, after = (share, 1.0) if case.weighs_inputs else (1.0, share)
            inner = gated(case, *(m[e] @ (before * row) + (0.0 if b is None else b[e]) for m, b in raised))
            out[t] += after * (matrix[e] @ inner + (0.0 if bias is None else bias[e]))
    return out, ties


def run(case: MoE, x: Tensor, weights: dict[str, Tensor]) -> Tensor:
    named = {f"layers.0.mlp.{name}": value for name, value in weights.items()}
    bound = bind(named, TABLE, "layers.0.mlp", "layers.0.mlp_norm")
    return TABLE.stage(api.MLP_BLOCK, MLPBlock(case, None, 1.0), bound)(x, None)[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 63, 100, 257])
@pytest.mark.parametrize("name", CASES)
def test_it_is_the_plain_definition(name: str, size: int, dtype: torch.dtype) -> None:
    case = CASES[name]
    x, weights = drawn(case, size, dtype)
    wanted, ties = plain(case, x, weights)
    assert np.isfinite(wanted).all()
    assert ties > size // 10 or case.num_experts_per_tok == case.num_experts or size == 1
    np.testing.assert_allclose(run(case, x, weights).double().numpy(), wanted, rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["over all", "clamped", "no gates"])
def test_an_idle_expert_has_no_part_in_the_gradients(name: str) -> None:
    """An idle expert does not spoil the gradients of others: they are finite although its matrices are not, and its own
    are zero.
    """
    case = CASES[name]
    x, weights = drawn(case, 63)
    leaves = {n: w.requires_grad_() for n, w in weights.items()}
    run(case, x.requires_grad_(), leaves).square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    for n, w in leaves.items():
        assert w.grad is not None and w.grad.isfinite().all()
        if n.startswith("experts"):
            assert not w.grad[-1].any()
            assert all(g.any() for g in w.grad[:-1])


def test_the_batch_changes_no_choice() -> None:
    """A token chooses the same experts whether it is alone, first, last or among others, also in ties."""
    case = CASES["over the chosen"]
    x, weights = drawn(case, 257)
    route = TABLE.primitive(api.ROUTE, case)
    together = route(x @ weights["router.weight"].T)[0]
    alone = torch.cat([route(row[None] @ weights["router.weight"].T)[0] for row in x])
    assert torch.equal(together, alone)
