"""Tilings of products: candidates, their cases in bench/gpu.py, and the table that is written from the lines."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import UNITS, Built, Gate, judge, noise, poisoned, table_of
from gpu_machine import Machine
from gpu_results import Results
from torch import Tensor

from ridgeline.ops.triton.launch import Compiled, launch
from ridgeline.ops.triton.packing import Packed
from ridgeline.ops.triton.products import pack_together, product_of
from ridgeline.ops.triton.tilings import COUNTS, MOST_TOKENS, Block, Kernel, Tilings, tilings_of
from ridgeline.quant import StoredLinear
from ridgeline.spec.quant import Format, format_of

MATRICES: Mapping[str, tuple[int, int]] = {"o": (4096, 4096), "gate up": (28672, 4096)}
SMALL_MATRICES: Mapping[str, tuple[int, int]] = {"odd": (100, 257)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 1024)  # one for each of tilings.COUNTS
GAIN = 0.98  # share of the time of the default tiling that a tiling takes at most, or it is not written


def kernel_of(format: Format) -> Kernel:
    """Return the kernel that multiplies with a format."""
    return "whole" if format.activations == "int8" else "dense"


def count_of(tokens: int) -> str:
    """Return the entry of the table that a number of tokens has."""
    return next((count for count in COUNTS[:-1] if tokens <= int(count)), COUNTS[-1])


def candidates(kernel: Kernel, tokens: int) -> Iterator[Block]:
    """Yield blocks for a number of tokens; the units for matrices compute the same bits in all of them."""
    width = min(max(16, 1 << (tokens - 1).bit_length()), MOST_TOKENS)
    widths = (64, 128) if width == MOST_TOKENS else (width,)
    for block_tokens in widths:
        for rows in (64, 128) if kernel == "dense" else (32, 64, 128):
            for warps in sorted({rows // 16, max(rows // 32, 4 if kernel == "dense" else 2)}):
                for stages in (3, 4, 5):
                    yield Block(block_tokens, rows, Compiled(warps, stages))


def only(kernel: Kernel, block: Block) -> Tilings:
    """Return tilings that have one block for every number of tokens."""
    return Tilings({kernel: dict.fromkeys(COUNTS, (block.tokens, block.rows, *block.compiled))})


def name_of(format: str, matrix: str, tokens: int, block: Block) -> str:
    """Return the name of a case."""
    warps, stages = block.compiled
    return f"tiling {format}, {matrix}, M {tokens}, block {block.tokens} x {block.rows}, {warps} warps, {stages} stages"


def product(machine: Machine, weights: str, rows: int, columns: int, tokens: int, block: Block) -> Built:
    """Return the product of tokens with a matrix [rows, columns] in one tiling.

    Its gate: the bits of the default tiling, and a token has the same bits alone and in the batch. Stage 2 compares the
    default tiling with float64.
    """
    format = Format() if weights == "plain" else format_of(weights)
    table, kernel = table_of(machine, "triton"), kernel_of(format)
    size = rows * columns * format.number_bytes("bfloat16")

    def packed(seed: int) -> Packed:
        data = noise(machine, rows, columns, seed=seed, dtype=torch.bfloat16) / 8
        return pack_together([StoredLinear(data, None, table, format)])

    def multiplies(matrix: Packed, tilings: Tilings) -> Callable[[Tensor], Tensor]:
        multiply = product_of(matrix, None, launch, tilings)

        def run(given: Tensor) -> Tensor:
            out = given.new_empty((len(given), rows))
            multiply(given, out)
            return out

        return run

    matrices = [packed(seed) for seed in range(machine.copies(size))]
    x = noise(machine, tokens, columns, seed=9)
    applies = [multiplies(matrix, only(kernel, block)) for matrix in matrices]

    def gate() -> Gate:
        with poisoned():
            got, alone = applies[0](x), applies[0](x[:1])
            wanted = multiplies(matrices[0], tilings_of())(x)
        return judge(got, wanted, 0.0, bool(torch.equal(got[0], alone[0])))

    moved = size + 4 * tokens * (rows + columns)
    runs = [lambda apply=apply: apply(x) for apply in applies]
    return Built(runs, gate, moved, 2.0 * tokens * rows * columns, UNITS[format.activations])


def fastest(results: Results, device: str, formats: Mapping[str, str]) -> dict[str, dict[str, list[int]]]:
    """Return the part of a GPU in tilings.json, from the newest lines of its cases.

    A block counts if its gates are true for all matrices, and is written if it takes at most GAIN of the time of the
    default one. formats: the kind of codes of each format.
    """
    commits = [commit for commit, name in results.runs() if name == device]
    lines = {line["case"]: line for commit in commits for line in results.of(commit, device) if line["seconds"]}
    found: dict[str, dict[str, list[int]]] = defaultdict(dict)
    for name, kind in formats.items():
        kernel = kernel_of(Format() if name == "plain" else format_of(name))
        for tokens in TOKENS:
            default, times = tilings_of().block(kernel, "", tokens), {}
            for block in candidates(kernel, tokens):
                each = [lines.get(name_of(name, matrix, tokens, block)) for matrix in MATRICES]
                if all(each):
                    times[block] = sum(line["seconds"] for line in each if line)
            best = min(times, key=lambda block: times[block], default=default)
            if default in times and times[best] <= GAIN * times[default]:
                found[f"{kernel} {kind}"][count_of(tokens)] = [best.tokens, best.rows, *best.compiled]
    return dict(found)


def write(results: Results, device: str, formats: Mapping[str, str], path: Path) -> int:
    """Write the part of a GPU into a table of tilings; return how many tilings it has."""
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    part = fastest(results, device, formats)
    table.pop(device, None)
    if part:
        Tilings(part)  # raises ValueError for what no product may use
        table[device] = part
    path.write_text(text_of(table), encoding="utf-8")
    return sum(map(len, part.values()))


def text_of(table: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Return a table as text: a line for each kernel."""
    parts = []
    for name, part in table.items():
        rows = ",\n".join(f"    {json.dumps(kernel)}: {json.dumps(counts)}" for kernel, counts in part.items())
        parts.append(f"  {json.dumps(name)}: {{\n{rows}\n  }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
