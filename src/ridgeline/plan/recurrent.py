"""What the reference ops of recurrent mixers hold at their peak, as they allocate it: an upper bound, in bytes."""

from __future__ import annotations

from ridgeline.spec import Mamba, Mamba2, RecurrentMixer, ShortConvolution

FLOAT = 4
# Bounds that ops/reference/recurrent.py keeps to.
SCAN_CHUNK, SCAN_BLOCK, SSD_CHUNK = 16, 2**22, 64


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
    if isinstance(mixer, ShortConvolution):
        return FLOAT * (states + (6 * tokens + 5 * padded) * mixer.channels)
    chunked = padded + SSD_CHUNK * seqs  # each sequence ends inside a chunk
    if not isinstance(mixer, Mamba2):
        heads, values, features = mixer.num_heads, mixer.head_dim + 1, mixer.num_features
        along = chunked * heads * (6 * values + 5 * features + 5 * SSD_CHUNK)
        return FLOAT * (
            states + 4 * tokens * heads * values + along + 4 * chunked // SSD_CHUNK * heads * values * features
        )
    inputs = 2 * tokens * (mixer.inner_size + mixer.conv_channels + mixer.num_heads)
    along = 4 * padded * mixer.conv_channels + chunked * mixer.num_heads * (4 * mixer.state_size + 5 * mixer.head_dim)
    matrices = 5 * chunked * SSD_CHUNK * mixer.num_heads
    chunk_states = 4 * (chunked // SSD_CHUNK) * mixer.inner_size * mixer.state_size
    return FLOAT * (states + inputs + along + matrices + chunk_states)
