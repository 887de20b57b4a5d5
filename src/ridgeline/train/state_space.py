"""Initialize S4 and S4D: a state that summarizes the whole past (HiPPO), and steps of many lengths."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ridgeline.spec import Weight

STEPS = (1e-3, 1e-1)  # the logarithms of the steps are uniform between these (arXiv:2111.00396, 4.4)


def initial(kind: Literal["legs", "diagonal"], weight: Weight, generator: torch.Generator) -> Tensor | None:
    """Return the initial value of a weight of a state space; None for its output projection.

    kind: "legs" is HiPPO-LegS, for S4; "diagonal" is S4D-Lin, for S4D (arXiv:2206.11893, 4).
    """
    name = weight.name.rpartition(".")[2]
    if name == "log_dt":
        low, high = (math.log(step) for step in STEPS)
        return low + (high - low) * torch.rand(weight.shape, generator=generator)
    if name in ("C", "D"):  # the real and imaginary parts of C have variance 1/2 each
        return torch.randn(weight.shape, generator=generator) * (0.5**0.5 if name == "C" else 1.0)
    if name not in ("A_log", "A_imag", "P", "B"):
        return None
    size = 2 * weight.shape[-1]  # one number of each conjugate pair is kept
    found = _s4d_lin(size) if kind == "diagonal" else _legs(size)
    return found[name].float().expand(weight.shape).clone()


def _s4d_lin(size: int) -> dict[str, Tensor]:
    """Return A = -1/2 + i pi n."""
    pairs = torch.arange(size // 2, dtype=torch.float64)
    return {"A_log": torch.full_like(pairs, 0.5).log(), "A_imag": math.pi * pairs}


def hippo_legs(size: int) -> tuple[Tensor, Tensor]:
    """Return HiPPO-LegS, A [N, N] and B [N], in float64: the projection of the past on Legendre polynomials
    (arXiv:2008.07669).
    """
    n = torch.arange(size, dtype=torch.float64)
    root = (2 * n + 1).sqrt()
    return -(torch.outer(root, root).tril(-1) + torch.diag(n + 1)), root


def _legs(size: int) -> dict[str, Tensor]:
    """Return HiPPO-LegS in the basis where it is diagonal plus low rank: A = V (diag - P P*) V*, with V unitary.

    A + p p^T with p = sqrt(n + 1/2) is -1/2 I plus a skew-symmetric matrix, whose eigenvectors V are unitary.
    """
    a, b = hippo_legs(size)
    p = (torch.arange(size, dtype=torch.float64) + 0.5).sqrt()
    skew = a + torch.outer(p, p) + 0.5 * torch.eye(size, dtype=torch.float64)
    frequencies, vectors = torch.linalg.eigh(-1j * skew)
    half = vectors[:, size // 2 :].conj().T  # frequencies ascend, so the upper half is positive
    found = {"A_log": torch.full((size // 2,), math.log(0.5)), "A_imag": frequencies[size // 2 :]}
    return found | {name: torch.view_as_real(half @ x.to(half.dtype)).T for name, x in (("P", p), ("B", b))}
