"""Recurrent blocks as compositions: the three parts of a mixer, and how they run over the sequences of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from ridgeline.ops import api
from ridgeline.ops.api import Array, Kept, Segments, SequenceBucket, States, Weights

F = TypeVar("F", bound=Callable[..., Any])
Arrays = Sequence[Array]
Before = Callable[[Any], tuple[Arrays, Array]]
Along = Callable[[Arrays, Arrays, Array], tuple[Array, Arrays]]
After = Callable[[Array, Array], Array]
Take = Callable[[Array, Array], Array]  # api.TAKE
Gather = Callable[[Sequence[Array], int, Array], Array]  # api.GATHER
# (inputs of the step's T tokens, states, kept inputs of R tokens, segments) -> y [T, inner], states
Follow = Callable[[Arrays, States, Kept, Segments], tuple[Array, States]]


class Primitives(Protocol):
    """The part of an ops table that the composition of a mixer uses."""

    @property
    def memory(self) -> api.Memory: ...

    def primitive(self, op: api.Op[F], case: object = None) -> F: ...


class Ops(Primitives, Protocol):
    """The part of an ops table that the composition of a stage uses."""

    def stage(self, op: api.Op[F], case: object, weights: Weights) -> F: ...


class Parts(NamedTuple):
    """A recurrent mixer.

    before: x [T, width] -> the inputs of `along`, each [T, ...], and the gate; every token alone.
    along: inputs, each [n, m, ...]; states, each [n, ...]; lengths [n] -> y [n, m, inner], states; along each sequence.
    after: y [T, inner], the gate -> [T, width]; every token alone.
    """

    before: Before
    along: Along
    after: After


def follow_segments(along: Along, take: Take, gather: Gather) -> Follow:
    """Return a function that runs a mixer along all sequences of a step: bucket after bucket, drafts last."""

    def follow(own: Arrays, states: States, kept: Kept, segments: Segments) -> tuple[Array, States]:
        both = [*zip(kept, own, strict=True)] if kept else None

        def run(bucket: SequenceBucket, given: States) -> tuple[Array, States]:
            rows, begin = bucket.rows, [take(state, bucket.members) for state in given]
            inputs = [gather(x, 1, rows) for x in both] if both else [take(x, rows) for x in own]
            return along(inputs, begin, bucket.lengths)

        outputs, left = zip(*(run(bucket, states) for bucket in segments.buckets), strict=True)
        after = tuple(gather(s, 1, segments.sequence_order) for s in zip(*left, strict=True))
        drafted = [run(bucket, after)[0] for bucket in segments.drafts]
        return gather([*outputs, *drafted], 2, segments.order), after

    return follow


def recurrent_body(
    first: Callable[[Array, Array | None], tuple[Array, Any]], parts: Parts, follow: Follow, take: Take
) -> Callable[..., tuple[Array, Array, States, Kept]]:
    """Return RECURRENT_BLOCK out of its parts.

    first: residual, delta -> the residual sum, and the input of `parts.before`.
    """

    def run(
        residual: Array, delta: Array | None, states: States, kept: Kept, segments: Segments
    ) -> tuple[Array, Array, States, Kept]:
        total, x = first(residual, delta)
        own, gate = parts.before(x)
        y, left = follow(own, states, kept, segments)
        keep = segments.keep
        return total, parts.after(y, gate), left, () if keep is None else [take(x, keep) for x in own]

    return run
