"""Attention that is rounded to bfloat16: the same bits in any company, the loss that its bound allows, planted bugs
that break the bound, answers of the engine, and the cases that are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ridgeline import LLM
from ridgeline.errors import DeviceError, RequestError
from ridgeline.evals.price import describe_attention
from ridgeline.ops import open_table
from ridgeline.ops.api import DenseKeyValues, DenseRows, PagedRows
from ridgeline.ops.host import stored
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.runtime.rounded import round_attention
from ridgeline.settings.attention import choose_attention
from ridgeline.spec import Attention, Blocks
from ridgeline.spec.request import SamplingParams
from ridgeline.spec.sight import CAUSAL, Sight
from ridgeline.spec.storage import EXACT, STORAGES, StateDType
from ridgeline.verify import verify

kernels = pytest.importorskip("ridgeline._kernels", reason="the kernels are not built: cmake -S . -B build")
from tests.oracle import attention_bounds as bounds  # noqa: E402

from cpu import test_tree_attention as trees  # noqa: E402
from cpu.test_kernels_state import (  # noqa: E402
    HEADS,
    LATENT,
    LOOKS,
    POOLS,
    SERVED,
    Array,
    Steps,
    check_steps,
    dense,
    draw,
    rows_of,
    unit_of,
)
from ridgeline.ops.cpu import attention as ours  # noqa: E402
from ridgeline.ops.cpu import latent as our_latent  # noqa: E402

REFUSAL = kernels.rounded_refusal()
can_round = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
TYPES: tuple[StateDType, ...] = ("bfloat16", "float16")
by_type = pytest.mark.parametrize("dtype", TYPES)
PROMPT = "Once upon a time there was a small house by the sea, and in it"


@pytest.fixture
def rounding() -> Iterator[None]:
    pools = [*POOLS.values(), *trees.POOLS.values()]
    for pool in pools:
        pool.rounds_attention = True
    yield
    for pool in pools:
        pool.rounds_attention = False


# ---- kernels ---------------------------------------------------------------------------------------------------------


@can_round
@pytest.mark.usefixtures("rounding")
@settings(max_examples=60, deadline=None, derandomize=True, database=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    heads=st.sampled_from([*HEADS, (26, 2)]),
    look=st.sampled_from([*LOOKS, {"sight": Blocks(7)}, {"sight": Blocks(64), "sinks": True}]),
    dtype=st.sampled_from(TYPES), **SERVED,
)  # fmt: skip
def test_chunks_pages_batches_and_threads_change_no_bit(
    heads: tuple[int, int], dim: int, look: dict[str, Any], dtype: str, page_tokens: int, lengths: list[int], pool: int,
    seed: int,
) -> None:  # fmt: skip
    check_steps(Attention(*heads, dim, 0.3, **look), STORAGES[dtype], page_tokens, lengths, pool, seed)


@can_round
@pytest.mark.usefixtures("rounding")
@by_type
@pytest.mark.parametrize("name", trees.CASES)
def test_each_draft_of_a_tree_has_the_bits_of_its_path(name: str, dtype: StateDType) -> None:
    for page_tokens, seed in ((16, 1), (4, 2)):
        rng = np.random.default_rng(seed)
        drafts = [trees.random_tree(rng, n) for n in (9, 14)]
        found = trees.tree_and_chains("cpu", trees.CASES[name], dtype, page_tokens, [(60, 2), (5, 0)], drafts, seed, 2)
        trees.check("cpu", *found)


@can_round
@pytest.mark.usefixtures("rounding")
@by_type
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_latents_too(dtype: StateDType, page_tokens: int) -> None:
    lengths, storage = [150, 3, 70], STORAGES[dtype]
    q, rows = rows_of(223, (4, 24)), rows_of(223, (1, 40), 1)
    up = rows_of(4, (36, 32), 2) / 6
    steps = Steps(LATENT, storage, page_tokens, lengths, 0, 2)
    attend = our_latent.paged_latent_attention(LATENT, POOLS[2])
    out = np.full((223, 80), np.nan, np.float32)
    steps.run((rows,), lambda tokens, layout: attend(q[tokens], PagedRows(steps.pages, layout), up), out)
    kept, one = stored.store_rows(storage)(rows), our_latent.latent_attention(LATENT, POOLS[1])
    np.testing.assert_array_equal(out, one(q, DenseRows((kept,), tuple(lengths)), up))
    wide = one(q, DenseRows((stored.as_floats(kept),), tuple(lengths)), up)  # in float32, which is never rounded
    assert 0 < np.abs(out - wide).max() < 0.03 * np.abs(wide).max()


@can_round
@by_type
def test_only_state_of_16_bits_is_rounded(dtype: StateDType, rounding: None) -> None:
    case = Attention(4, 2, 64, 0.125)
    given = draw(case, 90, 1)
    for storage in STORAGES.values():
        rounded = dense(case, storage, given, [90])
        POOLS[1].rounds_attention = False
        exact = dense(case, storage, given, [90])
        POOLS[1].rounds_attention = True
        assert np.array_equal(rounded, exact) == (storage.dtype not in TYPES)


@can_round
@pytest.mark.usefixtures("rounding")
@by_type
@pytest.mark.parametrize("sight", [CAUSAL, Blocks(24)], ids=str)
def test_the_loss_is_within_its_bound(sight: Sight, dtype: StateDType) -> None:
    """Against exact attention over the stored numbers: the errors of rounded inputs, and those of the arithmetic."""
    case = Attention(4, 2, 64, 0.125, sight=sight)
    q, k, v, _ = draw(case, 300, 4)
    q = q / 8  # because a bound of first order needs small changes
    kept = [stored.as_floats(stored.store_rows(STORAGES[dtype])(x)) for x in (k, v)]
    found = dense(case, STORAGES[dtype], (q, k, v, None), [300]).reshape(300, 4, 64)
    exact = bounds.attend(case, q, *kept, None)
    rounded = bounds.attend(case, q, *kept, None, unit=unit_of(STORAGES[dtype]), rounds=True)
    limit = rounded.bound + bounds.price(case, q, *kept, exact, "bfloat16", queries=True)
    assert (np.abs(found - exact.out) <= limit).all()
    assert np.abs(found - exact.out).max() > 10 * exact.bound.max()  # it is no exact attention


@can_round
@pytest.mark.usefixtures("rounding")
@by_type
def test_planted_bugs_break_the_bound(dtype: StateDType) -> None:
    """A key or a value of the token before, and a key that is lost."""
    case, n, at = Attention(4, 2, 64, 0.125), 150, 100
    q, k, v, _ = draw(case, n, 0)
    q[-1] = np.repeat(k[at], 2, 0) * 4  # the last token looks at one key
    storage = STORAGES[dtype]
    kept = [stored.as_floats(stored.store_rows(storage)(x)) for x in (k, v)]
    exact = bounds.attend(case, q, *kept, None, unit=unit_of(storage), rounds=True)

    def excess(q: Array, k: Array, v: Array) -> float:
        parts = (stored.store_rows(storage)(x) for x in (k, v))
        found = ours.attention(case, POOLS[1])(q, DenseKeyValues(*parts, (len(q),)), None).reshape(-1, 4, 64)
        return float((np.abs(found[-1] - exact.out[-1]) / exact.bound[-1]).max())

    assert excess(q, k, v) <= 1
    for x in (k, v):
        held = x[at].copy()
        x[at] = x[at - 1]
        assert excess(q, k, v) > 4
        x[at] = held
    assert excess(q[at + 1 :], k[at + 1 :], v[at + 1 :]) > 4


# ---- the engine ------------------------------------------------------------------------------------------------------


@can_round
@pytest.mark.parametrize(
    "dtype", [pytest.param("float16", marks=pytest.mark.slow), pytest.param("bfloat16", marks=pytest.mark.nightly)]
)
def test_answers_do_not_depend_on_how_they_are_served(dtype: StateDType) -> None:
    """Batches, chunks, prefix hits, forks, drafts and pages against naive sampling of one sequence alone."""
    llm = LLM("pocket", device="cpu", kv_cache_dtype=dtype, attention="bf16", cache="off", max_model_len=256)
    assert llm.loaded.table.driver is not None and llm.loaded.storage.dtype == dtype
    report = verify(llm.loaded, quick=True, new_tokens=4)
    assert report.equal and report.greedy.total and report.sampled.total


@can_round
def test_answers_are_those_of_rounded_attention() -> None:
    """The choice reaches the engine, whose logprobs differ from exact ones; the note has the price of it."""
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=1)
    found = {}
    for attention in ("exact", "bf16"):
        llm = LLM("pocket", device="cpu", attention=attention, max_model_len=256)
        assert llm.config is not None and llm.config.attention == attention
        assert llm.config.reasons["attention"].startswith("as given" if attention == "bf16" else "in float32")
        assert any(note.startswith("attention in bf16: KL to exact attention is ") for note in llm.loaded.notes) == (
            attention == "bf16"
        )
        (output,) = llm.generate([PROMPT], params)
        chosen = output.outputs[0].logprobs
        assert chosen is not None
        found[attention] = [one.logprob for one in chosen]
    assert found["exact"] != found["bf16"]
    assert found["exact"] == pytest.approx(found["bf16"], abs=0.1)


def test_unknown_names_and_states_of_other_sizes_are_refused() -> None:
    with pytest.raises(RequestError, match="attention is 'fp8'; it must be 'exact' or 'bf16'"):
        LLM("pocket", attention="fp8")
    spec = load_model("pocket", LoadOptions(device="cpu")).spec
    with pytest.raises(RequestError, match="'x' is not known; known are exact, bf16"):
        choose_attention("x", "float16", spec)
    for state in ("float32", "int8", "fp8"):
        with pytest.raises(RequestError, match=f"these are in {state}; add --kv-cache-dtype float16"):
            LLM("pocket", attention="bf16", kv_cache_dtype=state)


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_devices_that_cannot_round_say_so(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_table(device)
    loaded = replace(load_model("pocket", LoadOptions(device=device), table=table), storage=STORAGES["float16"])
    if device == "cpu":
        monkeypatch.setattr("ridgeline.ops.cpu.record.rounded_refusal", lambda: "this CPU has no avx512_bf16")
    why = "has no kernels that round it" if device == "reference" else "this CPU has no avx512_bf16"
    with pytest.raises(DeviceError, match=f"{why}; leave --attention out"):
        round_attention(loaded)


@can_round
def test_the_price_leaves_attention_rounded() -> None:
    """Measuring the price computes exact attention for a while, also if that fails."""
    table = open_table("cpu")
    loaded = replace(load_model("pocket", LoadOptions(device="cpu"), table=table), storage=EXACT)
    calls: list[bool] = []
    driver: Any = table.driver
    plain = driver.round_attention
    driver.round_attention = lambda *, rounds: (calls.append(rounds), plain(rounds=rounds))
    line = describe_attention("pocket", LoadOptions(device="cpu", load_format="dummy"), None, loaded, lambda why: None)
    assert line == "attention in bf16: the accuracy cost is not known: the weights are random"
    assert calls == [True]


@pytest.mark.skipif(not REFUSAL, reason="this process can round attention")
def test_a_pool_that_cannot_round_refuses() -> None:
    with pytest.raises(ValueError, match="attention cannot be rounded: "):
        POOLS[1].rounds_attention = True
