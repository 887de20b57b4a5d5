"""State in fp8: the rounding is torch's, every backend reads every code, and attention is that of dequantized codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.ops import api, open_table
from ridgeline.ops.api import DenseKeyValues, DenseRows, PagedKeyValues, PagedRows
from ridgeline.ops.host import stored
from ridgeline.ops.reference import stored as reference
from ridgeline.spec import Attention, FirstTokens
from ridgeline.spec.storage import STORAGES

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels are not built: cmake -S . -B build")
from tests.oracle import attention_bounds as bounds  # noqa: E402

from cpu.test_kernels_state import LATENT, POOLS, Array, Steps, draw, host_write, pages_of, rows_of  # noqa: E402
from ridgeline.ops.cpu import attention as ours  # noqa: E402
from ridgeline.ops.cpu import latent as our_latent  # noqa: E402
from ridgeline.ops.host.backend import NumpyBackend  # noqa: E402

FP8 = STORAGES["fp8"]
MOST, NAN = 448.0, 127
SCALES = [(1.0, 1.0), (0.03125, 0.0173), (2.7, 11.0)]


def torch_codes(x: Array, scale: float) -> Array:
    """Return what vLLM stores: x / scale, at most 448, in torch's type."""
    steps = torch.from_numpy(x) / torch.tensor(scale)
    return steps.clamp(-MOST, MOST).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def torch_floats(codes: Array) -> Array:
    return torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()


def edges() -> Array:
    """Return all finite numbers of the type, all points halfway between two, the floats beside those, and extremes."""
    numbers = torch_floats(np.arange(NAN, dtype=np.uint8))
    halfway = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(halfway, np.float32(to)) for to in (0, np.inf)]
    far = np.array([464, 480, 1e4, 1e36, 1e-45, 2.0**-11, 1e-30], np.float32)
    positive = np.concatenate((numbers, halfway, *beside, far))
    return np.concatenate((positive, -positive)).astype(np.float32)


# ---- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 0.0371, 2.0**-7, 3.3])
def test_rounding_is_torchs_to_the_bit(scale: float) -> None:
    x = np.concatenate((edges(), edges() * np.float32(scale), rows_of(4000, ()) * 20))
    wanted = torch_codes(x, scale)
    np.testing.assert_array_equal(stored.store_rows(FP8)(x, scale), wanted)
    np.testing.assert_array_equal(reference.store_rows(FP8)(torch.from_numpy(x), scale).numpy(), wanted)


@pytest.mark.parametrize("numbers", [1, 63, 100, 257])
@pytest.mark.parametrize("page_tokens", [3, 16])
def test_pages_hold_the_same_bits(numbers: int, page_tokens: int) -> None:
    """Write keys and values by kernels and by numpy. Infinities and NaN become NaN, and harm no other number."""
    case, count, scales = Attention(2, 2, numbers, 1.0), 32 // page_tokens + 2, (0.0371, 3.3)
    x = rows_of(32, (2, numbers)) * 90
    x[3, 1, 0], x[4, 0, -1], x[5, 1, numbers // 2] = np.inf, np.nan, -np.inf
    page, slot = 1 + np.arange(32) // page_tokens, np.arange(32) % page_tokens
    for write in (ours.write_pages(case, POOLS[2]), host_write(case)):
        pages = pages_of(case, FP8, page_tokens, count)
        write(pages, (x, x), page, slot, scales)
        for part, numbers_last in zip((stored.keys_of(pages[0]), stored.values_of(pages[1])), (0, 1), strict=True):
            held = part.numbers[page, :, slot] if numbers_last else part.numbers[page, :, :, slot]
            wanted = np.where(np.isfinite(x), torch_codes(x, scales[numbers_last]), np.uint8(NAN))
            np.testing.assert_array_equal(held, wanted)


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("scale", [1.0, 0.0625])
def test_kernels_read_every_code(rows: int, scale: float) -> None:
    """A query of zeros over one key returns its value, exactly. Many rows convert a tile once, few do not."""
    case = Attention(rows, 1, 256, 1.0)
    codes = np.where(np.arange(256) == 255, 0, np.arange(256)).astype(np.uint8)[None, None]  # 255 is never written
    found = ours.attention(case, POOLS[1])(
        np.zeros((1, rows, 256), np.float32), DenseKeyValues(np.zeros_like(codes), codes, (1,), (1.0, scale))
    )
    wanted = torch_floats(codes[0, 0]) * np.float32(scale)
    assert np.isnan(wanted).sum() == 1
    np.testing.assert_array_equal(found.reshape(rows, 256), np.tile(wanted, (rows, 1)))


def test_a_key_that_is_not_a_number_harms_its_own_head() -> None:
    case = Attention(4, 2, 32, 0.2)
    q, k, v, _ = draw(case, 70, 3)
    k[20, 1, 5] = np.nan
    store = stored.store_rows(FP8)
    found = ours.attention(case, POOLS[1])(q, DenseKeyValues(store(k), store(v), (70,))).reshape(70, 4, 32)
    assert np.isfinite(found[:, :2]).all() and np.isfinite(found[:20]).all() and np.isnan(found[20:, 2:]).all()


# ---- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 63, 100, 257])
@pytest.mark.parametrize("look", [{}, {"window": 24, "sinks": True}, {"window": 9, "pattern": FirstTokens(30)},
                                  {"softcap": 3.0}], ids=["full", "window", "first", "softcap"])  # fmt: skip
def test_attention_is_that_of_dequantized_codes(tokens: int, look: dict[str, Any]) -> None:
    """Chunks over poisoned pages give the bits of whole sequences, which are within the bound of float64."""
    case, scales = Attention(6, 2, 40, 0.3, **look), SCALES[tokens % 3]
    given = draw(case, tokens + 20, tokens)
    lengths = [tokens, 20]
    codes = [stored.store_rows(FP8)(x, scale) for x, scale in zip(given[1:3], scales, strict=True)]
    whole = ours.attention(case, POOLS[2])(given[0], DenseKeyValues(*codes, tuple(lengths), scales), given[3])
    numbers = [torch_floats(x) * np.float32(scale) for x, scale in zip(codes, scales, strict=True)]
    exact = bounds.attend(case, given[0][:tokens], *(x[:tokens] for x in numbers), given[3], scaled=True)
    assert (np.abs(whole[:tokens].reshape(exact.out.shape) - exact.out) <= exact.bound).all()
    for name, attend in (
        ("cpu", ours.paged_attention(case, POOLS[2])),
        ("host", NumpyBackend().primitive(api.PAGED_ATTENTION, case)),
    ):
        steps = Steps(case, FP8, 16, lengths, tokens, 2, scales)
        out = np.full_like(whole, np.nan)
        run = lambda t, lay, at=attend, s=steps: at(given[0][t], PagedKeyValues(*s.pages, lay, scales), given[3])  # noqa: E731
        steps.run(given[1:3], run, out)
        if name == "cpu":
            np.testing.assert_array_equal(out, whole)
        np.testing.assert_allclose(out, whole, rtol=0, atol=2e-5 * max(1.0, scales[1]))


@pytest.mark.parametrize("op", [api.ATTENTION, api.PAGED_ATTENTION], ids=["dense", "paged"])
def test_the_reference_reads_the_same_codes(op: Any) -> None:
    """Torch's op over codes equals the kernels' over the same ones."""
    case, scales = Attention(6, 2, 16, 0.3, window=50, sinks=True), (0.0371, 3.3)
    given, table = draw(case, 90, 1), open_table("reference", {"attention": "reference"})
    codes = [stored.store_rows(FP8)(x, s) for x, s in zip(given[1:3], scales, strict=True)]
    wanted = ours.attention(case, POOLS[1])(given[0], DenseKeyValues(*codes, (90,), scales), given[3])
    tensors: Any = [torch.from_numpy(x) for x in given]  # type: ignore[arg-type]
    if op is api.ATTENTION:
        store = table.primitive(api.STORE_ROWS, FP8)
        kept = (store(x, s) for x, s in zip(tensors[1:3], scales, strict=True))
        kv: Any = DenseKeyValues(*kept, (90,), scales)
    else:
        steps = Steps(case, FP8, 16, [90], 0, 1)
        layout = steps.layout(np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([90]), table.memory)
        pages = [torch.full((8, 16, 2, 16), 127, dtype=torch.uint8) for _ in range(2)]
        write = table.primitive(api.WRITE_PAGES, case)
        write(pages, tensors[1:3], layout.write_pages, layout.write_slots, scales)
        kv = PagedKeyValues(*pages, layout, scales)
    found = table.memory.get(table.primitive(op, case)(tensors[0], kv, tensors[3]))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scale", [1.0, 0.05])
@pytest.mark.parametrize("tokens", [1, 63, 100, 257])
def test_latents(scale: float, tokens: int) -> None:
    q, rows = rows_of(tokens, (4, 24)), rows_of(tokens, (1, 40), 1)
    up, scales, lengths = rows_of(4, (36, 32), 2) / 6, (scale, 1.0), (tokens,)
    kept = stored.store_rows(FP8)(rows, scale)
    whole = our_latent.latent_attention(LATENT, POOLS[1])(q, DenseRows((kept,), lengths, scales), up)
    steps = Steps(LATENT, FP8, 16, [tokens], 0, 2, scales)
    attend = our_latent.paged_latent_attention(LATENT, POOLS[2])
    out = np.full((tokens, 80), np.nan, np.float32)
    steps.run((rows,), lambda t, layout: attend(q[t], PagedRows(steps.pages, layout, scales), up), out)
    np.testing.assert_array_equal(out, whole)
    wide = torch_floats(kept) * np.float32(scale)
    exact = our_latent.latent_attention(LATENT, POOLS[1])(q, DenseRows((wide,), lengths), up)
    np.testing.assert_allclose(whole, exact, rtol=0, atol=1e-5)
    table: Any = open_table("reference").primitive(api.LATENT_ATTENTION, LATENT)
    host = NumpyBackend().primitive(api.LATENT_ATTENTION, LATENT)(q, DenseRows((kept,), lengths, scales), up)
    theirs = table(*map(torch.from_numpy, [q]), DenseRows((torch.from_numpy(kept),), lengths, scales),
                   torch.from_numpy(up))  # fmt: skip
    np.testing.assert_allclose(host, whole, rtol=0, atol=1e-5)
    np.testing.assert_allclose(theirs.numpy(), whole, rtol=0, atol=1e-5)


def test_bad_scales_are_refused() -> None:
    case, rows = Attention(1, 1, 4, 1.0), np.zeros((1, 1, 4), np.uint8)
    q = np.zeros((1, 1, 4), np.float32)
    for scale in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="must be a positive number"):
            ours.attention(case, POOLS[1])(q, DenseKeyValues(rows, rows, (1,), (scale, 1.0)))
