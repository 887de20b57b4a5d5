"""Bound the memory of a step besides weights and pages, in bytes, as the reference ops allocate it.

A step is a sequence of phases, and each phase reuses the memory of the one before it. So the bound is the memory that
lives through the whole step plus the largest phase. `tests/cpu/test_memory.py` compares it with the measured peak of a
process.

Not counted: the prompt and the answer of each request, which grow with the caller's queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ridgeline.spec import ChannelMixer, MaskedDiffusion, ModelSpec, TokenMixer
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.sight import BEYOND
from ridgeline.spec.workspace import FLOAT, INT, KeysRead, Phases, StepSize

# Limits of other files; tests compare them with the originals.
# ops/reference/paged.py: scores, and numbers of keys or values, at once, unless one query or sequence has more.
CPU_BLOCK, GPU_BLOCK = 2**20, 2**25
WIDEN_BLOCK = 2**18  # ops/reference/primitives.py: elements of a matrix that are converted to float32 at once
PIECE = 2**24  # sample/logit_rows.py: logits of a diffusion model that are computed at once
LAW_BLOCK = 2**22  # diffusion/denoiser.py: logits of which probabilities are computed at once
SAMPLE_BLOCK = 2**18  # sample/sampler.py: scores that are sampled at once
MOVE_BYTES = 2**24  # runtime/arena.py: bytes of pages that are moved at once, unless one page has more
PROMPT_CHUNK = 256  # runtime/generator.py: rows of logits that are held at once for prompt_logprobs
RECORDED_SEQS, RECORDED_TOKENS = 32, 72  # ops/driver.py: most sequences and tokens of a recorded step on a CPU
# ops/driver.py: on a GPU, numbers of sequences of recorded steps; most tokens of a step, recordings, tokens of all.
GPU_SEQS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
GPU_TOKENS, GPU_GRAPHS, GPU_ROWS = 256, 64, 2048
# ops/triton/paged.py: keys of a split; programs from which on splits are not divided, and the numbers of a value that
# have so many; columns of a program.
SPLIT, PROGRAMS, LARGEST_KEPT, COLUMNS = 512, 512, 128, 32
# ops/triton/tokens.py: logits of a part of a row, and likely tokens of a row for which there is room.
BEST_BLOCK, MOST_LIKELY = 4096, 4096
PROBE_TOKENS = 32  # runtime/runner.py: tokens of the prompt that is timed at the start, if there is swap space
# Measured. Bookkeeping of a page: reference counts, free list and index, and what checks of them need
# (sched/pages.py). LIBRARY_BYTES: memory that matrix products and the allocator keep.
BOOKKEEPING_BYTES = 512
LIBRARY_BYTES = 2**23


class Workspace:
    """Counts the memory that the steps of one model hold at their peak.

    Args:
        groups: State groups of the model, with pages of the final size.
        on_cpu: Whether attention uses the block size of a CPU.
        drafts: Draft tokens of a sequence in one step.
        float_bytes: Bytes of a number in the type in which the device computes, 4 or 8.
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
        self._wider = float_bytes // FLOAT  # everything is counted in float32
        self._spec, self._groups, self._block = spec, groups, CPU_BLOCK if on_cpu else GPU_BLOCK
        self._drafts, self._on_cpu = drafts, on_cpu
        mixers = [layer.mixer for layer in spec.layers if layer.mixer]
        self._kept = FLOAT * drafts * sum(mixer.draft_numbers(spec.hidden_size) for mixer in mixers)
        self._derived = FLOAT * sum(mixer.derived_numbers() for mixer in mixers)
        of_layer = {slot.layer: group for group in groups for slot in group.slots}
        self._layers = {
            (layer.mixer, layer.mlp, of_layer.get(spec.state_layer(i))): None for i, layer in enumerate(spec.layers)
        }
        self._rotary_dims = _rotary_dims(spec)

    def bytes(self, max_tokens: int, max_seqs: int, length: int, swap_bytes: int = 0) -> int:
        """Return the bytes of a step of up to `max_tokens` tokens of `max_seqs` sequences of `length` tokens.

        swap_bytes: bytes of all host pages. The bookkeeping of pages is not included: BOOKKEEPING_BYTES for each
        page. The result never shrinks when one of the four arguments grows.
        """
        size = StepSize(max(max_tokens, PROBE_TOKENS if swap_bytes else 1), max_seqs, length, self._block, self._drafts)
        stream = 2 * FLOAT * size.tokens * self._spec.hidden_size  # the residual and what is to be added to it
        if own := self._spec.layer_embeddings:
            stream += own.workspace(size.tokens, len(self._spec.layers))
        layers = max(
            _layer(size, self._spec.hidden_size, mixer, mlp, _keys_read(size, group) if group else None)
            for mixer, mlp, group in self._layers
        )
        rotaries = FLOAT * size.tokens * self._rotary_dims
        floats = stream + rotaries + max(layers, _head(size, self._spec))
        forward = self._wider * floats + _layouts(size, self._groups)
        held = LIBRARY_BYTES + self._derived + _tables(size, self._groups) + self._wider * self._kept * size.rows
        held += _late_logits(size, self._spec) + _unguided(size, self._spec)
        if self._on_cpu:
            held += _recorded(size, self._spec, self._groups)
        if not self._on_cpu:
            held += sum(self.on_gpu(size.tokens, max_seqs, length).values())
        return held + max(forward, _moves(size, self._groups, swap_bytes))

    def on_gpu(self, max_tokens: int, max_seqs: int, length: int) -> Mapping[str, int]:
        """Return the bytes that only a GPU needs, by use; the arguments are those of `bytes`."""
        size = StepSize(max_tokens, max_seqs, length, self._block, self._drafts)
        return {
            "recorded steps": _recorded_on_gpu(size, self._spec, self._groups),
            "partial sums of attention": 2 * _partials(size, self._spec),
            "queries and results as long as latents": FLOAT * size.tokens * _absorbed(self._spec),
        }

    def logits(self, max_tokens: int, max_seqs: int) -> int:
        """Return how many of these bytes, at most, are for logits, sampling and log probabilities."""
        return self._wider * _head(StepSize(max_tokens, max_seqs, 1, self._block, self._drafts), self._spec)


def pass_bytes(spec: ModelSpec, tokens: int, length: int, *, on_cpu: bool, float_bytes: int = FLOAT) -> int:
    """Return the bytes of a pass of an encoder over `tokens` tokens, in texts of up to `length` tokens."""
    size, keys = (
        StepSize(tokens, tokens, length, CPU_BLOCK if on_cpu else GPU_BLOCK, 0),
        KeysRead(length, tokens, False),
    )
    layers = max(_layer(size, spec.hidden_size, layer.mixer, layer.mlp, keys) for layer in spec.layers)
    # The stream, what is to be added to it, and a copy of the last hidden states from which vectors are read.
    stream = FLOAT * tokens * (4 * spec.hidden_size + _rotary_dims(spec))
    return LIBRARY_BYTES + float_bytes // FLOAT * (stream + layers) + 16 * INT * tokens


def _unguided(size: StepSize, spec: ModelSpec) -> int:
    """Return the bytes that guidance (`cfg_scale`) keeps of a pass without the prompt: the inputs of the head."""
    guides = isinstance(spec.diffusion, MaskedDiffusion) and spec.diffusion.block_cache == "none"
    return FLOAT * size.seqs * size.length * spec.hidden_size if guides and spec.block >= BEYOND else 0


def _rotary_dims(spec: ModelSpec) -> int:
    """Return the numbers of all rotations of a token: cosines and sines, and the frequencies looked up for it."""
    return sum(rope.dim + (rope.dim // 2 if rope.follows_length else 0) for rope in spec.ropes())


def _recorded(size: StepSize, spec: ModelSpec, groups: Sequence[StateGroup]) -> int:
    """Return the bytes of the results of recorded decode steps: those of the largest, half of them, and so on."""
    tokens = min(min(size.seqs, RECORDED_SEQS) * (1 + size.drafts), RECORDED_TOKENS)
    return 2 * tokens * (_row(size, spec, groups) + FLOAT * _absorbed(spec))


def _row(size: StepSize, spec: ModelSpec, groups: Sequence[StateGroup]) -> int:
    """Return the bytes of a token's arrays in a recorded step."""
    heads = max((own.num_heads * own.head_dim for own in spec.attentions(shared=True)), default=0)
    mixers = [layer.mixer for layer in spec.layers if layer.mixer]
    recurrent = max((mixer.resident_numbers(spec.hidden_size, several=True) for mixer in mixers), default=0)
    entries = sum(group.num_pages(size.length) + 2 for group in groups)
    embedded = 4 * spec.layer_embeddings.size * len(spec.layers) if spec.layer_embeddings else 0
    numbers = embedded + spec.vocab_size + 6 * spec.hidden_size + 5 * heads + recurrent + _rotary_dims(spec)
    return FLOAT * numbers + INT * entries


def _recorded_on_gpu(size: StepSize, spec: ModelSpec, groups: Sequence[StateGroup]) -> int:
    """Return the bytes of recorded decode steps on a GPU.

    Each recording keeps its results. The memory of all other arrays is shared: that of the largest step, half of it,
    and so on.
    """
    most = min(size.seqs + 1, GPU_SEQS[-1])  # a step is filled up with a spare sequence
    tokens = min(most * (1 + size.drafts), GPU_TOKENS)
    kept = min(GPU_ROWS, GPU_GRAPHS * tokens)
    if not size.drafts:
        kept = sum(n for n in GPU_SEQS if n < most) + most
    results = FLOAT * (spec.vocab_size + 2 * spec.hidden_size + 1) + INT
    drawing = FLOAT * MOST_LIKELY + 3 * (FLOAT + INT) * (1 + -(-spec.vocab_size // BEST_BLOCK))
    numbers = _row(size, spec, groups) + drawing + FLOAT * _absorbed(spec)
    return kept * results + 2 * tokens * numbers


def _absorbed(spec: ModelSpec) -> int:
    """Return the numbers of a token's queries and results that are as long as latents, of all heads of a layer.

    Recorded steps and kernels for GPUs always have them, and `workspace` counts those of some heads.
    """
    latent = [layer.mixer for layer in spec.layers if layer.mixer and layer.mixer.keeps_latents]
    return max((mixer.query_group * (mixer.state().elements + mixer.value_size) for mixer in latent), default=0)


def _partials(size: StepSize, spec: ModelSpec) -> int:
    """Return the most bytes of the softmax of parts of keys, which programs on a GPU leave for each other.

    In a decode step of few sequences each split of the keys has a program, and leaves a part for each query. Otherwise
    a program adds up all splits of a few queries, in memory of its own.
    """
    found, least = 0, COLUMNS // 2
    for mixer in (layer.mixer for layer in spec.layers if layer.mixer and layer.mixer.query_group):
        width, group, keys = max(16, _power_above(mixer.value_size)), mixer.query_group, mixer.reads().parts[0][0]
        blocks = -(-group // least)  # programs for the heads that share a head of keys
        most = PROGRAMS * LARGEST_KEPT // max(LARGEST_KEPT, width) - 1
        programs = min(size.seqs * (1 + size.drafts) * keys * blocks, most)
        apart = programs * -(-size.length // SPLIT) * (width + 4) * min(group, least)
        tiles = -(-size.tokens // max(1, least // _power_above(group))) + size.seqs
        found = max(found, apart, tiles * keys * width * max(COLUMNS, blocks * least))
    return FLOAT * found


def _power_above(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def _layer(
    size: StepSize, hidden_size: int, mixer: TokenMixer | None, mlp: ChannelMixer | None, keys: KeysRead | None
) -> int:
    """Return the largest phase of a layer, besides the residual stream. keys: the keys that its attention reads."""
    width = FLOAT * size.tokens * hidden_size
    before, during, held = Phases(0)
    if mixer and keys:
        before, during, held = mixer.workspace(size, hidden_size, keys)
    # Two residuals, the mixer's branch, the norm; the inputs and the result of the mixer until the layer ends.
    after = 4 * width + held + (mlp.workspace(size.tokens, hidden_size) if mlp else 0)
    return max(2 * width + max(width, before), width + during, after) + FLOAT * max(WIDEN_BLOCK, hidden_size)


def _keys_read(size: StepSize, group: StateGroup) -> KeysRead:
    """Return the keys that attention gathers from the pages of one group."""
    page, lookback = group.page_tokens, min(group.lookback, size.length)
    longest, first = group.num_pages(size.length), group.first_pages
    one = min(longest, first + (lookback + size.tokens + page - 2) // page + 1)
    least = min(longest, first + (lookback + page - 1) // page + 1)  # for a sequence with one token
    every = min(size.seqs * one, 2 * (size.seqs * (least + 1) + size.tokens // page))
    is_narrow = any(part.dtype != "float32" for slot in group.slots for part in slot.parts)
    return KeysRead(one * page, max(one, every) * page, is_narrow)


def _head(size: StepSize, spec: ModelSpec) -> int:
    """Return the bytes of logits of sampled rows, or of a chunk of a prompt, and of sampling from them."""
    rows = min(size.tokens, max(size.seqs + size.replays, PROMPT_CHUNK))
    laws = 0
    if spec.diffusion:
        rows = min(rows, max(1, PIECE // spec.vocab_size))
        laws = 6 * FLOAT * min(rows * spec.vocab_size, max(LAW_BLOCK, spec.vocab_size))  # see diffusion/denoiser.py
    logits = FLOAT * rows * spec.vocab_size
    streams = 8 if spec.head_transform else 6
    making = (3 if spec.logit_softcap else 2) * logits + streams * FLOAT * rows * spec.hidden_size
    # A copy of the rows, for beams. In float64: scores, their exponentials, log probabilities and their exponentials, a
    # copy of the rows that request them; then a dozen arrays of one row for its filters.
    block = min(rows * spec.vocab_size, max(SAMPLE_BLOCK, spec.vocab_size))
    return max(making, 2 * logits + laws + 5 * INT * block + 12 * INT * spec.vocab_size)


def _late_logits(size: StepSize, spec: ModelSpec) -> int:
    """Return the bytes of answers whose masks are late (engine/late.py): a float32 row of logits each, on the host."""
    return FLOAT * size.rows * spec.vocab_size


def _tables(size: StepSize, groups: Sequence[StateGroup]) -> int:
    """Return the bytes of page tables: the runner's arrays, and the scheduler's lists."""
    return sum(size.rows * group.num_pages(size.length) * 3 * INT for group in groups)


def _layouts(size: StepSize, groups: Sequence[StateGroup]) -> int:
    """Return the bytes of a step's layout.

    It has a few numbers per token, and the pages that each sequence reads with their positions while they are looked
    up.
    """
    pages = sum(_keys_read(size, group).every // group.page_tokens for group in groups)
    most = max(_keys_read(size, group).every // group.page_tokens for group in groups)
    return INT * (2 * pages + 6 * most + size.tokens * (16 + 12 * len(groups)))


def _moves(size: StepSize, groups: Sequence[StateGroup], swap_bytes: int) -> int:
    """Return the bytes of whole pages that are moved: copies for forked sequences, and swaps."""
    return max(max(g.page_bytes, min(MOVE_BYTES, max(size.rows * g.page_bytes, swap_bytes))) for g in groups)
