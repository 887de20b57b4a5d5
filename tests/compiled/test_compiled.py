"""Every kernel is compiled for sm_90 and sm_80: no spills, loads of 16 bytes, and the units for matrices."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from compiled import launches as l
from compiled.building import AMPERE, CDNA3, HOPPER, Built, Launched, build, compile_for
from ridgeline.spec import Attention, FirstTokens

TARGETS = pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])


def check(launched: Launched, target: GPUTarget, unit: str | None = None, *, is_wide: bool = True) -> Built:
    """Compile a launch, and check what every kernel must fulfill. unit: the unit for matrices on Hopper."""
    built = build(launched, target)
    assert (built.stack, built.count("STL", "LDL")) == (0, 0), "numbers spill from registers to the stack"
    assert built.wide_loads or not is_wide
    if unit is not None:
        assert built.count(unit if target is HOPPER else unit.replace("G", ""))
    return built


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize("tokens", [1, 64, 256])
@pytest.mark.parametrize("name", ["plain", "fp8", "int8", "int4-128", "int4-asym"])
def test_products(name: str, tokens: int, target: GPUTarget) -> None:
    for launched in l.product(name, tokens):
        unit = {"dense_product": "HGMMA", "whole_product": "IGMMA"}.get(launched.kernel.fn.__name__)
        if unit == "IGMMA" and launched.arguments["BLOCK_R"] < 64:  # too few rows for it
            unit = "IMMA"
        check(launched, target, unit)


LLAMA = Attention(32, 8, 128, 128**-0.5)


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(
    ("case", "tokens", "sequences", "dtype"),
    [
        (LLAMA, 8, 8, torch.float16), (LLAMA, 600, 600, torch.bfloat16), (LLAMA, 2048, 2, torch.float16),
        (LLAMA, 2048, 100, torch.bfloat16),
        (Attention(64, 8, 64, 0.125, window=128, sinks=True), 512, 8, torch.bfloat16),
        (Attention(16, 8, 128, 0.1, softcap=50.0, window=4096), 1, 1, torch.float16),
        (LLAMA, 2048, 2, torch.int8), (LLAMA, 8, 8, torch.uint8), (LLAMA, 2048, 2, torch.float32),
        (Attention(16, 8, 256, 0.1, softcap=50.0, window=4096), 2048, 2, torch.float16),
        (Attention(64, 1, 512, 0.1, window=64, pattern=FirstTokens(4)), 600, 600, torch.int8),
    ],
)  # fmt: skip
def test_attention(case: Attention, tokens: int, sequences: int, dtype: torch.dtype, target: GPUTarget) -> None:
    (launched,) = l.attention(case, tokens, sequences, dtype)
    check(launched, target, "HGMMA")


@pytest.mark.slow
@TARGETS
def test_trees_of_drafts(target: GPUTarget) -> None:
    (launched,) = l.attention(LLAMA, 64, 8, torch.float16, is_tree=True)
    assert launched.arguments["TREE"]
    check(launched, target, "HGMMA")


SEEN_ELSEWHERE = {"dense_product", "whole_product", "round_tokens"}  # by test_products
NARROW = {"rotate": "a program has one head of 128 numbers", "best_of_rows": "a row has few parts"}


@pytest.mark.slow
@TARGETS
def test_rows(target: GPUTarget) -> None:
    """Kernels over rows read 16 bytes at once, unless their rows are short."""
    different = {str(launched.key): launched for launched in l.rows()}
    for launched in different.values():
        name = launched.kernel.fn.__name__
        if name not in SEEN_ELSEWHERE:
            check(launched, target, is_wide=name not in NARROW)


@pytest.mark.slow
def test_kernels_compile_for_rocm() -> None:
    """One launch of each kernel compiles for gfx942. Nothing was run there."""
    launches = [
        *l.product("plain", 8), *l.product("int4-128", 8), *l.attention(LLAMA, 8, 8, torch.float16), *l.rows(),
    ]  # fmt: skip
    for launched in {launched.kernel.fn.__name__: launched for launched in launches}.values():
        assert compile_for(launched, CDNA3).asm["hsaco"]
