"""What a process of device cpu is expected to have resident of a model that runs, beside what its imports take.

Not a bound, as what a step may take is (memory.py), but the figure itself, as kernels and engine lay things out:

    weights   packed, and the ends of the mappings in which they lie: 32 MiB each, filled by matrices in their order,
              one larger than 8 MiB in its own; huge pages are touched whole
    pages     that were written, the null page, the states that recurrent layers leave where chunks of prompts end, and
              what is touched ahead
    scratch   of the kernels: activations packed, what an MLP holds between its matrices, sums of tiles of each thread
    step      the residual stream and the largest layer's arrays, logits
    code      of libraries and modules that come in when they are first used
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from ridgeline.cost.operations import TOGETHER
from ridgeline.spec import ModelSpec, Weight
from ridgeline.spec.dtype import DType
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.mixers import TokenMixer
from ridgeline.spec.quant import PANEL, PLAIN, Format, packed_bytes

FLOAT = 4
HUGE, MAPPING, MAPPED_ALONE = 2 << 20, 32 << 20, 8 << 20  # csrc/threads.cpp
# csrc/packing.h, csrc/kernels: tokens at once, of which so many are packed together; weights of a block.
BLOCK, UNIT, L2_BYTES = 516, 12, 256 << 10
AHEAD_TOKENS, STEP_TOKENS = 512, 128  # runtime/ahead.py
CODE_BYTES = 15 << 19  # measured: 7 to 8 MB


class ProcessMemory(NamedTuple):
    """Bytes, by what they are: see the top of the file."""

    weights: float
    ends: float
    pages: float
    scratch: float
    step: float
    code: float = CODE_BYTES

    @property
    def total(self) -> float:
        return sum(self)


class Run(NamedTuple):
    """What runs: sequences at once, each of a prompt and `new` tokens of an answer. chunk: tokens of a step, at most.
    threads: of the kernels.
    """

    sequences: int
    prompt: int
    new: int
    chunk: int
    threads: int

    @property
    def tokens(self) -> int:
        """Of the largest step."""
        return min(self.chunk, self.sequences * self.prompt)

    @property
    def length(self) -> int:
        """Tokens that are kept of a sequence: the last one is given, and not read."""
        return self.prompt + self.new - 1

    def alive(self, grid: int) -> int:
        """Sequences that hold their last page at once. One that is given a single token ends in the step that gives it:
        then as many as are begun when the first ones end, where parts of prompts end on multiples of `grid`.
        """
        first = min(self.prompt // grid * grid or self.prompt, self.chunk)
        rest, begun = self.prompt - first, self.chunk // first
        more = max(0, (self.chunk - begun * rest) // first) if rest else 1
        return self.sequences if self.new > 1 else min(self.sequences, begun + more)


def process_memory(
    spec: ModelSpec, weight_bytes: int, format: Format, dtype: DType, groups: Sequence[StateGroup],
    num_pages: Sequence[int], run: Run,
) -> ProcessMemory:  # fmt: skip
    """num_pages: of each group, at most."""
    alive = run.alive(max((g.page_tokens for g in groups if g.snapshot), default=1))
    pages = sum(
        min(touched_pages(g, written_pages(g, most, run, alive)), most) * g.page_bytes
        for g, most in zip(groups, num_pages, strict=True)
    )
    return ProcessMemory(
        weight_bytes, unfilled(matrix_sizes(spec, format, dtype)), pages,
        scratch_bytes(spec, format, run), step_bytes(spec, run, alive),
    )  # fmt: skip


def whole(size: float, unit: int = HUGE) -> int:
    """In whole units."""
    return -(-int(size) // unit) * unit


def matrix_sizes(spec: ModelSpec, format: Format, dtype: DType) -> Iterator[int]:
    """Bytes of each matrix as kernels pack them, in the order in which they are made; what reads the same is one."""
    head = Weight("head.weight", (spec.vocab_size, spec.hidden_size))
    yield _packed(head, format, dtype)
    products = [w for w in spec.weights() if w.name.startswith("layers.") and _is_product(w)]
    for _, together in groupby(products, lambda w: _company(w.name.removesuffix(".weight"))):
        some = list(together)
        yield from [sum(_packed(w, format, dtype) for w in some)] * (some[0].shape[0] if len(some[0].shape) == 3 else 1)


def _is_product(weight: Weight) -> bool:
    return weight.is_matrix and (len(weight.shape) == 2 or ".experts." in weight.name)


def _packed(weight: Weight, format: Format, dtype: DType) -> int:
    return packed_bytes(format if weight.may_be_rounded else PLAIN, dtype, *weight.shape[-2:])


def _company(name: str) -> str:
    """Of a layer's matrix: the same for all that read what it reads."""
    _, layer, part, own = name.split(".", 3)
    return f"{layer} {part} {next((t for t in TOGETHER if own in t), own)}"


def unfilled(sizes: Iterable[int]) -> int:
    """Bytes of mappings that are touched, but hold no matrix."""
    touched = asked = used = 0
    for size in sizes:
        asked += size
        if size > MAPPED_ALONE:
            touched += whole(size)
            continue
        size = whole(size, 4096)
        if used + size > MAPPING:
            touched, used = touched + whole(used), 0
        used += size
    return touched + whole(used) - asked


def written_pages(group: StateGroup, most: int, run: Run, alive: int) -> int:
    """Of a group, by a run, and the null page. Whole ones are kept for others that begin alike."""
    each = group.most_pages(run.length)
    if group.snapshot:
        whole_ones = -(-run.length // run.chunk)  # at the ends of chunks
        each += whole_ones - 1
    else:
        whole_ones = min(run.length // group.page_tokens, each)
    count = alive * each + (run.sequences - alive) * min(whole_ones, each)
    return min(count + 1, most)


def touched_pages(group: StateGroup, written: int) -> int:
    """Of a group of which so many pages are written, if there are as many."""
    return whole(written + -(-AHEAD_TOKENS // group.page_tokens), -(-STEP_TOKENS // group.page_tokens))


def scratch_bytes(spec: ModelSpec, format: Format, run: Run) -> int:
    """What the kernels of a pool keep for themselves: it grows with a quarter more than was asked for."""
    number = 1 if format.is_lossy else FLOAT
    mlps = [layer.mlp for layer in spec.layers if layer.mlp]
    inner = max((m.intermediate_size for m in mlps), default=0)
    columns = max([spec.hidden_size, inner, *(_columns(layer.mixer) for layer in spec.layers if layer.mixer)])
    tokens, choices = (
        min(run.tokens, BLOCK),
        max((m.num_experts_per_tok for m in mlps), default=0),
    )
    panels = 1 if format.bits == 4 else max(1, L2_BYTES // (spec.hidden_size * PANEL * number))
    slots = (
        tokens * columns * number,  # activations, packed
        run.threads * columns * UNIT * FLOAT,  # rows before that
        run.threads * tokens * PANEL * FLOAT * panels,  # sums of tiles
        (choices * run.tokens or tokens) * inner * FLOAT,  # between the matrices of an MLP
        choices * run.tokens * spec.hidden_size * FLOAT,  # results of experts
    )
    return sum(whole(1.25 * size) for size in slots if size)


def _columns(mixer: TokenMixer) -> int:
    """Of the widest matrix."""
    return max((w.shape[-1] for w in mixer.weights(1) if len(w.shape) == 2), default=0)


def step_bytes(spec: ModelSpec, run: Run, alive: int) -> int:
    """The stream, what is added to it and both anew; the arrays of the layer with most; logits."""
    mixers = {layer.mixer for layer in spec.layers if layer.mixer}
    several = run.sequences > 1
    numbers = 4 * spec.hidden_size + max(
        (m.resident_numbers(spec.hidden_size, several=several) for m in mixers), default=0
    )
    return FLOAT * (run.tokens * numbers + 2 * alive * spec.vocab_size)
