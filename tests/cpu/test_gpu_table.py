"""The table of a GPU, on a machine that has none: which backends it lists, and why they refuse."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.errors import DeviceError
from ridgeline.ops import api, open_table
from ridgeline.ops.devices import missing_kernels, served_by_definitions
from ridgeline.spec import Attention
from ridgeline.spec.quant import PLAIN, format_of


def with_capability(found: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)


def test_kernels_come_before_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability((9, 0), monkeypatch)
    table = open_table("cuda:0")
    assert table.choose(api.PRODUCT, PLAIN).backend == "triton"
    assert [backend for backend, _ in table.choose(api.ROPE).refusals] == ["torchlib", "descriptors", "triton", "sdpa"]
    assert open_table("cuda:0", {"product": "composed"}).choose(api.PRODUCT, PLAIN).backend == "composed"


def test_descriptors_serve_those_who_name_them(monkeypatch: pytest.MonkeyPatch) -> None:
    case, chosen = Attention(32, 8, 128, 1.0), {"paged_attention": "descriptors"}
    with_capability((9, 0), monkeypatch)
    assert open_table("cuda:0").choose(api.PAGED_ATTENTION, case).backend == "triton"
    assert open_table("cuda:0", chosen).choose(api.PAGED_ATTENTION, case).backend == "descriptors"
    with_capability((8, 0), monkeypatch)
    with pytest.raises(DeviceError, match=r"capability 9\.0 or higher, and this one has 8\.0"):
        open_table("cuda:0", chosen).choose(api.PAGED_ATTENTION, case)


def test_a_format_without_a_kernel_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability((8, 0), monkeypatch)
    found = open_table("cuda:0").choose(api.PRODUCT, format_of("int4-48"))
    assert dict(found.refusals)["triton"] == "groups have 48 columns; kernels read powers of two from 32 to 1024"


def test_old_gpus_are_refused_by_their_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability((7, 5), monkeypatch)
    found = open_table("cuda:0").choose(api.PRODUCT, PLAIN)
    assert (
        dict(found.refusals)["triton"] == "kernels need a GPU of compute capability 8.0 or higher, and this one has 7.5"
    )


def test_without_triton_the_definitions_serve_and_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("ridgeline.ops.devices"), "find_spec", lambda name: None)
    assert open_table("cuda:0").choose(api.PRODUCT, PLAIN).backend == "composed"
    (line,) = missing_kernels("cuda:0")
    assert line.endswith("pip install 'ridgeline[gpu]'")
    assert missing_kernels("reference") == ()


def test_each_op_that_the_definitions_serve_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with_capability((9, 0), monkeypatch)
    table = open_table("cuda:0", {"norm": "reference"})
    for scale in (0.1, 0.2):  # two cases with one reason
        table.choose(api.PAGED_ATTENTION, Attention(1, 1, 576, scale))
    table.choose(api.PRODUCT, PLAIN)
    table.choose(api.NORM)
    table.choose(api.ROPE)
    (line,) = served_by_definitions(table)
    assert line.startswith(
        "no kernel for GPUs serves this model's paged_attention: heads have 576 numbers; kernels take"
    )
    assert line.endswith("(--ops paged_attention=BACKEND selects a backend)")
    assert served_by_definitions(open_table("reference")) == ()
