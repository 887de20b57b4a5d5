"""API keys with limits of their own: requests and tokens a minute, and a share of the queue."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.serve.http.errors import APIError

OPTION = "--api-keys"
MAX_KEYS = 10_000
MAX_RATE = 10**12  # a minute
MAX_WEIGHT = 1000.0
FIELDS = frozenset({"key", "name", "requests_per_minute", "tokens_per_minute", "weight"})

# The hash of the key whose request the current task answers; None without keys.
CURRENT: ContextVar[bytes | None] = ContextVar("key", default=None)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key's name and limits. None: no limit. weight: its share of the queue, relative to other keys."""

    name: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    weight: float = 1.0


def keys_of(found: Mapping[str, Any], file: str) -> dict[bytes, ApiKey]:
    """Return the keys of a file by their SHA-256 hash. Raises RequestError, which names the entry but no key."""
    entries = found.get("keys")
    if found.keys() != {"keys"} or not isinstance(entries, list) or not 1 <= len(entries) <= MAX_KEYS:
        raise RequestError(f"{OPTION} {file} must have one list `keys` of 1 to {MAX_KEYS} entries")
    keys: dict[bytes, ApiKey] = {}
    for number, entry in enumerate(entries, 1):
        where = f"{OPTION} {file}: entry {number} of keys"
        if not isinstance(entry, dict):
            raise RequestError(f"{where} is not a table; write key, name and limits")
        digest, key = _entry(entry, where)
        if digest in keys or key.name in {other.name for other in keys.values()}:
            raise RequestError(f"{where} has the key or the name of an earlier entry; each must be unique")
        keys[digest] = key
    return keys


def _entry(entry: Mapping[str, Any], where: str) -> tuple[bytes, ApiKey]:
    if unknown := sorted(map(str, entry.keys() - FIELDS)):
        raise RequestError(f"{where} has the unknown field {unknown[0]:.40}; known are {', '.join(sorted(FIELDS))}")
    for name in ("key", "name"):
        if not isinstance(entry.get(name), str) or not entry[name].strip():
            raise RequestError(f"{where} has no text `{name}`")
    for name in ("requests_per_minute", "tokens_per_minute"):
        value = entry.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_RATE):
            raise RequestError(f"{where}: {name} is {value!r:.40}; it must be a whole number from 1 to {MAX_RATE}")
    weight = entry.get("weight", 1.0)
    if type(weight) not in (int, float) or not 0 < weight <= MAX_WEIGHT:
        raise RequestError(f"{where}: weight is {weight!r:.40}; it must be above 0 and at most {MAX_WEIGHT:g}")
    limits = {name: entry.get(name) for name in ("requests_per_minute", "tokens_per_minute")}
    return hashlib.sha256(entry["key"].strip().encode()).digest(), ApiKey(entry["name"], **limits, weight=weight)


class Bucket:
    """Holds what a key may still use. It refills evenly, up to a minute's worth. It may fall below 0, since the tokens
    of an answer are known only at its end.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute, self._level, self._at = per_minute, float(per_minute), now

    def level(self, now: float) -> float:
        """Return what is left."""
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Use an amount."""
        self._level = self.level(now) - amount

    def wait(self, amount: float, now: float) -> float:
        """Return the seconds until this much is left."""
        return max(0.0, (amount - self.level(now)) * 60 / self.per_minute)


@dataclass(slots=True)
class Use:
    """The use of one key. requests, tokens: its buckets, where it has limits. total_*: counts for metrics."""

    key: ApiKey
    requests: Bucket | None
    tokens: Bucket | None
    total_requests: int = 0
    total_tokens: int = 0
    total_refused: int = 0


@dataclass(slots=True)
class Keys:
    """Limits the requests and tokens of keys. known: the keys by hash. clock: returns the time in seconds."""

    known: Mapping[bytes, ApiKey]
    clock: Callable[[], float] = time.monotonic
    uses: dict[bytes, Use] = field(init=False)

    def __post_init__(self) -> None:
        now = self.clock()

        def bucket(limit: int | None) -> Bucket | None:
            return None if limit is None else Bucket(limit, now)

        self.uses = {
            digest: Use(key, bucket(key.requests_per_minute), bucket(key.tokens_per_minute))
            for digest, key in self.known.items()
        }

    def enter(self, digest: bytes | None) -> None:
        """Count a request. Raises APIError 429 if its key has no request or no token left."""
        if digest is None or (use := self.uses.get(digest)) is None:
            return
        now = self.clock()
        for what, bucket in (("requests", use.requests), ("tokens", use.tokens)):
            if bucket is not None and bucket.level(now) < 1:
                use.total_refused += 1
                wait = math.ceil(bucket.wait(1, now))
                raise APIError(
                    429, f"the API key {use.key.name!r:.100} has used its {bucket.per_minute} {what} a minute; try "
                    f"again in {wait} s", code="rate_limit_exceeded", retry_after=wait,
                )  # fmt: skip
        use.total_requests += 1
        if use.requests is not None:
            use.requests.take(1, now)

    def charge(self, digest: bytes | None, tokens: int) -> None:
        """Count tokens of a prompt or of an answer."""
        if digest is not None and (use := self.uses.get(digest)) is not None:
            use.total_tokens += tokens
            if use.tokens is not None:
                use.tokens.take(tokens, self.clock())

    def headers(self, digest: bytes | None) -> dict[str, str]:
        """Return the headers that tell a client its limits, in OpenAI's names."""
        use, found, now = self.uses.get(digest or b""), dict[str, str](), self.clock()
        for what, bucket in (("requests", use.requests), ("tokens", use.tokens)) if use else ():
            if bucket is not None:
                found[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(bucket.level(now))))
                found[f"x-ratelimit-reset-{what}"] = f"{bucket.wait(bucket.per_minute, now):.3f}s"
        return found
