"""Make masks over the vocabulary: quick ones within the step, others in threads, so that they delay only their answer.

Handing a mask to a thread costs more than a quick mask, because kernels use all cores and Python has one lock. A step
therefore makes the masks of a grammar itself while they are quick. After the first one that is not, all grammars use
threads for a while, so a step meets at most one. The library releases the interpreter's lock while it works. A thread
cannot be stopped, so the parser's limits bound the work for one mask, and `MAX_WAIT_SECONDS` bounds how long an answer
waits for all its masks. Grammars with slow masks share one thread of low priority, so that other grammars find a free
thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from typing import Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.sample.guidance import NICENESS, STACK_BYTES
from ridgeline.sample.guidance_errors import sentence

Mask = np.ndarray[Any, np.dtype[np.bool_]]
MAX_THREADS = 4
QUICK_SECONDS = 0.001  # a grammar whose last mask took less CPU time is quick
SLOW_SECONDS = 0.01  # a mask that takes more CPU time makes its grammar slow ...
SLOW_MASKS = 32  # ... for this number of masks
CAREFUL_MASKS = 1024  # masks of all grammars that are made in threads after a step has made one that was not quick
MAX_WAIT_SECONDS = 10.0  # time that one answer may wait for all its masks
TOO_LATE = (
    "structured_outputs: the answer waited longer than the limit of {:g} s for the masks of its tokens: simplify the "
    "structure, above all long repetitions such as .{{20}} behind .*"
)

_STACK = threading.Lock()  # held while the stack size of new threads is changed


def deep_threads(count: int, name: str, start: Callable[[], None] = lambda: None) -> ThreadPoolExecutor:
    """Return running threads with a stack of STACK_BYTES. start: a function that each thread calls first."""
    threads = ThreadPoolExecutor(count, name)
    together = threading.Barrier(count)

    def first() -> None:
        together.wait()
        start()

    with _STACK:
        before = threading.stack_size(STACK_BYTES)
        try:
            begun = [threads.submit(first) for _ in range(count)]
        except BaseException:
            together.abort()  # the threads that have begun wait for one that could not
            raise
        finally:
            threading.stack_size(before)
    wait(begun)
    return threads


class MaskThreads:
    """The threads that make one model's masks. They start with the first mask."""

    def __init__(self) -> None:
        self._careful = 0  # number of masks that are still made in threads, quick or not

    @property
    def careful(self) -> bool:
        """Return whether steps make no masks for now."""
        return self._careful > 0

    def be_careful(self) -> None:
        """Note that a step has made a mask that was not quick."""
        self._careful = CAREFUL_MASKS

    def submit(self, make: Callable[[], Mask | None], *, slow: bool) -> Future[Mask | None]:
        """Queue a call that makes a mask."""
        self._careful = max(0, self._careful - 1)
        return (self._slow if slow else self._fast).submit(make)

    @cached_property
    def _fast(self) -> ThreadPoolExecutor:
        return deep_threads(max(2, min(MAX_THREADS, (os.cpu_count() or 1) // 2)), "ridgeline-mask")

    @cached_property
    def _slow(self) -> ThreadPoolExecutor:
        return deep_threads(1, "ridgeline-slow-mask", step_back)


class Grammar:
    """A compiled structure, for any number of answers."""

    def __init__(self, matcher: Any, threads: MaskThreads) -> None:
        self._matcher, self._threads = matcher, threads
        self._slow = 0  # number of masks for which the grammar still counts as slow
        self._quick = False  # whether the last mask was quick; the first one is made in a thread

    @property
    def in_step(self) -> bool:
        """Return whether a step makes the next mask itself."""
        return self._quick and not self._threads.careful

    def start(self) -> Matcher:
        """Return a matcher for a new answer."""
        return Matcher(self)

    def submit(self, make: Callable[[], Mask | None]) -> Future[Mask | None]:
        """Queue a call that makes a mask of one of its answers."""
        return self._threads.submit(make, slow=self._slow > 0)

    def copy(self) -> Any:
        """Return the library's matcher for one answer."""
        return self._matcher.deep_copy()

    def took(self, seconds: float) -> None:
        """Record the CPU time that a mask took."""
        self._slow = SLOW_MASKS if seconds > SLOW_SECONDS else max(0, self._slow - 1)
        self._quick = seconds < QUICK_SECONDS

    def took_in_step(self) -> None:
        """Record that a step made the last mask."""
        if not self._quick:
            self._threads.be_careful()


class Matcher:
    """The state of one answer in a grammar. Only one thread may call its methods."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._state: Any = None  # the library's matcher, once the first mask is made
        self._tokens: list[int] = []  # tokens that the library's matcher has not seen yet
        self._found: Mask | RequestError | None = None  # the mask of the next token, if the step made it
        self._mask: Future[Mask | None] | None = None

    def prepare(self) -> None:
        """Begin to make the mask of the next token, unless it was begun or a step makes it."""
        if self._mask is None and self._found is None and not self._grammar.in_step:
            self._mask = self._grammar.submit(partial(_make, weakref.ref(self)))

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the mask of the next token, or make a quick one; return whether it is ready."""
        if self._mask is None and self._found is None and self._grammar.in_step:
            self._found = self._make_in_step()
        if self._found is not None:
            return True
        self.prepare()
        assert self._mask is not None
        if not self._mask.done() and seconds > 0:
            wait([self._mask], seconds)
        return self._mask.done()

    def _make_in_step(self) -> Mask | RequestError:
        try:
            return self.make()
        except RequestError as e:
            return e
        finally:
            self._grammar.took_in_step()

    def allowed(self) -> Mask:
        """Return which tokens may come next [at least vocabulary].

        Raises RequestError if the grammar has become too complex, or if the mask takes too long.
        """
        is_ready = self.wait(MAX_WAIT_SECONDS)
        if isinstance(self._found, RequestError):
            raise self._found
        if self._found is not None:
            return self._found
        mask = self._mask.result() if is_ready and self._mask is not None else None
        if mask is None:
            raise RequestError(TOO_LATE.format(MAX_WAIT_SECONDS))
        return mask

    def push(self, token: int) -> None:
        """Take the next token of the answer, which was allowed."""
        self._tokens.append(token)
        self._mask = self._found = None

    def make(self) -> Mask:
        """Return the mask of the next token. One call at a time, in any thread. Raises RequestError."""
        start = time.thread_time()
        if self._state is None:
            self._state = self._grammar.copy()
        tokens, self._tokens = self._tokens, []
        if tokens:
            self._state.consume_tokens(tokens)
        bits = self._state.compute_bitmask()
        self._grammar.took(time.thread_time() - start)
        if self._state.is_error():
            raise RequestError(sentence(self._state.get_error()))
        return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(np.bool_)


def _make(ref: weakref.ref[Matcher]) -> Mask | None:
    """Return a mask, or None if its answer is over."""
    matcher = ref()
    return None if matcher is None else matcher.make()


def step_back() -> None:
    """Lower the priority of this thread. Only Linux can do that for a thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
