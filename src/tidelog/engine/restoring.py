"""A lazy restore: reads are answered from the store at once, while the disk is filled behind them.

    restore_engine(lazy=True)   reader of the store (`reader.py`) ─┐
                                                                   ├─> reads go to whichever is there
    in a thread of its own      restore -> open -> catch up ───────┘   wait() gives the engine itself

Invariants
- A read shows a whole state, first the store's and then the engine's own; `applied_seq` never goes back.
- What a restore refuses before it begins (a directory in use, an engine that another node has open) is raised at once.
- The restore does not wait for the reader: it begins first, and asks the store for what it needs at the same time.
- A restore that fails later fails `wait`; reads go on from the store. One that is closed midway leaves a directory that
  cannot be opened, and that the next restore begins again with, as after a crash.
- What was begun on the reader ends there: iterators are not cut off when the engine takes over. The reader asks the
  store for nothing by itself then, unless a feed that was begun on it waits for more.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from threading import Event, Lock
from typing import Any, Concatenate, ParamSpec, TypeVar

from tidelog.engine.engine import Engine
from tidelog.engine.reader import EngineReader, OnlyRead
from tidelog.engine.recovery.restore import OnProgress, RestoreProgress
from tidelog.errors import ClosedError
from tidelog.store.aio import ClosedAtExit, twin, twin_of
from tidelog.store.scheduler import in_thread
from tidelog.units import to_seconds

_logger = logging.getLogger("tidelog.engine")
_PATIENCE_SECONDS = 5.0

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


def _read(
    original: Callable[Concatenate[Any, Arguments], Answer],
) -> Callable[Concatenate[RestoringEngine, Arguments], Answer]:
    """A call that is answered by the engine once it is there, and from the store before."""
    name: str = original.__name__

    def call(engine: RestoringEngine, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        answer: Answer = getattr(engine._current, name)(*args, **kwargs)
        return answer

    functools.update_wrapper(call, original)
    call.__qualname__ = f"RestoringEngine.{name}"
    return call


class RestoringEngine(OnlyRead, ClosedAtExit):
    """An engine that is being restored: `tidelog.restore_engine(..., lazy=True)`. It can be read; `wait` returns the
    engine itself, which can be changed.
    """

    _what = "this engine is being restored, and is only read here"
    _hint = "Ask the engine itself: wait() returns it when the disk is filled"

    def __init__(
        self,
        open_reader: Callable[[], EngineReader],
        restore: Callable[[OnProgress], Engine],
        on_progress: OnProgress | None = None,
    ) -> None:
        """Opens the reader while the restore runs already. One that cannot be opened ends the restore."""
        self._restored: Engine | None = None
        self._has_taken_over = Event()
        self._restore = restore
        self._on_progress = on_progress or (lambda progress: None)
        self._has_begun = Event()
        self._is_closed = False
        self._changing = Lock()
        self._engine: Future[Engine] = Future()
        self.progress: RestoreProgress | None = None
        """How far it is; None before it has begun."""
        self._running = in_thread(self._run, "tidelog-engine-restore")
        try:
            self._reader = open_reader()
        except BaseException:
            self._end_restore()
            raise
        self._reader._is_superseded = self._has_taken_over.is_set
        self._has_begun.wait()
        if self._engine.done():  # it has failed before it began, or is quick
            try:
                self._engine.result()
            except BaseException:
                self.close()
                raise

    def _run(self) -> None:
        try:
            engine = self._restore(self._progressed)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it
            if self._has_begun.is_set() and not isinstance(error, ClosedError):  # else it is raised at once
                _logger.error("a lazy restore failed: %s", error)
            self._engine.set_exception(error)
        else:
            with self._changing:
                if not self._is_closed:
                    self._restored = engine
                    self._has_taken_over.set()
                    self._engine.set_result(engine)
            if not self._engine.done():
                engine.close()
                self._engine.set_exception(_closed())
        finally:
            self._has_begun.set()

    def _progressed(self, progress: RestoreProgress) -> None:
        self.progress = progress
        self._has_begun.set()
        if self._is_closed:
            raise _closed()
        self._on_progress(progress)

    # Reading

    read = _read(EngineReader.read)
    open_object = _read(EngineReader.open_object)
    read_many = _read(EngineReader.read_many)
    stat = _read(EngineReader.stat)
    scan = _read(EngineReader.scan)
    list_objects = _read(EngineReader.list_objects)
    list_buckets = _read(EngineReader.list_buckets)
    has_bucket = _read(EngineReader.has_bucket)
    find_object = _read(EngineReader.find_object)
    versions = _read(EngineReader.versions)
    digest = _read(EngineReader.digest)
    changes = _read(EngineReader.changes)

    read_async = _read(EngineReader.read_async)
    open_object_async = _read(EngineReader.open_object_async)
    read_many_async = _read(EngineReader.read_many_async)
    stat_async = _read(EngineReader.stat_async)
    scan_async = _read(EngineReader.scan_async)
    list_objects_async = _read(EngineReader.list_objects_async)
    list_buckets_async = _read(EngineReader.list_buckets_async)
    has_bucket_async = _read(EngineReader.has_bucket_async)
    find_object_async = _read(EngineReader.find_object_async)
    versions_async = _read(EngineReader.versions_async)
    digest_async = _read(EngineReader.digest_async)
    changes_async = _read(EngineReader.changes_async)

    @property
    def applied_seq(self) -> int:
        """The last seq that is shown."""
        return self._current.applied_seq

    # The engine itself

    @property
    def is_restored(self) -> bool:
        """Whether the disk has all of it: reads are the engine's own then."""
        return self._restored is not None

    @property
    def _current(self) -> EngineReader | Engine:
        """Whichever answers."""
        return self._reader if self._restored is None else self._restored

    def wait(self, timeout: float | str | None = None) -> Engine:
        """Waits until the disk is filled, and the orchestrator's entries are applied; returns the engine. Closing the
        engine alone leaves what was begun before it came; `close` of this object ends both. TimeoutError after so many
        seconds; what fails the restore is raised here.
        """
        seconds = to_seconds(timeout)
        try:
            return self._engine.result(seconds)
        except TimeoutError as error:
            raise self._not_yet(error, seconds) from error

    @twin_of(wait)
    async def wait_async(self, timeout: float | str | None = None) -> Engine:
        seconds = to_seconds(timeout)
        restored = asyncio.wrap_future(self._engine)
        restored.add_done_callback(_look_at)  # the waiter may have been cancelled
        try:
            return await asyncio.wait_for(asyncio.shield(restored), seconds)
        except TimeoutError as error:
            raise self._not_yet(error, seconds) from error

    def _not_yet(self, error: TimeoutError, seconds: float | None) -> TimeoutError:
        """Says that the time is over; an error of the restore itself stays what it is."""
        if self._engine.done():
            return error
        return TimeoutError(f"the disk is not filled after {seconds:g} seconds: `progress` says how far it is")

    def close(self) -> None:
        """Closes the engine, or gives up the restore. Idempotent."""
        self._end_restore()
        self._reader.close()

    close_async = twin(close)

    def _end_restore(self) -> None:
        with self._changing:
            is_first, self._is_closed = not self._is_closed, True
        if self._restored is not None:
            self._restored.close()
        elif is_first:
            self._wait_for_end()

    def _wait_for_end(self) -> None:
        """For a few seconds: a store that hangs does not delay an exit."""
        try:
            self._running.result(_PATIENCE_SECONDS)
        except TimeoutError:
            _logger.warning("a lazy restore still waits for its store; it ends when that answers")

    def __repr__(self) -> str:
        how = "restored" if self.is_restored else "restoring"
        return f"<tidelog.RestoringEngine applied_seq={self.applied_seq} {how}>"


def _look_at(restored: asyncio.Future[Engine]) -> None:
    """The event loop complains of an error that nobody has looked at."""
    if not restored.cancelled():
        restored.exception()


def _closed() -> ClosedError:
    return ClosedError("the restore was given up", hint="Restore into the same directory again")
