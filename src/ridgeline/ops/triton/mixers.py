"""The stage RECURRENT_BLOCK as few launches.

Where a step only decodes, or has one prompt, states are read and written in their pages. Other steps, and steps with
drafts, copy the states of each bucket, as the definition does. Both give the same bits. Some mixers have a kernel for
steps that only decode, which computes all between the products.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.ops import api
from ridgeline.ops.api import Op, Segments, Weights
from ridgeline.ops.parts import Along, Follow, follow_segments, recurrent_body
from ridgeline.ops.recurrent import bind_mixer, input_matrices
from ridgeline.ops.reference.backend import ReferenceBackend, TorchMemory
from ridgeline.ops.reference.primitives import take
from ridgeline.ops.reference.recurrent import gather
from ridgeline.ops.stages import RecurrentBlock
from ridgeline.ops.triton.decode import ENDING, ONE_TOKEN, Bound
from ridgeline.ops.triton.launch import Launch
from ridgeline.ops.triton.products import STORED, Finish, StoredProduct, TwoProducts, refuses_together
from ridgeline.ops.triton.recurrent import (
    RECURRENCES,
    ROWS,
    Makers,
    Scan,
    activation,
    refuses_states,
    short_conv,
    state_space,
)
from ridgeline.ops.triton.stages import Begin, Stage, refuses_begin
from ridgeline.ops.triton.state import StatesInPages
from ridgeline.ops.triton.tokens import norm
from ridgeline.spec import (
    S4,
    S4D,
    GatedConvolution,
    GatedDelta,
    GatedLRU,
    KimiDelta,
    Mamba,
    Mamba2,
    ShortConvolution,
)

MAKERS: Makers = {**RECURRENCES, **ROWS, api.NORM: norm, api.ACTIVATION: activation}
# Kernels that also compute the activation of their results, by the mixers in which it follows them.
ACTIVATING: Mapping[Op[Any], Callable[[Any, Launch, str], Scan]] = {
    api.SHORT_CONV: short_conv, api.STATE_SPACE: state_space,
}  # fmt: skip
ACTIVATED: Mapping[type[Any], Op[Any]] = {
    Mamba: api.SHORT_CONV, Mamba2: api.SHORT_CONV, GatedDelta: api.SHORT_CONV, KimiDelta: api.SHORT_CONV,
    GatedConvolution: api.SHORT_CONV, S4: api.STATE_SPACE, S4D: api.STATE_SPACE,
}  # fmt: skip


class _Table:
    """The primitives of a mixer's composition. An activation that follows a kernel of ACTIVATING is a part of it."""

    def __init__(self, mixer: Any, launch: Launch, device: torch.device) -> None:
        self._mixer, self._launch, self._definitions = mixer, launch, ReferenceBackend()
        self.memory = TorchMemory(str(device))

    def primitive(self, op: Op[Any], case: object = None) -> Any:
        activating = ACTIVATED.get(type(self._mixer))
        if activating is not None and op is activating:
            return ACTIVATING[op](case, self._launch, self._mixer.activation)
        if activating is not None and op is api.ACTIVATION:
            return lambda x: x
        if op in MAKERS:
            return MAKERS[op](case, self._launch)
        return self._definitions.primitive(op, case)


# Pairs of matrices of a mixer: the first one multiplies the input, and the second one the product.
SECOND: Mapping[type[Any], Sequence[tuple[str, str]]] = {
    KimiDelta: (("decay_a", "decay_b"), ("gate_a", "gate_b")),
}  # fmt: skip


class _Computed:
    """A matrix whose product is one of several that were computed at once; `apply` picks it by its index."""

    def __init__(self, index: int) -> None:
        self._index = index

    def apply(self, x: Sequence[Tensor]) -> Tensor:
        return x[self._index]


class _Given:
    """A matrix whose product `_Computed` returned already."""

    def apply(self, x: Tensor) -> Tensor:
        return x


class Products:
    """Multiplies one input with several matrices; those that can be packed as one take one launch.

    Products of two pairs of matrices, if there are some, are multiplied with the second one of each, in one launch.
    """

    def __init__(
        self, names: Sequence[str], weights: Weights, pairs: Sequence[tuple[str, str]], launch: Launch
    ) -> None:
        linears, self._alike = [weights.linears[name] for name in names], list[list[int]]()
        for index, linear in enumerate(linears):
            for members in self._alike:
                if refuses_together([linears[members[0]], linear]) is None:
                    members.append(index)
                    break
            else:
                self._alike.append([index])
        self._rows = [linear.data.shape[0] for linear in linears]
        self._products = [StoredProduct([linears[i] for i in members], launch) for members in self._alike]
        self._pairs = [names.index(name) for name, _ in pairs]
        self._second = TwoProducts([weights.linears[name] for _, name in pairs], launch) if pairs else None
        self.linears: dict[str, Any] = {name: _Computed(i) for i, name in enumerate(names)}
        self.linears.update({name: _Given() for _, name in pairs})

    @property
    def only(self) -> StoredProduct | None:
        """Return the product of all matrices of the input if there is one, and it takes exact tokens."""
        (first, *others) = (*self._products, None)
        return first if len(others) == 1 and first is not None and first.dense is not None else None

    def __call__(self, x: Any, finish: Finish = STORED) -> list[Tensor]:
        """Return the products of x with all matrices. finish: the end of each."""
        found: dict[int, Tensor] = {}
        for members, product in zip(self._alike, self._products, strict=True):
            results = product(x) if finish is STORED else product.into(x, product.rows, finish=finish)
            parts = results.split([self._rows[i] for i in members], -1)
            found.update(zip(members, parts, strict=True))
        if self._second is not None:
            found.update(zip(self._pairs, self._second(*(found[i] for i in self._pairs)), strict=True))
        return [found[i] for i in range(len(found))]


def recurrent_block(case: RecurrentBlock, weights: Weights, launch: Launch) -> Callable[..., Any]:
    names = input_matrices(case.mixer)
    products = Products(names, weights, SECOND.get(type(case.mixer), ()), launch)
    begin = Begin(case, weights, launch, products.only)
    own = products.linears
    others = {name: linear for name, linear in weights.linears.items() if name not in own}
    for linear in others.values():
        linear.prepare()
    device = weights.arrays["norm.weight"].device
    bound = Weights({**own, **others}, weights.arrays)
    table = _Table(case.mixer, launch, device)
    parts = bind_mixer(case.mixer, bound, table)

    def first(residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | list[Tensor]]:
        total, x = begin(residual, delta)
        return total, products(x) if names else x

    follow = _follow_rectangle(parts.along, follow_segments(parts.along, take, gather))
    body, make = recurrent_body(first, parts, follow, take), ONE_TOKEN.get(type(case.mixer))
    decode = None if make is None else make(case.mixer, Bound(bound, parts.before, table, launch))
    ending = ENDING.get(type(case.mixer))
    finish = None if ending is None else ending(case.mixer, bound)

    def run(residual: Tensor, delta: Tensor | None, states: Any, kept: Any, segments: Segments) -> tuple[Any, ...]:
        is_in_pages = all(isinstance(state, StatesInPages) for state in states)
        if decode is None or kept or not is_in_pages or not _only_decodes(segments, len(residual)):
            return body(residual, delta, states, kept, segments)
        if finish is None:
            total, x = first(residual, delta)
        else:
            total, x = begin(residual, delta)
            x = products(x, finish(states))
        return total, decode(x, states, segments.buckets[0].lengths), states, ()

    return run


def _follow_rectangle(along: Along, otherwise: Follow) -> Follow:
    """Return a function that runs n sequences of m tokens each without copies, and all other steps by `otherwise`."""

    def follow(own: Any, states: Any, kept: Any, segments: Segments) -> tuple[Any, Any]:
        tokens = own[0].shape[0]
        if kept or not _is_rectangle(segments, tokens):
            return otherwise(own, states, kept, segments)
        (bucket,) = segments.buckets
        y, left = along([a.unflatten(0, bucket.rows.shape) for a in own], states, bucket.lengths)
        return y.flatten(0, 1), left

    return follow


def _is_rectangle(segments: Segments, tokens: int) -> bool:
    """Return whether the tokens are n sequences of m each, without drafts: then their rows are in order.

    Steps that only decode, and steps of a single prompt, are of this kind. Nothing is read from the device.
    """
    if len(segments.buckets) != 1 or segments.drafts or segments.keep is not None:
        return False
    return bool(segments.buckets[0].rows.numel() == tokens)


def _only_decodes(segments: Segments, tokens: int) -> bool:
    """Return whether a step has one token of each sequence, without drafts."""
    return _is_rectangle(segments, tokens) and segments.buckets[0].rows.shape[1] == 1


def refuses_block(case: RecurrentBlock) -> str | None:
    """Return why no kernel serves a recurrent block; None if one does."""
    if isinstance(case.mixer, GatedLRU):
        return f"no kernel computes {case.mixer.kind}; torch does"
    if not isinstance(case.mixer, GatedConvolution | ShortConvolution) and (reason := refuses_states(case.mixer)):
        return reason
    return refuses_begin(case)


STAGES: Mapping[Op[Any], Stage] = {api.RECURRENT_BLOCK: Stage(refuses_block, recurrent_block)}
