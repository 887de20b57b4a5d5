"""Choose the replica of a request: plain functions of the request and of the replicas' state.

The simulator and the server call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import Any, Protocol


class Request(Protocol):
    """Describes a request to a router."""

    @property
    def prompt_tokens(self) -> int:
        """Return the number of tokens of its prompt."""
        ...


class ReplicaState(Protocol):
    """The state of a replica for a router. pending_tokens: prompt tokens of requests without a token yet."""

    pending_tokens: int

    @property
    def live(self) -> int:
        """Return the number of requests that are not over."""
        ...

    def cached_tokens(self, request: Any) -> int:
        """Return how many tokens of a prompt the prefix index holds."""
        ...


# Called with the request, the replicas, the request's number from 0 and a random generator; the replica's number.
Route = Callable[[Request, Sequence[ReplicaState], int, Random], int]


def round_robin(request: Request, replicas: Sequence[ReplicaState], number: int, chance: Random) -> int:
    """Choose replicas in turn."""
    return number % len(replicas)


def least_loaded(request: Request, replicas: Sequence[ReplicaState], number: int, chance: Random) -> int:
    """Choose the replica with the fewest requests; of equals the one with the fewest tokens to compute."""
    return min(range(len(replicas)), key=lambda i: (replicas[i].live, replicas[i].pending_tokens))


def power_of_two(request: Request, replicas: Sequence[ReplicaState], number: int, chance: Random) -> int:
    """Choose the less loaded of two random replicas (Mitzenmacher, IEEE TPDS 12(10), 2001)."""
    pair = chance.sample(range(len(replicas)), min(2, len(replicas)))
    return min(pair, key=lambda i: (replicas[i].live, replicas[i].pending_tokens))


def prefix_aware(request: Request, replicas: Sequence[ReplicaState], number: int, chance: Random) -> int:
    """Choose the replica with the fewest tokens to compute until this prompt is done; of equals the least loaded."""

    def ahead(i: int) -> tuple[int, int]:
        replica = replicas[i]
        return replica.pending_tokens + request.prompt_tokens - replica.cached_tokens(request), replica.live

    return min(range(len(replicas)), key=ahead)


ROUTES: Mapping[str, Route] = MappingProxyType({
    "round-robin": round_robin, "least-loaded": least_loaded, "power-of-two": power_of_two, "prefix": prefix_aware,
})  # fmt: skip
