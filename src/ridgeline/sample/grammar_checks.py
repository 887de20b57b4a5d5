"""Check in a helper process whether structures can be compiled, and keep the results for a while."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property

from ridgeline.bounded import BoundedPool, Setup, Value
from ridgeline.errors import BoundExceeded, RequestError
from ridgeline.sample import guidance
from ridgeline.spec.structure import StructuredOutputs

KEPT_SECONDS = 600.0  # how long a result holds; a machine that was busy may do better later
MAX_KEPT_CHARACTERS = 1 << 23  # characters of all kept sources
MAX_KEPT = 4096  # number of kept results
MAX_WAITING = 1 << 16  # checks that wait for the helper; a server allows far fewer (serve/engine/compiler.py)


@dataclass(frozen=True, slots=True)
class _Result:
    """The result of a check: the source, or why it is refused. since: when it was requested (time.monotonic)."""

    since: float
    source: Future[tuple[str, str]] = field(default_factory=Future)  # the source and the refusal, one of them empty

    @property
    def size(self) -> int:
        """Return the number of characters of the source; 0 while it is not ready."""
        return len(self.source.result()[0]) if self.source.done() and not self.source.exception() else 0


class GrammarChecks:
    """The checks of one vocabulary. Safe to call from several threads.

    arguments: returns the arguments of `guidance.set_up`, which the helper process calls first. The process starts
    with the first check, and is replaced when it exceeds a limit.
    """

    def __init__(self, arguments: Callable[[], tuple[Value, ...]]) -> None:
        self._arguments = arguments
        self._lock = threading.Lock()
        self._results: OrderedDict[bytes, _Result] = OrderedDict()

    def source(self, structure: StructuredOutputs) -> str:
        """Return the structure in the compiler's notation. Raises RequestError if it cannot be compiled.

        Concurrent callers with equal structures wait for one check.
        """
        key = _key(structure)
        with self._lock:
            found = self._fresh(key)
            mine = found is None
            if found is None:
                found = self._results[key] = _Result(time.monotonic())
        if mine:
            self._check(key, found, structure)
        source, refusal = found.source.result()
        if refusal:
            raise RequestError(refusal)
        return source

    def known(self, structure: StructuredOutputs) -> bool:
        """Return whether the result is ready."""
        with self._lock:
            found = self._fresh(_key(structure))
            return found is not None and found.source.done()

    def _check(self, key: bytes, result: _Result, structure: StructuredOutputs) -> None:
        """Check the structure in the helper. Failures of the helper itself are not kept."""
        try:
            with self._lock:
                pool = self._pool
            question = structure.kind, structure.value, structure.whitespace_pattern
            source = pool.run_sync(guidance.check, *question, limits=guidance.CHECK_LIMITS)
            result.source.set_result((source, ""))
        except RequestError as e:
            result.source.set_result(("", str(e)))
        except BoundExceeded as e:
            result.source.set_result(("", f"structured_outputs: it cannot be compiled, because {e}: simplify it"))
        except BaseException as e:
            with self._lock:
                self._results.pop(key, None)
            result.source.set_exception(e)
            return
        with self._lock:
            self._forget()

    def _fresh(self, key: bytes) -> _Result | None:
        """Return a result that still holds, or None."""
        found = self._results.get(key)
        if found is None or time.monotonic() - found.since > KEPT_SECONDS:
            return None
        self._results.move_to_end(key)
        return found

    def _forget(self) -> None:
        """Drop the least recently requested results beyond the limits."""
        size = sum(result.size for result in self._results.values())
        while len(self._results) > MAX_KEPT or size > MAX_KEPT_CHARACTERS:
            _, dropped = self._results.popitem(last=False)
            size -= dropped.size

    @cached_property
    def _pool(self) -> BoundedPool:
        return BoundedPool(1, max_waiting=MAX_WAITING, setup=Setup(guidance.set_up, self._arguments()))


def _key(structure: StructuredOutputs) -> bytes:
    text = repr((structure.kind, structure.value, structure.whitespace_pattern)).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()
