"""Find the largest settings that fit in memory.

Memory holds the pages, their bookkeeping, the workspace of a step (cost/memory.py) and, if the device is the host, swap
space. If memory is short, the settings that the user has not set become smaller in this order:

    1. tokens and sequences of a step, while they take more than their share of the memory beyond their minimum
    2. max_model_len, unless the user set it
    3. tokens and sequences again, down to one
    4. block_size

So no settings are found only if the smallest ones do not fit.

Snapshots of recurrent layers have S bytes each and are kept every C tokens. N sequences that each leave a prefix of P
tokens take N S P / C of the M bytes of all pages; a request that continues from such a prefix recomputes C / 2 of its P
tokens. The sum of both shares is least at C = P sqrt(2 N S / M): this is the rule for checkpoints of long computations
(Young, CACM 17(9), 1974), with a share of memory as the cost of a snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import sqrt

from ridgeline.cost.head_memory import HeadWorkspace
from ridgeline.cost.memory import BOOKKEEPING_BYTES, Workspace
from ridgeline.settings.config import EngineOptions
from ridgeline.spec import ModelSpec
from ridgeline.spec.groups import StateGroup, state_groups, with_layers
from ridgeline.spec.heads import HeadSpec
from ridgeline.spec.sight import BEYOND
from ridgeline.spec.storage import SNAPSHOTS, Storage
from ridgeline.spec.trees import head_rows

SEQS, TOKENS, PAGE_TOKENS = 256, 512, 16  # the choice if memory allows it
STEP_SHARE = Fraction(1, 4)  # share of the memory for the tokens and sequences of a step
PREFIX_TOKENS = 2048  # P above, unless the longest sequence is shorter
LEAST_SNAPSHOT = 64  # tokens; recomputing fewer takes almost no time


@dataclass(frozen=True, slots=True)
class Problem:
    """The inputs of `resolve`.

    storage: how keys and values are stored. swap: bytes of swap space. float_bytes: bytes of a number in the type in
    which the device computes. most_seqs, most_tokens: sequences and tokens of a step if memory allows them. draft: the
    draft model or head that runs over the same pages; None without one.
    """

    spec: ModelSpec
    storage: Storage
    max_model_len: int
    fixed_len: bool
    options: EngineOptions
    free: int
    fraction: float
    swap: int
    on_host: bool
    float_bytes: int
    most_seqs: int = SEQS
    most_tokens: int = TOKENS
    draft: ModelSpec | HeadSpec | None = None

    @property
    def limit(self) -> int:
        """Return the limit of the bytes of pages and workspace."""
        most = self.free if self.options.kv_cache_memory_bytes else int(self.free * self.fraction)
        return most - self.swap if self.on_host else most

    @property
    def least_length(self) -> int:
        """Return the number of tokens of the longest sequence that must be possible."""
        return self.max_model_len if self.fixed_len else 1

    @property
    def least_tokens(self) -> int:
        """Return the fewest tokens of a step: a pass over a whole sequence is one step."""
        whole = isinstance(self.spec, ModelSpec) and self.spec.block >= BEYOND
        return self.max_model_len if whole else 1

    def solve(self) -> Settings | None:
        """Return the first settings that fit, in the order of the module's docstring; None if none do."""
        size = self.options.block_size or PAGE_TOKENS
        found = self._with_pages(size)
        while found is None and self.options.block_size is None and size > 1:
            size //= 2
            found = self._with_pages(size)
        return found and found.with_snapshots()

    def least(self, page_tokens: int, length: int) -> Settings:
        """Return settings with the fewest tokens and sequences of a step."""
        drafts = self.options.num_speculative_tokens or 0
        if isinstance(self.spec, ModelSpec) and self.spec.diffusion:
            drafts = min(self.spec.open_tokens, self.max_model_len)  # a pass has logits for all of them
        groups = own = self._groups(self.spec, page_tokens)
        count = partial(Workspace, on_cpu=self.on_host, drafts=drafts, float_bytes=self.float_bytes)
        counts: list[Workspace | HeadWorkspace] = [count(self.spec, own)]
        if self.draft is not None:
            more = self._groups(self.draft, page_tokens)
            groups = with_layers(own, more, len(self.spec.layers))
            width = self.options.draft_tree or 1
            kept = max(drafts, head_rows(width, drafts))
            of_head = partial(
                HeadWorkspace, on_cpu=self.on_host, drafts=kept, width=width, float_bytes=self.float_bytes
            )
            counts.append(count(self.draft, more) if isinstance(self.draft, ModelSpec) else of_head(self.draft, more))
        tokens, seqs = self.options.max_num_batched_tokens or self.least_tokens, self.options.max_num_seqs or 1
        return Settings(self, page_tokens, groups, tuple(counts), tokens, seqs, length)

    def _groups(self, spec: ModelSpec | HeadSpec, page_tokens: int) -> tuple[StateGroup, ...]:
        return state_groups(
            spec,
            page_tokens=page_tokens,
            storage=self.storage,
            snapshots=SNAPSHOTS[self.float_bytes],
            state_snapshot_tokens=self.options.state_snapshot_tokens or snapshot_grid(page_tokens, 0),
        )

    def most(self) -> tuple[int, int]:
        """Return the tokens and sequences of a step if memory allows them."""
        fixed_tokens, fixed_seqs = self.options.max_num_batched_tokens, self.options.max_num_seqs
        tokens = fixed_tokens or max(self.most_tokens, fixed_seqs or 0, self.least_tokens)
        return tokens, fixed_seqs or min(self.most_seqs, tokens)

    def _with_pages(self, page_tokens: int) -> Settings | None:
        least = self.least(page_tokens, self.max_model_len).cut()
        if least.length < self.least_length:
            return None
        tokens, seqs = self.most()
        found = replace(least, tokens=tokens, seqs=seqs)
        fair = least.workspace() + int(self.limit * STEP_SHARE)
        while found.workspace() > fair or found.cut().length < self.least_length:
            found = found.smaller()  # ends at `least`, which fits
        return found.cut()


@dataclass(frozen=True, slots=True)
class Settings:
    """Holds a choice of settings and computes the memory that it takes.

    page_tokens: tokens of a page of keys and values. tokens, seqs: tokens and sequences of a step. length: tokens of
    the longest sequence. groups: state groups, with the largest possible number of snapshots until `with_snapshots`.
    counts: count the workspace of the model, and of its draft model or head.
    """

    problem: Problem
    page_tokens: int
    groups: tuple[StateGroup, ...]
    counts: tuple[Workspace | HeadWorkspace, ...]
    tokens: int
    seqs: int
    length: int

    def workspace(self) -> int:
        """Return the bytes of a step's workspace."""
        return sum(count.bytes(self.tokens, self.seqs, self.length, self.problem.swap) for count in self.counts)

    def room(self) -> int:
        """Return the bytes that are left for pages and their bookkeeping."""
        return self.problem.limit - self.workspace()

    def sequence(self, bookkeeping_bytes: int = 0) -> int:
        """Return the bytes of the pages of one sequence of full length, and of the null pages."""
        return sum((g.most_pages(self.length) + 1) * (g.page_bytes + bookkeeping_bytes) for g in self.groups)

    def fits(self) -> bool:
        """Return whether a sequence of full length and the pages that the user set fit."""
        fixed, room = self.problem.options.kv_cache_memory_bytes, self.room()
        return (not fixed or self.sequence() <= fixed <= room) and self.sequence(BOOKKEEPING_BYTES) <= room

    def cut(self) -> Settings:
        """Return these settings with the longest sequence up to the present length that fits; 0 if none does."""
        low, high = 0, self.length
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if replace(self, length=middle).fits() else (low, middle - 1)
        return replace(self, length=low)

    def smaller(self) -> Settings:
        """Return these settings with half the tokens or half the sequences of a step, whichever frees more memory.

        At least one of the two must be above 1 and not set by the user.
        """
        options, found = self.problem.options, []
        least = self.problem.least_tokens
        if options.max_num_batched_tokens is None and self.tokens > least:
            half = max(self.tokens // 2, least)
            seqs = self.seqs if options.max_num_seqs else min(self.seqs, half)
            found.append(replace(self, tokens=half, seqs=seqs))
        if options.max_num_seqs is None and self.seqs > 1:
            found.append(replace(self, seqs=self.seqs // 2))
        return min(found, key=Settings.workspace)

    @property
    def prefix(self) -> int:
        """Return the number of tokens of the prefix that a sequence is assumed to leave for others."""
        return left_prefix(self.length)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a snapshot; 0 if no layer is recurrent."""
        return snapshot_bytes(self.groups)

    @property
    def state_snapshot_tokens(self) -> int:
        """Return the number of tokens between two snapshots, in whole pages.

        The user sets it, or the rule of the module's docstring.
        """
        if self.problem.options.state_snapshot_tokens:
            return self.problem.options.state_snapshot_tokens
        return snapshot_grid(self.page_tokens, self.prefix * sqrt(2 * self.snapshot_share(1)))

    def snapshot_share(self, number: int) -> float:
        """Return the share of all pages that `number` snapshots for each sequence take."""
        room = min(self.room(), self.problem.options.kv_cache_memory_bytes or self.room())
        return number * self.seqs * self.state_bytes / room

    def with_snapshots(self) -> Settings:
        """Return these settings with pages of snapshots that cover `state_snapshot_tokens` tokens."""
        return replace(self, groups=with_snapshots(self.groups, self.state_snapshot_tokens))

    def pages(self) -> tuple[int, ...]:
        """Return the number of pages of each group, null pages included.

        They serve `seqs` sequences of full length and the snapshots that these leave, or fewer by one factor.
        """
        return num_pages(self.groups, self.length, self.seqs, self._affordable)

    def _affordable(self, full: Sequence[int]) -> Fraction:
        """Return how many sequences with `full` pages of each group fit."""
        fixed = self.problem.options.kv_cache_memory_bytes
        shares = [share_of(full, self.groups, self.room(), BOOKKEEPING_BYTES)]
        return min([*shares, share_of(full, self.groups, fixed, 0)] if fixed else shares)

    def host_pages(self) -> tuple[int, ...]:
        """Return the number of host pages of each group, in the proportion of the pages.

        All 0 if one would have none.
        """
        full = self._full()
        share = min(Fraction(self.seqs), share_of(full, self.groups, self.problem.swap, BOOKKEEPING_BYTES))
        pages = tuple(int(n * share) + 1 for n in full)
        return pages if min(pages) > 1 else (0,) * len(full)

    def _full(self) -> list[int]:
        return [g.most_pages(self.length) for g in self.groups]


def snapshot_grid(page_tokens: int, wanted: float) -> int:
    """Return the tokens of 1, 2, 4, ... pages that are nearest to `wanted`, and at least LEAST_SNAPSHOT."""
    tokens = page_tokens
    while tokens < LEAST_SNAPSHOT or tokens * sqrt(2) <= wanted:
        tokens *= 2
    return tokens


def left_prefix(length: int) -> int:
    """Return the tokens of the prefix that a sequence of at most `length` tokens is assumed to leave for others."""
    return min(PREFIX_TOKENS, length)


def snapshot_bytes(groups: Sequence[StateGroup]) -> int:
    """Return the bytes of the state of all recurrent layers; 0 if there are none."""
    return sum(g.page_bytes for g in groups if g.snapshot)


def with_snapshots(groups: Sequence[StateGroup], tokens: int) -> tuple[StateGroup, ...]:
    """Return the groups with `tokens` tokens between two snapshots."""
    return tuple(replace(g, page_tokens=tokens) if g.snapshot else g for g in groups)


def num_pages(
    groups: Sequence[StateGroup], length: int, seqs: int, affordable: Callable[[Sequence[int]], Fraction]
) -> tuple[int, ...]:
    """Return the number of pages of each group, null pages included.

    They serve `seqs` sequences of `length` tokens and the snapshots that these leave, or fewer by one factor.
    affordable: returns how many sequences fit that have a given number of pages of each group.
    """
    full = [g.most_pages(length) for g in groups]
    prefix = left_prefix(length)
    more = [n + (prefix // g.page_tokens if g.snapshot else 0) for n, g in zip(full, groups, strict=True)]
    share = affordable(more)
    if share < 1:  # not even one sequence with all of its snapshots
        more, share = full, affordable(full)
    return tuple(int(n * min(Fraction(seqs), share)) + 1 for n in more)


def share_of(full: Sequence[int], groups: Sequence[StateGroup], room: int, bookkeeping_bytes: int) -> Fraction:
    """Return the factor on `full` pages of each group that fills `room` bytes, with a null page of each group."""
    sizes = [g.page_bytes + bookkeeping_bytes for g in groups]
    return max(Fraction(room - sum(sizes), sum(n * size for n, size in zip(full, sizes, strict=True))), Fraction(0))
