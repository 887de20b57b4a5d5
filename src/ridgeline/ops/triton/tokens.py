"""Primitives over rows: NORM, WRITE_PAGES, BEST, DRAW and ACCEPT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.ops.api import PageTarget
from ridgeline.ops.draws import DRAW_WORDS, TRIAL_WORDS, TYPICAL_DELTA, TYPICAL_EPSILON
from ridgeline.ops.reference.primitives import norm as norm_definition
from ridgeline.ops.triton.accept import try_drafts
from ridgeline.ops.triton.draw import cut_rows, draw_of_parts
from ridgeline.ops.triton.launch import Compiled, Counters, Launch
from ridgeline.ops.triton.packing import Packed
from ridgeline.ops.triton.paged import KINDS, power_above, views_of
from ridgeline.ops.triton.products import NORM_TOKENS, Rounded, StoredProduct, Unnormalized
from ridgeline.ops.triton.rows import best_of_parts, best_of_rows, normalize, write_rows
from ridgeline.spec import Attention, IndexedAttention, LatentAttention, LayerNorm, RMSNorm
from ridgeline.spec.storage import UNSCALED, KVScales

BEST_BLOCK = 4096  # logits of a part
DRAW_BLOCK = 1024  # logits that one program draws from at once
LIKELY = -10.0  # score of tokens that filters look at first: 4.5e-5 of the best one's probability
MOST_LIKELY = 4096  # such tokens of a row for which there is room; with more of them, filters look at the whole row
MOST_WIDTH = 2**15  # numbers of a row that one program keeps in registers
MOST_INSIDE = 2**13  # the same for a program of 128 threads that also multiplies


def warps_for(width: int) -> int:
    """Return warps for a norm of so many numbers. Each thread holds at most 32 of them; beyond 2^14, some spill."""
    return 4 if width <= 2048 else 8 if width <= 2**13 else 16


class Normalizer:
    """A norm with its weights, and the sum before it. rounds: a matrix that takes the results as rounded tokens."""

    def __init__(
        self, case: RMSNorm | LayerNorm, weight: Tensor, bias: Tensor | None, launch: Launch,
        rounds: Packed | None = None,
    ) -> None:  # fmt: skip
        self._is_layer, self._rounds = isinstance(case, LayerNorm), rounds
        self._eps, self._offset = case.eps, case.offset
        self._weight, self._bias, self._launch = weight, bias, launch

    def __call__(
        self, residual: Tensor, delta: Tensor | None = None, scale: float = 1.0, rows: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Return residual + scale * delta and its norm, for all rows or for some.

        Where rows are chosen, the sum is not kept, and the first result is the residual.
        """
        residual, width = residual if residual.stride(-1) == 1 else residual.contiguous(), residual.shape[-1]
        count, packed = residual.shape[0] if rows is None else rows.shape[0], self._rounds
        total = None
        if delta is not None and rows is None:
            total = torch.empty((count, width), dtype=torch.float32, device=residual.device)
        rounded = None if packed is None else Rounded.empty(packed, count)
        out = rounded.steps if rounded else residual.new_empty((count, width), dtype=torch.float32)
        given = None if packed is None else packed.input_scale
        if count:
            self._launch(
                normalize, (count,), Compiled(warps_for(width)),
                residual=residual, delta=None if delta is None else delta.contiguous(), rows=rows, weight=self._weight,
                bias=self._bias, total=total, out=out, token_scales=rounded and rounded.token_scales, width=width,
                filled=out.shape[1], stride=residual.stride(0), scale=scale, offset=self._offset, eps=self._eps,
                given=1.0 if given is None else given, HAS_DELTA=delta is not None, HAS_ROWS=rows is not None,
                HAS_TOTAL=total is not None, HAS_BIAS=self._bias is not None, IS_LAYER=self._is_layer,
                ROUNDS=packed is not None, HAS_SCALE=given is not None, BLOCK=power_above(out.shape[1]),
            )  # fmt: skip
        return residual if total is None else total, rounded or out

    def before(
        self, product: StoredProduct, residual: Tensor, delta: Tensor | None = None, scale: float = 1.0
    ) -> tuple[Tensor, Any]:
        """Return residual + scale * delta, and what the product multiplies: few tokens are normalized in its launch.

        The product must be the next kernel that starts: then it also writes the sum.
        """
        few = 0 < len(residual) <= NORM_TOKENS and product.dense is not None and self.fits_in
        if not few or residual.stride(-1) != 1:
            return self(residual, delta, scale)
        total, width = None, residual.shape[-1]
        if delta is not None:
            total, delta = residual.new_empty((len(residual), width), dtype=torch.float32), delta.contiguous()
        return residual if total is None else total, Unnormalized(
            residual, delta, total, self._weight, self._bias, scale, self._offset, self._eps, self._is_layer,
            power_above(width),
        )  # fmt: skip

    @property
    def fits_in(self) -> bool:
        """Return whether a kernel that also multiplies can normalize a row."""
        return self._weight.shape[-1] <= MOST_INSIDE

    def inside(self, residual: Tensor, delta: Tensor | None, scale: float) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Return the arguments of a kernel that calls `rows.sum_and_norm`, and room for the sum and its norm."""
        residual, width = residual if residual.stride(-1) == 1 else residual.contiguous(), residual.shape[-1]
        total, out = (residual.new_empty((len(residual), width), dtype=torch.float32) for _ in range(2))
        found = {
            "residual": residual, "delta": None if delta is None else delta.contiguous(), "norm_weight": self._weight,
            "norm_bias": self._bias, "total": None if delta is None else total, "stride": residual.stride(0),
            "residual_scale": scale, "offset": self._offset, "eps": self._eps, "HAS_DELTA": delta is not None,
            "HAS_TOTAL": delta is not None, "HAS_NORM_BIAS": self._bias is not None, "IS_LAYER": self._is_layer,
            "BLOCK_N": power_above(width),
        }  # fmt: skip
        return found, residual if delta is None else total, out


def norm(case: RMSNorm | LayerNorm, launch: Launch) -> Callable[..., Tensor]:
    """Return NORM. Rows that are too long for one program take the definition."""
    other = norm_definition(case)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.shape[-1] > MOST_WIDTH:
            return other(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = Normalizer(case, weight, bias, launch)(rows)[1]
        return out.view(x.shape)

    return run


def refuses_pages(case: object) -> str | None:
    """Return why no kernel writes this state into pages; None if one does."""
    return "no kernel writes the keys of an indexer" if isinstance(case, IndexedAttention) else None


def write_pages(case: Attention | LatentAttention, launch: Launch) -> Callable[..., None]:
    """Return WRITE_PAGES for keys and values, and for latents."""

    def write(
        pages: Sequence[Tensor], parts: Sequence[Tensor], write_page: Tensor, write_slot: Tensor,
        scales: KVScales = UNSCALED,
    ) -> None:  # fmt: skip
        tokens, heads, numbers = parts[0].shape
        rows = [x if x.stride()[1:] == (numbers, 1) else x.contiguous() for x in parts]
        launch(
            write_rows, (tokens,), Compiled(4),
            k=rows[0], v=rows[-1], k_stride=rows[0].stride(0), v_stride=rows[-1].stride(0), K=heads, D=numbers,
            PARTS=len(parts), HEADS=power_above(heads), WIDTH=power_above(numbers),
            **in_pages(PageTarget(tuple(pages), write_page, write_slot, scales)),
        )  # fmt: skip

    return write


def in_pages(target: PageTarget) -> dict[str, Any]:
    """Return the arguments of a kernel that writes rows into pages."""
    parts: Any = target.parts
    views = [views_of(part) for part in parts]
    (keys, key_scales), (values, value_scales) = views[0], views[-1]
    return {
        "keys": keys, "values": values, "key_scales": key_scales, "value_scales": value_scales, "pages": target.pages,
        "slots": target.slots, "page_stride": keys.stride(0), "slot_stride": keys.stride(1),
        "head_stride": keys.stride(2), "scale_stride": 0 if key_scales is None else key_scales.stride(0),
        "k_scale": target.scales[0], "v_scale": target.scales[1], "KIND": KINDS[keys.dtype][0],
    }  # fmt: skip


def best(launch: Launch) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return BEST: the best of each part of a row, then the best of the parts."""

    def run(logits: Tensor) -> tuple[Tensor, Tensor]:
        part_ids, part_values = _best_parts(logits.float().contiguous(), launch)
        rows, parts = part_ids.shape
        ids = torch.empty(rows, dtype=torch.int64, device=part_ids.device)
        values = torch.empty(rows, dtype=torch.float32, device=part_ids.device)
        launch(
            best_of_rows, (rows,), Compiled(1),
            part_ids=part_ids, part_values=part_values, ids=ids, values=values, parts=parts, BLOCK=power_above(parts),
        )  # fmt: skip
        return ids, values

    return run


def draw(launch: Launch) -> Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """Return DRAW: the best logit of each part; where filters cut; and the largest sum of score and noise."""
    run = _drawing(launch)
    return lambda logits, draws, token_ids: run(logits, draws, token_ids, None)


def accept(launch: Launch) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return ACCEPT: drafts are tried behind the filters of DRAW, and the largest sum serves rows without one."""
    run = _drawing(launch)
    return lambda logits, draws, trials: run(logits, draws, None, trials)


def _drawing(launch: Launch) -> Callable[[Tensor, Tensor, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]:
    """Return DRAW, with the trials of ACCEPT or without any."""
    counters = Counters()

    def run(logits: Tensor, draws: Tensor, token_ids: Tensor | None, trials: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = logits.float().contiguous()
        rows, vocabulary = logits.shape
        if draws.shape[0] != rows * DRAW_WORDS:
            raise ValueError(f"{draws.shape[0]} numbers of draws for {rows} rows; each row has {DRAW_WORDS}")
        if trials is not None and trials.shape[0] != rows * TRIAL_WORDS:
            raise ValueError(f"{trials.shape[0]} numbers of trials for {rows} rows; each row has {TRIAL_WORDS}")

        def new(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty((rows, *shape), dtype=dtype, device=logits.device)

        best_ids, best_values = _best_parts(logits, launch)
        parts = best_ids.shape[1]
        tops, likely, cuts = new(torch.float32), new(torch.int32, MOST_LIKELY), new(torch.int32, 2)
        launch(
            cut_rows, (rows,), Compiled(8),
            logits=logits, draws=draws, best_ids=best_ids, best_values=best_values, tops=tops, likely=likely, cuts=cuts,
            vocabulary=vocabulary, parts=parts, WORDS=DRAW_WORDS, LIKELY=LIKELY, MOST=MOST_LIKELY, BLOCK=DRAW_BLOCK,
            BLOCK_P=power_above(parts),
        )  # fmt: skip
        taken = None
        if trials is not None:
            taken = new(torch.int64)
            launch(
                try_drafts, (rows,), Compiled(8),
                logits=logits, draws=draws, trials=trials, tops=tops, cuts=cuts, taken=taken, vocabulary=vocabulary,
                WORDS=DRAW_WORDS, TRIAL=TRIAL_WORDS, EPSILON=TYPICAL_EPSILON, DELTA=TYPICAL_DELTA, BLOCK=DRAW_BLOCK,
            )  # fmt: skip
        ids = new(torch.int64)
        launch(
            draw_of_parts, (rows, parts), Compiled(4),
            logits=logits, draws=draws, tops=tops, cuts=cuts, best_ids=best_ids, best_values=best_values,
            token_ids=token_ids, trials=trials, taken=taken, part_ids=new(torch.int32, parts),
            part_values=new(torch.float64, parts), ids=ids,
            arrived=counters(rows, logits.device), vocabulary=vocabulary, WORDS=DRAW_WORDS,
            TRIAL=TRIAL_WORDS, HAS_IDS=token_ids is not None, HAS_TRIALS=trials is not None, PART=BEST_BLOCK,
            BLOCK=min(DRAW_BLOCK, BEST_BLOCK), BLOCK_P=power_above(parts),
        )  # fmt: skip
        return ids, tops

    return run


def _best_parts(logits: Tensor, launch: Launch) -> tuple[Tensor, Tensor]:
    """Return index and value of the best logit of each part of each row [rows, parts]."""
    rows, vocabulary = logits.shape
    parts = -(-vocabulary // BEST_BLOCK)
    ids = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    launch(
        best_of_parts, (rows, parts), Compiled(4),
        logits=logits, ids=ids, values=values, vocabulary=vocabulary, BLOCK=BEST_BLOCK,
    )  # fmt: skip
    return ids, values
