"""Predict the resident memory of a process of device cpu while a model runs, besides the program: its imports and the
tokenizer.

This is a prediction, while memory.py computes a bound. It follows how kernels and engine allocate memory:

    weights   packed matrices
    ends      unused ends of the mappings that hold them: 32 MiB each, filled by matrices in their order. A matrix
              larger than 8 MiB has its own mapping. Huge pages are touched as a whole.
    pages     pages that were written, the null page, recurrent states at the ends of chunks of prompts, and pages that
              are touched ahead (runtime/ahead.py)
    scratch   buffers of the kernels: packed activations, arrays between the matrices of an MLP, sums of tiles
    step      the residual stream, the arrays of the largest layer, logits
    code      libraries and modules that are loaded with the model
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
from ridgeline.spec.quant import PANEL, Format, FormatTable, coded_bytes, has_layout, packed_bytes

FLOAT = 4
HUGE, MAPPING, MAPPED_ALONE = 2 << 20, 32 << 20, 8 << 20  # csrc/threads.cpp
# csrc/packing.h, csrc/kernels: tokens computed at once, tokens packed together, and bytes of weights of a block.
BLOCK, UNIT, L2_BYTES = 516, 12, 256 << 10
CODE_BYTES = 15 << 19  # measured: 7 to 8 MB
PROGRAM_BYTES, TOKEN_BYTES = 57 << 20, 320  # measured: Python with all imports, and a tokenizer's entry


class ProcessMemory(NamedTuple):
    """Resident bytes by kind; the module's docstring explains the kinds."""

    weights: float
    ends: float
    pages: float
    scratch: float
    step: float
    code: float = CODE_BYTES

    @property
    def total(self) -> float:
        return sum(self)

    def by_use(self, vocab_size: int) -> dict[str, int]:
        """Return the resident bytes of the whole process by the uses of `EngineConfig.memory`."""
        uses = {
            "program": program_bytes(vocab_size) + self.ends + self.code, "weights": self.weights,
            "state pages": self.pages, "workspace": self.scratch + self.step,
        }  # fmt: skip
        return {use: int(size) for use, size in {**uses, "process": sum(uses.values())}.items()}


class Run(NamedTuple):
    """Requests that run at once.

    sequences: number of sequences. prompt, new: tokens of the prompt and of the answer of each. chunk: most tokens of a
    step. threads: threads of the kernels. earlier: requests of this size that were answered before.
    """

    sequences: int
    prompt: int
    new: int
    chunk: int
    threads: int
    earlier: int = 0

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the largest step."""
        return min(self.chunk, self.sequences * self.prompt)

    @property
    def length(self) -> int:
        """Return how many tokens' state is kept for a sequence: the last token of the answer is never computed."""
        return self.prompt + self.new - 1

    def alive(self, grid: int) -> int:
        """Return how many sequences hold their last page at the same time.

        A sequence with an answer of one token ends in the step that samples it. Then only those sequences count that
        have started when the first ones end. Chunks of prompts end on multiples of `grid` tokens.
        """
        first = min(self.prompt // grid * grid or self.prompt, self.chunk)
        rest, begun = self.prompt - first, self.chunk // first
        more = max(0, (self.chunk - begun * rest) // first) if rest else 1
        return self.sequences if self.new > 1 else min(self.sequences, begun + more)


def program_bytes(vocab_size: int) -> int:
    """Predict the resident memory of the program before it loads a model: its imports, and the tokenizer."""
    return PROGRAM_BYTES + TOKEN_BYTES * vocab_size


def process_memory(
    spec: ModelSpec, weight_bytes: int, formats: FormatTable, dtype: DType, groups: Sequence[StateGroup],
    num_pages: Sequence[int], run: Run, kept: Sequence[int] = (),
) -> ProcessMemory:  # fmt: skip
    """Predict the resident memory of a run.

    num_pages: number of pages of each group. kept: free pages of each group that stay in the prefix cache; (): as many
    as at first. Prompts that look for old pages raise it.
    """
    alive = run.alive(max((g.page_tokens for g in groups if g.snapshot), default=1))
    stay = kept or [g.kept_pages for g in groups]
    pages = sum(
        touched_pages(g, written_pages(g, most, run, alive, own), most, run) * g.page_bytes
        for g, most, own in zip(groups, num_pages, stay, strict=True)
    )
    return ProcessMemory(
        weight_bytes, unfilled(matrix_sizes(spec, formats, dtype)), pages,
        scratch_bytes(spec, formats.main, run), step_bytes(spec, run, alive),
    )  # fmt: skip


def idle_memory(
    spec: ModelSpec, weight_bytes: int, formats: FormatTable, dtype: DType, groups: Sequence[StateGroup],
    num_pages: Sequence[int],
) -> ProcessMemory:  # fmt: skip
    """Predict the resident memory before the first request. weight_bytes: without views of files, which are not read
    yet.
    """
    pages = sum(touched_pages(g, 1, most) * g.page_bytes for g, most in zip(groups, num_pages, strict=True))
    return ProcessMemory(weight_bytes, unfilled(matrix_sizes(spec, formats, dtype)), pages, 0.0, 0.0)


def whole(size: float, unit: int = HUGE) -> int:
    """Round up to whole units."""
    return -(-int(size) // unit) * unit


def matrix_sizes(spec: ModelSpec, formats: FormatTable, dtype: DType) -> Iterator[int]:
    """Yield the bytes of each packed matrix in the order in which they are packed.

    Matrices that read the same activations are one.
    """
    head = Weight("head.weight", (spec.vocab_size, spec.hidden_size))
    yield _packed(head, formats, dtype)
    products = [w for w in spec.weights() if w.name.startswith("layers.") and _is_product(w)]
    for _, together in groupby(products, lambda w: _shared_input(w.name.removesuffix(".weight"))):
        some = list(together)
        yield from [sum(_packed(w, formats, dtype) for w in some)] * (
            some[0].shape[0] if len(some[0].shape) == 3 else 1
        )


def _is_product(weight: Weight) -> bool:
    return weight.is_matrix and (len(weight.shape) == 2 or ".experts." in weight.name)


def _packed(weight: Weight, formats: FormatTable, dtype: DType) -> int:
    own = formats.of(weight)
    return packed_bytes(own, dtype, *weight.shape[-2:]) if has_layout(own) else coded_bytes(own, *weight.shape[-2:])


def _shared_input(name: str) -> str:
    """Return a name that is equal for all matrices of a layer that read the same activations."""
    _, layer, part, own = name.split(".", 3)
    return f"{layer} {part} {next((t for t in TOGETHER if own in t), own)}"


def unfilled(sizes: Iterable[int]) -> int:
    """Return the bytes of mappings that are touched but hold no matrix."""
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


def written_pages(group: StateGroup, most: int, run: Run, alive: int, kept: int) -> int:
    """Return how many pages of a group a run writes, the null page included.

    Full pages of sequences that are over stay in the prefix cache, as far as the pool keeps them (sched/pages.py).
    most: number of the group's pages. kept: free pages that stay.
    """
    each = group.most_pages(run.length)
    if group.snapshot:
        whole_ones = -(-run.length // run.chunk)  # states at the ends of chunks
        each += whole_ones - 1
    else:
        whole_ones = min(run.length // group.page_tokens, each)
    over = run.earlier + run.sequences - alive
    count = alive * each + min(over * min(whole_ones, each), kept)
    return min(count + 1, most)


def touched_pages(group: StateGroup, written: int, most: int, run: Run | None = None) -> int:
    """Return how many of a group's `most` pages have memory if `written` are written; more are touched ahead."""
    chunk = 1 if run is None or group.snapshot else group.num_pages(min(run.chunk, run.prompt))
    return min(whole(written + max(group.ahead_pages, chunk), group.touch_pages), most)


def scratch_bytes(spec: ModelSpec, format: Format, run: Run) -> int:
    """Return the bytes of the kernels' buffers, which are allocated a quarter larger than requested."""
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
        tokens * columns * number,  # packed activations
        run.threads * columns * UNIT * FLOAT,  # rows before they are packed
        run.threads * tokens * PANEL * FLOAT * panels,  # sums of tiles
        (choices * run.tokens or tokens) * inner * FLOAT,  # arrays between the matrices of an MLP
        choices * run.tokens * spec.hidden_size * FLOAT,  # results of experts
    )
    return sum(whole(1.25 * size) for size in slots if size)


def _columns(mixer: TokenMixer) -> int:
    """Return the columns of the mixer's widest matrix."""
    return max((w.shape[-1] for w in mixer.weights(1) if len(w.shape) == 2), default=0)


def step_bytes(spec: ModelSpec, run: Run, alive: int) -> int:
    """Return the bytes of a step: old and new stream with what is added to it, the largest layer's arrays, logits."""
    mixers = {layer.mixer for layer in spec.layers if layer.mixer}
    several = run.sequences > 1
    embedded = 3 * spec.layer_embeddings.size * len(spec.layers) if spec.layer_embeddings else 0
    numbers = (
        embedded
        + 4 * spec.hidden_size
        + max((m.resident_numbers(spec.hidden_size, several=several) for m in mixers), default=0)
    )
    return FLOAT * (run.tokens * numbers + 2 * alive * spec.vocab_size)
