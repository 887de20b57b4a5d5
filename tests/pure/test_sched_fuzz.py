"""Run the scheduler against the fake device: fresh seeds, every mix of state groups, every event of a request."""

from __future__ import annotations

import pickle
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import pytest
from sched_device import EOS, VOCAB, FakeDevice, Script

from ridgeline.sched import Priority, Result, Scheduler, Sequence, StepPlan, fcfs, hash_root
from ridgeline.sched.work import Update
from ridgeline.spec.groups import StateGroup
from ridgeline.spec.regimes import NO_REGIMES, Regimes
from ridgeline.spec.state import ALL
from ridgeline.spec.trees import as_parents

KV = StateGroup("kv", 4, ALL, 64)
WINDOW = StateGroup("window", 4, 11, 64)
LATENT = StateGroup("latent", 8, ALL, 16)
STATE = StateGroup("state", 16, 1, 256, snapshot=True)
FIRST = StateGroup("first and window", 4, 11, 64, first_tokens=6)
MIXES = {
    "kv": (KV,),
    "kv, window": (KV, WINDOW),
    "snapshot": (STATE,),
    "kv, snapshot": (KV, STATE),
    "a snapshot at every token": (StateGroup("state", 1, 1, 256, snapshot=True),),
    "kv, latent, window, snapshot": (KV, LATENT, WINDOW, STATE),
    "first tokens": (FIRST,),
    "kv, first tokens, window, snapshot": (KV, FIRST, WINDOW, STATE),
    "first tokens beyond the window, large pages": (StateGroup("first", 8, 3, 64, first_tokens=33), WINDOW),
    "pages of one token, two windows": (
        StateGroup("kv", 1, ALL, 8),
        StateGroup("narrow", 2, 0, 8),
        StateGroup("window", 8, 5, 8),
    ),
    "odd pages, two snapshots": (
        StateGroup("kv", 12, ALL, 8),
        StateGroup("state", 32, 1, 8, snapshot=True),
        StateGroup("fine", 4, 1, 8, snapshot=True),
    ),
}
# No regimes; one length or two lengths at which sequences are recomputed; rotations that depend on the prompt's length;
# both.
REGIMES = (
    NO_REGIMES, NO_REGIMES, Regimes((40,), (40,)), Regimes((71,), (71,)), Regimes((9, 83), (9, 83)),
    Regimes(range(50, 124), (), 50), Regimes((20, *range(50, 124)), (20, 90), 50),
)  # fmt: skip
STOP = 1  # this token ends a request one step late, as a stop string does
MAX_STEPS = 20_000
MAX_FORKS = 20  # at most, in one run


@dataclass
class Request:
    """A request with the tokens that the test expects."""

    tokens: list[int]  # the prompt, then the tokens of updates
    num_prompt: int
    max_length: int
    root: bytes
    stops: bool
    over: bool = False
    aborted: bool = False


@dataclass
class Search:
    """A beam search: its live beams, and the beams whose step gave candidates. It continues when all beams have
    candidates.
    """

    width: int
    live: list[int]
    ready: set[int] = field(default_factory=set)


@dataclass
class Fuzz:
    """One run: a random pool, random requests, and every event that a request may have."""

    groups: tuple[StateGroup, ...]
    seed: int
    num_requests: int = 20
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        self.longest = 124
        most = [group.most_pages(self.longest) for group in self.groups]
        self.regimes = random.Random(self.seed + 2).choice(REGIMES)
        self.sequences: list[Sequence] = []
        scale = rng.choice([1.0, 1.3, 2.0, 6.0])
        more, host = rng.choice([0, 0, 12]), rng.choice([0, 1, 3])
        self.scheduler = Scheduler(
            self.groups,
            [int(n * scale) + more + 1 for n in most],
            max_batch_tokens=rng.choice([5, 16, 33, 64, 200]),
            max_seqs=rng.randint(1, 12),
            num_host_pages=[n * host + 1 for n in most],
            policy=rng.choice([fcfs, Priority(patience=8)]),
            swap_cost=(lambda tokens, num_bytes: rng.choice(["swap", "recompute"])) if host else None,
            regimes=self.regimes,
        )
        self.device = FakeDevice(self.groups)
        self.depth = rng.choice([1, 2])
        self.drafting, self.forking = rng.random() < 0.5, rng.random() < 0.5
        self.searching = 0.3 if self.depth == 1 and rng.random() < 0.5 else 0.0
        self.searches: dict[int, Search] = {}  # each search under the number of each of its live beams
        self.aborting = rng.choice([0.0, 0.0, 0.03])
        self.requests: dict[int, Request] = {}
        self.flight: deque[tuple[StepPlan, list[Result]]] = deque()
        self.chance = random.Random(self.seed + 1)  # decides which tokens are late
        self.lateness = self.chance.choice([0.0, 0.1, 0.5])
        self.late: dict[int, tuple[int, Result]] = {}  # late tokens with their steps, by sequence
        self.bases = [[rng.randrange(2, VOCAB) for _ in range(70)] for _ in range(3)]
        self.roots = [hash_root(), hash_root(cache_salt="a"), hash_root(adapter="a")]

    def run(self) -> Counter[str]:
        rng, scheduler = self.rng, self.scheduler
        todo, steps = self.num_requests, 0
        while todo or len(scheduler) or self.flight:
            for _ in range(min(todo, rng.randint(0, 3))):
                self.add()
                todo -= 1
            self.give()
            plan = scheduler.schedule()
            assert plan or self.flight or self.late or not len(scheduler), "no progress"
            if plan:
                plan = pickle.loads(pickle.dumps(plan))
                self.flight.append((plan, self.device.run(plan)))
                self.hold(*self.flight[-1])
            if rng.random() < self.aborting:
                self.abort()
            if self.flight and (len(self.flight) >= self.depth or not plan):
                self.commit()
            scheduler.check()
            steps += 1
            assert steps < MAX_STEPS, f"the run does not end within {MAX_STEPS} steps"
        self.finish()
        self.counts["steps"] = steps
        return self.counts

    # ---- events -------------------------------------------------------------------------------------

    def add(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.bases)[: rng.randint(0, 70)] + [
            rng.randrange(2, VOCAB) for _ in range(rng.randint(0, 14))
        ]
        prompt = prompt or [2]
        max_tokens = rng.randint(1, self.longest - len(prompt))
        root = rng.choice(self.roots)
        priority = rng.randint(-2, 2)
        if rng.random() < self.searching:
            self.begin_search(prompt, min(max_tokens, 12), root, priority)
            return
        choices = rng.randint(2, 5) if rng.random() < 0.2 else 1
        family = [self.make(prompt, len(prompt), max_tokens, root, priority) for _ in range(choices)]
        self.scheduler.add(family[0], family[1:])

    def make(self, tokens: list[int], num_prompt: int, max_tokens: int, root: bytes, priority: int) -> Sequence:
        number = len(self.requests)
        self.requests[number] = Request(
            list(tokens), num_prompt, num_prompt + max_tokens, root, self.rng.random() < 0.5
        )
        script = Script(tuple(tokens), self.rng.randrange(1000), root, self.regimes, num_prompt)
        self.device.scripts[number] = script
        self.sequences.append(Sequence(number, list(tokens), max_tokens, priority, root, num_prompt))
        return self.sequences[-1]

    def begin_search(self, prompt: list[int], max_tokens: int, root: bytes, priority: int) -> None:
        first = self.make(prompt, len(prompt), max_tokens, root, priority)
        self.scheduler.add(first)
        self.searches[first.id] = Search(self.rng.randint(2, 6), [first.id])

    def advance(self, search: Search) -> None:
        """Choose a random parent for each new beam of a search in which all beams have candidates."""
        parents = [self.rng.choice(search.live) for _ in range(search.width)]
        beams: list[int] = []
        for number in sorted(search.live, key=parents.count):
            parent, beam_tokens = self.requests[number], self.rng.sample(range(2, VOCAB), search.width)
            max_tokens = parent.max_length - parent.num_prompt
            if parent.max_length - len(parent.tokens) > 1:
                for token in beam_tokens[: parents.count(number)]:
                    child = self.make([*parent.tokens, token], parent.num_prompt, max_tokens, parent.root, 0)
                    self.scheduler.fork(number, child)
                    self.counts["beams"] += 1
                    beams.append(child.id)
            self.scheduler.abort(number)
            parent.over = parent.aborted = True
            del self.searches[number]
        search.live, search.ready = beams, set()
        self.searches |= dict.fromkeys(beams, search)

    def abort(self) -> None:
        live = [number for number, request in self.requests.items() if not request.over]
        if live:
            number = self.rng.choice(live)
            search = self.searches.get(number)
            for member in [number] if search is None else search.live:  # all beams of a search are aborted together
                assert self.scheduler.abort(member)
                assert not self.scheduler.abort(member)
                self.requests[member].over = self.requests[member].aborted = True
                self.searches.pop(member, None)

    def hold(self, plan: StepPlan, results: list[Result]) -> None:
        """Delay some tokens of the step."""
        for i, work in enumerate(plan.works):
            if work.sample and work.sequence not in self.searches and self.chance.random() < self.lateness:
                token = results[i].tokens[0]
                self.late[work.sequence] = plan.step, Result((token,), results[i].ended and len(results[i].tokens) == 1)
                self.scheduler.hold(work.sequence)
                results[i] = Result()

    def give(self) -> None:
        """Give some of the late tokens to the scheduler."""
        for number, (step, result) in list(self.late.items()):
            if self.requests[number].over or not self.scheduler.is_held(number):
                del self.late[number]
            elif step <= self.device.committed and self.chance.random() < 0.5:
                del self.late[number]
                self.counts["late"] += 1
                self.take(self.scheduler.give(number, result))

    def take(self, update: Update) -> None:
        request = self.requests[update.sequence]
        assert not request.over, "tokens for a request that has ended"
        request.tokens += update.tokens
        request.over = update.finished
        if request.stops and STOP in update.tokens and not request.over:
            self.scheduler.abort(update.sequence)
            request.over = True

    def commit(self) -> None:
        rng = self.rng
        plan, results = self.flight.popleft()
        paused = []
        for i, work in enumerate(plan.works):
            if work.sample and work.sequence in self.searches:
                results[i] = Result()
                self.searches[work.sequence].ready.add(work.sequence)
        if self.forking and self.depth == 1:
            for i, work in enumerate(plan.works):
                can = work.sample and not work.num_draft and self.counts["forks"] < MAX_FORKS
                can = can and work.sequence not in self.searches and bool(results[i].tokens)
                if can and rng.random() < 0.05:
                    results[i] = Result()
                    paused.append(work.sequence)
        updates = self.scheduler.commit(plan, results)
        self.device.committed = plan.step
        assert len({u.sequence for u in updates}) == len(updates)
        for update in updates:
            self.take(update)
        for number in paused:
            if not self.requests[number].over:
                self.branch(number, both=True)
        for search in {id(s): s for s in self.searches.values()}.values():
            if search.ready == set(search.live):
                self.advance(search)
        for number, request in list(self.requests.items()):
            if not request.over and number not in self.searches and number not in self.late:
                if self.forking and self.depth == 1 and self.counts["forks"] < MAX_FORKS and rng.random() < 0.01:
                    self.branch(number, both=False)
                if self.drafting and rng.random() < 0.5:
                    self.propose(number, len(request.tokens))

    def branch(self, number: int, *, both: bool) -> None:
        """Fork a sequence as beams do: add another token at the end of the parent, or replace
        the parent by two forks.
        """
        parent = self.requests[number]
        known = parent.tokens if both else parent.tokens[: max(parent.num_prompt, len(parent.tokens) - 1)]
        for token in self.rng.sample(range(2, VOCAB), 1 + both):
            room = parent.max_length - len(known) - 1
            if room > 0:
                max_tokens = parent.max_length - parent.num_prompt
                self.scheduler.fork(number, self.make([*known, token], parent.num_prompt, max_tokens, parent.root, 0))
                self.counts["forks"] += 1
        if both:
            self.scheduler.abort(number)
            parent.over = parent.aborted = True

    def propose(self, number: int, known: int) -> None:
        script, rng = self.device.scripts[number], self.rng
        drafts = [script.token(known + i) if rng.random() < 0.8 else rng.randrange(VOCAB) for i in range(6)]
        drafts = drafts[: rng.randint(0, 6)]
        if any(group.snapshot for group in self.device.groups) or rng.random() < 0.5:
            self.scheduler.propose(number, drafts)
            return
        tree, parents = list[int](), list[int]()  # wrong drafts among those of the chain
        last = -1
        while drafts or rng.random() < 0.3:
            right = drafts and rng.random() < 0.6
            parents.append(last if right else rng.randint(-1, len(tree) - 1))
            tree.append(drafts.pop(0) if right else rng.randrange(VOCAB))
            last = len(tree) - 1 if right else last
        self.scheduler.propose(number, tree, as_parents(parents, len(tree)))

    # ---- checks at the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Check that every request has the tokens of the model, recomputed from the start, and that it ended where it
        must.
        """
        for number, request in self.requests.items():
            assert request.over
            script = self.device.scripts[number]
            again = Script(script.given, script.seed, script.root, self.regimes, script.num_prompt)
            expected = [again.token(i) for i in range(len(request.tokens))]
            assert request.tokens == expected, f"wrong tokens in {number}"
            made = request.tokens[len(script.given) :]
            ends = [i for i, t in enumerate(made) if t == EOS or (t == STOP and request.stops)]
            if request.aborted:
                assert len(request.tokens) <= request.max_length
            elif ends:
                # With a late stop, accepted drafts may follow the stop token; an end of sequence is always the last
                # token.
                assert ends[0] == len(made) - 1 or made[ends[0]] == STOP
            else:
                assert len(request.tokens) == request.max_length, f"{number} ended early"
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        assert all(g.used_pages == g.host_pages_used == 0 for g in stats.groups), "pages were lost"
        assert 0 <= stats.hit_rate < 1
        self.counts.update(self.device.counts)
        self.counts.update(
            restarts=sum(seq.num_restarts for seq in self.sequences),
            hit_tokens=stats.hit_tokens,
            recomputes=stats.preempted_recompute,
            swapped=stats.preempted_swap,
        )


def fuzz(groups: tuple[StateGroup, ...], seed: int) -> Counter[str]:
    try:
        return Fuzz(groups, seed).run()
    except Exception as e:
        raise AssertionError(f"seed {seed}: {type(e).__name__}: {e}") from e


def many(mix: str, seeds: list[int], *, complete: bool = True) -> None:
    total: Counter[str] = Counter()
    for seed in seeds:
        total += fuzz(MIXES[mix], seed)
    # A fuzz that no longer contains the difficult cases proves nothing.
    hard = ["steps", "swaps", "accepted", "hit_tokens", "recomputes", "swapped", "forks", "beams", "late", "restarts"]
    # a fork copies a page that is partly filled
    hard += ["copies"] if any(group.page_tokens > 1 for group in MIXES[mix]) else []
    hard += ["replays"] if any(group.snapshot for group in MIXES[mix]) else []
    missed = [name for name in hard if not total[name]]
    assert not (complete and missed), f"never happened in {seeds}: {missed}; {dict(total)}"


@pytest.mark.parametrize("mix", MIXES)
def test_fixed_seeds(mix: str) -> None:
    many(mix, list(range(16)))


@pytest.mark.parametrize("mix", MIXES)
def test_fresh_seeds(mix: str) -> None:
    many(mix, [random.SystemRandom().randrange(1 << 32) for _ in range(4)], complete=False)


@pytest.mark.nightly
@pytest.mark.parametrize("mix", MIXES)
def test_many_fresh_seeds(mix: str) -> None:
    many(mix, [random.SystemRandom().randrange(1 << 32) for _ in range(500)])
