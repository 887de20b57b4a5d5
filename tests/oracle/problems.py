"""Compare numpy primitives with their definitions in torch, in float64, one problem at a time.

Inputs are slices of larger arrays full of NaN, so that a read outside of them is noticed. No call may change its
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from ridgeline.nn.binding import bind
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import Op, PagedKeyValues, Weights
from ridgeline.ops.host.backend import NumpyBackend
from ridgeline.ops.reference.backend import ReferenceBackend
from ridgeline.spec.quant import PLAIN, Format, FormatTable

SIZES = (1, 63, 100, 257)
NUMPY, REFERENCE = NumpyBackend(), ReferenceBackend()
STORED = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
Array = np.ndarray[Any, Any]


class Problem(NamedTuple):
    op: Op[Any]
    case: object
    args: tuple[Any, ...]
    tolerance: float = 3e-6


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> Array:
    rng = np.random.default_rng([len(shape), *shape, seed])
    return rng.normal(size=shape).astype(np.float32).astype(STORED[dtype])


def expert_weights(matrices: Any, biases: Any, table: OpsTable, format: Format = PLAIN) -> Weights:
    """Return the weights of an EXPERT_BLOCK. matrices, biases: gate (or None), up and down, each for all experts."""
    arrays = {}
    for name, matrix, bias in zip(("gate", "up", "down"), matrices, biases or (None,) * 3, strict=True):
        if matrix is not None:
            arrays[f"mlp.experts.{name}.weight"] = matrix
        if bias is not None:
            arrays[f"mlp.experts.{name}.bias"] = bias
    return Weights({}, {}, bind(arrays, table, "mlp", "norm", FormatTable(format)).experts)


# ---- equal arguments for both ----------------------------------------------------------------------------------------


def each(x: Any, change: Callable[[Array], Any]) -> Any:
    """Return the arguments with every array changed; named tuples keep their type."""
    if isinstance(x, np.ndarray):
        return change(x)
    if isinstance(x, api.PagedLayout):
        own = {field.name: each(getattr(x, field.name), change) for field in fields(x)}
        return api.PagedLayout(**{**own, "fill_buckets": lambda: each(x.fill_buckets(), change)})
    if isinstance(x, tuple | list):
        items = [each(item, change) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
    return x


def poisoned(x: Array) -> Array:
    """Return the values as a slice of an array whose other elements are NaN, or an index that is out of range."""
    rest = 1 << 40 if x.dtype.kind == "i" else np.nan
    room = np.full([n + 4 for n in x.shape], rest, x.dtype)
    inner = room[tuple(slice(2, n + 2) for n in x.shape)]
    inner[...] = x
    return inner


def tensor(x: Array, dtype: Any = np.float64) -> torch.Tensor:
    return torch.from_numpy(x if x.dtype.kind in "ib" else x.astype(dtype))


def run(p: Problem) -> Any:
    """Return numpy's result, after checking that the inputs are unchanged and the outputs have their types."""
    args = tuple(in_pages(a) if isinstance(a, PagedKeyValues) else a for a in each(p.args, poisoned))
    before = each(args, np.copy)
    out = NUMPY.primitive(p.op, p.case)(*args)
    for old, new in zip(arrays(before), arrays(args), strict=True):
        np.testing.assert_array_equal(new.astype(np.float64), old.astype(np.float64))
    assert all(x.dtype in (np.float32, np.int64) for x in arrays(out))
    return out


def in_pages(kv: PagedKeyValues) -> PagedKeyValues:
    """Return keys and values in the layout of this device's pages."""
    orders = (0, 2, 3, 1), (0, 2, 1, 3)
    given = zip((kv.keys, kv.values), orders, strict=True)
    there = (np.ascontiguousarray(x.transpose(order)).reshape(x.shape) for x, order in given)
    return PagedKeyValues(*there, kv.layout)


def arrays(x: Any) -> list[Any]:
    if isinstance(x, api.PagedLayout):
        return arrays([getattr(x, field.name) for field in fields(x)]) + arrays(x.fill_buckets())
    if isinstance(x, tuple | list):
        return [a for item in x for a in arrays(item)]
    return [x] if isinstance(x, np.ndarray | torch.Tensor) else []


def check(p: Problem) -> None:
    # Data in pages is converted to float32 there, so the operands must be, too.
    dtype = np.float32 if p.op is api.PAGED_ATTENTION else np.float64
    wanted = arrays(REFERENCE.primitive(p.op, p.case)(*each(p.args, lambda x: tensor(x, dtype))))
    got = arrays(run(p))
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        scale = max(1.0, float(b.abs().max())) if b.numel() else 1.0
        np.testing.assert_allclose(a.astype(np.float64), b.double().numpy(), rtol=0, atol=p.tolerance * scale)
