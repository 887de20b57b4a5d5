"""What the reference ops of recurrent mixers hold at their peak, as they allocate it: an upper bound, in bytes."""

from __future__ import annotations

from ridgeline.spec import (
    S4,
    S4D,
    GatedConvolution,
    GatedDelta,
    KimiDelta,
    LightningAttention,
    Mamba,
    Mamba2,
    RecurrentMixer,
    ShortConvolution,
)

FLOAT = 4
# Bounds that ops/reference/recurrent.py, s4.py and delta.py keep to.
SCAN_CHUNK, SCAN_BLOCK, SSD_CHUNK, S4_BLOCK, DELTA_CHUNK = 16, 2**22, 64, 64, 64


def kept_elements(mixer: RecurrentMixer, width: int) -> int:
    """Numbers that are kept of a draft at most: what it becomes on its way to the state, as the matrices give it."""
    return width + sum(weight.shape[0] for weight in mixer.weights(width) if len(weight.shape) == 2)


def recurrent_bytes(mixer: RecurrentMixer, tokens: int, padded: int, seqs: int) -> int:
    """Of one layer's mixer, beside the stream. padded: tokens as they run along the sequences, padding included."""
    states = 4 * seqs * mixer.state().elements  # read, new, and put in order
    if isinstance(mixer, Mamba):
        inputs, along = 3 * tokens * mixer.inner_size, 8 * padded * (mixer.inner_size + mixer.state_size)
        one = mixer.inner_size * mixer.state_size
        block = min(padded + SCAN_CHUNK * seqs, max(SCAN_BLOCK // one, SCAN_CHUNK * seqs)) * one
        return FLOAT * (states + inputs + along + 8 * block)
    if isinstance(mixer, ShortConvolution | GatedConvolution):
        return FLOAT * (states + 6 * (tokens + padded) * mixer.channels)
    if isinstance(mixer, GatedDelta | KimiDelta):
        return FLOAT * (states + _delta(mixer, tokens, padded, seqs))
    # Sequences end inside a chunk; those that are shorter than one are in a chunk that padding has counted.
    ends = min(seqs, max(1, tokens // SSD_CHUNK))
    chunked, chunks = padded + SSD_CHUNK * ends, padded // SSD_CHUNK + seqs
    if isinstance(mixer, S4 | S4D):
        return FLOAT * states + _state_space(mixer, tokens, chunked, chunks, seqs)
    if isinstance(mixer, LightningAttention):
        inputs, size = 7 * tokens * mixer.inner_size, mixer.head_dim  # qkv before and after its activation, the gate
        along = chunked * mixer.num_heads * (10 * size + 3 * SSD_CHUNK)
        return FLOAT * (states + inputs + along + 4 * chunks * mixer.inner_size * size)
    if not isinstance(mixer, Mamba2):
        heads, values, features = mixer.num_heads, mixer.head_dim + 1, mixer.num_features
        along = chunked * heads * (6 * values + 5 * features + 5 * SSD_CHUNK)
        return FLOAT * (states + 4 * tokens * heads * values + along + 4 * chunks * heads * values * features)
    inputs = 2 * tokens * (mixer.inner_size + mixer.conv_channels + mixer.num_heads)
    along = 4 * padded * mixer.conv_channels + chunked * mixer.num_heads * (4 * mixer.state_size + 5 * mixer.head_dim)
    matrices = 5 * chunked * SSD_CHUNK * mixer.num_heads
    chunk_states = 4 * chunks * mixer.inner_size * mixer.state_size
    return FLOAT * (states + inputs + along + matrices + chunk_states)


def _state_space(mixer: S4 | S4D, tokens: int, blocked: int, blocks: int, seqs: int) -> int:
    """Beside the states: the tokens on their way, a step of one token in float64, and what the weights alone give."""
    n = mixer.state_size
    # Inputs, their transforms and what these give, twice as long; outputs, and the projection to two numbers of each.
    along = FLOAT * mixer.channels * (13 * blocked + 6 * tokens)
    between = 4 * FLOAT * blocks * mixer.channels * n
    step = 16 * FLOAT * seqs * mixer.channels * n
    matrices = 16 * n if isinstance(mixer, S4) else 0  # the step as a matrix, and its powers
    return max(along + between, step) + 2 * FLOAT * mixer.channels * n * (matrices + 8 * S4_BLOCK)


def _delta(mixer: GatedDelta | KimiDelta, tokens: int, padded: int, seqs: int) -> int:
    """Numbers beside the states: of the whole step, along the sequences, and in chunks of them."""
    heads, keys, values = mixer.num_heads, mixer.key_dim, mixer.head_dim
    decays = 1 if isinstance(mixer, GatedDelta) else keys
    # Of a sequence longer than a chunk the chunks are at most twice as long.
    chunked = min(padded + DELTA_CHUNK * seqs, max(2 * padded, DELTA_CHUNK * seqs))
    inputs = 2 * tokens * (sum(mixer.sizes) + heads * (values + decays + 1))
    # What was taken, its convolution; unit queries and keys for each head of values, decays.
    along = padded * (2 * sum(mixer.sizes) + heads * (2 * keys + 3 * decays + 2))
    # The same in chunks; right sides and solutions; results. Three matrices: products, the system and its copy.
    chunks = chunked * heads * (4 * keys + 6 * values + 2 * decays + 3 * DELTA_CHUNK)
    return inputs + along + chunks + 2 * seqs * heads * keys * values
