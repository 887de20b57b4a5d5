"""What a step holds besides weights and pages, counted as the reference ops allocate it: an upper bound, in bytes.

A step is a row of phases, and what one phase takes the next one gets back, so the count is what lives through the
whole step plus the largest phase. `tests/cpu/test_memory.py` holds it against the measured peak of a process.

Not counted: what a request itself holds, its prompt and its answer, which grows with the caller's queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.spec import ChannelMixer, ModelSpec, TokenMixer
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.workspace import FLOAT, INT, KeysRead, Phases, StepSize

# Bounds that other files keep to, and that a test compares with theirs.
# ops/reference/paged.py: scores, and numbers of keys and of values, at once, unless one query or sequence has more.
CPU_BLOCK, GPU_BLOCK = 2**20, 2**25
WIDEN_BLOCK = 2**18  # ops/reference/primitives.py: elements of a narrow matrix that are widened at once
SAMPLE_BLOCK = 2**18  # sample/sampler.py: scores that are sampled at once
MOVE_BYTES = 2**24  # runtime/arena.py: bytes of pages that are moved at once, unless one page has more
PROMPT_CHUNK = 256  # runtime/generator.py: rows of logits that are held at once for prompt_logprobs
RECORDED_SEQS = 32  # runtime/graphs.py: sequences of a decode step that is recorded, at most
PROBE_TOKENS = 32  # runtime/runner.py: of a prompt that is timed at the start, where there is swap space
# Measured: reference counts, free list and index of a page, with room to check them (sched/pages.py); what matrix
# products and the allocator keep for themselves.
PAGE_BOOK_BYTES = 512
LIBRARY_BYTES = 2**23


class Workspace:
    """Counts what the steps of one model hold at their peak. groups: its state groups, with pages of the size to be.

    on_cpu: the blocks of attention are those of a CPU. drafts: of a sequence in a step. float_bytes: of a number in the
    type in which the device computes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        groups: Sequence[StateGroup],
        *,
        on_cpu: bool,
        drafts: int = 0,
        float_bytes: int = FLOAT,
    ) -> None:
        self._wider = float_bytes // FLOAT  # all is counted in float32
        self._spec, self._groups, self._block = spec, groups, CPU_BLOCK if on_cpu else GPU_BLOCK
        self._drafts, self._on_cpu = drafts, on_cpu
        mixers = [layer.mixer for layer in spec.layers if layer.mixer]
        self._kept = FLOAT * drafts * sum(mixer.draft_numbers(spec.hidden_size) for mixer in mixers)
        of_layer = {slot.layer: group for group in groups for slot in group.slots}
        self._layers = {
            (layer.mixer, layer.mlp, of_layer.get(spec.state_layer(i))): None for i, layer in enumerate(spec.layers)
        }
        self._rotary_dims = _rotary_dims(spec)

    def bytes(self, max_tokens: int, max_seqs: int, length: int, swap_bytes: int = 0) -> int:
        """Bytes of a step of up to `max_tokens` tokens of `max_seqs` sequences of `length` tokens.

        swap_bytes: of all host pages. The books of the pages are not in it: PAGE_BOOK_BYTES for each page. With each
        of the four it grows or stays.
        """
        size = StepSize(max(max_tokens, PROBE_TOKENS if swap_bytes else 1), max_seqs, length, self._block, self._drafts)
        stream = 2 * FLOAT * size.tokens * self._spec.hidden_size  # the residual and what is to be added to it
        layers = max(_layer(size, self._spec.hidden_size, *case) for case in self._layers)
        rotaries = FLOAT * size.tokens * self._rotary_dims
        floats = stream + rotaries + max(layers, _head(size, self._spec))
        forward = self._wider * floats + _layouts(size, self._groups)
        held = LIBRARY_BYTES + _tables(size, self._groups) + self._wider * self._kept * size.rows
        held += _late_logits(size, self._spec)
        if self._on_cpu and not any(group.snapshot for group in self._groups):
            held += _recorded(size, self._spec, self._groups)
        return held + max(forward, _moves(size, self._groups, swap_bytes))

    def logits(self, max_tokens: int, max_seqs: int) -> int:
        """Of these bytes, at most, what logits take, and what sampling and log probabilities make of them."""
        size = StepSize(max_tokens, max_seqs, 1, self._block, self._drafts)
        return self._wider * _head(size, self._spec) + _late_logits(size, self._spec)


def _rotary_dims(spec: ModelSpec) -> int:
    """Numbers of all rotations of a token: cosines and sines, and the frequencies that are looked up for it."""
    return sum(rope.dim + (rope.dim // 2 if rope.follows_length else 0) for rope in spec.ropes())


def _recorded(size: StepSize, spec: ModelSpec, groups: Sequence[StateGroup]) -> int:
    """What recorded decode steps keep for their results: that of the largest, and half of it, and half of that, ..."""
    heads = max((own.num_heads * own.head_dim for own in spec.attentions(shared=True)), default=0)
    places = sum(group.num_pages(size.length) + 2 for group in groups)
    row = FLOAT * (spec.vocab_size + 6 * spec.hidden_size + 5 * heads + _rotary_dims(spec)) + INT * places
    return 2 * min(size.seqs, RECORDED_SEQS) * row


def _layer(
    size: StepSize, hidden_size: int, mixer: TokenMixer | None, mlp: ChannelMixer | None, group: StateGroup | None
) -> int:
    """The largest phase of a layer, beside the stream that it was given. group: of its state; None without a mixer."""
    width = FLOAT * size.tokens * hidden_size
    before, during, held = Phases(0)
    if mixer and group:
        before, during, held = mixer.workspace(size, hidden_size, _keys_read(size, group))
    # Two residuals, the branch of attention, the norm; what attention was given and its result, until the end.
    after = 4 * width + held + (mlp.workspace(size.tokens, hidden_size) if mlp else 0)
    return max(2 * width + max(width, before), width + during, after) + FLOAT * max(WIDEN_BLOCK, hidden_size)


def _keys_read(size: StepSize, group: StateGroup) -> KeysRead:
    """Return the keys that attention gathers from the pages of one group."""
    page, lookback = group.page_tokens, min(group.lookback, size.length)
    longest, first = group.num_pages(size.length), group.first_pages
    one = min(longest, first + (lookback + size.tokens + page - 2) // page + 1)
    least = min(longest, first + (lookback + page - 1) // page + 1)  # of a sequence with one token
    every = min(size.seqs * one, 2 * (size.seqs * (least + 1) + size.tokens // page))
    is_narrow = any(part.dtype != "float32" for slot in group.slots for part in slot.parts)
    return KeysRead(one * page, max(one, every) * page, is_narrow)


def _head(size: StepSize, spec: ModelSpec) -> int:
    """Logits of the sampled rows, or of a chunk of a prompt, and what sampling makes of them."""
    rows = min(size.tokens, max(size.seqs + size.replays, PROMPT_CHUNK))
    logits = FLOAT * rows * spec.vocab_size
    making = (3 if spec.logit_softcap else 2) * logits + 6 * FLOAT * rows * spec.hidden_size
    # A copy of the rows, where beams are among them. In float64: scores, their exponentials, the log probabilities and
    # theirs, a copy of the rows that ask for them; then a dozen arrays of one row, for its filters.
    block = min(rows * spec.vocab_size, max(SAMPLE_BLOCK, spec.vocab_size))
    return max(making, 2 * logits + 5 * INT * block + 12 * INT * spec.vocab_size)


def _late_logits(size: StepSize, spec: ModelSpec) -> int:
    """What answers keep whose masks are late (engine/late.py): a row of logits each, in float32 on the host."""
    return FLOAT * size.rows * spec.vocab_size


def _tables(size: StepSize, groups: Sequence[StateGroup]) -> int:
    """Page tables: the runner's arrays, and the scheduler's lists."""
    return sum(size.rows * group.num_pages(size.length) * 3 * INT for group in groups)


def _layouts(size: StepSize, groups: Sequence[StateGroup]) -> int:
    """Where tokens read and write: a few numbers per token, and the pages that each sequence reads with their places,
    while they are looked up."""
    pages = sum(_keys_read(size, group).every // group.page_tokens for group in groups)
    most = max(_keys_read(size, group).every // group.page_tokens for group in groups)
    return INT * (2 * pages + 6 * most + size.tokens * (16 + 12 * len(groups)))


def _moves(size: StepSize, groups: Sequence[StateGroup], swap_bytes: int) -> int:
    """Whole pages on their way: copies for sequences that part, and swaps."""
    return max(max(g.page_bytes, min(MOVE_BYTES, max(size.rows * g.page_bytes, swap_bytes))) for g in groups)
