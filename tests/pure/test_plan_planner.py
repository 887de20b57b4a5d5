"""Properties for any model and machine: better hardware is never slower, and a larger load never takes less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_spec import specs

from ridgeline.catalog.machines import hardware, machines
from ridgeline.catalog.models import find_model
from ridgeline.cost.footprint import formula_bytes, largest
from ridgeline.cost.operations import Forward, Slice
from ridgeline.cost.precision import Precision
from ridgeline.cost.roofline import BOUNDS, time_step
from ridgeline.cost.shard import Scheme, device_operations
from ridgeline.errors import RequestError
from ridgeline.plan.planner import Deployment, Load, Planner, Speculation, batch_sizes
from ridgeline.spec import LatentAttention, ModelSpec
from ridgeline.spec.hardware import HardwareSpec

H100 = hardware("h100")
MISTRAL, MIXTRAL, V3 = (find_model(n).spec for n in ("mistral-7b", "mixtral-8x7b", "deepseek-v3"))
COUNT = st.integers(1, 300)
MACHINES = st.sampled_from(machines())


def planner(spec: ModelSpec, machine: HardwareSpec = H100, **more: Any) -> Planner:
    return Planner(Deployment(spec, machine, **more))


@given(specs(), MACHINES, COUNT, COUNT, st.integers(1, 40), st.floats(1, 10))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_better_hardware_is_never_slower(
    spec: ModelSpec, machine: HardwareSpec, batch: int, past: int, tokens: int, better: float
) -> None:
    ops = Forward(spec, Precision()).operations([Slice(batch, tokens, past + tokens)])
    now = time_step(ops, machine)
    wider = replace(machine, read_bytes_per_s=machine.read_bytes_per_s * better)
    faster = replace(machine, flops_per_s={k: v * better for k, v in machine.flops_per_s.items()})
    for other in (wider, faster):
        assert time_step(ops, other).seconds <= now.seconds * (1 + 1e-12)
    assert sum(now.by_cause().values()) == pytest.approx(now.seconds)
    assert set(now.by_cause()) == set(BOUNDS)
    floor = max(now.bytes / machine.read_bytes_per_s, now.flops / max(machine.flops_per_s.values()))
    assert now.seconds >= floor * (1 - 1e-9)


@given(specs(), MACHINES, COUNT, COUNT, COUNT)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_a_larger_batch_never_gives_fewer_tokens(
    spec: ModelSpec, machine: HardwareSpec, batch: int, more: int, context: int
) -> None:
    plan = planner(spec, machine)
    few, many = (plan.decode(n, context).seconds for n in (batch, batch + more))
    assert many >= few * (1 - 1e-9)
    assert (batch + more) / many >= batch / few * (1 - 1e-9)


@given(specs(), COUNT, COUNT, COUNT)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_a_longer_context_never_takes_less(spec: ModelSpec, batch: int, context: int, more: int) -> None:
    """This holds for memory and for time, except with latents, whose form with fewer operations may move more bytes."""
    plan = planner(spec)
    if not any(isinstance(layer.mixer, LatentAttention) for layer in spec.layers):
        assert plan.decode(batch, context + more).seconds >= plan.decode(batch, context).seconds * (1 - 1e-9)
    short, long = (plan.memory.footprint(batch, n) for n in (context, context + more))
    assert long.pages_bytes >= short.pages_bytes
    assert long.formula_bytes >= short.formula_bytes
    assert short.pages_bytes >= short.formula_bytes
    assert plan.memory.footprint(batch + 1, context).used_bytes > short.used_bytes


@given(specs(), COUNT, st.integers(1, 64), st.sampled_from(["float32", "bfloat16", "int8", "int4"]))
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_pages_hold_the_bytes_of_the_formula(spec: ModelSpec, context: int, page_tokens: int, kind: str) -> None:
    """The allocated bytes are never less; for a sequence that fills its pages, they exceed the formula by at most a
    window's page and one.
    """
    precision = Precision(state=kind)
    groups = planner(spec, precision=precision, page_tokens=page_tokens).memory.groups
    allocated = sum(g.most_pages(context) * g.page_bytes for g in groups)
    formula = formula_bytes(spec, precision, context)
    assert allocated >= formula
    assert allocated - formula <= 2 * sum(g.page_bytes for g in groups)


@pytest.mark.parametrize(("spec", "way"), [
    (MISTRAL, "tp"), (MISTRAL, "pp"), (MIXTRAL, "tp"), (MIXTRAL, "ep"), (V3, "ep"), (V3, "pp"),
])  # fmt: skip
@pytest.mark.parametrize(("batch", "context"), [(1, 2), (7, 300), (64, 4096)])
def test_devices_share(spec: ModelSpec, way: str, batch: int, context: int) -> None:
    alone, shared = planner(spec), planner(spec, scheme=Scheme(**{way: 4}))
    a, b = alone.memory.footprint(4 * batch, context), shared.memory.footprint(4 * batch, context)
    assert b.weight_bytes < a.weight_bytes
    assert b.pages_bytes <= a.pages_bytes
    ops = device_operations(shared.forward, [Slice(4 * batch, 1, context)], Scheme(**{way: 4}))
    whole = alone.decode(4 * batch, context)
    # All devices together do the work of one; the stages of a pipeline follow each other.
    done = sum(o.flops * o.layers for o in ops)
    assert 4 * done == pytest.approx(whole.flops, rel=0.02)
    assert sum(o.messages for o in ops) > 0


def test_all_reduce() -> None:
    """Two of them in each of 32 layers, after o and after down: 2 (p - 1) / p of the bytes, or all once by a switch."""
    plan = planner(MISTRAL, scheme=Scheme(tp=4))
    step = plan.decode(8, 100)
    reduces = [t for t in step.operations if t.operation.name == "all-reduce"]
    assert [t.operation.layers for t in reduces] == [32, 32]
    sent = 2 * 3 / 4 * 8 * 4096 * 2
    assert reduces[0].operation.link_bytes == sent
    assert reduces[0].seconds == pytest.approx(32 * (8 * 4096 * 2 / 450e9 + 2e-6))
    assert reduces[0].bound == "link"
    assert H100.link is not None
    ring = planner(MISTRAL, replace(H100, link=replace(H100.link, sums=False)), scheme=Scheme(tp=4)).decode(8, 100)
    first = next(t for t in ring.operations if t.operation.name == "all-reduce")
    assert first.seconds == pytest.approx(32 * (sent / 450e9 + 2e-6))


def test_a_slower_link_is_slower_and_none_is_an_error() -> None:
    times = [
        planner(MISTRAL, replace(H100, link=link), scheme=Scheme(tp=2)).decode(8, 100).seconds
        for link in (H100.link, hardware("l4").link, replace(H100.link, bytes_per_s=1e9))  # type: ignore[type-var]
    ]
    assert times == sorted(times)
    with pytest.raises(RequestError, match="has no link between devices; name one: --link"):
        planner(MISTRAL, hardware("m3-max"), scheme=Scheme(tp=2)).decode(8, 100)


@pytest.mark.parametrize(("scheme", "message"), [
    ({"tp": 0}, "tp is 0; it must be at least 1"), ({"tp": 3}, r"tp 3 does not divide 32 heads; tp 2 does"),
    ({"ep": 2}, "no experts"), ({"pp": 99}, "32 layers"), ({"tp": 2, "ep": 2}, "not supported"),
])  # fmt: skip
def test_schemes_that_cannot_be(scheme: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        planner(MISTRAL, scheme=Scheme(**scheme))


def test_latency_is_made_of_its_parts() -> None:
    plan = planner(MISTRAL)
    load = Load(4, 3000, 1000)
    f = plan.figures(load)
    assert f.ttft_s == pytest.approx(sum(s.seconds for s in plan.chunks(3000)))
    assert f.latency_s == pytest.approx(f.ttft_s + 999 * f.tpot_s)
    each = [plan.decode(4, c).seconds for c in range(3001, 4001)]
    assert f.tpot_s == pytest.approx(
        sum(each) / len(each), rel=1e-4
    )  # Simpson's rule compared with the mean over every step
    assert f.served_tokens_per_s < f.tokens_per_s
    assert f.naive_step_s > 30 * f.step_s
    assert planner(MISTRAL, prefix_hit=0.9).figures(load).ttft_s < f.ttft_s / 5


def test_the_knee_is_where_state_takes_as_long_as_weights() -> None:
    """For t = a + b n the power n / t^2 is largest at n = a / b (Kleinrock 1979)."""
    spec = find_model("llama-2-13b").spec
    plan = planner(spec)
    a = plan.decode(1, 1024).seconds - (b := (plan.decode(65, 1024).seconds - plan.decode(1, 1024).seconds) / 64)
    knee = plan.knee(Load(1, 1000, 24))
    sizes = batch_sizes(1 << 14)
    below, above = sizes[sizes.index(knee) - 1], sizes[sizes.index(knee) + 1]
    assert below < a / b < above


def test_drafts_stop_paying_as_the_batch_grows() -> None:
    """Verification reads the same weights until it is compute-bound. With a long context, all drafts share one read of
    the state, so that they always pay (as in MagicDec, 2408.11049).
    """
    drafts = Speculation(0.7, 4)
    short, long = (planner(find_model("llama-3.1-8b").spec, speculation=drafts) for _ in range(2))
    end = short.speculation_pays_below(256)
    assert end is not None
    assert 100 < end < 1000
    assert short.token_s(end - 1, 256) < short.decode(end - 1, 256).seconds
    assert short.token_s(end, 256) >= short.decode(end, 256).seconds
    assert long.speculation_pays_below(32_000) is None
    assert planner(MISTRAL, speculation=Speculation(0.0, 4)).speculation_pays_below(256) == 1
    assert planner(MISTRAL).speculation_pays_below(256) is None


@given(st.integers(0, 2000), st.integers(1, 1500))
@settings(deadline=None, derandomize=True, database=None)
def test_largest(limit: int, most: int) -> None:
    assert largest(lambda n: n <= limit, most) == min(limit, most)


@pytest.mark.parametrize("build", [
    lambda: Load(0, 1, 1), lambda: Load(1, 0, 1), lambda: Load(1, 1, -2), lambda: Speculation(1.1, 4),
    lambda: Speculation(0.5, 0), lambda: Speculation(0.5, 1, -1), lambda: Deployment(MISTRAL, H100, chunk=0),
    lambda: Deployment(MISTRAL, H100, prefix_hit=1.0), lambda: Precision("int9"),
    lambda: planner(MISTRAL).figures(Load(1, 32768, 1)),
])  # fmt: skip
def test_invalid_values_are_refused(build: object) -> None:
    with pytest.raises(RequestError):
        build()  # type: ignore[operator]


def test_cost_of_a_large_model_takes_milliseconds() -> None:
    """A model of 671 billion parameters is counted without creating them. The bound is generous for slow machines."""
    import time

    start = time.process_time()
    planner(V3, precision=Precision("fp8")).figures(Load(64, 3072, 1024))
    assert time.process_time() - start < 0.5
