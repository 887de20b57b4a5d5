"""A request in the scheduler: its tokens, progress, page tables and hash chain.

    0          computed        replay_from        planned         len(tokens) + pending
    |-------------|-----------------|----------------|-------------------|
     pages hold it  steps in flight   accepted drafts   to be run

computed == replay_from: no step is in flight. Pages of every group hold the state that is needed to continue from
`computed`. For the accepted drafts after it, the pages of row groups hold their rows, and the device keeps the inputs
of snapshot groups with the row of the tables. A sequence that leaves its row (swap), or one that shares its pages
(fork), continues from `computed`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ridgeline.spec.groups import StateGroup
from ridgeline.spec.regimes import Regimes
from ridgeline.spec.trees import as_parents

# The policy's key, the arrival of its first ancestor (its own, if it is no fork), and its own arrival.
Order = tuple[float, int, int]
# The key of a full page in the prefix index: a hash of all tokens up to its end, or a number (sim/).
PageKey = bytes | int


@dataclass(slots=True, eq=False)
class Sequence:
    """One request, or one of its choices. The caller sets the first five fields; the scheduler owns the rest.

    tokens: the prompt, then the generated tokens. max_tokens: most tokens to generate. priority: lower is more urgent
    (policy.py). root: the first link of the hash chain; only sequences with the same root share pages (`hash_root`).
    num_prompt: length of the prompt; to be set if `tokens` hold generated ones from the start (beams). num_cached:
    tokens found in the prefix index when it was admitted.
    """

    id: int
    tokens: list[int]
    max_tokens: int
    priority: int = 0
    root: bytes = b""
    num_prompt: int = 0
    num_cached: int = 0
    num_preempted: int = 0
    num_restarts: int = 0
    arrival: int = 0
    order: Order = (0.0, 0, 0)  # the least runs first
    max_length: int = 0  # in tokens, generated ones included
    bound: int = 0  # at this length it is over, or is computed again
    floor: int = 0  # its tokens are rotated at least as in a context of so many tokens (spec/regimes.py)
    children: list[Sequence] = field(default_factory=list)  # waiting for the prompt, to share its pages
    drafts: tuple[int, ...] = ()  # for the next step
    parents: tuple[int, ...] = ()  # of the drafts, if they form a tree (trees.py)
    waits: bool = False  # its tokens are known when a step is committed, not before: until then it runs no more
    wanted: tuple[int, int] | None = None  # drafts whose logits are sampled; None: all
    part: tuple[int, int] | None = None  # position of the first draft, and number of rows that drafts read (blocks.py)
    after: int = 0  # known tokens that follow the answer, in whole sequences, or the rest of its last canvas
    signal: Any = None  # of the drafts, if they are a canvas (work.py)
    adapter: int = -1  # slot of its adapter; -1: none
    block: int = 1  # tokens whose rows are final together; above 1 only in diffusion models (blocks.py)
    # progress
    row: int = -1  # -1: not running
    epoch: int = 0
    last_step: int = 0  # the newest step with work for it
    computed: int = 0
    replay_from: int = 0
    planned: int = 0
    pending: int = 0  # sampled tokens that only the device knows yet
    held: bool = False  # its next token comes late, by `give`; it does not run before
    snapshot_at: int = 0  # a step must end at this position, so that its snapshot can be published
    # pages, per group
    tables: list[list[int]] = field(default_factory=list)
    sealed: list[int] = field(default_factory=list)  # pages [0, sealed) are in the prefix index, or were
    dropped: list[int] = field(default_factory=list)  # pages [0, dropped) were released, except for the first tokens'
    sent: list[int] = field(default_factory=list)  # entries [0, sent) are known to the device
    host: list[list[int]] = field(
        default_factory=list
    )  # host pages it was swapped to, one for each page of reads(computed)
    covered: int = 0  # a step that ends by here needs no page, copy or delta
    rows_end: int = 0  # pages of rows up to here belong to it alone; those of states may not
    next_event: int = 0  # while `computed` is below this, there is no page to seal or to release
    _chain: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.tokens)  # the choices of a request are often given the same list
        self.num_prompt = self.num_prompt or len(self.tokens)
        self.bound = self.max_length = self.num_prompt + self.max_tokens

    @property
    def settled(self) -> int:
        """Return the number of tokens in whole blocks: their rows are final once they are computed together."""
        return len(self.tokens) // self.block * self.block

    @property
    def fork_at(self) -> int:
        """Return how many tokens the choices of a request share: each of them computes the last block itself."""
        return (len(self.tokens) - 1) // self.block * self.block

    @property
    def is_shared(self) -> bool:
        """Return whether another sequence can share its pages."""
        return True

    @property
    def is_idle(self) -> bool:
        """Return whether it pauses because a step gave it no token: it does not run until it is forked or ended.

        A sequence that is held is not idle: it continues by itself.
        """
        waits = self.pending or self.held or self.drafts
        return not waits and self.computed == self.planned == len(self.tokens)

    def prefix_hash(self, position: int, grid: int) -> PageKey:
        """Return the hash of tokens [0, position) under the root. position: a multiple of `grid`, tokens per link."""
        chain, links = self._chain, position // grid
        while len(chain) < links:
            begin = len(chain) * grid
            body = array("I", self.tokens[begin : begin + grid]).tobytes()
            before = chain[-1] if chain else root_of(self.root, self.floor)
            chain.append(hashlib.blake2b(before + body, digest_size=16).digest())
        return chain[links - 1]

    def page_keys(self, first: int, stop: int, page_tokens: int, grid: int) -> Iterable[PageKey]:
        """Return the keys of pages [first, stop)."""
        return [self.prefix_hash((index + 1) * page_tokens, grid) for index in range(first, stop)]

    def num_pages(self, g: int, group: StateGroup) -> int:
        """Return the number of pages that it holds in group `g`."""
        table, dropped = self.tables[g], self.dropped[g]
        if group.snapshot:
            return sum(map(bool, table[dropped:]))
        return len(table) - dropped + min(group.first_pages, dropped)

    def propose(self, drafts: Iterable[int], parents: Iterable[int] = ()) -> None:
        """Set the drafts of the next step."""
        self.drafts, self.parents = tuple(drafts), tuple(parents)

    def tree(self, count: int) -> tuple[int, ...]:
        """Return the parents of the first `count` drafts; () if they are a chain."""
        return as_parents(self.parents[:count], count)

    def enter(self, regimes: Regimes) -> None:
        """Set what follows from its length: how its tokens are rotated, and the length at which that changes."""
        length = len(self.tokens)
        self.floor = regimes.floor(self.num_prompt, length)
        self.bound = min(self.max_length, regimes.end(length) + 1)
        self._chain.clear()

    def restart(self, epoch: int) -> None:
        """Forget all progress. Results of steps in flight have an older epoch and are ignored."""
        self.epoch = epoch
        self.computed = self.replay_from = self.planned = self.pending = 0
        self.held = False  # its last token is computed again, and sampled again
        if self.part is not None:  # the rows that its next pass was to read are lost
            self.part, self.drafts = None, ()


def root_of(root: bytes, floor: int) -> bytes:
    """Return the root of a hash chain: sequences with different floors never share state."""
    return hashlib.blake2b(root + floor.to_bytes(8, "little"), digest_size=16).digest() if floor else root


def hash_root(*, cache_salt: str = "", adapter: str = "", state_precision: str = "", alone: str = "") -> bytes:
    """Return the root of a hash chain. Sequences with different arguments never share state.

    alone: a unique name for a request that must share pages with no other. Clients cannot set it; they can set
    cache_salt.
    """
    parts = (part.encode() for part in (cache_salt, adapter, state_precision, alone))
    body = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(body, digest_size=16).digest()
