"""Which keys a query of attention sees: windows, patterns, first keys, and the paths of drafts in a tree."""

import triton
import triton.language as tl


@triton.jit
def bits_of(path):
    """Return the 64 bits of a path as 0 or 1."""
    return ((path >> tl.arange(0, 64).to(tl.int64)) & 1).to(tl.int32)


@triton.jit
def slots_of(at, known, path):
    """Return the slots of keys at some positions of a draft's path. known: slots that hold no drafts."""
    bits = bits_of(path)
    rank = tl.cumsum(bits, 0) - 1  # number of ancestors of each draft on the path
    is_it = (rank[None, :] == (at - known)[:, None]) & (bits[None, :] == 1)
    return tl.where(at < known, at, known + tl.sum(tl.where(is_it, tl.arange(0, 64)[None, :], 0), 1))


@triton.jit
def sees(at, position, RULE: tl.constexpr):
    """Return which keys [N] the queries [R] see: [N, R].

    RULE: number of keys in the window, and their distance; number of first keys; distance of keys that are seen beside
    the window. 0 stands for no window, no first keys and no other ones.
    """
    WINDOW: tl.constexpr = RULE[0]
    STEP: tl.constexpr = RULE[1]
    FIRST: tl.constexpr = RULE[2]
    STRIDE: tl.constexpr = RULE[3]
    distance = position[None, :] - at[:, None]
    seen = distance >= 0
    if WINDOW > 0:
        near = distance < WINDOW * STEP
        if STEP > 1:
            near = near & (distance % STEP == 0)
        if FIRST > 0:
            near = near | (at < FIRST)[:, None]
        if STRIDE > 0:
            near = near | (distance % STRIDE == 0)
        seen = seen & near
    return seen


@triton.jit
def bounds_of(split, span, RULE: tl.constexpr, SIZES: tl.constexpr):
    """Return the first key that a split reads for the window, the number of keys before it in tiles that hold first
    keys of the rule, and the number of all keys that it reads.
    """
    SPLIT: tl.constexpr = SIZES[1]
    BLOCK_K: tl.constexpr = SIZES[2]
    begin = tl.maximum(split * SPLIT, tl.minimum(span[1] // BLOCK_K * BLOCK_K, (split + 1) * SPLIT))
    ahead = 0
    if RULE[2] > 0:
        firsts = (tl.maximum(RULE[2] - split * SPLIT, 0) + BLOCK_K - 1) // BLOCK_K * BLOCK_K
        ahead = tl.minimum(firsts, begin - split * SPLIT)
    return begin, ahead, ahead + tl.minimum((split + 1) * SPLIT, span[2] + 1) - begin


@triton.jit
def tile_at(step, begin, ahead, split, span, RULE: tl.constexpr, SIZES: tl.constexpr, TREE: tl.constexpr):
    """Return the positions of the keys of a tile, whether they are read, and their slots; see `split_of`."""
    SPLIT: tl.constexpr = SIZES[1]
    oldest, last, known, path = span[1], span[2], span[3], span[4]
    n = tl.arange(0, SIZES[2])
    at = begin + step - ahead + n
    if RULE[2] > 0:
        at = tl.where(step < ahead, split * SPLIT + step + n, at)
    is_held = ((at >= oldest) | (at < RULE[2])) & (at < tl.minimum((split + 1) * SPLIT, last + 1))
    if TREE:
        slot = slots_of(at, known, path)
    else:
        slot = at
    return at, is_held, slot
