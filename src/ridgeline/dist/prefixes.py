"""Index which replicas have computed which prompts, by blocks of tokens. The index is bounded."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

CAPACITY = 200_000  # blocks; some 40 MB
DIGEST_BYTES = 16
MOST_BLOCKS = 1024  # of a prompt that are told apart: a longer one would keep the event loop


def block_keys(tokens: Sequence[int], block: int, salt: str) -> list[bytes]:
    """Return one key for each full block of `block` tokens, up to MOST_BLOCKS. A key stands for the block and all
    tokens before it.

    salt: prompts with different salts share nothing (`GenerationRequest.cache_salt`).
    """
    data, step = memoryview(array("q", tokens[: MOST_BLOCKS * block])).cast("B"), 8 * block
    seen = hashlib.blake2b(salt.encode(), digest_size=DIGEST_BYTES)
    keys = []
    for end in range(step, len(data) + 1, step):
        seen.update(data[end - step : end])
        keys.append(seen.copy().digest())
    return keys


class PrefixIndex:
    """Maps keys of blocks to the replicas that hold them. The blocks that were used last are kept."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, set[int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def depths(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Return for each replica how many of the first blocks it holds without a gap; none for a depth of 0."""
        found: dict[int, int] = {}
        rest: set[int] | None = None  # replicas that hold all blocks so far
        for depth, key in enumerate(keys, 1):
            holders = self._holders.get(key)
            rest = set() if holders is None else set(holders) if rest is None else rest & holders
            if not rest:
                break
            found.update(dict.fromkeys(rest, depth))
        return found

    def add(self, keys: Sequence[bytes], replica: int) -> None:
        """Record that a replica holds these blocks of one prompt."""
        for key in reversed(keys):  # the first block, which most prompts share, is forgotten last
            self._holders.setdefault(key, set()).add(replica)
            self._holders.move_to_end(key)
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def remove(self, keys: Sequence[bytes], replica: int) -> None:
        """Record that a replica does not hold these blocks any more."""
        for key in keys:
            if (holders := self._holders.get(key)) is not None:
                holders.discard(replica)
                if not holders:
                    del self._holders[key]

    def forget(self, replica: int) -> None:
        """Record that a replica has lost all of its blocks."""
        self.remove([key for key, holders in self._holders.items() if replica in holders], replica)
