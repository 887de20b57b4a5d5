"""Stages as few launches: the sum and the norm, one product of all matrices of the input, and what follows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ridgeline.ops import api
from ridgeline.ops.api import Op, Rotary, Weights
from ridgeline.ops.stages import AttentionInput, Head, LatentInput, MLPBlock, RecurrentBlock
from ridgeline.ops.triton.launch import Compiled, Launch
from ridgeline.ops.triton.packing import refuses_format
from ridgeline.ops.triton.paged import power_above
from ridgeline.ops.triton.products import StoredProduct
from ridgeline.ops.triton.rows import activate, rotate
from ridgeline.ops.triton.tokens import Normalizer
from ridgeline.spec import GatedMLP, RMSNorm

ACTIVATE_BLOCK = 1024  # numbers that one program activates


class Kernels(NamedTuple):
    """All kernels of a backend share these: how they are started, and the slices of `products.Dense`."""

    launch: Launch
    slices: int


class Stage(NamedTuple):
    """A stage: why a case has no kernel, or None; and a function that makes the kernel of a case with its weights."""

    refuses: Callable[[Any], str | None]
    make: Callable[[Any, Weights, Kernels], Callable[..., Any]]


def product(case: Any, weights: Weights, kernels: Kernels) -> StoredProduct:
    return StoredProduct([weights.linears["matrix"]], kernels.slices, kernels.launch)


Case = AttentionInput | LatentInput | MLPBlock | RecurrentBlock | Head


class Begin:
    """The residual sum and the norm, which begin a stage."""

    def __init__(self, case: Case, weights: Weights, kernels: Kernels) -> None:
        arrays: Any = weights.arrays
        assert case.norm is not None  # refused otherwise
        self._scale = case.residual_scale
        self._norm = Normalizer(case.norm, arrays["norm.weight"], arrays.get("norm.bias"), kernels.launch)

    def __call__(self, residual: Tensor, delta: Tensor | None, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._norm(residual, delta, self._scale, rows)


def refuses_begin(case: Case) -> str | None:
    """Return why no kernel begins a stage as its case says; None if one does."""
    return None if case.norm is not None else "the input has no norm"


def refuses_heads(case: AttentionInput) -> str | None:
    """Return why no kernel serves the input of attention; None if one does."""
    if case.mixer.out_gate:
        return "no kernel computes the gate of attention's results"
    if case.mixer.qk_norm is not None and case.mixer.qk_norm_over == "all_heads":
        return "no kernel normalizes all heads at once"
    if not isinstance(case.mixer.qk_norm, RMSNorm | None):
        return "heads are normalized by RMSNorm alone"
    return refuses_begin(case)


class Heads:
    """The projections of attention's input, normalized and rotated: ATTENTION_INPUT and, without keys, QUERY_INPUT."""

    def __init__(self, case: AttentionInput, weights: Weights, kernels: Kernels, names: str) -> None:
        self._mixer, self._launch = case.mixer, kernels.launch
        self._begin = Begin(case, weights, kernels)
        self._product = StoredProduct([weights.linears[name] for name in names], kernels.slices, kernels.launch)
        self._num_keys = case.mixer.num_kv_heads if "k" in names else 0
        self._norms: list[Any] = [weights.arrays.get(f"{name}_norm.weight") for name in "qk"]

    def run(
        self, residual: Tensor, delta: Tensor | None, rotary: Rotary | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Return the residual, q [T, H, D], k [T, K, D] or None, and all projections [T, ...]."""
        m = self._mixer
        total, x = self._begin(residual, delta)
        both = self._product(x)
        tokens, keys, norm, rope = both.shape[0], self._num_keys, m.qk_norm, m.rope if rotary else None
        if norm is None and rope is None:
            q, k = both[:, : m.num_heads * m.head_dim], both[:, m.num_heads * m.head_dim :][:, : keys * m.head_dim]
            return total, q.unflatten(1, (-1, m.head_dim)), k.unflatten(1, (-1, m.head_dim)) if keys else None, both
        q, k = both.new_empty((tokens, m.num_heads, m.head_dim)), both.new_empty((tokens, keys, m.head_dim))
        if tokens:
            self._launch(
                rotate, (tokens, m.num_heads + keys), Compiled(1),
                x=both, cos=rotary.cos if rotary and rope else None, sin=rotary.sin if rotary and rope else None,
                q_weight=self._norms[0], k_weight=self._norms[1] if keys else self._norms[0], q=q, k=k,
                stride=both.stride(0), offset=norm.offset if isinstance(norm, RMSNorm) else 0.0,
                eps=norm.eps if norm else 0.0, H=m.num_heads, K=keys, D=m.head_dim, DIM=rope.dim if rope else 0,
                INTERLEAVED=bool(rope and rope.interleaved), HAS_NORM=norm is not None, BLOCK=power_above(m.head_dim),
            )  # fmt: skip
        return total, q, k, both


def attention_input(case: AttentionInput, weights: Weights, kernels: Kernels) -> Callable[..., Any]:
    heads, m = Heads(case, weights, kernels, "qkv"), case.mixer

    def stage(residual: Tensor, delta: Tensor | None, rotary: Rotary | None) -> tuple[Any, ...]:
        total, q, k, both = heads.run(residual, delta, rotary)
        v = both[:, -m.num_kv_heads * m.head_dim :].unflatten(1, (-1, m.head_dim))
        return total, q, None, k, v

    return stage


def query_input(case: AttentionInput, weights: Weights, kernels: Kernels) -> Callable[..., Any]:
    heads = Heads(case, weights, kernels, "q")

    def stage(residual: Tensor, delta: Tensor | None, rotary: Rotary | None) -> tuple[Any, ...]:
        total, q, _, _ = heads.run(residual, delta, rotary)
        return total, q, None

    return stage


class Mlp:
    """An MLP: one product of gate and up, the activation, and the product with down."""

    def __init__(self, mlp: Any, weights: Weights, kernels: Kernels) -> None:
        self._mlp, self._gated, self._launch = mlp, isinstance(mlp, GatedMLP), kernels.launch
        names = ("gate", "up") if self._gated else ("up",)
        self._up = StoredProduct([weights.linears[name] for name in names], kernels.slices, kernels.launch)
        self._down = StoredProduct([weights.linears["down"]], kernels.slices, kernels.launch)

    def __call__(self, x: Tensor) -> Tensor:
        raised, width = self._up(x), self._mlp.intermediate_size
        inner = raised.new_empty((raised.shape[0], width))
        if raised.shape[0]:
            self._launch(
                activate, (raised.shape[0], -(-width // ACTIVATE_BLOCK)), Compiled(4),
                x=raised, out=inner, width=width, stride=raised.stride(0), NAME=self._mlp.activation,
                GATED=self._gated, BLOCK=ACTIVATE_BLOCK,
            )  # fmt: skip
        return self._down(inner)


def mlp_block(case: MLPBlock, weights: Weights, kernels: Kernels) -> Callable[..., Any]:
    begin, mlp = Begin(case, weights, kernels), Mlp(case.mlp, weights, kernels)

    def stage(residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        total, x = begin(residual, delta)
        return total, mlp(x)

    return stage


def refuses_head(case: Head) -> str | None:
    """Return why no kernel serves a head; None if one does."""
    if case.logit_scale != 1.0 or case.logit_softcap:
        return "no kernel scales or caps logits"
    return refuses_begin(case)


class HeadStage:
    """The last norm and the output head; an `ops.api.HeadStage`."""

    def __init__(self, case: Head, weights: Weights, kernels: Kernels) -> None:
        self._begin = Begin(case, weights, kernels)
        self.project = StoredProduct([weights.linears["head"]], kernels.slices, kernels.launch)

    def __call__(self, residual: Tensor, delta: Tensor | None, rows: Tensor | None) -> Tensor:
        return self.project(self._begin(residual, delta, rows)[1])


STAGES: Mapping[Op[Any], Stage] = {
    api.PRODUCT: Stage(refuses_format, product),
    api.ATTENTION_INPUT: Stage(refuses_heads, attention_input),
    api.QUERY_INPUT: Stage(refuses_heads, query_input),
    api.HEAD: Stage(refuses_head, HeadStage),
}
# Matrices that one kernel multiplies with at once, by their names in a stage.
TOGETHER = (
    ("q", "k", "v"), ("q", "q_a", "kv_a"), ("gate", "up"), ("shared.gate", "shared.up"), ("router", "shared_gate"),
)  # fmt: skip
