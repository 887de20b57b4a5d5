"""A forward pass returns the streams that enter chosen layers, with pages and without, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest

from oracle.ours import SPECS, random_weights
from ridgeline.nn import Capture, Model
from ridgeline.ops import api, open_table
from ridgeline.quant import store
from ridgeline.runtime.arena import Arena
from ridgeline.runtime.drafts import DraftInputs
from ridgeline.runtime.layout import Slices, build_layout
from ridgeline.runtime.step import DenseStep, PagedStep
from ridgeline.spec.groups import state_groups
from ridgeline.spec.quant import PLAIN

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def names(ids: tuple[int, ...]) -> list[str]:
    """Return the names of captured outputs that equal the streams: the output of the layer before each."""
    return [f"layers.{i - 1}" if i else "embed" for i in ids]


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["cla_mixed", "lightning"])
def test_streams_are_those_that_enter_the_layers(name: str, device: str) -> None:
    """`cla_mixed` has layers of every arrangement but DeepNorm, which `lightning` has, with scaled branches."""
    spec, table = SPECS[name], open_table(device)
    memory, drawn = table.memory, random_weights(SPECS[name])
    model = Model(spec, {n: memory.put(x, "float32", "float32") for n, x in drawn.items()}, table, 64)
    count = len(spec.layers)
    ids = (count, 0, 2, count // 2)
    step, capture = DenseStep.build([TOKENS], memory), Capture(spec, names(ids))
    model.forward(step, capture)
    stream = model.forward(step, aux=ids)
    for layer, name, found in zip(ids, names(ids), stream.aux, strict=True):
        assert np.array_equal(memory.get(found), memory.get(capture.outputs[name])), layer
    wanted = memory.get(model(step))
    assert np.array_equal(memory.get(model.logits(stream)), wanted)
    assert model.forward(step).aux == ()
    # Rows after the last norm, without the norm: the logits of the model.
    np.testing.assert_allclose(memory.get(model.project(model.hidden(stream))), wanted, atol=2e-5)


def test_streams_of_a_paged_pass() -> None:
    spec, table = SPECS["cla2"], open_table("cpu")
    memory, groups = table.memory, state_groups(SPECS["cla2"], page_tokens=4)
    model = Model(spec, random_weights(spec), table, 64)
    arena = Arena(groups, [8] * len(groups), [0] * len(groups), memory)
    pages, found = np.array([[3, 1, 6]]), []
    for start, count in ((0, 7), (7, 1), (8, 2)):
        slices = Slices.plain(np.array([0]), np.array([start]), np.array([count]))
        layouts = [build_layout(slices, pages, g.page_tokens, g.lookback, memory) for g in groups]
        tokens = memory.integers(np.array(TOKENS[start : start + count]))
        positions = memory.integers(slices.positions())
        step = PagedStep(tokens, positions, slices, layouts, arena, DraftInputs(1, 0, table), table)
        found.append([memory.get(x) for x in model.forward(step, aux=(1, 3, 6)).aux])
    wanted = model.forward(DenseStep.build([TOKENS], memory), aux=(1, 3, 6)).aux
    for i, stream in enumerate(wanted):
        np.testing.assert_allclose(np.concatenate([part[i] for part in found]), memory.get(stream), atol=1e-5)


def test_joins_and_products_run_again_from_a_recording() -> None:
    """A recorded step of a head joins streams and multiplies them with a matrix."""
    table = open_table("cpu")
    if table.driver is None:
        pytest.skip("the kernels are not built")
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, n)).astype(np.float32) for n in (7, 5))
    assert np.array_equal(table.primitive(api.JOIN)(a, b[:, ::2]), np.concatenate((a, b[:, ::2]), 1))
    weight = rng.standard_normal((4, 12)).astype(np.float32)
    matrix = api.Weights({"matrix": store(weight, None, table, PLAIN)}, {})
    product, joined = table.stage(api.PRODUCT, PLAIN, matrix), table.primitive(api.JOIN)
    recorded = table.driver.recorder().record(lambda: [product(joined(a, b))], [a, b])
    assert not isinstance(recorded, str), recorded
    a += 1.0
    recorded.run()
    np.testing.assert_allclose(recorded.results[0], np.concatenate((a, b), 1) @ weight.T, atol=1e-5)
