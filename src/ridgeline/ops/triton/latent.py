"""Attention over latents: the stage LATENT_INPUT, and the primitive PAGED_LATENT_ATTENTION.

Attention has the absorbed form: kv_b maps queries into the latents' space, and results out of it. All heads share one
key, the stored row, and one value, which is the beginning of the key. The definition rebuilds keys and values for long
chunks. These kernels never do, so that no chunk changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ridgeline.ops import api
from ridgeline.ops.api import Op, PagedRows, PageTarget, Rotary, Weights
from ridgeline.ops.stages import LatentInput
from ridgeline.ops.table import GPU_BACKEND
from ridgeline.ops.triton.heads import absorb, multiply_heads, rotate_latents
from ridgeline.ops.triton.launch import Compiled, Launch
from ridgeline.ops.triton.paged import LARGEST_HEAD, SLICES, Attend, Heads, power_above
from ridgeline.ops.triton.products import Finish, StoredProduct
from ridgeline.ops.triton.stages import Begin, Stage, refuses_begin
from ridgeline.ops.triton.tokens import Normalizer, in_pages
from ridgeline.spec import LatentAttention, RMSNorm

BLOCK_ROWS, BLOCK_COLUMNS = 64, 64  # of a matrix of a head
FEW_TOKENS, BLOCK_TOKENS = 16, 64  # tokens of a program of small steps, and of others


def refuses_latents(case: LatentAttention) -> str | None:
    """Return why no kernel serves attention over latents; None if one does."""
    if case.kv_lora_rank > LARGEST_HEAD:
        return f"latents have {case.kv_lora_rank} numbers; kernels take {LARGEST_HEAD} at most"
    return None


class HeadProduct:
    """A product of each head of tokens with a matrix of its own."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def __call__(self, x: Tensor, matrices: Tensor, copied: int = 0) -> Tensor:
        """Return [T, H, rows + copied] for x [T, H, columns + copied] and matrices [H, rows, columns].

        copied: how many numbers of each head follow the columns. They also follow the results.
        """
        x = x if x.stride(-1) == 1 else x.contiguous()
        tokens, (heads, rows, columns) = x.shape[0], matrices.shape
        block = FEW_TOKENS if tokens <= FEW_TOKENS else BLOCK_TOKENS
        out = x.new_empty((tokens, heads, rows + copied))
        self._launch(
            multiply_heads, (-(-tokens // block), -(-rows // BLOCK_ROWS), heads), Compiled(4, 3),
            x=x, matrices=matrices, out=out, tokens=tokens, x_stride=x.stride(0), x_head=x.stride(1),
            matrix_stride=matrices.stride(0), row_stride=matrices.stride(1), column_stride=matrices.stride(2),
            SHAPE=(heads, rows, columns, copied, power_above(max(1, copied))), SLICES=SLICES, BLOCK_T=block,
            BLOCK_R=BLOCK_ROWS, BLOCK_C=BLOCK_COLUMNS,
        )  # fmt: skip
        return out


class Absorbed(NamedTuple):
    """Queries [T, H, rank + rope] in the space of latents, which LATENT_INPUT computed."""

    queries: Tensor


def paged_latent_attention(
    case: LatentAttention, launch: Launch
) -> Callable[[Tensor | Absorbed, PagedRows, Tensor], Tensor]:
    """Return PAGED_LATENT_ATTENTION."""
    heads, rank, nope = case.num_heads, case.kv_lora_rank, case.qk_nope_head_dim
    attend = Attend(Heads(heads, 1, rank, case.row, case.scale), launch)
    multiply = HeadProduct(launch)

    def run(q: Tensor | Absorbed, kv: PagedRows, kv_b: Tensor) -> Tensor:
        pages: Any = kv.parts[0]
        scale = kv.scales[0]  # keys and values are one
        is_ready = isinstance(q, Absorbed)
        queries = q.queries if is_ready else multiply(q, kv_b[:, :nope].mT, case.qk_rope_head_dim)
        sums = attend(queries, pages, pages, kv.layout, (scale, scale))
        return multiply(sums.view(-1, heads, rank), kv_b[:, nope:]).flatten(1)

    return run


def refuses_input(case: LatentInput) -> str | None:
    """Return why no kernel serves the input of attention over latents; None if one does."""
    if not isinstance(case.mixer.latent_norm, RMSNorm):
        return "latents are normalized by RMSNorm alone"
    if case.mixer.latent_scale != 1.0:
        return "no kernel multiplies latents after their norm"
    return refuses_begin(case)


class LatentStage:
    """The stage LATENT_INPUT: one product of all matrices of the input, then q_b, and rotation beside the norm.

    Where our kernel reads the pages, the last launch also maps queries into the space of latents, and writes these.
    """

    def __init__(self, case: LatentInput, weights: Weights, launch: Launch) -> None:
        m, linears, arrays = case.mixer, weights.linears, weights.arrays
        self._mixer, self._launch = m, launch
        names = "q" if m.q_lora_rank is None else "q_a", "kv_a"
        self._product = StoredProduct([linears[name] for name in names], launch)
        self._begin = Begin(case, weights, launch, self._product)
        self._norm: Any = m.latent_norm
        self._weight: Any = arrays["kv_a_norm.weight"]
        self._kv_b: Any = arrays.get("kv_b.weight")
        self._absorbs = case.reader == GPU_BACKEND and self._kv_b is not None and m.qk_rope_head_dim > 0
        self._second: tuple[Normalizer, StoredProduct] | None = None
        if m.q_lora_rank is not None:
            given: Any = arrays["q_a_norm.weight"]
            second = StoredProduct([linears["q_b"]], launch)
            self._second = Normalizer(self._norm, given, None, self._launch, second.rounds), second

    def __call__(
        self, residual: Tensor, delta: Tensor | None, rotary: Rotary | None, target: PageTarget | None = None
    ) -> tuple[Tensor, Tensor | Absorbed, Tensor | None]:
        m = self._mixer
        total, x = self._begin(residual, delta)
        both = self._product(x)
        x, kept = both[:, : -m.row], both[:, -m.row :]
        if self._second is not None:
            normalize, multiply = self._second
            begun = normalize.before(multiply, x)[1]
            if target is not None and self._absorbs and multiply.dense and 0 < len(x) <= FEW_TOKENS:
                return total, self._absorbed(multiply, begun, kept, rotary if m.rope else None, target), None
            x = multiply(begun)
        turn = rotary if m.rope else None
        given = {
            "x": x, "kept": kept, "cos": turn and turn.cos, "sin": turn and turn.sin, "weight": self._weight,
            "x_stride": x.stride(0), "kept_stride": kept.stride(0), "offset": self._norm.offset,
            "eps": self._norm.eps, "ROTATES": turn is not None, "INTERLEAVED": bool(m.rope and m.rope.interleaved),
        }  # fmt: skip
        if target is not None and self._absorbs:
            return total, self._absorb(given, target), None
        tokens, row = both.shape[0], power_above(m.row)
        q, latents = both.new_empty((tokens, m.num_heads, m.qk_head_dim)), both.new_empty((tokens, 1, m.row))
        if tokens:
            self._launch(
                rotate_latents, (tokens, m.num_heads + 1), Compiled(1), **given, q=q, latents=latents,
                SHAPE=(m.num_heads, m.qk_nope_head_dim, m.qk_rope_head_dim, m.kv_lora_rank),
                BLOCKS=(power_above(m.qk_head_dim), row),
            )  # fmt: skip
        return total, q, latents

    def _absorbed(
        self, multiply: StoredProduct, x: Any, kept: Tensor, turn: Rotary | None, target: PageTarget
    ) -> Absorbed:
        """Do the same at the end of the product of few queries, which starts as many threads as `absorb` has."""
        m, kv_b, pages = self._mixer, self._kv_b[:, : self._mixer.qk_nope_head_dim].mT, in_pages(target)
        kind, whole = pages.pop("KIND"), multiply.room(x, multiply.rows)
        how = (
            "absorbed", m.num_heads, m.kv_lora_rank, m.qk_nope_head_dim, m.qk_rope_head_dim, turn is not None,
            bool(m.rope and m.rope.interleaved), kind, SLICES, power_above(m.qk_rope_head_dim), power_above(m.row),
            BLOCK_ROWS, BLOCK_COLUMNS,
        )  # fmt: skip
        finish = Finish(
            how, turn and turn.cos, turn and turn.sin, **pages, q_weight=self._weight, offset=self._norm.offset,
            eps=self._norm.eps, whole=whole, matrices=kv_b, matrix_stride=kv_b.stride(0), row_stride=kv_b.stride(1),
            column_stride=kv_b.stride(2), latents=kept, latents_stride=kept.stride(0),
        )  # fmt: skip
        return Absorbed(multiply.into(x, m.num_heads, m.row, finish=finish))

    def _absorb(self, given: dict[str, Any], target: PageTarget) -> Absorbed:
        """Write latents into pages, and return queries in their space: one launch."""
        m, tokens, kv_b = self._mixer, given["x"].shape[0], self._kv_b[:, : self._mixer.qk_nope_head_dim].mT
        block = FEW_TOKENS if tokens <= FEW_TOKENS else BLOCK_TOKENS
        queries = given["x"].new_empty((tokens, m.num_heads, m.row))
        pages = in_pages(target)
        names = "keys", "key_scales", "pages", "slots", "page_stride", "slot_stride", "scale_stride", "k_scale", "KIND"
        if tokens:
            self._launch(
                absorb, (-(-tokens // block), -(-m.kv_lora_rank // BLOCK_ROWS), m.num_heads + 1), Compiled(4, 3),
                **given, **{name: pages[name] for name in names}, matrices=kv_b, out=queries, tokens=tokens,
                matrix_stride=kv_b.stride(0), row_stride=kv_b.stride(1), column_stride=kv_b.stride(2),
                SHAPE=(
                    m.num_heads, m.kv_lora_rank, m.qk_nope_head_dim, m.qk_rope_head_dim,
                    power_above(m.qk_rope_head_dim), power_above(m.row),
                ), SLICES=SLICES, BLOCK_T=block, BLOCK_R=BLOCK_ROWS, BLOCK_C=BLOCK_COLUMNS,
            )  # fmt: skip
        return Absorbed(queries)


STAGES: Mapping[Op[Any], Stage] = {api.LATENT_INPUT: Stage(refuses_input, LatentStage)}
