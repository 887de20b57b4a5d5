"""The torchlib backend: kernels of torch and of the libraries beside it, which serve the ops that a user gives them.

They are not chosen by themselves. A library chooses an algorithm by the shape of a batch, so a token's bits may depend
on the batch, and no setting of scheduling may change a token.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from ridgeline.errors import DeviceError
from ridgeline.ops import api
from ridgeline.ops.api import Op, Weights
from ridgeline.ops.torchlib import attention, experts, products
from ridgeline.spec.quant import Format

NAME = "torchlib"
BY_BATCH = "a token's bits may depend on its batch; --ops {op}=torchlib accepts that"
UNMEASURED = "nobody measured whether it is faster than triton; --ops {op}=torchlib selects it, and no bit changes"


class Candidate(NamedTuple):
    """A kernel of a library: why it does not serve a case, or None; and a function that makes it.

    make: (case) for a primitive, (case, weights) for a stage.
    """

    refuses: Callable[[Any], str | None]
    make: Callable[..., Callable[..., Any]]


def unbound(module: str, name: str, why: str) -> Candidate:
    """Return a candidate that refuses every case: the library is not installed, or nothing calls it for a reason."""

    def refuses(case: object) -> str:
        return f"{name} is not installed" if find_spec(module) is None else f"{name} is not called: {why}"

    def make(*given: object) -> Callable[..., Any]:
        raise DeviceError(refuses(given))

    return Candidate(refuses, make)


FLASHINFER = unbound("flashinfer", "FlashInfer", "it reads page tables on the host before each step")
DEEP_GEMM = unbound(
    "deep_gemm", "DeepGEMM", "its tokens have a scale for each 128 numbers, and no format here has them"
)

# The candidates of each op, best first.
CANDIDATES: Mapping[Op[Any], tuple[Candidate, ...]] = {
    api.PRODUCT: (Candidate(products.refuses_product, products.TorchProduct), DEEP_GEMM),
    api.EXPERT_BLOCK: (Candidate(experts.refuses_case, experts.expert_block),),
    api.ATTENTION: (Candidate(attention.refuses_prompts, attention.prompts),),
    api.PAGED_ATTENTION: (
        Candidate(attention.refuses_varlen, attention.varlen),
        Candidate(attention.refuses_flash, attention.flash),
        FLASHINFER,
    ),
}


class TorchlibBackend:
    """Kernels of libraries. chosen: names of the ops that the user gave to this backend (`--ops OP=torchlib`)."""

    name = NAME

    def __init__(self, chosen: Collection[str] = ()) -> None:
        self._chosen = frozenset(chosen)

    def refuses(self, op: Op[Any], case: object) -> str | None:
        candidates = CANDIDATES.get(op, ())
        reasons = [one.refuses(case) for one in candidates]
        if not candidates:
            return "no kernel of a library is called for it"
        if None not in reasons:
            return "; ".join(dict.fromkeys(str(reason) for reason in reasons))
        if op.name in self._chosen:
            return None
        return (UNMEASURED if _is_exact(op, case) else BY_BATCH).format(op=op.name)

    def refuses_weights(self, op: Op[Any], weights: Weights) -> str | None:
        if op is api.EXPERT_BLOCK:
            return experts.refuses_experts(weights)
        return products.refuses_matrix(weights.linears["matrix"])

    def primitive(self, op: Op[Any], case: object) -> Callable[..., Any]:
        return self._first(op, case).make(case)

    def stage(self, op: Op[Any], case: object, weights: Weights) -> Callable[..., Any]:
        return self._first(op, case).make(case, weights)

    def _first(self, op: Op[Any], case: object) -> Candidate:
        return next(one for one in CANDIDATES[op] if one.refuses(case) is None)


def chosen_ops(overrides: Mapping[str, str], name: str = NAME) -> frozenset[str]:
    """Return the names of the ops that `--ops` gives to this backend, or to one of another name."""
    return frozenset(op for op, backend in overrides.items() if backend == name)


def _is_exact(op: Op[Any], case: object) -> bool:
    """Return whether results are sums of whole numbers, which no order of terms changes."""
    return op is api.PRODUCT and isinstance(case, Format) and case.activations == "int8"
