"""Tilings of products: the part of a product that one program computes, from a table that was tuned before.

tilings.json has them for each GPU that was tuned, by the kernel, the kind of codes and the number of tokens; `default`
serves other GPUs, and what a GPU's own part leaves out. Nothing is tuned while a model runs, because a step that is
recorded must not compile or measure. `bench/gpu.py 7` measures candidates, and `--tilings` writes the fastest.

A tiling changes no bit of a result. The order of a sum depends on the width of a tile and on splits, which are facts of
the matrix (packing.py, products.py), and `check` refuses blocks that the units for matrices would compute differently.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import torch

from ridgeline.ops.triton.launch import Compiled

Kernel = Literal["dense", "whole"]
COUNTS = "1", "2", "4", "8", "16", "32", "64", "more"  # most tokens of a step, each tuned apart
DEFAULT = "default"
UNIT_ROWS = 16  # of a matrix for each warp: four warps share an instruction of 64 rows on Hopper
LEAST_ROWS: Mapping[Kernel, int] = {"dense": 64, "whole": 32}  # sums of whole numbers are exact in every instruction
MOST_ROWS, LEAST_TOKENS, MOST_TOKENS = 128, 16, 128  # rows are filled up to a multiple of 128
WARPS, MOST_STAGES = (1, 2, 4, 8), 6


class Block(NamedTuple):
    """The part of a product that one program computes, and how it is compiled."""

    tokens: int
    rows: int
    compiled: Compiled


def check(kernel: Kernel, block: Block) -> None:
    """Raise ValueError for a block whose results could have other bits, or that a kernel cannot compute."""
    tokens, rows, (warps, stages) = block
    numbers = {
        "tokens": (tokens, LEAST_TOKENS, MOST_TOKENS), "rows": (rows, LEAST_ROWS[kernel], MOST_ROWS)
    }  # fmt: skip
    for name, (value, least, most) in numbers.items():
        if value & (value - 1) or not least <= value <= most:
            raise ValueError(f"a block of {kernel} has {value} {name}; take a power of two from {least} to {most}")
    if warps not in WARPS or not 1 <= stages <= MOST_STAGES:
        raise ValueError(f"{warps} warps and {stages} stages; take 1, 2, 4 or 8 warps and 1 to {MOST_STAGES} stages")
    if rows < UNIT_ROWS * warps or (kernel == "dense" and warps < 4):
        raise ValueError(f"{warps} warps for {rows} rows; {kernel} takes {UNIT_ROWS} rows for each, dense 4 or 8 warps")


class Tilings:
    """The blocks of one GPU. parts: one or more, in the form of the parts of tilings.json."""

    def __init__(self, *parts: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
        """Read the parts, best first. Raises ValueError for a block that `check` refuses, and for an unknown name."""
        self._parts = [{name: dict(_blocks(name, counts)) for name, counts in part.items()} for part in parts]

    def block(self, kernel: Kernel, kind: str, tokens: int) -> Block:
        """Return the block for a number of tokens and a matrix whose codes are of a kind."""
        count = next((c for c in COUNTS[:-1] if tokens <= int(c)), COUNTS[-1])
        return next(
            found for part in self._parts for name in (f"{kernel} {kind}", kernel)
            if (found := part.get(name, {}).get(count)) is not None
        )  # fmt: skip


def _blocks(name: str, counts: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Block]]:
    kernel: Any = name.split(" ")[0]
    if kernel not in LEAST_ROWS or not set(counts) <= set(COUNTS):
        raise ValueError(f"tilings of {name!r} for {', '.join(counts)} tokens; kernels are dense and whole")
    for count, (tokens, rows, warps, stages) in counts.items():
        block = Block(tokens, rows, Compiled(warps, stages))
        check(kernel, block)
        yield count, block


@cache
def tilings_of(name: str = DEFAULT) -> Tilings:
    """Return the tilings of a GPU by its name, as torch gives it."""
    table = json.loads(files("ridgeline.ops.triton").joinpath("tilings.json").read_text(encoding="utf-8"))
    own = [table[name]] if name != DEFAULT and name in table else []
    return Tilings(*own, table[DEFAULT])


def tilings_on(device: torch.device) -> Tilings:
    """Return the tilings of a device; those of `default` where kernels are interpreted or only compiled."""
    return tilings_of(torch.cuda.get_device_name(device) if device.type == "cuda" else DEFAULT)
