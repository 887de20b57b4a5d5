"""What a step holds besides weights and pages, counted as the reference ops allocate it: an upper bound, in bytes.

A step is a row of phases, and what one phase takes the next one gets back, so the count is what lives through the
whole step plus the largest phase. `tests/cpu/test_memory.py` holds it against the measured peak of a process.

Not counted: what a request itself holds, its prompt and its answer, which grows with the caller's queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.cost.recurrent_memory import kept_elements, recurrent_bytes
from ridgeline.spec import (
    Attention,
    ClampedSwiGLU,
    Dilated,
    GatedMLP,
    LatentAttention,
    ModelSpec,
    MoE,
    RecurrentMixer,
    SharedAttention,
    Strided,
)
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.mixers import ChannelMixer, TokenMixer

FLOAT, INT = 4, 8
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


@dataclass(frozen=True, slots=True)
class StepSize:
    """The largest step that settings allow.

    tokens, seqs: in one step. rows: sequences that have a line in the page tables. length: of a sequence, in tokens.
    block: scores, and numbers of keys, that attention holds at once. drafts: of a sequence.
    """

    tokens: int
    rows: int
    length: int
    block: int
    drafts: int

    @property
    def replays(self) -> int:
        """Tokens that recurrent layers run once more, because they were drafts before."""
        return self.seqs * self.drafts

    @property
    def seqs(self) -> int:
        return min(self.tokens, self.rows)

    @property
    def queries(self) -> int:
        """Tokens as attention sees them: sequences of unlike length are padded, to twice the tokens at most."""
        return self.tokens if self.seqs == 1 else 2 * self.tokens


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
        self._kept = FLOAT * drafts * _kept_elements(spec)
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
    mixers = [m.attention if isinstance(m, SharedAttention) else m for m in (layer.mixer for layer in spec.layers)]
    heads = max((m.num_heads * m.head_dim for m in mixers if isinstance(m, Attention)), default=0)
    places = sum(group.num_pages(size.length) + 2 for group in groups)
    row = FLOAT * (spec.vocab_size + 6 * spec.hidden_size + 5 * heads + _rotary_dims(spec)) + INT * places
    return 2 * min(size.seqs, RECORDED_SEQS) * row


def _layer(
    size: StepSize, hidden_size: int, mixer: TokenMixer | None, mlp: ChannelMixer | None, group: StateGroup | None
) -> int:
    """The largest phase of a layer, beside the stream that it was given. group: of its state; None without a mixer."""
    width = FLOAT * size.tokens * hidden_size
    if mixer is None or group is None:
        before, during, held = 0, 0, 0
    elif isinstance(mixer, Attention | SharedAttention):
        before, during, held = _attention_phases(size, mixer, group)
    elif isinstance(mixer, LatentAttention):
        before, during, held = _latent_phases(size, mixer, group)
    else:
        before, during, held = _recurrent(size, hidden_size, mixer), 0, 0
    # Two residuals, the branch of attention, the norm; what attention was given and its result, until the end.
    after = 4 * width + held + _channel(size.tokens, hidden_size, mlp)
    return max(2 * width + max(width, before), width + during, after) + FLOAT * max(WIDEN_BLOCK, hidden_size)


def _kept_elements(spec: ModelSpec) -> int:
    """Numbers that all recurrent layers keep of a draft."""
    mixers = [layer.mixer for layer in spec.layers]
    return sum(kept_elements(mixer, spec.hidden_size) for mixer in mixers if isinstance(mixer, RecurrentMixer))


def _recurrent(size: StepSize, hidden_size: int, mixer: RecurrentMixer) -> int:
    """Drafts run by themselves after the tokens before them; what is run once more is laid before the step's own."""
    if not size.drafts:
        return recurrent_bytes(mixer, size.tokens, size.queries, size.seqs)
    tokens = size.tokens + size.replays
    inputs = FLOAT * tokens * kept_elements(mixer, hidden_size)
    return 2 * inputs + recurrent_bytes(mixer, tokens, 4 * tokens, 2 * size.seqs)


def _attention_phases(size: StepSize, mixer: Attention | SharedAttention, group: StateGroup) -> tuple[int, int, int]:
    """Besides residuals and norms: while q, k and v are made, while they are attended to, and held afterwards."""
    q = FLOAT * size.tokens * mixer.num_heads * mixer.head_dim
    kv = FLOAT * size.tokens * mixer.num_kv_heads * mixer.head_dim
    gate = q if _own(mixer).out_gate else 0
    # q, k and v, each with up to two copies while it is normalized and turned. What is gated, and the gate's sigmoid.
    during = gate + q + 2 * kv + _attention(size, mixer, group)
    return max(3 * q, gate + q + 3 * kv), during, 2 * q + 2 * kv + 3 * gate


def _latent_phases(size: StepSize, mixer: LatentAttention, group: StateGroup) -> tuple[int, int, int]:
    q = FLOAT * size.tokens * mixer.num_heads * mixer.qk_head_dim
    out = FLOAT * size.tokens * mixer.num_heads * mixer.v_head_dim
    row = FLOAT * size.tokens * mixer.row
    before = 3 * q + 4 * row + 2 * FLOAT * size.tokens * (mixer.q_lora_rank or 0)
    return before, q + row + _latent_attention(size, mixer, group), q + out + row


def _latent_attention(size: StepSize, mixer: LatentAttention, group: StateGroup) -> int:
    """Attention over pages of latents: what is gathered, what is made of it or of queries, scores, results."""
    heads, key = mixer.num_heads, mixer.qk_head_dim + mixer.v_head_dim
    one, every = _keys_read(size, group)
    several = max(one, min(every, size.block // max(heads, mixer.row)))
    gathered = several * ((3 if _is_narrow(group) else 2) * FLOAT * mixer.row + 32)
    # Of a head: its keys and values, or queries and results as long as latents; as many heads as a block holds.
    of_head = max(several * key, size.queries * (mixer.row + mixer.kv_lora_rank))
    up = (mixer.qk_nope_head_dim + mixer.v_head_dim) * mixer.kv_lora_rank
    made = 3 * FLOAT * min(heads * of_head, max(size.block, of_head)) + 2 * FLOAT * min(heads * up, max(size.block, up))
    scores = min(size.queries * one * heads, max(size.block, one * heads))
    results = 4 * FLOAT * size.queries * heads * max(mixer.qk_head_dim, mixer.v_head_dim)
    return gathered + made + (4 * FLOAT + 2) * scores + results


def _attention(size: StepSize, mixer: Attention | SharedAttention, group: StateGroup) -> int:
    """Attention over pages: gathered keys and values, a block of scores, queries and results."""
    heads, kv_heads = mixer.num_heads, mixer.num_kv_heads
    one, every = _keys_read(size, group)
    # Keys and values; of more than one sequence a product makes a third copy, [n, K, D, S] in one piece.
    key = FLOAT * kv_heads * mixer.head_dim
    several = min(every, size.block // (kv_heads * mixer.head_dim))
    narrow = key if _is_narrow(group) else 0  # what is gathered of a part, before it is widened
    gathered = max(one * (2 * key + narrow + 32), several * (3 * key + narrow + 32) if size.seqs > 1 else 0)
    # The scores, masked, and their softmax; the masks of a query are bytes, one more for each query of a key head.
    pairs = min(size.queries * one, max(size.block // heads, one))
    scores = pairs * (3 * FLOAT * heads + heads // kv_heads + 6 + (2 * INT if _measures_distances(mixer) else 0))
    return gathered + scores + 4 * FLOAT * size.queries * heads * mixer.head_dim


def _is_narrow(group: StateGroup) -> bool:
    """Are rows stored in another type than that in which they are computed with?"""
    return any(part.dtype != "float32" for slot in group.slots for part in slot.parts)


def _measures_distances(mixer: Attention | SharedAttention) -> bool:
    """Is the distance of every query to every key needed, and its remainder?"""
    return isinstance(_own(mixer).pattern, Dilated | Strided)


def _own(mixer: Attention | SharedAttention) -> Attention:
    return mixer.attention if isinstance(mixer, SharedAttention) else mixer


def _keys_read(size: StepSize, group: StateGroup) -> tuple[int, int]:
    """Keys that one sequence gathers at most, in whole pages, and all sequences of a step, padding included."""
    page, lookback = group.page_tokens, min(group.lookback, size.length)
    longest, first = group.num_pages(size.length), group.first_pages
    one = min(longest, first + (lookback + size.tokens + page - 2) // page + 1)
    least = min(longest, first + (lookback + page - 1) // page + 1)  # of a sequence with one token
    every = min(size.seqs * one, 2 * (size.seqs * (least + 1) + size.tokens // page))
    return one * page, max(one, every) * page


def _channel(tokens: int, hidden_size: int, mlp: ChannelMixer | None) -> int:
    """A channel mixer's intermediates. A narrow matrix gives its result twice: in blocks, and joined."""
    if mlp is None:
        return 0
    width, inner = FLOAT * tokens * hidden_size, FLOAT * tokens * mlp.intermediate_size
    if not isinstance(mlp, MoE):
        return max((4 if isinstance(mlp, GatedMLP) else 2) * inner, inner + 2 * width)
    chosen = mlp.num_experts_per_tok
    routing = tokens * (28 * mlp.num_experts + 6 * INT * chosen)
    # All tokens may choose the same expert; the results of every choice are held thrice while they are put in order.
    parts = 5 if isinstance(mlp.activation, ClampedSwiGLU) else 4
    read = FLOAT * tokens * mlp.latent_size if mlp.latent_size else width  # by an expert, and written
    routed = routing + max((chosen + 1) * read + parts * inner, (3 * chosen + 1) * read)
    if mlp.latent_size:
        routed += width + 2 * read
    return max(routed, 2 * width + _channel(tokens, hidden_size, mlp.shared)) if mlp.shared else routed


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
    pages = sum(_keys_read(size, group)[1] // group.page_tokens for group in groups)
    most = max(_keys_read(size, group)[1] // group.page_tokens for group in groups)
    return INT * (2 * pages + 6 * most + size.tokens * (16 + 12 * len(groups)))


def _moves(size: StepSize, groups: Sequence[StateGroup], swap_bytes: int) -> int:
    """Whole pages on their way: copies for sequences that part, and swaps."""
    return max(max(g.page_bytes, min(MOVE_BYTES, max(size.rows * g.page_bytes, swap_bytes))) for g in groups)
