"""Every kernel is compiled for sm_90 and sm_80: no spills, loads of 16 bytes, and the units for matrices."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from compiled import launches as l
from compiled.building import AMPERE, HOPPER, build

TARGETS = pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize("tokens", [1, 64, 256])
@pytest.mark.parametrize("name", ["plain", "fp8", "int8", "int4-128", "int4-asym"])
def test_products(name: str, tokens: int, target: GPUTarget) -> None:
    for launched in l.product(name, tokens):
        built = build(launched, target)
        assert (built.stack, built.count("STL", "LDL")) == (0, 0)
        assert built.wide_loads
        unit = {"dense_product": "HMMA", "whole_product": "IMMA"}.get(launched.kernel.fn.__name__)
        if unit and target is HOPPER and launched.arguments["BLOCK_R"] >= 64:
            unit = {"HMMA": "HGMMA", "IMMA": "IGMMA"}[unit]
        assert unit is None or built.count(unit)
