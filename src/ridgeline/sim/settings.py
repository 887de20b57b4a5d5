"""With what an engine would run a model on a machine: pages, sequences, tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ridgeline.errors import RequestError
from ridgeline.plan.precision import FLOAT_BYTES, Precision
from ridgeline.spec import ModelSpec
from ridgeline.spec.groups import StateGroup, state_groups
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.text import num_bytes

MEMORY_SHARE = 0.9  # of the machine's, for weights and pages; the rest is for what a step holds
MAX_SEQS, MAX_BATCH_TOKENS, PAGE_TOKENS = 256, 2048, 16
ROW_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1})


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one replica. num_pages: per group, the null page included. max_model_len: of a sequence, in tokens."""

    groups: tuple[StateGroup, ...]
    num_pages: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int

    @property
    def state_bytes(self) -> int:
        """Bytes of all pages."""
        return sum((n - 1) * g.page_bytes for n, g in zip(self.num_pages, self.groups, strict=True))


def settings(
    spec: ModelSpec,
    hardware: HardwareSpec,
    precision: Precision,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = MAX_SEQS,
    max_num_batched_tokens: int = MAX_BATCH_TOKENS,
    block_size: int = PAGE_TOKENS,
) -> Settings:
    """Pages fill what the weights leave, at most for `max_num_seqs` sequences of full length.

    Raises RequestError where weights and one sequence of full length do not fit, with the numbers and what would.
    """
    for name, value in (
        ("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens), ("block_size", block_size),
    ):  # fmt: skip
        if value < 1:
            raise RequestError(f"{name} is {value}; it must be a whole number of at least 1")
    if precision.state not in ROW_BYTES:
        raise RequestError(f"state in {precision.state} cannot be simulated; known are {', '.join(ROW_BYTES)}")
    length = spec.resolve_max_model_len(max_model_len)
    row = ROW_BYTES[precision.state]
    groups = tuple(
        replace(g, page_bytes=g.page_bytes * FLOAT_BYTES // row) if g.snapshot else g
        for g in state_groups(spec, page_tokens=block_size, element_bytes=row)
    )
    weights = sum(precision.weight_bytes(w) for w in spec.weights())
    room = int(hardware.memory_bytes * MEMORY_SHARE) - weights

    def sequence(tokens: int) -> int:
        return sum(g.page_bytes * (g.most_pages(tokens) + 1) for g in groups)

    if sequence(length) > room:
        raise RequestError(_too_small(hardware, weights, room, sequence(length), length, _longest(sequence, room)))
    most = [g.most_pages(length) for g in groups]
    each = sum(n * g.page_bytes for n, g in zip(most, groups, strict=True))
    share = min(max_num_seqs, (room - sum(g.page_bytes for g in groups)) / each)
    pages = tuple(int(n * share) + 1 for n in most)
    return Settings(groups, pages, max_num_seqs, max_num_batched_tokens, length)


def _longest(sequence: Callable[[int], int], room: int) -> int:
    """The longest sequence that fits, 0 for none; by bisection."""
    low, high = 0, 1 << 24
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sequence(middle) <= room else (low, middle - 1)
    return low


def _too_small(hardware: HardwareSpec, weights: int, room: int, need: int, length: int, longest: int) -> str:
    where = f"{hardware.name} has {num_bytes(hardware.memory_bytes)}, of which {MEMORY_SHARE:.0%} are used"
    if room <= 0 or not longest:
        return f"{where}: {num_bytes(weights)} of weights do not fit; take narrower weights or a larger machine"
    return (
        f"{where}: beside {num_bytes(weights)} of weights, one sequence of {length} tokens needs {num_bytes(need)} of "
        f"{num_bytes(room)}; lower --max-model-len to {longest}"
    )
