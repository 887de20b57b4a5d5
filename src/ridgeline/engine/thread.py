"""Run a session in a thread of its own, so that an event loop, or any other thread, may send it requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from ridgeline.engine.session import Session
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sched.stats import Stats
from ridgeline.spec.request import OutputChunk

IDLE_SECONDS = 1.0  # after so long without work the bookkeeping is checked

# Called in the engine's thread with every chunk of a request, or with the exception that ended it.
Listener = Callable[[OutputChunk | Exception], None]


class EngineClosed(RuntimeError):
    """The engine was closed while the request was open, or before it arrived."""


class EngineThread:
    """Drives a session in a thread; nothing else may use the session from then on.

    Requests may be added and ended from any thread, at any moment. An exception in a step ends all open requests and is
    passed to their listeners; the engine continues with new ones.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._listeners: dict[int, Listener] = {}  # by the session's id
        self._closed = False
        self._lock = threading.Lock()  # a command is either run or refused, never lost
        self._thread = threading.Thread(target=self._run, name="ridgeline-engine", daemon=True)
        self._thread.start()

    def add(self, request: GenerationRequest, listener: Listener) -> Callable[[], None]:
        """Queue a request; a function that ends it, which may be called at any time. Raises EngineClosed."""
        opened: list[int] = []

        def add() -> None:
            try:
                request_id = self._session.add(request, lambda chunk: self._tell(opened[0], chunk))
            except Exception as e:
                listener(e)
                return
            opened.append(request_id)
            self._listeners[request_id] = listener

        def end() -> None:
            if opened and self._listeners.pop(opened[0], None) is not None:
                self._session.abort(opened[0])

        self._send(add)
        return lambda: self._send(end, late=True)

    def stats(self, listener: Callable[[Stats | None], None]) -> None:
        """Call `listener`, in the engine's thread, with the session's statistics. Raises EngineClosed."""
        self._send(lambda: listener(self._session.stats()))

    def close(self) -> None:
        """End all requests, with EngineClosed for their listeners, and the thread. May be called again."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(lambda: None)  # wakes it up
        self._thread.join()

    def _send(self, command: Callable[[], None], *, late: bool = False) -> None:
        with self._lock:
            if not self._closed:
                self._inbox.put(command)
            elif not late:
                raise EngineClosed("the engine is closed")

    def _run(self) -> None:
        while not self._closed:
            try:
                self._read_inbox(wait=not len(self._session))
                if len(self._session):
                    self._session.step()
            except Exception as e:
                self._end_all(e)
            except BaseException as e:  # sys.exit() too: without this thread all would wait forever
                self._end_all(RuntimeError(f"a step of the engine raised {type(e).__name__}: {e}"))
        self._read_inbox(wait=False)
        self._end_all(EngineClosed("the engine was closed"))

    def _read_inbox(self, wait: bool) -> None:
        """Run the commands in the inbox. wait: run at least one."""
        if wait:
            self._first_command()()
        try:
            while True:
                self._inbox.get_nowait()()
        except Empty:
            return

    def _first_command(self) -> Callable[[], None]:
        try:
            return self._inbox.get(timeout=IDLE_SECONDS)
        except Empty:
            self._check()
            return self._inbox.get()

    def _check(self) -> None:
        try:
            self._session.check()
        except AssertionError:  # a bug in the engine; no request is open, so none is harmed
            logging.getLogger(__name__).exception("the bookkeeping of pages is inconsistent; the cache was reset")

    def _tell(self, request_id: int, chunk: OutputChunk) -> None:
        listener = self._listeners.get(request_id)
        if chunk.output is not None:
            self._listeners.pop(request_id, None)
        if listener is not None:
            listener(chunk)

    def _end_all(self, error: Exception) -> None:
        listeners, self._listeners = self._listeners, {}
        for request_id, listener in listeners.items():
            self._session.abort(request_id)
            listener(error)
