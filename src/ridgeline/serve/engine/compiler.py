"""Compile structured outputs in threads of the engine process, so that slow ones do not delay other requests.

New structures wait for the helper process that checks them. Structures that were checked before do not wait for them.
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
MAX_NEW = 32  # new structures that are being checked or wait; requests with more get a 429
BUSY = f"{MAX_NEW} other structured_outputs are waiting to be checked; try again in a moment"

log = logging.getLogger(__name__)


class Compiler:
    """Compiles the structures of requests; its methods belong to the engine's loop. wake: called in a thread whenever a
    structure is compiled.
    """

    def __init__(self, grammars: Grammars, wake: Callable[[], None]) -> None:
        self._grammars = grammars
        self._checking = ThreadPoolExecutor(THREADS, "ridgeline-check")
        self._known = ThreadPoolExecutor(1, "ridgeline-compile")
        self._done: SimpleQueue[tuple[Submit, RequestError | HelpersBusy | None]] = SimpleQueue()
        self._waiting: set[int] = set()
        self._new: set[int] = set()  # requests whose structure waits for its check
        self._wake = wake

    def add(self, submit: Submit) -> bool:
        """Add a request. Return False, without adding it, if the request has no structure."""
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
        """Drop a request. Its slot becomes free once a thread reaches it."""
        self._waiting.discard(request_id)

    def done(self) -> Iterator[tuple[Submit, RequestError | HelpersBusy | None]]:
        """Return requests that now have their grammar, and None, or the error if the compilation failed."""
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
            except Exception as e:  # only this request fails
                log.exception("a structure could not be compiled")
                error = RequestError(f"structured_outputs could not be compiled: {type(e).__name__}")
        self._done.put((submit, error))
        self._wake()
