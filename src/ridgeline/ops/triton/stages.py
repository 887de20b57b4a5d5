"""Stages as few launches: the sum and the norm, one product of all matrices of the input, and what follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ridgeline.ops import api
from ridgeline.ops.api import Op, PageTarget, Rotary, Weights
from ridgeline.ops.stages import AttentionInput, Head, LatentInput, MLPBlock, RecurrentBlock
from ridgeline.ops.triton.launch import Launch
from ridgeline.ops.triton.packing import refuses_format
from ridgeline.ops.triton.paged import power_above
from ridgeline.ops.triton.products import STORED, Finish, Rounded, StoredProduct
from ridgeline.ops.triton.tokens import Normalizer, in_pages
from ridgeline.spec import Attention, GatedMLP, RMSNorm


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
        self._before, self._scale = before, case.residual_scale
        self._norm = Normalizer(
            case.norm, arrays["norm.weight"], arrays.get("norm.bias"), launch, before and before.rounds
        )

    def __call__(
        self, residual: Tensor, delta: Tensor | None, rows: Tensor | None = None, *, is_apart: bool = False
    ) -> tuple[Tensor, Any]:
        """Return the sum, and its norm: a Tensor, or tokens that are rounded or normalized by the product after it.

        is_apart: the norm has a kernel of its own in every case.
        """
        if self._before is None or rows is not None or is_apart:
            return self._norm(residual, delta, self._scale, rows)
        return self._norm.before(self._before, residual, delta, self._scale)

    @property
    def fits_in(self) -> bool:
        """Return whether another kernel can begin the stage: a row fits into its registers."""
        return self._norm.fits_in

    def inside(self, residual: Tensor, delta: Tensor | None) -> tuple[dict[str, Any], Tensor, Tensor]:
        """Return the arguments of a kernel that begins the stage itself, and room for the sum and its norm."""
        return self._norm.inside(residual, delta, self._scale)


def refuses_begin(case: Case) -> str | None:
    """Return why no kernel begins a stage as its case says; None if one does."""
    return None if case.norm is not None else "the input has no norm"


def refuses_heads(case: AttentionInput) -> str | None:
    """Return why no kernel serves the input of attention; None if one does."""
    if case.mixer.values_are_keys or case.mixer.value_eps is not None:
        return "no kernel takes values from keys or normalizes them"
    if case.mixer.gate_over == "head":
        return "no kernel has a gate of each head"
    if case.mixer.clip is not None:
        return "no kernel limits queries, keys and values"
    if case.mixer.norms_rotated:
        return "no kernel rotates heads before their norm"
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
    scales, need all numbers of a head at once: there, the program that ends last of those of a head does it.
    """

    def __init__(self, case: AttentionInput, weights: Weights, launch: Launch, names: str) -> None:
        self._mixer = case.mixer
        gate = [weights.linears["out_gate"]] if case.mixer.out_gate else []
        matrices = [*(weights.linears[name] for name in names), *gate]
        self._product = StoredProduct(matrices, launch, rows_of_heads(case.mixer, names))
        self._begin = Begin(case, weights, launch, self._product)
        self._num_keys = case.mixer.num_kv_heads if "k" in names else 0
        self._norms: dict[str, Any] = {}
        if isinstance(case.mixer.qk_norm, RMSNorm):
            q, k = (weights.arrays.get(f"{name}_norm.weight") for name in "qk")
            self._norms = {
                "q_weight": q, "k_weight": k if self._num_keys else q, "offset": case.mixer.qk_norm.offset,
                "eps": case.mixer.qk_norm.eps,
            }  # fmt: skip

    def run(
        self, residual: Tensor, delta: Tensor | None, rotary: Rotary | None, target: PageTarget | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return the residual, q [T, H, D], the gate [T, H D] or None, k and v [T, K, D].

        k and v are None in pages, and without keys.
        """
        m, keys, product = self._mixer, self._num_keys, self._product
        turn, kept = rotary if m.rope else None, dict(in_pages(target)) if target else {}
        kind = kept.pop("KIND", "plain")
        is_whole = bool(self._norms) or kind == "int8" or m.head_dim % 2 == 1
        total, x = self._begin(residual, delta, is_apart=is_whole)  # with both, some numbers spill on sm_80
        if keys and not target:
            k, v = (product.room(x, keys, m.head_dim) for _ in range(2))
            kept = {"keys": k, "values": v, "head_stride": m.head_dim}
        dim, is_interleaved = (m.rope.dim, m.rope.interleaved) if m.rope and turn else (0, False)
        how: tuple[Any, ...] = ("heads", m.num_heads, keys, m.head_dim, dim, is_interleaved, kind)
        whole = None
        if is_whole:
            how = "whole heads", *how[1:], bool(self._norms), power_above(m.head_dim)
            whole = product.room(x, product.rows)
        gate = product.room(x, m.num_heads * m.head_dim) if m.out_gate else None
        finish = Finish(how, turn and turn.cos, turn and turn.sin, gates=gate, whole=whole, **kept, **self._norms)
        q = product.into(x, m.num_heads, m.head_dim, finish=finish)
        return total, q, gate, *((None, None) if target else (kept.get("keys"), kept.get("values")))


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
        self.down = StoredProduct([weights.linears["down"]], launch)
        self.width, self.finish = width, Finish(("activated", mlp.activation, is_gated))

    def __call__(self, x: Tensor | Rounded) -> Tensor:
        return self.down(self.up.into(x, self.width, finish=self.finish))


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
        self._product = StoredProduct([weights.linears["head"]], launch)
        self._begin = Begin(case, weights, launch, self._product)
        is_plain = case.logit_scale == 1.0 and not case.logit_softcap
        self._finish = STORED if is_plain else Finish(("logits", case.logit_scale, case.logit_softcap or 0.0))

    def __call__(self, residual: Tensor, delta: Tensor | None, rows: Tensor | None) -> Tensor:
        return self._product.into(self._begin(residual, delta, rows)[1], self._product.rows, finish=self._finish)

    def project(self, x: Tensor) -> Tensor:
        return self._product.into(x, self._product.rows, finish=self._finish)

    @property
    def rows(self) -> None:
        """Return None: the kernels do not look up rows of a packed matrix."""


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
