"""A step as plain data, which can be planned ahead, pickled, sent to other processes, recorded and replayed.

A runner runs plans in the order of their numbers, and each plan in this order:

    1. swap_out (device -> host), swap_in (host -> device), copies (device -> device): whole pages
    2. the deltas of every Work into the page tables [group][row][index]
    3. the forward pass over all works

In a diffusion model, drafts are the open block, or the whole sequence: none of them is accepted (blocks.py).

A Work runs the tokens at positions [start, start + len(tokens)). A token LAST is the one that its row sampled in the
step before. The drafts begin at limit = start + len(tokens) - num_draft.

    row groups       every token, drafts included, reads rows [token - lookback, token) and the rows of
                     [0, first_tokens) before it, and writes its own row. Rows after the accepted tokens are garbage
                     that a later step overwrites. If the drafts form a tree (`parents`), a draft reads the known tokens
                     and its ancestors, and its position is the one after them; its row is in the slot
                     limit + its index. Before the next step, the device moves the rows of the accepted drafts
                     to the slots of their positions.
    snapshot groups  replay_from <= start: the page table[(replay_from - 1) // T] holds the state after replay_from
                     tokens (0: the empty state). Tokens [replay_from, start) are drafts that the last step of this row
                     had accepted: the device kept their inputs and replays them. The state after `limit` tokens goes
                     to page table[(limit - 1) // T]. The device keeps the drafts' inputs with the row, but no states.

             replay_from       start         limit          start + len(tokens)
        ----------|--------------|-------------|---------------|
         in pages   kept inputs    known tokens  drafts
                                               ^ the state that this step leaves in pages
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ridgeline.errors import RequestError
from ridgeline.spec.request import TokenLogprobs
from ridgeline.spec.trees import depths

LAST = -1


class PageDelta(NamedTuple):
    """Entries [first, first + len(pages)) of row `row` of a group's page table; NULL_PAGE: no page."""

    group: int
    row: int
    first: int
    pages: tuple[int, ...]


class PageCopy(NamedTuple):
    """A copy of page `src` of a group to page `dst`; for a swap one of them is on the host."""

    group: int
    src: int
    dst: int


class Work(NamedTuple):
    """Some tokens of one sequence: a prefill chunk, a decode, or the verification of drafts; see the top of the file.

    row: the sequence's row in the device's tables while it runs; it may pass to another sequence while an older step is
    in flight. epoch: a number that changes with each preemption, so that old results are ignored. sample: the logits of
    the last known token, and of the drafts, are sampled. parents: the parent of each draft of a tree (trees.py).
    wanted: the first and the end of the tokens whose logits are sampled instead, if most drafts are not predicted.
    reads: if the work is a part of a whole sequence, whose other rows stay as an earlier pass left them: the number of
    rows of its sequence, all of which its tokens read. 0: its tokens read no rows after their own.
    signal: if the drafts are a canvas, which is a pass of its own: the mean embedding of each token's last prediction,
    float32 [num_draft, hidden size]. adapter: the slot of its sequence's adapter; -1: none.
    """

    sequence: int
    row: int
    epoch: int
    start: int
    tokens: tuple[int, ...]
    sample: bool
    replay_from: int
    num_draft: int = 0
    deltas: tuple[PageDelta, ...] = ()
    floor: int = 0
    parents: tuple[int, ...] = ()
    wanted: tuple[int, int] | None = None
    signal: Any = None
    reads: int = 0
    adapter: int = -1

    @property
    def limit(self) -> int:
        """Return the number of tokens of its sequence that are computed for good once it has run."""
        return 0 if self.reads else self.start + self.known

    @property
    def known(self) -> int:
        """Return the number of tokens that are no drafts."""
        return len(self.tokens) - self.num_draft

    @property
    def rows(self) -> range:
        """Return the indices of the tokens whose logits are sampled: the last known one, if any, and the drafts."""
        if self.wanted is not None:
            return range(*self.wanted)
        return range(max(0, len(self.tokens) - self.num_draft - 1), len(self.tokens))

    @property
    def num_rows(self) -> int:
        """Return the number of rows of logits that are sampled."""
        return len(self.rows)

    @property
    def depth(self) -> int:
        """Return how many drafts can be accepted."""
        return max(depths(self.parents)) + 1 if self.parents else self.num_draft


class StepPlan(NamedTuple):
    """One step. `works` is empty if the step only swaps pages."""

    step: int
    works: tuple[Work, ...]
    copies: tuple[PageCopy, ...] = ()
    swap_out: tuple[PageCopy, ...] = ()
    swap_in: tuple[PageCopy, ...] = ()


class Result(NamedTuple):
    """The result of a Work: the accepted drafts and one token after them; no tokens if it was not sampled.

    ended: the last token is an end of sequence or a stop token. A sampling work may give no token: the sequence then
    pauses. Either it is forked or ended later, as beams are (without drafts), or it is held and its token comes later
    (`Scheduler.hold`). In both cases its `waits` must be set, so that it is in no later step.
    The scheduler does not look at the other fields. logprobs: an entry for each token, if the request wants them.
    path: indices of the accepted drafts of a tree.
    error: why no token could be sampled. prompt_logprobs: entries of the prompt's tokens that this step computed, if
    the request wants them.
    """

    tokens: tuple[int, ...] = ()
    ended: bool = False
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: RequestError | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    path: tuple[int, ...] = ()


class Update(NamedTuple):
    """New tokens of a sequence after a commit. finished: it is over, and its pages are released."""

    sequence: int
    tokens: tuple[int, ...]
    finished: bool
