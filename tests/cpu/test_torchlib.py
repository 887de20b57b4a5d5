"""The kernels of torch as candidates, on CPU tensors: their results, and why they are not chosen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.errors import DeviceError
from ridgeline.ops import OpsTable, api
from ridgeline.ops.api import DenseKeyValues, PagedKeyValues, QuantizedMatrix, Weights
from ridgeline.ops.reference.backend import ReferenceBackend, TorchMemory
from ridgeline.ops.torchlib import attention
from ridgeline.ops.torchlib.backend import TorchlibBackend, chosen_ops
from ridgeline.quant import StoredLinear, bound
from ridgeline.quant.bounds import sliced_bound
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.spec import Attention, MoE, Ungated
from ridgeline.spec.quant import PLAIN, Format, format_of

BF16 = Format(activations="bf16")


def table(*ops: str) -> OpsTable:
    """Return a table over CPU tensors in which these ops are given to torchlib."""
    overrides = dict.fromkeys(ops, "torchlib")
    return OpsTable(
        TorchMemory("reference"), (TorchlibBackend(chosen_ops(overrides)), ReferenceBackend()), overrides
    )  # fmt: skip


REFERENCE = table()


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(kernels: OpsTable, format: Format, matrix: Any, bias: torch.Tensor | None) -> StoredLinear:
    found = StoredLinear(matrix, bias, kernels, format)
    found.prepare()
    return found


@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize(("columns", "rows"), [(257, 100), (63, 1)])
@pytest.mark.parametrize("format", [PLAIN, BF16], ids=lambda f: f.name)
def test_products_of_bfloat16_are_within_their_bound(format: Format, columns: int, rows: int, tokens: int) -> None:
    x, matrix, bias = draw(tokens, columns), draw(rows, columns, seed=1).bfloat16(), draw(rows, seed=2)
    got = linear(table("product"), format, matrix, bias).apply(x[None])[0]
    wanted = x.double() @ matrix.double().T + bias.double()
    slices = 1 if format is BF16 else 2
    error = (got.double() - wanted).abs().numpy()
    assert (error <= sliced_bound(*(a.double().numpy() for a in (x, matrix, bias)), PLAIN, slices)).all()
    if slices == 1 and tokens > 1 and rows > 1:
        assert (error > sliced_bound(*(a.double().numpy() for a in (x, matrix, bias)), PLAIN, 2)).any()


@pytest.mark.parametrize("tokens", [1, 63])
@pytest.mark.parametrize(("columns", "rows"), [(257, 100), (63, 1)])
@pytest.mark.parametrize("name", ["int8", "fp8-fp8"])
def test_products_of_codes(name: str, columns: int, rows: int, tokens: int) -> None:
    """Sums of int8 are exact, so they have the bits of the definition; those of fp8 are within the bound."""
    format = format_of(name)
    x, matrix, bias = draw(tokens, columns), draw(rows, columns, seed=1), draw(rows, seed=2)
    x[0] *= 100
    stored, same = linear(table("product"), format, matrix, bias), linear(REFERENCE, format, matrix, bias)
    wide = stored.dequantize()
    assert torch.equal(wide, same.dequantize())
    got, wanted = stored.apply(x), x.double() @ wide.double().T + bias.double()
    allowed = bound(*(a.double().numpy() for a in (x, wide, bias)), format)
    assert ((got.double() - wanted).abs().numpy() <= allowed).all()
    if name == "int8":
        assert torch.equal(got, same.apply(x))
        assert torch.equal(got[0], stored.apply(x[:1])[0])
    x[0, 0] = float("nan")
    broken = stored.apply(x)
    assert broken[0].isnan().all() and torch.equal(broken[1:], got[1:])


def test_a_scale_of_the_input_is_used() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).view(2, 8)
    matrix = QuantizedMatrix(format_of("int8"), codes, torch.ones(2, 1), input_scale=0.5)
    got = linear(table("product"), format_of("int8"), matrix, None).apply(torch.full((1, 8), 0.76))
    assert torch.equal(got, 2 * 0.5 * codes.sum(1, dtype=torch.float32)[None])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("int4-128", "one scale for each row"), ("int8-asym", "one scale for each row"),
        ("fp8", "not fp8 with exact"), ("int8-exact", "not int8 with exact"),
        ("plain", "a token's bits may depend on its batch"),
        ("int8", "nobody measured whether it is faster"), ("fp8-fp8", "a token's bits may depend on its batch"),
    ],
)  # fmt: skip
def test_nothing_is_chosen_by_itself(name: str, reason: str) -> None:
    format = PLAIN if name == "plain" else format_of(name)
    found = dict(REFERENCE.choose(api.PRODUCT, format).refusals)["torchlib"]
    assert reason in found
    assert REFERENCE.choose(api.PRODUCT, format).backend == "composed"


def test_a_product_that_torch_does_not_have_is_an_error_if_it_was_asked_for() -> None:
    with pytest.raises(DeviceError, match="one scale for each row"):
        linear(table("product"), format_of("int4-128"), draw(4, 256), None)
    with pytest.raises(DeviceError, match="plain matrices are multiplied in bfloat16, not in float32"):
        linear(table("product"), PLAIN, draw(4, 8), None)


GROUPED = Attention(6, 2, 16, 0.25)


@pytest.mark.parametrize("lengths", [(1,), (63, 1, 100)])
def test_whole_prompts(lengths: tuple[int, ...]) -> None:
    q, k, v = (draw(sum(lengths), n, 16, seed=n).bfloat16() for n in (6, 2, 2))
    kv = DenseKeyValues(k.float(), v.float(), lengths)
    got = table("attention").primitive(api.ATTENTION, GROUPED)(q.float(), kv, None)
    wide = DenseKeyValues(k.double(), v.double(), lengths)
    wanted = REFERENCE.primitive(api.ATTENTION, GROUPED)(q.double(), wide, None)
    assert got.dtype == torch.float32
    assert (got - wanted).abs().max() < 2**-6  # weights and results are rounded to bfloat16


@pytest.mark.parametrize(
    ("op", "case", "reason"),
    [
        (api.ATTENTION, replace(GROUPED, window=8), "has no windows"),
        (api.ATTENTION, replace(GROUPED, softcap=5.0), "no soft caps"),
        (api.ATTENTION, replace(GROUPED, sinks=True), "sinks"),
        (api.ATTENTION, replace(GROUPED, alibi=8.0), "slopes"),
        (api.ATTENTION, GROUPED, "a token's bits may depend on its batch; --ops attention=torchlib accepts that"),
        (api.PAGED_ATTENTION, GROUPED, "FlashAttention 3, and its package flash_attn_interface is not installed"),
        (api.PAGED_ATTENTION, GROUPED, "flash-attn is not installed; FlashInfer is not installed"),
        (api.PRODUCT, format_of("fp8-128x128"), "DeepGEMM is not installed"),
        (api.NORM, None, "no kernel of a library is called for it"),
    ],
)  # fmt: skip
def test_refusals(op: Any, case: object, reason: str) -> None:
    assert reason in str(TorchlibBackend().refuses(op, case))


def pages_of(case: Attention, ends: list[int], page: int) -> tuple[list[torch.Tensor], np.ndarray]:
    """Return keys and values in float16 pages, NaN behind the last token, and the page tables."""
    count = -(-max(ends) // page)
    tables = np.arange(1, len(ends) * count + 1).reshape(len(ends), count)
    views = [torch.full((tables.size + 1, page, case.num_kv_heads, case.head_dim), torch.nan) for _ in "kv"]
    for row, end in enumerate(ends):
        for slot in range(end):
            for i, view in enumerate(views):
                view[tables[row, slot // page], slot % page] = draw(
                    case.num_kv_heads, case.head_dim, seed=1000 * row + 2 * slot + i
                )
    return [view.half() for view in views], tables


def stub(q: Any, k: Any, v: Any, ends: Any, scale: float, window: tuple[int, int], used: Any, tables: Any) -> Any:
    """Compute in float64 what FlashAttention promises over pages."""
    assert ends.dtype == used.dtype == tables.dtype == torch.int32 and q.dtype == k.dtype
    found = []
    for i, row in enumerate(tables):
        keys, values = (
            x[row.long()].flatten(0, 1)[: used[i]].double().repeat_interleave(q.shape[1] // x.shape[2], 1)
            for x in (k, v)
        )
        for at, one in zip(range(used[i] - (ends[i + 1] - ends[i]), used[i]), q[ends[i] : ends[i + 1]], strict=True):
            first = 0 if window[0] < 0 else max(0, at - window[0])
            seen = slice(first, at + 1 + window[1])
            scores = torch.einsum("hd,khd->hk", one.double(), keys[seen]) * scale
            found.append(torch.einsum("hk,khd->hd", scores.softmax(1), values[seen]))
    return torch.stack(found).to(q.dtype)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("library", "page"), [("varlen", 16), ("flash", 256)])
def test_pages_reach_a_library_as_it_takes_them(
    library: str, page: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The libraries need a GPU. A stub with their arguments stands for them: which keys, in which pages."""
    case = replace(GROUPED, window=window)

    def varlen(q: Any, k: Any, v: Any, ends: Any, cu_seq_k: None, most_q: int, most_k: int, **given: Any) -> Any:
        assert (
            cu_seq_k is None
            and given["enable_gqa"]
            and (most_q, most_k) == (len(q), given["block_table"].shape[1] * page)
        )
        return stub(q, k, v, ends, given["scale"], given["window_size"], given["seqused_k"], given["block_table"])

    def flash(q: Any, k: Any, v: Any, ends: Any, ends_k: Any, most_q: int, most_k: int, **given: Any) -> Any:
        assert given["causal"]
        return stub(q, k, v, ends, given["softmax_scale"], given["window_size"], ends_k.diff(), given["block_table"])

    import torch.nn.attention.varlen

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: None)
    monkeypatch.setattr(attention, "import_module", lambda name: SimpleNamespace(flash_attn_varlen_func=flash))
    installed = {"varlen": attention.FA3, "flash": attention.FLASH}[library]
    monkeypatch.setattr(attention, "find_spec", lambda name: name == installed or None)

    (keys, values), tables = pages_of(case, [40, 17, 3], page)
    slices = Slices.plain(np.array([0, 2, 1]), np.array([39, 0, 10]), np.array([1, 3, 7]))
    layout = build_layout(slices, tables, page, case.state().lookback, REFERENCE.memory)
    q = draw(11, 6, 16).half().float()
    kernels = table("paged_attention")
    for stored in (torch.float16, torch.float32):  # pages in float32 take the definition
        kv = PagedKeyValues(keys.to(stored), values.to(stored), layout)
        got = kernels.primitive(api.PAGED_ATTENTION, case)(q, kv, None)
        wanted = REFERENCE.primitive(api.PAGED_ATTENTION, case)(q.double(), kv, None)
        assert (got - wanted).abs().max() < (2e-3 if stored == torch.float16 else 1e-5)


@pytest.mark.parametrize("gated", [True, False])
def test_experts(gated: bool) -> None:
    case = MoE(5, 2, 32, "silu" if gated else Ungated("relu2"))
    names = ("gate", "up", "down") if gated else ("up", "down")
    shapes = {"gate": (32, 48), "up": (32, 48), "down": (48, 32)}

    def weights(kernels: OpsTable, bias: torch.Tensor | None = None) -> Weights:
        drawn = {n: [draw(*shapes[n], seed=7 * e + len(n)).bfloat16() / 6 for e in range(5)] for n in names}
        return Weights({}, {}, {n: [StoredLinear(d, bias, kernels, PLAIN) for d in drawn[n]] for n in names})

    x, scores = draw(63, 48), torch.rand(63, 2, generator=torch.Generator().manual_seed(3))
    ids = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i))[:2] for i in range(63)])
    kernels = table("expert_block")
    got = kernels.stage(api.EXPERT_BLOCK, case, weights(kernels))(x, ids, scores)
    wanted = REFERENCE.stage(api.EXPERT_BLOCK, case, weights(REFERENCE))(x, ids, scores)
    assert (got - wanted).abs().max() < 2**-6 * wanted.abs().max()
    with pytest.raises(DeviceError, match="experts have biases"):
        kernels.stage(api.EXPERT_BLOCK, case, weights(kernels, draw(1)))
