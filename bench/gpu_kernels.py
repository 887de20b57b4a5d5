"""Single kernels of bench/gpu.py: inputs of noise, runs over copies of them, and the gate of each kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_machine import Machine, Run, poisoned
from torch import Tensor

from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import DenseKeyValues, PagedKeyValues, QuantizedMatrix
from ridgeline.ops.reference import quant
from ridgeline.ops.reference.backend import ReferenceBackend, TorchMemory
from ridgeline.ops.torchlib.backend import TorchlibBackend
from ridgeline.ops.torchlib.products import multiply
from ridgeline.ops.triton.backend import TritonBackend
from ridgeline.ops.triton.descriptors import DescriptorBackend
from ridgeline.ops.triton.launch import launch
from ridgeline.quant import StoredLinear, bound
from ridgeline.quant.bounds import sliced_bound
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import Attention, RMSNorm
from ridgeline.spec.quant import Format, format_of

CHECKED = 48  # tokens and queries of a large case that are compared with float64
CHECKED_ROWS = 512  # rows of a matrix
BLOCK_TOKENS = 64  # tokens of a block, for torch's product in blocks of a fixed size
PAGE = 16
UNITS = {"exact": "bfloat16", "int8": "int8", "fp8": "fp8"}  # type of a product by the activations


class Gate(NamedTuple):
    """Whether a case is right. error: the largest; allowed: the bound there. same: whether a token has the same bits
    alone and in the batch; None where that makes no sense.
    """

    ok: bool
    error: float
    allowed: float
    same: bool | None = None


class Built(NamedTuple):
    """A case that is ready to run. unit: type of the operands, which names the peak that `flops` are compared with."""

    runs: Sequence[Run]
    gate: Callable[[], Gate]
    num_bytes: float
    flops: float
    unit: str = "bfloat16"


def noise(machine: Machine, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(machine.device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=machine.device).to(dtype)


def table_of(machine: Machine, backend: str) -> OpsTable:
    """Return the kernels of one backend, and the definitions behind them."""
    ops = [op.name for op in (api.PRODUCT, api.ATTENTION, api.PAGED_ATTENTION)]
    ours = {
        "triton": TritonBackend(), "torchlib": TorchlibBackend(ops), "descriptors": DescriptorBackend(launch, ops),
    }[backend]  # fmt: skip
    return OpsTable(TorchMemory(machine.engine_device), (ours, ReferenceBackend()))


def some_of(count: int, most: int) -> Tensor:
    """Return sorted indices, the first and the last among them."""
    if count <= most:
        return torch.arange(count)
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: most - 2]
    return torch.cat((drawn, torch.tensor([0, count - 1]))).unique()


def judge(got: Tensor, wanted: Tensor, allowed: Any, same: bool | None = None, *, exact: bool = True) -> Gate:
    """Compare with float64. allowed: largest error, a number or one for each result. exact: whether `same` is asked."""
    error = (got.double() - wanted.double()).abs().cpu().numpy()
    allowed = np.broadcast_to(np.asarray(allowed, np.float64), error.shape)
    share = np.where(np.isfinite(error), error, np.inf) / np.maximum(allowed, 1e-300)
    worst = np.unravel_index(int(share.argmax()), share.shape)
    finite = float(error[worst]) if np.isfinite(error[worst]) else math.nan
    return Gate(bool(share[worst] <= 1) and (same is not False or not exact), finite, float(allowed[worst]), same)


# ---- products -------------------------------------------------------------------------------------------------------


def torch_blocks(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """Return torch's product over blocks of a fixed number of tokens, whose bits may be free of the batch."""

    def run(x: Tensor) -> Tensor:
        more = -len(x) % BLOCK_TOKENS
        blocks = torch.nn.functional.pad(x.bfloat16(), (0, 0, 0, more)).split(BLOCK_TOKENS)
        return torch.cat([multiply(block, weight) for block in blocks])[: len(x)]

    return run


def product(machine: Machine, backend: str, weights: str, rows: int, columns: int, tokens: int) -> Built:
    """Return the product of tokens with a matrix [rows, columns]. backend: triton, torchlib, or `mm in blocks`."""
    format = Format() if weights == "plain" else format_of(weights)
    in_blocks = backend == "mm in blocks"
    table = table_of(machine, "torchlib" if in_blocks else backend)
    size = rows * columns * format.number_bytes("bfloat16")

    def matrix(seed: int) -> Tensor:
        return noise(machine, rows, columns, seed=seed, dtype=torch.bfloat16) / 8

    def stored(data: Tensor) -> StoredLinear:
        found = StoredLinear(data, None, table, format)
        found.prepare()
        return found

    first = matrix(0)
    others = [first, *(matrix(seed) for seed in range(1, machine.copies(size)))]
    applies = [torch_blocks(data) if in_blocks else stored(data).apply for data in others]
    del others
    x = noise(machine, tokens, columns, seed=9)

    def gate() -> Gate:
        with poisoned():
            got, alone = applies[0](x), applies[0](x[:1])
        at, of = some_of(tokens, CHECKED), some_of(rows, CHECKED_ROWS)
        wide, given = stored(first).dequantize()[of].double().cpu(), x[at].double().cpu()
        numbers = given.numpy(), wide.numpy(), np.zeros(len(of))
        slices = 1 if in_blocks else 2
        allowed = sliced_bound(*numbers, format, slices) if format.activations == "exact" else bound(*numbers, format)
        found = judge(
            got[at][:, of], given @ wide.T, allowed, bool(torch.equal(got[0], alone[0])), exact=backend == "triton"
        )
        if format.activations == "int8":
            coded: QuantizedMatrix = quant.quantize(format)(first)
            same = quant.quantized_linear(format)(x[at], coded.rows(of.to(machine.device)), None)
            return found._replace(ok=found.ok and torch.equal(got[at][:, of], same))
        return found

    runs = [lambda apply=apply: apply(x) for apply in applies]
    moved = size + 4 * rows * (format.numbers != "plain" and not format.group) + 4 * tokens * (rows + columns)
    return Built(runs, gate, moved, 2.0 * tokens * rows * columns, UNITS[format.activations])


# ---- attention ------------------------------------------------------------------------------------------------------


class Keys(NamedTuple):
    """Pages of several layers in noise, with NaN in page 0 and behind the last token of each sequence."""

    layers: Sequence[tuple[Tensor, Tensor]]
    tables: np.ndarray
    ends: Sequence[int]


def keys_of(machine: Machine, case: Attention, batch: int, context: int, copies: int, page: int) -> Keys:
    count = -(-context // page)
    tables = np.random.default_rng(0).permutation(np.arange(1, batch * count + 1)).reshape(batch, count)
    layers = []
    for i in range(copies):
        both = torch.empty(
            (batch * count + 1, 2, page, case.num_kv_heads, case.head_dim), dtype=torch.bfloat16, device=machine.device
        )
        both.normal_(generator=torch.Generator(machine.device).manual_seed(i))
        both[0] = math.nan
        if used := context % page:
            both[torch.from_numpy(tables[:, -1]).to(machine.device), :, used:] = math.nan
        layers.append((both[:, 0], both[:, 1]))
    return Keys(layers, tables, [context] * batch)


def attended(case: Attention, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return one query's attention [H, D] in float64. q: [H, D]; keys and values: [S, K, D] of all tokens it reads."""
    groups = case.num_heads // case.num_kv_heads
    queries = q.double().unflatten(0, (case.num_kv_heads, groups))
    scores = torch.einsum("kgd,skd->kgs", queries, keys.double()) * case.scale
    return torch.einsum("kgs,skd->kgd", scores.softmax(-1), values.double()).flatten(0, 1)


def attention(
    machine: Machine, backend: str, heads: tuple[int, int, int], batch: int, context: int, tokens: int, page: int = PAGE
) -> Built:
    """Return attention of the last `tokens` tokens of each sequence over its pages.

    heads: number of query heads, number of key heads, and their size. page: tokens of a page.
    """
    num, num_kv, size = heads
    case = Attention(num, num_kv, size, size**-0.5)
    state = 2 * batch * context * num_kv * size * 2
    keys = keys_of(machine, case, batch, context, min(machine.copies(state), 32), page)
    memory = TorchMemory(machine.engine_device)
    run_one = table_of(machine, backend).primitive(api.PAGED_ATTENTION, case)
    starts, counts = np.full(batch, context - tokens), np.full(batch, tokens)

    def layout(rows: int) -> Any:
        slices = Slices.plain(np.arange(rows), starts[:rows], counts[:rows])
        return build_layout(slices, keys.tables, page, case.state().lookback, memory)

    whole, lone = layout(batch), layout(1)
    q = noise(machine, batch * tokens, num, size, seed=9) * 2

    def gate() -> Gate:
        with poisoned():
            got = run_one(q, PagedKeyValues(*keys.layers[0], whole), None)
            alone = run_one(q[:tokens], PagedKeyValues(*keys.layers[0], lone), None)
        at = some_of(batch * tokens, 6 if context > 1 << 14 else CHECKED)
        wanted = []
        for row, offset in ((int(i) // tokens, int(i) % tokens) for i in at):
            pages = torch.from_numpy(keys.tables[row]).to(machine.device)
            read = context - tokens + offset + 1
            k, v = (view[pages].flatten(0, 1)[:read] for view in keys.layers[0])
            wanted.append(attended(case, q[row * tokens + offset], k, v).flatten())
        is_ours = backend != "torchlib"
        allowed = 1e-4 if is_ours else 2.0**-6
        return judge(got[at], torch.stack(wanted), allowed, bool(torch.equal(got[:tokens], alone)), exact=is_ours)

    runs = [lambda kv=kv: run_one(q, PagedKeyValues(*kv, whole), None) for kv in keys.layers]
    pairs = batch * (tokens * (context - tokens) + tokens * (tokens + 1) / 2)
    return Built(runs, gate, state + 8.0 * q.numel(), 4.0 * pairs * num * size)


def prompts(machine: Machine, heads: tuple[int, int, int], tokens: int) -> Built:
    """Return torch's fused attention of one whole prompt."""
    num, num_kv, size = heads
    case = Attention(num, num_kv, size, size**-0.5)
    q, k, v = (
        noise(machine, tokens, n, size, seed=i, dtype=torch.bfloat16) for i, n in enumerate((num, num_kv, num_kv))
    )
    attend = table_of(machine, "torchlib").primitive(api.ATTENTION, case)

    def gate() -> Gate:
        at = some_of(tokens, CHECKED)
        with poisoned():
            got = attend(q, DenseKeyValues(k, v, (tokens,)), None)[at]
        wanted = torch.stack([attended(case, q[i], k[: i + 1], v[: i + 1]).flatten() for i in at.tolist()])
        return judge(got, wanted, 2.0**-6)

    moved = 2.0 * (2 * q.numel() + k.numel() + v.numel())
    return Built(
        [lambda: attend(q, DenseKeyValues(k, v, (tokens,)), None)] * 2, gate, moved,
        2.0 * tokens * (tokens + 1) * num * size,
    )  # fmt: skip


# ---- rows -----------------------------------------------------------------------------------------------------------


def norm(machine: Machine, backend: str, tokens: int, width: int) -> Built:
    """Return RMSNorm over rows."""
    case, table = RMSNorm(), table_of(machine, backend)
    copies = machine.copies(8 * tokens * width)
    inputs, weight = [noise(machine, tokens, width, seed=i) for i in range(copies)], noise(machine, width, seed=99)
    run_one = table.primitive(api.NORM, case)

    def gate() -> Gate:
        with poisoned():
            got, alone = run_one(inputs[0], weight, None), run_one(inputs[0][:1], weight, None)
        x = inputs[0].double()
        wanted = x * (x.square().mean(1, keepdim=True) + case.eps).rsqrt() * weight.double()
        allowed = 1e-5 * (1 + wanted.abs().cpu().numpy())
        return judge(got, wanted, allowed, bool(torch.equal(got[0], alone[0])))

    return Built(
        [lambda x=x: run_one(x, weight, None) for x in inputs], gate, 8.0 * tokens * width, 4.0 * tokens * width
    )


def best(machine: Machine, backend: str, tokens: int, vocabulary: int) -> Built:
    """Return the best logit of each row."""
    run_one = table_of(machine, backend).primitive(api.BEST)
    copies = machine.copies(4 * tokens * vocabulary)
    inputs = [noise(machine, tokens, vocabulary, seed=i) for i in range(copies)]

    def gate() -> Gate:
        with poisoned():
            ids, values = run_one(inputs[0])
        wanted = inputs[0].cpu().numpy().argmax(1)
        right = np.array_equal(ids.cpu().numpy(), wanted)
        return judge(values, inputs[0].max(1).values, 0.0 if right else -1.0)

    return Built([lambda x=x: run_one(x) for x in inputs], gate, 4.0 * tokens * vocabulary, 0.0)


# ---- ceilings -------------------------------------------------------------------------------------------------------


def copying(machine: Machine, num_bytes: int) -> Built:
    """Return a copy of memory, which reads and writes `num_bytes` each."""
    sources = [noise(machine, num_bytes // 4, seed=i) for i in range(2)]
    target = torch.empty_like(sources[0])

    def gate() -> Gate:
        target.fill_(math.nan)
        target.copy_(sources[0])
        return judge(target[:4096], sources[0][:4096], 0.0 if torch.equal(target, sources[0]) else -1.0)

    return Built([lambda s=s: target.copy_(s) for s in sources], gate, 2.0 * num_bytes, 0.0)


def peak(machine: Machine, unit: str, size: int) -> Built:
    """Return torch's product of two square matrices of a type."""
    wide = [noise(machine, size, size, seed=i) for i in range(2)]
    one = torch.ones((), device=machine.device)
    multiplies: Mapping[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
        "bfloat16": (lambda x: x.bfloat16(), lambda a, b: a @ b.T),
        "fp8": (
            lambda x: x.to(torch.float8_e4m3fn),
            lambda a, b: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16),
        ),
        "int8": (lambda x: (x * 30).round().clamp(-127, 127).to(torch.int8), lambda a, b: torch._int_mm(a, b.T)),
    }
    narrow, run_one = multiplies[unit]
    a, b = map(narrow, wide)

    def gate() -> Gate:
        at = some_of(size, 16)
        with poisoned():
            got = run_one(a, b)[at]
        wanted = a[at].float().double() @ b.float().double().T
        share = 0.0 if unit == "int8" else 2.0**-7
        return judge(got, wanted, share * (wanted.abs().max().item() + math.sqrt(size)))

    return Built([lambda: run_one(a, b), lambda: run_one(b, a)], gate, 0.0, 2.0 * size**3, unit)


CEILINGS: Mapping[str, Callable[[Machine], Built]] = {
    "copy": lambda m: copying(m, 1 << 16 if m.is_small else 1 << 30),
    **{unit: lambda m, unit=unit: peak(m, unit, 64 if m.is_small else 8192) for unit in ("bfloat16", "fp8", "int8")},
}
