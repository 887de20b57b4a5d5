"""Every kernel is compiled for sm_90 and sm_80: no spills, loads of 16 bytes, and the units for matrices."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from compiled import launches as l
from compiled.building import AMPERE, CDNA3, HOPPER, UNITS, Built, Launched, build, compile_for, disassemble
from interpreted.guarded import nightly
from ridgeline.spec import (
    S4,
    S4D,
    Attention,
    ExpertGroups,
    FirstTokens,
    GatedDelta,
    GatedMLP,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    MoE,
    RMSNorm,
    Rope,
    ShortConvolution,
    TaylorAttention,
)
from ridgeline.spec.quant import PLAIN, format_of

# The daily run compiles for one of them, and of each kernel the cases that differ most: a quarter of the time.
TARGETS = pytest.mark.parametrize(
    "target", [HOPPER, pytest.param(AMPERE, marks=pytest.mark.nightly)], ids=["sm_90", "sm_80"]
)


def check(launched: Launched, target: GPUTarget, unit: str | None = None, *, is_wide: bool = True) -> Built:
    """Compile a launch, and check what every kernel must fulfill. unit: the unit for matrices on Hopper."""
    built = build(launched, target)
    assert built.stack == 0, "numbers spill from registers to the stack"
    assert built.wide_loads or not is_wide
    if unit is not None:
        assert built.has(unit if target is HOPPER else unit.replace("G", ""))
    return built


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("plain", 1), ("plain", 256), ("float32", 64), ("fp8", 64), ("int8", 1), ("int8", 64), ("int4-128", 1),
        ("int4-asym", 256),
        *nightly(
            ("plain", 64), ("fp8", 1), ("fp8", 256), ("int8", 256), ("int4-128", 64), ("int4-128", 256),
            ("int4-asym", 1), ("int4-asym", 64), ("float32", 1), ("float32", 256),
            *(("float16", tokens) for tokens in (1, 64, 256)),
        ),
    ],
)  # fmt: skip
def test_products(name: str, tokens: int, target: GPUTarget) -> None:
    for launched in l.product(name, tokens):
        unit = {"dense_product": "HGMMA", "whole_product": "IGMMA"}.get(launched.kernel.fn.__name__)
        if unit == "IGMMA" and launched.arguments["BLOCK_R"] < 64:  # too few rows for it
            unit = "IMMA"
        check(launched, target, unit)


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("plain", 1), ("fp8", 64), ("int8", 1), ("int4-asym", 64),
        *nightly(
            ("plain", 64), ("plain", 256), ("fp8", 1), ("fp8", 256), ("int8", 64), ("int8", 256), ("int4-asym", 1),
            ("int4-asym", 256),
        ),
    ],
)  # fmt: skip
def test_products_that_rotate_normalize_and_write_pages_or_activate(name: str, tokens: int, target: GPUTarget) -> None:
    launches = l.finished(name, tokens)
    assert [launched.arguments["FINISH"][0] for launched in launches] == ["heads", "activated", "whole heads"]
    for launched in launches:
        check(launched, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", [HOPPER], ids=["sm_90"])
def test_activations(target: GPUTarget) -> None:
    for launched in l.activations():
        check(launched, target, "HGMMA")


LLAMA = Attention(32, 8, 128, 128**-0.5)


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(
    ("case", "tokens", "sequences", "dtype"),
    [
        (LLAMA, 8, 8, torch.float16), (LLAMA, 2048, 2, torch.bfloat16),
        (Attention(64, 8, 64, 0.125, window=128, sinks=True), 512, 8, torch.bfloat16),
        (LLAMA, 2048, 2, torch.int8), (LLAMA, 8, 8, torch.uint8),
        (Attention(16, 8, 256, 0.1, softcap=50.0, window=4096), 2048, 2, torch.float32),
        (Attention(64, 1, 512, 0.1, window=64, pattern=FirstTokens(4)), 600, 600, torch.int8),
        *nightly(
            (LLAMA, 600, 600, torch.bfloat16), (LLAMA, 2048, 2, torch.float16), (LLAMA, 2048, 100, torch.bfloat16),
            (Attention(16, 8, 128, 0.1, softcap=50.0, window=4096), 1, 1, torch.float16),
            (LLAMA, 2048, 2, torch.float32),
            (Attention(16, 8, 256, 0.1, softcap=50.0, window=4096), 2048, 2, torch.float16),
            (Attention(64, 1, 512, 0.1, window=64, pattern=FirstTokens(4)), 600, 600, torch.float32),
        ),
    ],
)  # fmt: skip
def test_attention(case: Attention, tokens: int, sequences: int, dtype: torch.dtype, target: GPUTarget) -> None:
    (launched,) = l.attention(case, tokens, sequences, dtype)
    check(launched, target, "HGMMA")


DEEPSEEK = LatentAttention(  # V3
    128, 512, 128, 64, 128, 192**-0.5, RMSNorm(), q_lora_rank=1536, rope=Rope(64, interleaved=True)
)
LITE = LatentAttention(16, 512, 128, 64, 128, 192**-0.5, RMSNorm(), rope=Rope(64, interleaved=True))  # V2 Lite


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(
    ("case", "tokens", "sequences", "dtype"),
    [
        (LITE, 1, 1, torch.bfloat16), (DEEPSEEK, 100, 100, torch.int8),
        *nightly(
            *((LITE, 1, 1, dtype) for dtype in (torch.int8, torch.uint8, torch.float32)),
            *((DEEPSEEK, 100, 100, dtype) for dtype in (torch.bfloat16, torch.uint8, torch.float32)),
            *((DEEPSEEK, 2048, 2, dtype) for dtype in (torch.bfloat16, torch.int8, torch.uint8, torch.float32)),
        ),
    ],
)  # fmt: skip
def test_latents(case: LatentAttention, tokens: int, sequences: int, dtype: torch.dtype, target: GPUTarget) -> None:
    launches = l.latents(case, tokens, sequences, dtype)
    assert [launched.kernel.fn.__name__ for launched in launches] == ["multiply_heads", "attend", "multiply_heads"]
    for launched in launches:
        check(launched, target, "HGMMA")


@pytest.mark.slow
@TARGETS
def test_the_input_of_latents(target: GPUTarget) -> None:
    """Up to 16 queries, the second product maps them into the space of latents: three kernels follow, so attention
    with latents of queries starts 5 for 1 or 2 tokens, and 7 for up to 16. Products are seen by test_products.
    """
    begin = ["normalize", "dense_product", "normalize", "dense_product"]
    for is_paged, tokens, last in ((True, 8, []), (True, 100, ["absorb"]), (False, 8, ["rotate_latents"])):
        launches = l.latent_input(DEEPSEEK, 7168, tokens, is_paged=is_paged)
        assert [launched.kernel.fn.__name__ for launched in launches] == [*begin, *last]
        assert (launches[3].arguments["FINISH"][0] == "absorbed") == (not last)
        check(launches[-1], target, "HGMMA" if is_paged else None)
    check(launches[2], target)
    for tokens in (8, 100):
        check(l.latent_input(DEEPSEEK, 7168, tokens, torch.int8)[-1], target, "HGMMA")
    few = l.latent_input(DEEPSEEK, 7168, 2)
    assert [launched.kernel.fn.__name__ for launched in few] == ["dense_product", "dense_product"]
    for launched in few:
        check(launched, target, "HGMMA")


QWEN3 = MoE(128, 8, 768)
GROUPED = MoE(160, 6, 1536, normalize=False, groups=ExpertGroups(8, 3, "best"), scale=16.0)
EXPERT_KERNELS = {"rate_and_choose", "choose_experts", "sort_visits", "expert_product"}


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(
    ("case", "width", "name", "tokens"),
    [
        (QWEN3, 2048, "auto", 1), (QWEN3, 2048, "int4-128", 1), (QWEN3, 2048, "int8", 2048),
        (GROUPED, 5120, "fp8", 600),
        *nightly(
            *((QWEN3, 2048, "auto", tokens) for tokens in (600, 2048)),
            *((QWEN3, 2048, "int8", tokens) for tokens in (1, 600)),
            *((QWEN3, 2048, "int4-128", tokens) for tokens in (600, 2048)),
            *((GROUPED, 5120, "fp8", tokens) for tokens in (1, 2048)),
        ),
    ],
)  # fmt: skip
def test_experts(case: MoE, width: int, name: str, tokens: int, target: GPUTarget) -> None:
    launches = l.experts(case, width, PLAIN if name == "auto" else format_of(name), tokens)
    assert len(launches) == 3 if tokens == 1 else 8 if name.startswith("int") else 6
    for launched in {str(launched.key): launched for launched in launches}.values():
        kernel, unit = launched.kernel.fn.__name__, None
        if kernel == "expert_product":
            is_low = launched.arguments["BLOCK_R"] < 64
            unit = "HGMMA" if not launched.arguments["WHOLE"] else "IMMA" if is_low else "IGMMA"
        if kernel == "rate_and_choose":
            unit = "HGMMA"
        if kernel in EXPERT_KERNELS:
            check(launched, target, unit, is_wide=kernel not in ("choose_experts", "sort_visits"))


DEEPSEEK_V3 = MoE(256, 8, 2048, scores="sigmoid", choice_bias=True, scale=2.5,
                  groups=ExpertGroups(8, 4, "best_two"), shared=GatedMLP(2048))  # fmt: skip
QWEN3_NEXT = MoE(512, 10, 512, shared=GatedMLP(512), shared_gate=True)


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(
    ("case", "width", "name", "tokens"),
    [
        (QWEN3_NEXT, 2048, "fp8", 8),
        *nightly(
            (DEEPSEEK_V3, 7168, "auto", 1), (QWEN3_NEXT, 2048, "auto", 51), (QWEN3_NEXT, 2048, "int8", 8),
            (QWEN3_NEXT, 2048, "int4-128", 1),
        ),
    ],
)  # fmt: skip
def test_a_shared_expert_starts_no_kernel(case: MoE, width: int, name: str, tokens: int, target: GPUTarget) -> None:
    launches = l.experts(case, width, PLAIN if name == "auto" else format_of(name), tokens)
    assert [x.kernel.fn.__name__ for x in launches] == ["rate_and_choose", "expert_product", "expert_product"]
    for launched in launches:
        is_whole = launched.arguments.get("WHOLE", False)
        check(launched, target, "IMMA" if is_whole else "HGMMA")


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(("case", "tokens"), [(QWEN3, 8), *nightly((QWEN3, 64), (GROUPED, 64))])
def test_a_router_of_few_tokens(case: MoE, tokens: int, target: GPUTarget) -> None:
    """64 tokens have the most visits that are sorted beside the choice: attention and experts start 7 kernels."""
    launches = l.experts(case, 2048, PLAIN, tokens)
    assert [x.kernel.fn.__name__ for x in launches] == ["rate_and_choose", "expert_product", "expert_product"]
    check(launches[0], target, "HGMMA")
    launches = l.experts(case, 16384, PLAIN, tokens)
    names = ["normalize", "dense_product", "choose_experts", "expert_product", "expert_product"]
    assert [x.kernel.fn.__name__ for x in launches] == names  # a row does not fit into a program of the product
    check(launches[2], target, is_wide=False)


MIXERS = {  # a published model's mixer, its hidden size, and the launches of decode and of a prompt
    "mamba": (Mamba(5120, 16, 4, 160), 2560, (6, 8)),
    "mamba2": (Mamba2(80, 64, 128, 1, 4, RMSNorm()), 2560, (4, 6)),
    "gated delta": (GatedDelta(32, 16, 128, 128, 4, RMSNorm()), 2048, (4, 8)),
    "kimi delta": (KimiDelta(32, 128, 4, 128, RMSNorm()), 2304, (5, 9)),
    "lightning": (LightningAttention(64, 96, RMSNorm()), 6144, (4, 7)),
    "short convolution": (ShortConvolution(2048, 3), 2048, (4, 6)),
    "based": (TaylorAttention(16, 64, 16), 1024, (4, 4)),
    "s4": (S4(1024, 64), 1024, (4, 4)),
    "s4d": (S4D(1024, 64), 1024, (4, 4)),
}
ALONG = {
    "delta_step", "ssd_step", "lightning_step", "convolution_step", "convolve", "linear_scan", "selective_scan",
    "delta_scan", "state_space_scan", "taylor_scan", "gated_rows",
    "multiply_rows",
}  # fmt: skip
# A program reads few numbers of a row; rows of BASED's states have 273 numbers, which begin at no multiple of 16 bytes.
NARROW_ALONG = {"selective_scan", "gated_rows", "taylor_scan"}


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, (8, 1)) for name in MIXERS),
        *((name, (1, 512)) for name in ("mamba", "mamba2", "gated delta", "lightning")),
        # Prompts of the others start the kernels of decode steps, or of a mixer above.
        *nightly(*((name, (1, 512)) for name in ("kimi delta", "short convolution", "based", "s4", "s4d"))),
    ],
)
def test_recurrences(name: str, shape: tuple[int, int], target: GPUTarget) -> None:
    mixer, width, counts = MIXERS[name]
    launches = l.recurrent(mixer, width, *shape)
    assert len(launches) == counts[shape[1] > 1], [launched.kernel.fn.__name__ for launched in launches]
    for launched in {str(launched.key): launched for launched in launches}.values():
        kernel = launched.kernel.fn.__name__
        if kernel in ALONG:
            check(launched, target, is_wide=kernel not in NARROW_ALONG)


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize("sequences", [1, *nightly((8,), (64,), (256,))])
def test_a_product_that_convolves(sequences: int, target: GPUTarget) -> None:
    """The input of Mamba filters what it computes. With the norm before it, a layer and its MLP start 7 kernels."""
    mixer, width, _ = MIXERS["mamba"]
    launches = l.recurrent(mixer, width, sequences, 1)
    (found,) = [x for x in launches if x.arguments.get("FINISH", ("rows",))[0] == "convolved"]
    assert bool(found.arguments["NORM"]) == (len(launches) == 5) == (sequences == 1)
    check(found, target, "HGMMA")


@pytest.mark.nightly
@pytest.mark.parametrize("target", [HOPPER], ids=["sm_90"])
def test_recurrences_of_drafts(target: GPUTarget) -> None:
    """In steps with drafts, states are copied, and accepted drafts run again before the known token."""
    for name in ("mamba2", "gated delta"):
        mixer, width, _ = MIXERS[name]
        launches = l.recurrent(mixer, width, 8, 5, drafts=4)
        along = [launched for launched in launches if launched.kernel.fn.__name__ in ALONG]
        assert not any(launched.arguments.get("IN_PAGES") for launched in along), name
        for launched in {str(launched.key): launched for launched in along}.values():
            check(launched, target, is_wide=launched.kernel.fn.__name__ not in NARROW_ALONG)


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize(("tokens", "sequences"), [(8, 8), (2048, 2)])
def test_tensor_descriptors(tokens: int, sequences: int, target: GPUTarget) -> None:
    """Hopper copies tiles; on older GPUs descriptors become pointers."""
    (launched,) = l.attention(LLAMA, tokens, sequences, torch.bfloat16, 64, described=True)
    built = check(launched, target, "HGMMA")
    assert any("bulk.tensor" in name for name in built.instructions) == (target is HOPPER)


@pytest.mark.slow
@TARGETS
def test_trees_of_drafts(target: GPUTarget) -> None:
    (launched,) = l.attention(LLAMA, 64, 8, torch.float16, is_tree=True)
    assert launched.arguments["TREE"]
    check(launched, target, "HGMMA")


SEEN_ELSEWHERE = {"dense_product", "whole_product", "round_tokens"}  # by test_products
NARROW = {"best_of_rows": "a row has few parts"}


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
@TARGETS
@pytest.mark.parametrize("width", [4096, *(pytest.param(2**n, marks=pytest.mark.nightly) for n in (10, 11, 13, 14))])
def test_norms(width: int, target: GPUTarget) -> None:
    """Rows of up to 2^14 numbers fit into registers, with layer norm and RMS norm, as floats and rounded."""
    for launched in l.norms(width):
        check(launched, target)


@pytest.mark.nightly
@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["sm_90", "sm_80"])
def test_ptx_tells_what_the_machine_code_does(target: GPUTarget) -> None:
    """The other tests read PTX, which takes a hundredth of the time of machine code."""
    launches = [
        *l.product("plain", 64), *l.product("int8", 64), *l.product("int4-asym", 1), *l.finished("fp8", 256)[:1],
        *l.attention(LLAMA, 8, 8, torch.float16), *l.attention(LLAMA, 2048, 2, torch.int8), *l.rows()[:3],
        *l.attention(Attention(16, 8, 512, 0.1), 2048, 2, torch.float32), *l.norms(2**15)[:1],  # the last one spills
    ]  # fmt: skip
    for built in (build(launched, target) for launched in launches):
        machine = disassemble(built)
        wide = sum(n for name, n in machine.items() if name.startswith(("LDG", "LDGSTS")) and ".128" in name)
        assert bool(built.wide_loads) == bool(wide)
        assert bool(built.stack) == any(name.startswith(("STL", "LDL")) for name in machine)
        assert [unit for unit in UNITS if built.has(unit)] == [
            unit for unit in UNITS if any(name.startswith(unit) for name in machine)
        ]


@pytest.mark.nightly
def test_kernels_compile_for_rocm() -> None:
    """One launch of each kernel compiles for gfx942. Nothing was run there."""
    launches = [
        *l.product("plain", 8), *l.product("int4-128", 8), *l.attention(LLAMA, 8, 8, torch.float16), *l.rows(),
        *l.latents(LITE, 8, 8, torch.bfloat16), *l.latent_input(LITE, 2048, 8),
        *l.latent_input(LITE, 2048, 8, is_paged=False),
        *l.experts(MoE(8, 2, 768), 2048, PLAIN, 8), *l.preparing(),
        *(launched for mixer, width, _ in MIXERS.values() for launched in l.recurrent(mixer, width, 8, 1)),
    ]  # fmt: skip
    for launched in {launched.kernel.fn.__name__: launched for launched in launches}.values():
        assert compile_for(launched, CDNA3).asm["hsaco"]
