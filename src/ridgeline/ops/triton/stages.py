"""Stages as few launches: the sum and the norm, one product of all matrices of the input, and what follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ridgeline.ops import api
from ridgeline.ops.api import Op, PageTarget, Rotary, Weights
from ridgeline.ops.stages import AttentionInput, Head, LatentInput, MLPBlock, RecurrentBlock
from ridgeline.ops.triton.launch import Compiled, Launch
from ridgeline.ops.triton.packing import refuses_format
from ridgeline.ops.triton.paged import power_above
from ridgeline.ops.triton.products import STORED, Finish, Rounded, StoredProduct
from ridgeline.ops.triton.rows import rotate
from ridgeline.ops.triton.tokens import Normalizer, in_pages
from ridgeline.spec import Attention, GatedMLP, RMSNorm

NO_PAGES: Mapping[str, Any] = {  # of `rotate`, for keys and values that do not go to pages
    "values": None, "key_scales": None, "value_scales": None, "pages": None, "slots": None, "page_stride": 0,
    "slot_stride": 0, "head_stride": 0, "scale_stride": 0, "k_scale": 1.0, "v_scale": 1.0, "KIND": None,
}  # fmt: skip


class Stage(NamedTuple):
    """A stage: why a case has no kernel, or None; and a function that makes the kernel of a case with its weights."""

    refuses: Callable[[Any], str | None]
    make: Callable[[Any, Weights, Launch], Callable[..., Any]]


def product(case: Any, weights: Weights, launch: Launch) -> StoredProduct:
    return StoredProduct([weights.linears["matrix"]], launch)


Case = AttentionInput | LatentInput | MLPBlock | RecurrentBlock | Head


class Begin:
    """The residual sum and the norm, which begin a stage. before: the product of a stage that has one alone."""

    def __init__(self, case: Case, weights: Weights, launch: Launch, before: StoredProduct | None = None) -> None:
        arrays: Any = weights.arrays
        assert case.norm is not None  # refused otherwise
        self._scale = case.residual_scale
        self._norm = Normalizer(
            case.norm, arrays["norm.weight"], arrays.get("norm.bias"), launch, before and before.rounds
        )

    def __call__(self, residual: Tensor, delta: Tensor | None, rows: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the sum, and its norm: a Tensor, or tokens that are rounded for the product."""
        return self._norm(residual, delta, self._scale, rows)


def refuses_begin(case: Case) -> str | None:
    """Return why no kernel begins a stage as its case says; None if one does."""
    return None if case.norm is not None else "the input has no norm"


def refuses_heads(case: AttentionInput) -> str | None:
    """Return why no kernel serves the input of attention; None if one does."""
    if case.mixer.qk_norm is not None and case.mixer.qk_norm_over == "all_heads":
        return "no kernel normalizes all heads at once"
    if not isinstance(case.mixer.qk_norm, RMSNorm | None):
        return "heads are normalized by RMSNorm alone"
    return refuses_begin(case)


def rows_of_heads(mixer: Attention, names: str) -> list[int]:
    """Return the rows of the matrices q, k and v, or of q alone, and of gates, in the order in which numbers that
    rotate together are neighbors: those of each head of keys and queries, and in the same way those of others.
    """
    size, dim = mixer.head_dim, mixer.rope.dim if mixer.rope else 0
    own = list(range(size))
    if mixer.rope and not mixer.rope.interleaved:
        own[:dim] = [i + half for i in range(dim // 2) for half in (0, dim // 2)]
    heads = mixer.num_heads * (1 + mixer.out_gate) + (2 * mixer.num_kv_heads if "k" in names else 0)
    return [head * size + number for head in range(heads) for number in own]


class Heads:
    """The projections of attention's input, normalized and rotated: ATTENTION_INPUT and, without keys, QUERY_INPUT.

    The product rotates what it computes, and writes keys and values into pages. Norms of heads, and rows of pages with
    scales, need all numbers of a head at once: there, rotation is a launch of its own.
    """

    def __init__(self, case: AttentionInput, weights: Weights, launch: Launch, names: str) -> None:
        self._mixer, self._launch = case.mixer, launch
        self._is_fused = case.mixer.qk_norm is None and case.mixer.head_dim % 2 == 0
        order = rows_of_heads(case.mixer, names) if self._is_fused else None
        gate = [weights.linears["out_gate"]] if case.mixer.out_gate else []
        self._product = StoredProduct([*(weights.linears[name] for name in names), *gate], launch, order)
        self._begin = Begin(case, weights, launch, self._product)
        self._num_keys = case.mixer.num_kv_heads if "k" in names else 0
        self._norms: list[Any] = [weights.arrays.get(f"{name}_norm.weight") for name in "qk"]

    def run(
        self, residual: Tensor, delta: Tensor | None, rotary: Rotary | None, target: PageTarget | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the residual, q [T, H, D], the gate [T, H D] or None, k and v [T, K, D].

        k and v are None in pages, and undefined without keys.
        """
        m, keys = self._mixer, self._num_keys
        total, x = self._begin(residual, delta)
        turn = rotary if m.rope else None
        if self._is_fused:
            return total, *self._rotated(x, turn, target)
        both = self._product(x)
        q, k = (both.new_empty((both.shape[0], heads, m.head_dim)) for heads in (m.num_heads, keys))
        if both.shape[0]:
            self._rotate(both, q, k, turn, target)
        ends = (m.num_heads + 2 * keys) * m.head_dim
        gate = both[:, ends:] if m.out_gate else None
        if target:
            return total, q, gate, None, None
        return total, q, gate, k, both[:, ends - keys * m.head_dim : ends].unflatten(1, (-1, m.head_dim))

    def _rotated(
        self, x: Tensor | Rounded, turn: Rotary | None, target: PageTarget | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return q, the gate, k and v. The last two are None where they are in pages."""
        m, keys, rope = self._mixer, self._num_keys, self._mixer.rope if turn else None
        parts: Sequence[Any] = target.parts if target else ()
        in_pages = bool(parts) and parts[0].is_floating_point()
        if keys and not in_pages:
            parts = [self._product.room(x, keys, m.head_dim) for _ in range(2)]
        k, v = parts if keys else (None, None)
        gate = self._product.room(x, m.num_heads * m.head_dim) if m.out_gate else None
        heads = m.num_heads, keys, m.head_dim, rope.dim if rope else 0, bool(rope and rope.interleaved), in_pages
        finish = Finish(
            ("heads", *heads), turn and turn.cos, turn and turn.sin, k, v, gate,
            *((target.pages, target.slots, *k.stride()[:3]) if target and in_pages else (None, None, 0, 0, m.head_dim)),
        )  # fmt: skip
        q = self._product.into(x, m.num_heads, m.head_dim, finish=finish)
        return (q, gate, None, None) if in_pages else (q, gate, k, v)

    def _rotate(self, both: Tensor, q: Tensor, k: Tensor, turn: Rotary | None, target: PageTarget | None) -> None:
        """Normalize and rotate all heads in a launch of its own. k: where keys go that do not go to pages."""
        m, keys, norm, rope = self._mixer, self._num_keys, self._mixer.qk_norm, self._mixer.rope if turn else None
        self._launch(
            rotate, (both.shape[0], m.num_heads + (2 * keys if target else keys)), Compiled(1),
            **(in_pages(target) if target else {**NO_PAGES, "keys": k}),
            x=both, cos=turn and turn.cos, sin=turn and turn.sin, q_weight=self._norms[0],
            k_weight=self._norms[1] if keys else self._norms[0], q=q, stride=both.stride(0),
            offset=norm.offset if isinstance(norm, RMSNorm) else 0.0, eps=norm.eps if norm else 0.0, H=m.num_heads,
            K=keys, D=m.head_dim, DIM=rope.dim if rope else 0, INTERLEAVED=bool(rope and rope.interleaved),
            HAS_NORM=norm is not None, BLOCK=power_above(m.head_dim),
        )  # fmt: skip


def attention_input(case: AttentionInput, weights: Weights, launch: Launch) -> Callable[..., Any]:
    heads = Heads(case, weights, launch, "qkv")

    def stage(
        residual: Tensor, delta: Tensor | None, rotary: Rotary | None, target: PageTarget | None = None
    ) -> tuple[Any, ...]:
        return heads.run(residual, delta, rotary, target)

    return stage


def query_input(case: AttentionInput, weights: Weights, launch: Launch) -> Callable[..., Any]:
    heads = Heads(case, weights, launch, "q")

    def stage(residual: Tensor, delta: Tensor | None, rotary: Rotary | None) -> tuple[Any, ...]:
        return heads.run(residual, delta, rotary)[:3]

    return stage


class Mlp:
    """An MLP: one product of gate and up with the activation, and the product with down."""

    def __init__(self, mlp: Any, weights: Weights, launch: Launch) -> None:
        is_gated, width = isinstance(mlp, GatedMLP), mlp.intermediate_size
        names = ("gate", "up") if is_gated else ("up",)
        pairs = [row for i in range(width) for row in (i, width + i)] if is_gated else None
        self.up = StoredProduct([weights.linears[name] for name in names], launch, pairs)
        self._down = StoredProduct([weights.linears["down"]], launch)
        self._width, self._finish = width, Finish(("activated", mlp.activation, is_gated))

    def __call__(self, x: Tensor | Rounded) -> Tensor:
        return self._down(self.up.into(x, self._width, finish=self._finish))


def mlp_block(case: MLPBlock, weights: Weights, launch: Launch) -> Callable[..., Any]:
    mlp = Mlp(case.mlp, weights, launch)
    begin = Begin(case, weights, launch, mlp.up)

    def stage(residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        total, x = begin(residual, delta)
        return total, mlp(x)

    return stage


class HeadStage:
    """The last norm and the output head; an `ops.api.HeadStage`."""

    def __init__(self, case: Head, weights: Weights, launch: Launch) -> None:
        self.project = StoredProduct([weights.linears["head"]], launch)
        self._begin = Begin(case, weights, launch, self.project)
        is_plain = case.logit_scale == 1.0 and not case.logit_softcap
        self._finish = STORED if is_plain else Finish(("logits", case.logit_scale, case.logit_softcap or 0.0))

    def __call__(self, residual: Tensor, delta: Tensor | None, rows: Tensor | None) -> Tensor:
        return self.project.into(self._begin(residual, delta, rows)[1], self.project.rows, finish=self._finish)


STAGES: Mapping[Op[Any], Stage] = {
    api.PRODUCT: Stage(refuses_format, product),
    api.ATTENTION_INPUT: Stage(refuses_heads, attention_input),
    api.QUERY_INPUT: Stage(refuses_heads, query_input),
    api.HEAD: Stage(refuses_begin, HeadStage),
}
# Matrices that one kernel multiplies with at once, by their names in a stage.
TOGETHER = (
    ("q", "k", "v", "out_gate"), ("q", "q_a", "kv_a"), ("gate", "up"), ("shared.gate", "shared.up"),
    ("router", "shared_gate"),
)  # fmt: skip
