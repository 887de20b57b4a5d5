"""A simulation has the pages that an engine would have."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.catalog.machines import hardware
from ridgeline.catalog.models import find_model
from ridgeline.cost.footprint import page_groups
from ridgeline.cost.precision import Precision
from ridgeline.plan.planner import Deployment
from ridgeline.settings.config import EngineOptions
from ridgeline.settings.resolve import resolve
from ridgeline.sim import settings
from ridgeline.spec.groups import state_groups
from ridgeline.spec.storage import STORAGES

MODELS = ("llama-3-8b", "gemma-2-9b", "deepseek-v2", "jamba", "mamba-2.8b", "gpt-oss-20b")


@pytest.mark.parametrize("model", MODELS)
def test_pages_are_as_large_as_the_engines(model: str) -> None:
    spec = find_model(model).spec
    for name, storage in STORAGES.items():
        ours, engines = (
            page_groups(spec, Precision(state=name), 16),
            state_groups(spec, page_tokens=16, storage=storage),
        )
        assert [g.page_bytes for g in ours] == [g.page_bytes for g in engines], name


@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-2-9b", "mamba-2.8b", "jamba"])
def test_settings_are_the_engines(model: str) -> None:
    """The workspace is counted with float32 state, as in the engine; a machine with enough memory gets the requested
    settings.
    """
    spec = find_model(model).spec
    machine = replace(hardware("cpu-server"), memory_bytes=2 * 10**12)
    deployment = Deployment(spec, machine, Precision(state="float32"))
    ours = settings(deployment, max_model_len=4096)
    weights = sum(deployment.precision.weight_bytes(w) for w in spec.weights())
    engines = resolve(
        spec,
        4096,
        EngineOptions(),
        free_bytes=int(machine.memory_bytes - weights),
        fixed_len=True,
        host_free_bytes=None,
    )
    assert (ours.max_num_seqs, ours.max_num_batched_tokens) == (engines.max_num_seqs, engines.max_num_batched_tokens)
    assert [(g.page_tokens, g.page_bytes) for g in ours.groups] == [
        (g.page_tokens, g.page_bytes) for g in engines.groups
    ]
    for a, b in zip(ours.num_pages, engines.num_pages, strict=True):
        assert abs(a - b) <= 1 + b // 10_000
