"""The predicted resident memory of a process: how matrices fill mappings, which pages are written, and how many states
are held.
"""

from __future__ import annotations

from pathlib import Path

from ridgeline.cost.process_memory import (
    BLOCK,
    CODE_BYTES,
    HUGE,
    L2_BYTES,
    MAPPED_ALONE,
    MAPPING,
    Run,
    idle_memory,
    matrix_sizes,
    process_memory,
    program_bytes,
    touched_pages,
    unfilled,
    written_pages,
)
from ridgeline.spec import Attention, GatedMLP, Layer, Mamba2, ModelSpec, MoE, RMSNorm, Rope
from ridgeline.spec.footprint import footprint
from ridgeline.spec.groups import state_groups
from ridgeline.spec.quant import FORMATS, PANEL, FormatTable

MIB, NORM = 2**20, RMSNorm()
ATTENTION = Attention(4, 2, 32, 0.2, Rope(32))
MIXED = ModelSpec(
    "x", 1000, 128, 4096,
    (Layer(ATTENTION, GatedMLP(256), NORM), Layer(Mamba2(4, 64, 64, 1, 4, NORM), MoE(4, 2, 96), NORM)), NORM,
)  # fmt: skip


def test_the_ends_of_mappings() -> None:
    assert unfilled([]) == 0
    assert unfilled([9 * MIB]) == MIB  # a single matrix in whole huge pages
    assert unfilled([8 * MIB] * 4) == 0
    # the fifth matrix does not fit into the mapping of the other four
    assert unfilled([7 * MIB] * 5) == (28 + 8 - 35) * MIB
    assert unfilled([100]) == HUGE - 100


def test_the_kernels_use_the_counted_layout() -> None:
    csrc = Path(__file__).parents[2] / "csrc"
    for file, text in {
        "threads.cpp": f"mapping = size_t({MAPPING >> 20}) << 20", "packing.h": f"BLOCK = {BLOCK};",
        "kernels/products.cpp": f"L2_BYTES = {L2_BYTES >> 10} << 10", "matrix.h": f"PANEL = {PANEL};",
    }.items():  # fmt: skip
        assert text in (csrc / file).read_text(encoding="utf-8"), file
    assert MAPPED_ALONE == MAPPING // 4 and "bytes > mapping / 4" in (csrc / "threads.cpp").read_text(encoding="utf-8")


def test_matrices_are_all_that_kernels_pack() -> None:
    for format in FORMATS.values():
        assert (
            sum(matrix_sizes(MIXED, FormatTable(format), "float32"))
            == footprint(MIXED, FormatTable(format), "float32", packs=True).products
        )


def test_pages_that_are_written() -> None:
    rows, states = sorted(state_groups(MIXED, page_tokens=16), key=lambda g: g.snapshot)
    one, kept = Run(1, 100, 1, 512, 2), rows.kept_pages
    assert one.length == 100 and one.alive(1) == 1
    assert written_pages(rows, 50, one, 1, kept) == 7 + 1  # one more for the null page
    assert written_pages(rows, 5, one, 1, kept) == 5
    # 64 sequences one after the other: the live ones' pages, and those that the prefix cache keeps.
    many = Run(64, 500, 1, 512, 2)
    assert written_pages(rows, 10_000, many, many.alive(1), kept) == many.alive(1) * 32 + kept + 1
    # Earlier requests leave pages too, and more stay once prompts look for them.
    later = one._replace(earlier=3)
    assert written_pages(rows, 10_000, later, 1, kept) == 7 + 3 * 6 + 1
    later = one._replace(earlier=1000)
    assert [written_pages(rows, 10_000, later, 1, n) for n in (kept, 3 * kept)] == [7 + n + 1 for n in (kept, 3 * kept)]
    # Snapshots at the ends of earlier chunks are kept.
    chunked = Run(1, 2048, 1, 512, 2)
    each = states.most_pages(2048)
    assert written_pages(states, 10, chunked, 1, states.kept_pages) == each + 3 + 1


def test_pages_that_are_touched() -> None:
    rows, states = sorted(state_groups(MIXED, page_tokens=16), key=lambda g: g.snapshot)
    assert touched_pages(rows, 1, 1000) == touched_pages(rows, 8, 1000) == 40
    assert touched_pages(rows, 1, 20) == 20
    assert touched_pages(rows, 9, 1000) == 48
    # After a chunk of 2,048 tokens, the memory of as many is touched.
    assert touched_pages(rows, 129, 1000, Run(1, 9000, 1, 2048, 2)) == 264
    assert touched_pages(rows, 129, 1000, Run(1, 300, 1, 2048, 2)) == 168
    assert touched_pages(states, 3, 1000, Run(1, 9000, 1, 2048, 2)) == 5


def test_before_the_first_request() -> None:
    groups = state_groups(MIXED, page_tokens=16)
    found = idle_memory(MIXED, 10 * MIB, FormatTable(), "float32", groups, [1000, 1000])
    touched = sum(touched_pages(g, 1, 1000) * g.page_bytes for g in groups)
    assert found.total == 10 * MIB + found.ends + touched + CODE_BYTES
    uses = found.by_use(1000)
    assert uses["process"] == sum(uses.values()) // 2 == int(found.total + program_bytes(1000))


def test_the_number_of_live_sequences() -> None:
    assert Run(16, 100, 9, 512, 2).alive(1) == 16
    assert Run(16, 100, 1, 512, 2).alive(1) == 6  # five sequences end in a step, and another one has begun
    # eight sequences stop at 64; the next step computes the rest of them and begins three more
    assert Run(16, 100, 1, 512, 2).alive(64) == 11
    assert Run(4, 2048, 1, 512, 2).alive(64) == 1


def test_the_sum_grows_with_the_run() -> None:
    groups = state_groups(MIXED, page_tokens=16)
    sizes = [
        process_memory(
            MIXED, 10 * MIB, FormatTable(), "float32", groups, [1000] * len(groups), Run(n, prompt, 8, 512, 2)
        )
        for n, prompt in ((1, 64), (1, 600), (8, 600))
    ]
    totals = [found.total for found in sizes]
    assert totals == sorted(totals) and totals[0] > 10 * MIB + CODE_BYTES
    assert sum(sizes[0]) == totals[0]
