"""Structures of requests, compiled in threads of the engine's process: a slow one holds up nobody's tokens.

A structure that is new waits for the one helper process that checks it; one that was checked before passes those by.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Empty, SimpleQueue

from ridgeline.errors import HelpersBusy, RequestError
from ridgeline.sample.grammar import Grammars
from ridgeline.serve.engine.messages import Submit

THREADS = 2  # for new structures
MAX_NEW = 32  # new structures that are checked or wait; more are told to come again
BUSY = f"{MAX_NEW} other structured_outputs wait to be checked; try again in a moment"

log = logging.getLogger(__name__)


class Compiler:
    """Belongs to the engine's loop. wake: called in a thread when something is done."""

    def __init__(self, grammars: Grammars, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._checking = ThreadPoolExecutor(THREADS, "ridgeline-check")
        self._known = ThreadPoolExecutor(1, "ridgeline-compile")
        self._done: SimpleQueue[tuple[Submit, RequestError | HelpersBusy | None]] = SimpleQueue()
        self._waiting: set[int] = set()
        self._new: set[int] = set()  # those that wait for a check
        self._wake = wake

    def add(self, submit: Submit) -> bool:
        """Take a request that has a structure; False for one that has none."""
        structure = getattr(submit.request.params, "structured_outputs", None)
        if structure is None:
            return False
        self._waiting.add(submit.id)
        if self._grammars.is_known(structure):
            self._known.submit(self._compile, submit)
        elif len(self._new) >= MAX_NEW:
            self._done.put((submit, HelpersBusy(BUSY)))
            self._wake()
        else:
            self._new.add(submit.id)
            self._checking.submit(self._compile, submit)
        return True

    def abort(self, request_id: int) -> None:
        """Forget a request. Its place is free once a thread has come to it."""
        self._waiting.discard(request_id)

    def done(self) -> Iterator[tuple[Submit, RequestError | HelpersBusy | None]]:
        """Requests that have their grammar now, or why they have none."""
        while True:
            try:
                submit, error = self._done.get_nowait()
            except Empty:
                return
            self._new.discard(submit.id)
            if submit.id in self._waiting:
                self._waiting.discard(submit.id)
                yield submit, error

    def _compile(self, submit: Submit) -> None:
        error: RequestError | HelpersBusy | None = None
        if submit.id in self._waiting:  # not aborted while others were compiled
            try:
                submit = replace(submit, request=submit.request.with_grammar(self._grammars))
            except (RequestError, HelpersBusy) as e:
                error = e
            except Exception as e:  # whatever a structure does to its compiler, it is that request that fails
                log.exception("a structure could not be compiled")
                error = RequestError(f"structured_outputs could not be compiled: {type(e).__name__}")
        self._done.put((submit, error))
        self._wake()
