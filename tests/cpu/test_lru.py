"""The real-gated linear recurrent unit against its paper, token by token in float64: torch, numpy and the kernel."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from oracle.problems import NUMPY, REFERENCE, Problem, check, normal, poisoned
from ridgeline.ops import api
from ridgeline.spec import GatedLRU

CASE = GatedLRU(channels=6, num_blocks=2, conv_size=3)
SIZES = (1, 63, 100, 257)
HAS_KERNELS = find_spec("ridgeline._kernels") is not None
Array = np.ndarray[Any, Any]


def draw(n: int, m: int) -> tuple[Array, ...]:
    """Return x, both gates' logits, the decay, begun (of every second sequence) and h."""
    rows = [normal(n, m, 6, seed=i) for i in range(3)]
    begun = np.tile((np.arange(n) % 2).astype(np.float32)[:, None], 2)
    return *rows, np.linspace(-6, 1, 6, dtype=np.float32), begun, normal(n, 6, seed=4) * begun[:, :1]


def by_definition(x: Array, into: Array, gate: Array, decay: Array, begun: Array, h: Array) -> tuple[Array, Array]:
    """Compute arXiv:2402.19427, equations 1 to 4; the first token has no factor, as in the published code."""
    x, into, gate, decay, h = (a.astype(np.float64) for a in (x, into, gate, decay, h))
    ys = []
    for t in range(x.shape[1]):
        a = np.exp(-8 * np.log1p(np.exp(decay)) / (1 + np.exp(-gate[:, t])))
        factor = np.sqrt(1 - a * a)
        if t == 0:
            factor = np.where(begun[:, :1] > 0, factor, 1.0)
        h = a * h + factor * x[:, t] / (1 + np.exp(-into[:, t]))
        ys.append(h)
    return np.stack(ys, 1), h


def of_torch() -> Callable[..., Any]:
    def run(*args: Array) -> list[Array]:
        double = (torch.from_numpy(a if a.dtype == np.int64 else a.astype(np.float64)) for a in args)
        return [y.numpy() for y in REFERENCE.primitive(api.GATED_LRU, CASE)(*double)]

    return run


def of_kernels() -> Callable[..., Any]:
    from ridgeline._kernels import Pool
    from ridgeline.ops.cpu.primitives import KERNELS

    return KERNELS[api.GATED_LRU].make(CASE, Pool(2))


BACKENDS: dict[str, Callable[[], Callable[..., Any]]] = {
    "torch": of_torch, "numpy": lambda: NUMPY.primitive(api.GATED_LRU, CASE),
    **({"kernels": of_kernels} if HAS_KERNELS else {}),
}  # fmt: skip
by_backend = pytest.mark.parametrize("backend", BACKENDS)


@pytest.mark.parametrize("size", SIZES)
@by_backend
def test_the_unit_is_the_papers(backend: str, size: int) -> None:
    args = draw(3, size)
    y, begun, h = BACKENDS[backend]()(*args, np.full(3, size))
    wanted_y, wanted_h = by_definition(*args)
    np.testing.assert_allclose(y, wanted_y, rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(h, wanted_h, rtol=2e-5, atol=2e-5)
    assert (begun == 1).all()


@by_backend
def test_parts_and_padding_change_nothing(backend: str) -> None:
    """Kernels give the same bits; functions of torch and numpy may round numbers at the end of an array otherwise."""
    run, lengths = BACKENDS[backend](), np.array([1, 40, 100])
    *rows, decay, begun, h = draw(3, 100)
    tolerance = dict.fromkeys(("rtol", "atol"), 0.0 if backend == "kernels" else 1e-6)
    y, _, last = run(*rows, decay, begun, h, lengths)
    for i, n in enumerate(lengths):
        state, flag, at = h[i : i + 1], begun[i : i + 1], 0
        for end in (1, 7, 60, 100):
            if part := min(end, n) - at:
                own = [np.ascontiguousarray(x[i : i + 1, at : at + part]) for x in rows]
                out, flag, state = run(*own, decay, flag, state, np.array([part]))
                np.testing.assert_allclose(out[0], y[i, at : at + part], **tolerance)
                at += part
        np.testing.assert_allclose(state[0], last[i], **tolerance)


def test_numpy_is_torch_beside_poison() -> None:
    check(Problem(api.GATED_LRU, CASE, (*draw(3, 50), np.full(3, 50)), 2e-5))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_have_matrices_of_their_own(dtype: str) -> None:
    x, weight, bias = normal(5, 7, 12), normal(3, 6, 4, seed=1, dtype=dtype), normal(3, 6, seed=2)
    check(Problem(api.BLOCK_LINEAR, None, (x, weight, bias)))
    parts = [x[..., 4 * g : 4 * g + 4] @ weight[g].astype(np.float64).T + bias[g] for g in range(3)]
    wanted = np.concatenate(parts, -1)
    np.testing.assert_allclose(NUMPY.primitive(api.BLOCK_LINEAR, None)(x, weight, bias), wanted, rtol=1e-5, atol=1e-5)
    if HAS_KERNELS:
        from ridgeline._kernels import Pool
        from ridgeline.ops.cpu.primitives import KERNELS

        kernel = KERNELS[api.BLOCK_LINEAR].make(None, Pool(2))
        np.testing.assert_allclose(kernel(poisoned(x), weight, bias), wanted, rtol=1e-5, atol=1e-5)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="channels 6 is not a multiple of num_blocks 4"):
        GatedLRU(6, 4, 3)
    with pytest.raises(ValueError, match="conv_size must be at least 2"):
        GatedLRU(6, 2, 1)
    with pytest.raises(ValueError, match="2 blocks of channels are not a multiple of 4 ranks"):
        CASE.part(4)
    half = CASE.part(2)
    assert (half.channels, half.num_blocks) == (3, 1)
