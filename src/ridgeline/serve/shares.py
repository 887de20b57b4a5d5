"""Share the engine between API keys: requests wait here, and the key that has had least of its share goes first."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

from ridgeline.serve.keys import Keys
from ridgeline.spec.request import OutputChunk


class _Waiting(NamedTuple):
    """A request that waits: its answers, the tokens of its prompts, and what ends the wait."""

    answers: int
    tokens: int
    turn: asyncio.Future[None]


class Shares:
    """Lets at most `slots` answers run at once, and orders those that wait by weighted fair queueing.

    weight_of: returns a key's weight. A key's work is its tokens divided by its weight; the waiting key with the least
    work goes next, and requests of one key by arrival. A key that was idle starts at the least work of the busy ones,
    so that it cannot save up turns.
    """

    def __init__(self, slots: int, weight_of: Callable[[bytes | None], float]) -> None:
        self._slots, self._weight_of = slots, weight_of
        self._running: defaultdict[bytes | None, int] = defaultdict(int)
        self._queues: dict[bytes | None, deque[_Waiting]] = {}
        self._work: defaultdict[bytes | None, float] = defaultdict(float)

    def waiting(self, key: bytes | None) -> int:
        """Return the number of requests of a key that wait."""
        return len(self._queues.get(key, ()))

    async def enter(self, key: bytes | None, answers: int, tokens: int) -> None:
        """Wait for the turn of a request. tokens: the number of tokens of its prompts."""
        busy = {*self._queues, *(other for other, count in self._running.items() if count)} - {key}
        if busy and not self._running[key] and key not in self._queues:
            self._work[key] = max(self._work[key], min(self._work[other] for other in busy))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(key, deque()).append(_Waiting(answers, tokens, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave(key, answers)
            else:
                self._drop(key, turn)
            raise

    def charge(self, key: bytes | None, tokens: int) -> None:
        """Count tokens of answers as work of their key."""
        self._work[key] += tokens / self._weight_of(key)

    def leave(self, key: bytes | None, answers: int) -> None:
        """Free the slots of a request."""
        self._running[key] -= answers
        self._admit()

    def _admit(self) -> None:
        """Let requests go while there are slots. A request for more answers than slots goes once no other runs."""
        while self._queues:
            key = min(self._queues, key=lambda one: self._work[one])
            first, running = self._queues[key][0], sum(self._running.values())
            if running and running + first.answers > self._slots:
                return
            self._pop(key)
            self._running[key] += first.answers
            self.charge(key, first.tokens + first.answers)
            first.turn.set_result(None)

    def _pop(self, key: bytes | None) -> None:
        self._queues[key].popleft()
        if not self._queues[key]:
            del self._queues[key]

    def _drop(self, key: bytes | None, turn: asyncio.Future[None]) -> None:
        """Remove a request that does not wait any more."""
        left = deque(one for one in self._queues[key] if one.turn is not turn)
        if left:
            self._queues[key] = left
        else:
            del self._queues[key]
        self._admit()


class Bill:
    """Counts the tokens of one request's answers for its key, and frees its slots at the end."""

    def __init__(self, keys: Keys, shares: Shares | None, key: bytes | None, answers: int) -> None:
        self._keys, self._shares, self._key, self._answers = keys, shares, key, answers

    def count(self, chunk: OutputChunk) -> None:
        """Count the tokens of a chunk of a stream."""
        self._add(len(chunk.token_ids))

    def count_whole(self, chunk: OutputChunk) -> None:
        """Count the tokens of a whole answer, which the last chunk has."""
        if chunk.output is not None:
            self._add(sum(len(answer.token_ids) for answer in chunk.output.outputs))

    def _add(self, tokens: int) -> None:
        self._keys.charge(self._key, tokens)
        if self._shares is not None:
            self._shares.charge(self._key, tokens)

    def close(self) -> None:
        """Free the slots."""
        if self._shares is not None:
            self._shares.leave(self._key, self._answers)
