"""A fake device that checks what every page contains, and a fake model whose next token is a hash of all before it.

The device only gets StepPlans: from these it keeps its own page tables, its own pages through copies and swaps, and its
own inputs of drafts. A Script, which the test passes, says which tokens a sequence must contain. The content of a row
or a snapshot is the hash of all tokens up to it. So a read finds a page of another position or sequence, a page that
was not written yet, and a page from before a preemption.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ridgeline.sched import LAST, PageCopy, Result, StepPlan, Work
from ridgeline.spec.groups import NULL_PAGE, StateGroup
from ridgeline.spec.regimes import NO_REGIMES, Regimes
from ridgeline.spec.trees import child_with

VOCAB = 50
EOS = 0
MASK = (1 << 64) - 1


def mix(state: int, token: int) -> int:
    """Return the hash after one more token."""
    state = ((state ^ (token + 0x9E3779B97F4A7C15)) * 0xBF58476D1CE4E5B9) & MASK
    return state ^ (state >> 29)


@dataclass
class Script:
    """The tokens that a sequence must contain: its prompt, then the model's. `seed` is its sampling noise.

    A state also depends on the floor of the sequence (spec/regimes.py), and a token on the state under the floor for
    its length. num_prompt: number of prompt tokens; None: all of `given`.
    """

    given: tuple[int, ...]
    seed: int
    root: bytes = b""
    regimes: Regimes = NO_REGIMES
    num_prompt: int | None = None
    tokens: list[int] = field(default_factory=list)
    states: dict[int, list[int]] = field(default_factory=dict)  # the states of each floor

    def floor(self, length: int) -> int:
        """Return the floor of the sequence when it has `length` tokens."""
        return self.regimes.floor(len(self.given) if self.num_prompt is None else self.num_prompt, length)

    def _extend(self, length: int) -> None:
        while (n := len(self.tokens)) < length:
            given = n < len(self.given)
            self.tokens.append(self.given[n] if given else mix(self.state(n, self.floor(n)), self.seed) % VOCAB)

    def token(self, position: int) -> int:
        self._extend(position + 1)
        return self.tokens[position]

    def state(self, length: int, floor: int) -> int:
        """Return the hash of the first `length` tokens under a floor."""
        self._extend(length)
        begin = int.from_bytes(self.root[:7].ljust(7, b"x"), "little")
        states = self.states.setdefault(floor, [mix(begin, floor) if floor else begin])
        for token in self.tokens[len(states) - 1 : length]:
            states.append(mix(states[-1], token))
        return states[length]

    def state_after(self, length: int, others: tuple[int, ...], floor: int) -> int:
        state = self.state(length, floor)
        for token in others:
            state = mix(state, token)
        return state


Page = dict[Any, Any]  # rows: index -> hash; a snapshot: "state" -> (position, hash)


class FakeDevice:
    """Runs plans at once and in order; `committed` is the last step that the test has committed to the scheduler."""

    def __init__(self, groups: tuple[StateGroup, ...]) -> None:
        self.groups = groups
        self.scripts: dict[int, Script] = {}
        self.step = 0
        self.committed = 0
        self.pages: list[dict[int, Page]] = [{} for _ in groups]
        self.host: list[dict[int, Page]] = [{} for _ in groups]
        self.tables: dict[tuple[int, int], dict[int, int]] = {}  # (group, row) -> index -> page
        self.owner: dict[int, tuple[int, int]] = {}  # row -> sequence, epoch
        self.last: dict[int, tuple[int, int]] = {}  # row -> sequence, position of the last sampled token
        self.kept: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # row -> sequence, position, drafts from there
        self.touched: dict[tuple[str, int, int], int] = {}  # (memory, group, page) -> the newest step that used it
        self.given: set[tuple[str, int, int]] = set()  # pages that the current step hands out
        self.counts = dict.fromkeys(("reads", "copies", "swaps", "replays", "accepted", "moved", "reused"), 0)

    def run(self, plan: StepPlan) -> list[Result]:
        assert plan.step == self.step + 1, "steps out of order"
        self.step = plan.step
        self.given.clear()
        self._swap(plan)
        for copy in plan.copies:
            self._handed_out("device", copy.group, copy.dst)
            self.pages[copy.group][copy.dst] = dict(self.pages[copy.group][copy.src])
            self.counts["copies"] += 1
        rows = [work.row for work in plan.works]
        assert len(set(rows)) == len(rows), "two works on one row"
        for work in plan.works:
            self._table(work)
        return [self._run(work) for work in plan.works]

    # ---- pages ------------------------------------------------------------------------------------------

    def _swap(self, plan: StepPlan) -> None:
        moves: list[tuple[PageCopy, str, Any, str, Any]] = [
            *((move, "device", self.pages, "host", self.host) for move in plan.swap_out),
            *((move, "host", self.host, "device", self.pages) for move in plan.swap_in),
        ]
        for move, source, sources, target, targets in moves:
            self._handed_out(target, move.group, move.dst)
            targets[move.group][move.dst] = dict(sources[move.group].get(move.src, {}))
            self._touch(source, move.group, move.src)
            self._touch(target, move.group, move.dst)
            self.counts["swaps"] += 1

    def _touch(self, memory: str, group: int, page: int) -> None:
        self.touched[memory, group, page] = self.step

    def _handed_out(self, memory: str, group: int, page: int) -> None:
        assert page != NULL_PAGE, "wrote to the null page"
        if (memory, group, page) in self.given:  # a whole page was copied here for the work that now writes to it
            return
        self.given.add((memory, group, page))
        newest = self.touched.get((memory, group, page), 0)
        assert newest <= self.committed, f"{memory} page {page} was handed out again with step {newest} in flight"

    def _table(self, work: Work) -> None:
        if self.owner.get(work.row) != (work.sequence, work.epoch):
            self.owner[work.row] = work.sequence, work.epoch
            self.counts["reused"] += work.start
            for g in range(len(self.groups)):
                self.tables[g, work.row] = {}
        end, limit = work.start + len(work.tokens), work.start + len(work.tokens) - work.num_draft
        for delta in work.deltas:
            assert delta.row == work.row
            group = self.groups[delta.group]
            for index, page in enumerate(delta.pages, delta.first):
                self.tables[delta.group, delta.row][index] = page
                if group.snapshot:  # a page that the work also reads was shared, not handed out
                    fresh = index == (limit - 1) // group.page_tokens != (work.replay_from - 1) // group.page_tokens
                else:
                    fresh = work.start <= index * group.page_tokens < end
                if fresh:
                    self._handed_out("device", delta.group, page)

    def _page(self, g: int, row: int, index: int) -> Page:
        page = self.tables[g, row].get(index, NULL_PAGE)
        assert page != NULL_PAGE, f"{self.groups[g].name}: entry {index} of row {row} is not kept"
        self._touch("device", g, page)
        return self.pages[g].setdefault(page, {})

    # ---- the model --------------------------------------------------------------------------------------

    def _run(self, work: Work) -> Result:
        script, start, row = self.scripts[work.sequence], work.start, work.row
        limit = start + len(work.tokens) - work.num_draft
        drafts = work.tokens[len(work.tokens) - work.num_draft :]
        assert limit > start and start >= work.replay_from
        assert not work.sample or work.floor == script.floor(limit) == script.floor(limit + len(drafts))
        for position, token in enumerate(work.tokens[: limit - start], start):
            if token == LAST:
                assert self.last.get(row) == (work.sequence, position), (
                    "the last token of the row is of another sequence"
                )
            else:
                assert token == script.token(position), f"wrong token at {position}"
        for g, group in enumerate(self.groups):
            if group.snapshot:
                self._run_snapshot(g, work, script, limit)
            else:
                self._run_rows(g, work, script, limit, drafts)
        self.kept[row] = work.sequence, limit, drafts
        if not work.sample:
            assert not drafts
            return Result()
        return self._sample(work, script, limit, drafts)

    def _run_rows(self, g: int, work: Work, script: Script, limit: int, drafts: tuple[int, ...]) -> None:
        group, size = self.groups[g], self.groups[g].page_tokens
        back = max(0, work.start - group.lookback)
        for position in (*range(min(group.first_tokens, back)), *range(back, work.start)):
            held = self._page(g, work.row, position // size).get(position % size)
            assert held == script.state(position + 1, work.floor), (
                f"{group.name}: wrong row at {position} of {work.start}"
            )
            self.counts["reads"] += 1
        rows = [(p, script.state(p + 1, work.floor)) for p in range(work.start, limit)]
        for i in range(len(drafts)):
            path = tuple(drafts[j] for j in ancestors(work.parents, i))
            rows.append((limit + i, script.state_after(limit, path, work.floor)))
        for position, state in rows:
            self._page(g, work.row, position // size)[position % size] = state

    def _run_snapshot(self, g: int, work: Work, script: Script, limit: int) -> None:
        group, size, begin = self.groups[g], self.groups[g].page_tokens, work.replay_from
        if begin:
            held = self._page(g, work.row, (begin - 1) // size).get("state")
            assert held == (begin, script.state(begin, work.floor)), f"{group.name}: wrong state at {begin}: {held}"
            self.counts["reads"] += 1
        if work.start > begin:
            owner, position, drafts = self.kept[work.row]
            assert (owner, position) == (work.sequence, begin), "the stored inputs are of other positions"
            replayed = [script.token(p) for p in range(begin, work.start)]
            assert list(drafts[: work.start - begin]) == replayed, "a rejected draft is replayed"
            self.counts["replays"] += 1
        self._page(g, work.row, (limit - 1) // size)["state"] = (limit, script.state(limit, work.floor))

    def _sample(self, work: Work, script: Script, limit: int, drafts: tuple[int, ...]) -> Result:
        """Return the longest path of right drafts and one more token, up to an end of sequence. Move its rows."""
        self.last[work.row] = work.sequence, limit
        tokens, path = [script.token(limit)], list[int]()
        while tokens[-1] != EOS:
            node = child_with(work.parents, drafts, path[-1] if path else -1, tokens[-1])
            if node is None:
                break
            path.append(node)
            tokens.append(script.token(limit + len(tokens)))
            self.counts["accepted"] += 1
        for g, group in enumerate(self.groups):
            for source, target in [(limit + node, limit + depth) for depth, node in enumerate(path) if work.parents]:
                size = group.page_tokens
                held = self._page(g, work.row, source // size)[source % size]
                self._page(g, work.row, target // size)[target % size] = held
                self.counts["moved"] += source != target
        return Result(tuple(tokens), tokens[-1] == EOS)


def ancestors(parents: tuple[int, ...], node: int) -> list[int]:
    """Return the drafts on the path to a draft, itself included; without parents they are a chain."""
    if not parents:
        return list(range(node + 1))
    return [*(ancestors(parents, parents[node]) if parents[node] >= 0 else ()), node]
