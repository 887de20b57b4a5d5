"""Primitives that prepare a step on the GPU: DECODE_LAYOUT, KNOWN_TOKENS and KEEP_TOKENS."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.ops.triton.launch import Compiled, Launch
from ridgeline.ops.triton.steps import keep_tokens, known_tokens, place_tokens

BLOCK = 1024  # numbers that one program copies


def decode_layout(launch: Launch) -> Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]:
    """Return DECODE_LAYOUT. Only pages that sequences have are copied, not whole rows of the page table."""

    def run(
        page_table: Tensor, rows: Tensor, positions: Tensor, last: Tensor, page_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, sequences, columns = rows.shape[0], last.shape[0], page_table.shape[1]
        pages, slots = page_table.new_empty(tokens), page_table.new_empty(tokens)
        tables = page_table.new_empty((sequences, columns))
        launch(
            place_tokens, (tokens, -(-columns // BLOCK)), Compiled(4),
            table=page_table, rows=rows, positions=positions, last=last, pages=pages, slots=slots, tables=tables,
            tokens=tokens, sequences=sequences, columns=columns, stride=page_table.stride(0), PAGE=page_tokens,
            BLOCK=BLOCK,
        )  # fmt: skip
        return pages, slots, tables

    return run


def known(launch: Launch) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return KNOWN_TOKENS."""

    def run(tokens: Tensor, sampled: Tensor, rows: Tensor) -> Tensor:
        count = tokens.shape[0]
        ids = torch.empty(count, dtype=torch.int64, device=tokens.device)
        launch(
            known_tokens, (-(-count // BLOCK),), Compiled(4),
            tokens=tokens, sampled=sampled, rows=rows, ids=ids, count=count, BLOCK=BLOCK,
        )  # fmt: skip
        return ids

    return run


def keep(launch: Launch) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return KEEP_TOKENS."""

    def run(sampled: Tensor, rows: Tensor, ids: Tensor) -> None:
        count = ids.shape[0]
        launch(
            keep_tokens, (-(-count // BLOCK),), Compiled(4), sampled=sampled, rows=rows, ids=ids, count=count,
            BLOCK=BLOCK,
        )  # fmt: skip

    return run
