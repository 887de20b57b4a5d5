"""Plan diffusion language models: the cost of a pass over a whole sequence, and of an answer that takes several passes.

LLaDA (Nie et al., arXiv:2502.09992) is a Llama with bidirectional attention. A pass takes the whole sequence, prompt
and masked answer, and returns logits for the open block, by default the whole answer. Then some masks are filled, and
the next pass begins. All keys change with every pass, so nothing can be cached exactly, and no token is final before
the last pass. With a block cache (Fast-dLLM, arXiv:2505.22618), only the first pass over each block of the answer
computes all positions; later ones compute those of the block (`dual`), or those after it as well (`prefix`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import get_args

from ridgeline.cost.calibrated import calibrated_step, facts_of
from ridgeline.cost.memory import PIECE
from ridgeline.cost.operations import Operation, Slice
from ridgeline.cost.precision import FLOAT_BYTES
from ridgeline.cost.roofline import StepTime, time_step
from ridgeline.cost.shard import device_operations
from ridgeline.errors import RequestError
from ridgeline.plan.blocks import BlockPasses
from ridgeline.plan.planner import Load, Planner
from ridgeline.spec.diffusion import BlockCache
from ridgeline.spec.sight import CAUSAL

UNKNOWN = (
    "not known: how many passes an answer of a given quality needs (the authors of LLaDA found one per token best)"
)


@dataclass(frozen=True, slots=True)
class Denoising:
    """The cost of a load on one device: bytes, and seconds of one pass. An answer takes `passes` passes.

    logits_bytes: float32 logits that are computed at once. wanted: positions of a sequence whose logits a pass
    computes. cached: with a block cache, a pass after the first one over a block, and how many of the passes are such
    ones. state_bytes: the rows that it reads.
    """

    load: Load
    passes: int
    weight_bytes: float
    activation_bytes: float
    logits_bytes: float
    memory_bytes: int
    step: StepTime
    wanted: int
    cached: tuple[StepTime, int] | None = None
    state_bytes: float = 0.0

    @property
    def used_bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes + self.logits_bytes + self.state_bytes

    @property
    def fits(self) -> bool:
        return self.used_bytes <= self.memory_bytes

    @property
    def latency_s(self) -> float:
        if self.cached is None:
            return self.passes * self.step.seconds
        later, count = self.cached
        return (self.passes - count) * self.step.seconds + count * later.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.load.batch * self.load.output / self.latency_s


@dataclass(frozen=True, slots=True)
class CachedBlocks:
    """A block cache: its kind, tokens of a block, and mean tokens that a pass keeps."""

    kind: BlockCache
    block: int
    tokens_per_pass: float = 1.0

    @classmethod
    def parse(cls, text: str) -> CachedBlocks:
        """Return the meaning of KIND:BLOCK[:TOKENS_PER_PASS], as in dual:32:2. Raises RequestError."""
        try:
            kind, block, *tokens = text.split(":")
            found = next(one for one in get_args(BlockCache) if one == kind and one != "none")
            passes = BlockPasses(int(block), *map(float, tokens))
        except (ValueError, TypeError, StopIteration):
            raise RequestError(
                f"block_cache is {text!r}; give prefix or dual, the tokens of a block, and perhaps the tokens that a "
                "pass keeps, as in dual:32:2"
            ) from None
        return cls(found, passes.size, passes.tokens_per_pass)

    def computed(self, output: int) -> int:
        """Return the mean positions that a pass after the first one over a block computes."""
        block = min(self.block, output)
        return block if self.kind == "dual" else -(-(output + block) // 2)


def denoise(planner: Planner, load: Load, passes: int | None = None, cache: CachedBlocks | None = None) -> Denoising:
    """Plan a load. passes: passes per answer; None: one per token, or as `cache` says, which is the block cache.

    Raises RequestError if the context is too long.
    """
    planner.check(load.context)
    d = planner.deployment
    if d.scheme.ep > 1 or d.scheme.pp > 1:
        raise RequestError(
            f"a diffusion model can be planned with tp and replicas only; leave out ep {d.scheme.ep}, pp {d.scheme.pp}"
        )
    wanted = load.output if cache is None else min(cache.block, load.output)
    ops, step = _pass(planner, Slice(load.batch, load.context, load.context, wanted))
    passes, cached, state = passes or load.output, None, 0.0
    if cache is not None:
        passes, tokens = ceil(load.output / cache.tokens_per_pass), cache.computed(load.output)
        later = max(0, passes - ceil(load.output / cache.block))
        cached = _pass(planner, Slice(load.batch, tokens, load.context, wanted))[1], later
        state = planner.footprint(load).pages_bytes
    tokens = load.batch * load.context
    stream = 4 * d.precision.activation_bytes(tokens * d.spec.hidden_size)
    rows = min(load.batch * wanted, max(1, PIECE // d.spec.vocab_size))
    logits = FLOAT_BYTES * rows * d.spec.vocab_size / d.scheme.tp
    most = max(op.activation_bytes for op in ops if op.name != "head")
    return Denoising(
        load,
        passes,
        planner.memory.weight_bytes,
        stream + most,
        logits,
        d.hardware.memory_bytes,
        step,
        wanted,
        cached,
        state,
    )


def _pass(planner: Planner, part: Slice) -> tuple[tuple[Operation, ...], StepTime]:
    """Return the operations of a pass over some positions of each sequence, and their time."""
    d, batch = planner.deployment, [part]
    ops = tuple(_both_ways(device_operations(planner.forward, batch, d.scheme), part))
    rates = d.hardware.rates
    return ops, (
        time_step(ops, d.hardware) if rates is None else calibrated_step(ops, facts_of(d.spec), batch, d.hardware)
    )


def _both_ways(operations: tuple[Operation, ...], part: Slice) -> Iterator[Operation]:
    """Yield the operations with attention that is not causal: every query attends to all keys."""
    more = part.tokens * part.context / CAUSAL.attended(part.tokens, part.context)
    for op in operations:
        if op.kind == "state":
            passes = tuple((numbers * more, rows) for numbers, rows in op.passes)
            yield replace(op, flops=op.flops * more, passes=passes)
        else:
            yield op
