"""An idempotent producer: appends can be retried without storing anything twice.

Each message has a sequence, a number that increases. A sequence that was stored is not stored again: a client that does
not know whether an append succeeded (the process died, the topic moved, a response was lost) retries it with the same
number.

Invariants
- A message is appended if and only if its sequence is above the last one of the producer's name; gaps are allowed.
- When several messages are appended at once, the new ones among them are stored atomically.
- Appends from asyncio tasks run in the order in which the tasks made them: none overtakes one that waits for space.
- Once another producer of the same name is opened, this one is fenced and appends nothing more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from datetime import datetime
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from tidelog.errors import (
    BackpressureError,
    ClosedError,
    FencedError,
    Hint,
    InputError,
    RetryError,
    TidelogError,
)
from tidelog.log import Log
from tidelog.store.aio import ClosedAtExit, twin, twin_of
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.message import (
    SHIPPED,
    HeadersGiven,
    Message,
    PayloadEncoder,
    Sync,
    batch_marks,
    checked_sync,
    producer_entry,
    several,
    wait_shipped,
    wait_shipped_async,
)
from tidelog.topics.producer.registry import ProducerRegistry
from tidelog.units import to_seconds

# A FIFO of appends by asyncio tasks that have to wait.
#
# A producer treats a sequence below its last one as stored. So an append must not overtake another one of the same
# producer: the overtaken one would count as stored and never be.
#
# Invariants
# - One thread of the event loop's pool runs all of them, as long as there are any.
# - A cancelled task leaves its append in the queue: it may be executed, as any append without a response may be.
# - An append that fails temporarily (no space) fails the appends queued after it, so that all of them can be retried.


Made = TypeVar("Made")


class _Waiting(NamedTuple):
    append: Callable[[], Any]
    answer: Future[Any]


class AppendLine:
    """The line of one producer. Tasks of several event loops may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: deque[_Waiting] = deque()
        self._is_moving = False

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits and nothing is being appended: who comes now overtakes nobody."""
        return not self._is_moving

    async def join(self, append: Callable[[], Made]) -> Made:
        """Has `append` called in a worker thread when it is its turn; what it returns, or raises."""
        answer: Future[Made] = Future()
        with self._lock:
            self._waiting.append(_Waiting(append, answer))
            must_move, self._is_moving = not self._is_moving, True
        if must_move:
            self._start(asyncio.get_running_loop())
        return await asyncio.shield(asyncio.wrap_future(answer))

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            loop.run_in_executor(None, self._move)
        except RuntimeError as error:  # the loop is ending, and its pool has ended
            self._is_moving = False
            self._fail_waiting(error)

    def _move(self) -> None:
        """In the worker thread, until nobody waits."""
        while (waiting := self._next()) is not None:
            try:
                waiting.answer.set_result(waiting.append())
            except BaseException as error:  # noqa: BLE001 - the task that waits for it gets it
                waiting.answer.set_exception(error)
                if isinstance(error, RetryError):
                    self._fail_waiting(_left_behind(error))

    def _next(self) -> _Waiting | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._is_moving = False
            return None

    def _fail_waiting(self, error: BaseException) -> None:
        with self._lock:
            left, self._waiting = self._waiting, deque()
        for waiting in left:
            waiting.answer.set_exception(error)


def _left_behind(error: RetryError) -> BackpressureError:
    return BackpressureError(
        f"an append of this producer that was before this one failed: {error.message}",
        operation="append",
        hint="Make them again, in the order of their sequences",
    )


_MAX_SEQUENCE = (1 << 64) - 1
# The payloads of the messages with these sequences, but for so many at the beginning, which are stored.
_Encode = Callable[[Sequence[int], int], list[bytes]]
# The first of consecutive sequences (None: the one after the last), or each of them.
_Sequences = int | None | tuple[int, ...]


class Producer(ClosedAtExit):
    """Made by `topic.producer(name)`. Threads and tasks may share it; use it as a context manager or close it."""

    def __init__(
        self,
        registry: ProducerRegistry,
        name: str,
        encoder: PayloadEncoder,
        appendable: Callable[[], Log],
        appendable_at_once: Callable[[], Log | None],
    ) -> None:
        """`appendable` gives the log, or raises what an append would. It may ask a store, which takes its time;
        `appendable_at_once` gives None then."""
        self._registry = registry
        self._entry, self._epoch = registry.open(name)
        self._name_bytes = name.encode("utf-8")
        self._encoder = encoder
        self._appendable = appendable
        self._appendable_at_once = appendable_at_once
        self._line = AppendLine()
        self._is_closed = False

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def epoch(self) -> int:
        """Increases each time the name is opened."""
        return self._epoch

    @property
    def last_sequence(self) -> int | None:
        """The highest stored sequence of this name; None before the first."""
        with self._entry.lock:
            self._registry.settle(self._entry)
            return self._entry.state.last_sequence

    async def last_sequence_async(self) -> int | None:
        """As `last_sequence`, which may wait for an append of another thread, or read the topic."""
        return await in_store_thread(lambda: self.last_sequence)

    def __repr__(self) -> str:
        return f"<Producer {self.name}>"

    def close(self) -> None:
        """Ends the producer; what it stored is remembered. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._registry.closed(self._entry, self._epoch)

    close_async = twin(close)

    # Appending

    def append(
        self,
        value: bytes | Message | None,
        *,
        sequence: int | None = None,
        key: bytes | None = None,
        headers: HeadersGiven | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> int:
        """Stores a message, unless its sequence is already stored; returns its offset either way.

        Without `sequence` it gets the one after the last. For a sequence that is stored, but not among the last 1000 of
        this name, the offset is -1; the same holds for one that is below the last and was never stored: it comes too
        late.
        """

        if timeout is not None:
            timeout = to_seconds(timeout)
        sync = checked_sync(sync, self._registry.tiered)
        log = self._appendable()
        with self._entry.lock:
            sequences, known = self._begin(sequence, 1)
            if known:
                offset = known[0]
            else:
                mark = producer_entry(self._epoch, sequences[0], self._name_bytes)
                payload = self._encoder.one(value, key, headers, timestamp, deliver_at, mark)
                offset = self._append(log, [payload], sequences, timeout)[0]
        if not known:
            self._registry.stored(1)
        if sync:
            self._wait(log, [offset], sync, timeout)
        return offset

    def append_many(
        self,
        messages: Iterable[bytes | Message],
        *,
        sequence: int | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> list[int]:
        """Stores messages with consecutive sequences, the first of which is `sequence`; returns their offsets.

        Those that are new are stored together or not at all; the others have the offsets that `append` would return.
        """
        whole = several(messages)
        return self._store(sequence, len(whole), self._many(whole), sync, timeout)

    def _append_numbered(
        self, messages: Sequence[bytes | Message], sequences: tuple[int, ...], sync: Sync, timeout: float | str | None
    ) -> list[int]:
        """As `append_many`, where each message has a sequence; they increase."""
        return self._store(sequences, len(messages), self._many(messages), sync, timeout)

    def _find(self, sequence: int) -> int | None:
        """Where the message of this name and sequence is; None when it is not stored, -1 when that is forgotten."""
        with self._entry.lock:
            self._registry.settle(self._entry)
            return self._entry.state.find(sequence)

    @twin_of(append)
    async def append_async(
        self,
        value: bytes | Message | None,
        *,
        sequence: int | None = None,
        key: bytes | None = None,
        headers: HeadersGiven | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> int:
        def encode(sequences: Sequence[int], skip: int) -> list[bytes]:
            mark = producer_entry(self._epoch, sequences[skip], self._name_bytes)
            return [self._encoder.one(value, key, headers, timestamp, deliver_at, mark)]

        (offset,) = await self._store_async(sequence, 1, encode, sync, timeout)
        return offset

    @twin_of(append_many)
    async def append_many_async(
        self,
        messages: Iterable[bytes | Message],
        *,
        sequence: int | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> list[int]:
        whole = several(messages)
        return await self._store_async(sequence, len(whole), self._many(whole), sync, timeout)

    def _many(self, messages: Sequence[bytes | Message]) -> _Encode:
        def encode(sequences: Sequence[int], skip: int) -> list[bytes]:
            fresh = messages[skip:] if skip else messages
            if isinstance(sequences, range):
                values = self._encoder.values(fresh, self._name_bytes, self._epoch, sequences[skip])
                if values is not None:
                    return values
            batch = batch_marks(len(fresh)) if len(fresh) > 1 else [b""]
            marks = (producer_entry(self._epoch, number, self._name_bytes) for number in sequences[skip:])
            return [
                self._encoder.one(message, None, None, None, None, place + mark)
                for message, place, mark in zip(fresh, batch, marks, strict=True)
            ]

        return encode

    # One step: look, append, remember

    def _store(
        self, sequence: _Sequences, count: int, encode: _Encode, sync: Sync, timeout: float | str | None
    ) -> list[int]:
        timeout = to_seconds(timeout)
        sync = checked_sync(sync, self._registry.tiered)
        log = self._appendable()
        with self._entry.lock:
            offsets, fresh = self._accept(log, sequence, count, encode, timeout)
        self._registry.stored(fresh)
        if sync and count:
            self._wait(log, offsets, sync, timeout)
        return offsets

    def _wait(self, log: Log, offsets: list[int], sync: Sync, timeout: float | None) -> None:
        """For duplicates too: one may have been accepted a moment ago, by a thread that did not ask for the disk."""
        first, count = _span(log, offsets)
        tiered = self._registry.tiered
        if sync == SHIPPED and tiered is not None:
            wait_shipped(tiered, first, first + count - 1, timeout)
        else:
            log.wait_durable(first, count)

    async def _store_async(
        self, sequence: _Sequences, count: int, encode: _Encode, sync: Sync, timeout: float | str | None
    ) -> list[int]:
        timeout = to_seconds(timeout)
        sync = checked_sync(sync, self._registry.tiered)
        accepted = self._accept_at_once(sequence, count, encode) if self._line.is_empty else None
        if accepted is None:
            # It has to wait, for room or for another append: in line, and not in the thread of the event loop.
            accepted = await self._line.join(lambda: self._accept_in_turn(sequence, count, encode, timeout))
        offsets, fresh = accepted
        if self._registry.count_stored(fresh):
            await in_store_thread(self._registry.keep)
        if sync and count:
            await self._wait_async(self._registry.log, offsets, sync, timeout)
        return offsets

    async def _wait_async(self, log: Log, offsets: list[int], sync: Sync, timeout: float | None) -> None:
        first, count = _span(log, offsets)
        tiered = self._registry.tiered
        if sync == SHIPPED and tiered is not None:
            await wait_shipped_async(tiered, first, first + count - 1, timeout)
        else:
            await log.wait_durable_async(first, count)

    def _accept_at_once(self, sequence: _Sequences, count: int, encode: _Encode) -> tuple[list[int], int] | None:
        """None when that is not possible without waiting."""
        log = self._appendable_at_once()
        if log is None or not self._entry.lock.acquire(blocking=False):
            return None
        try:
            if self._entry.unsure_from is not None:
                return None  # what is stored has to be read first
            return self._accept(log, sequence, count, encode, 0)
        except BackpressureError:
            return None
        finally:
            self._entry.lock.release()

    def _accept_in_turn(
        self, sequence: _Sequences, count: int, encode: _Encode, timeout: float | None
    ) -> tuple[list[int], int]:
        log = self._appendable()
        with self._entry.lock:
            return self._accept(log, sequence, count, encode, timeout)

    def _accept(
        self, log: Log, sequence: _Sequences, count: int, encode: _Encode, timeout: float | None
    ) -> tuple[list[int], int]:
        """The offsets of all, and how many of them are new."""
        sequences, offsets = self._begin(sequence, count)
        skip = len(offsets)
        if skip < count:
            offsets += self._append(log, encode(sequences, skip), sequences[skip:], timeout)
        return offsets, count - skip

    def _begin(self, sequence: _Sequences, count: int) -> tuple[Sequence[int], list[int]]:
        """The sequences, and the offsets of those that are stored already. Called under the lock."""
        entry = self._entry
        if entry.epoch != self._epoch or self._is_closed:
            raise self._unusable()
        if entry.unsure_from is not None:
            self._registry.settle(entry)
        sequences: Sequence[int]
        if isinstance(sequence, tuple):
            sequences = sequence
        else:
            last = entry.state.last_sequence
            first = checked_sequence(sequence, 0 if last is None else last + 1, count)
            sequences = range(first, first + count)
        return sequences, entry.state.stored(sequences)

    def _append(self, log: Log, payloads: list[bytes], sequences: Sequence[int], timeout: float | None) -> range:
        before, entry = log.next_offset, self._entry
        try:
            offset = log.try_append(payloads[0]) if len(payloads) == 1 else None
            if offset is None:
                offset = log.append_many(payloads, timeout_seconds=timeout)[0]
            entry.state.record_many(self._epoch, sequences, offset)
        except TidelogError:
            raise  # nothing was accepted
        except BaseException:
            entry.unsure_from = before  # interrupted anywhere: it may be in the topic
            raise
        return range(offset, offset + len(payloads))

    def _unusable(self) -> FencedError | ClosedError:
        if self._entry.epoch == self._epoch:
            return ClosedError(
                f"the producer {self.name!r} is closed",
                hint=Hint("Open it again: topic.producer(name)", "Run it again"),
            )
        return FencedError(
            f"another producer was opened as {self.name!r} and replaces this one",
            operation="append",
            hint="Give each producer that is in use at the same time a name of its own",
        )


def _span(log: Log, offsets: list[int]) -> tuple[int, int]:
    """What has to be synced: for offsets that are not known any more, all there is."""
    if offsets[0] >= 0 and -1 not in offsets:
        first, last = min(offsets), offsets[-1]
    else:
        last = log.next_offset - 1
        first = min(offset for offset in (*offsets, last) if offset >= 0)
    return first, last + 1 - first


def checked_sequence(sequence: object, default: int, count: int) -> int:
    """The first of so many sequences; InputError when they cannot be."""
    if sequence is None:
        sequence = default
    if isinstance(sequence, bool) or not isinstance(sequence, int):
        raise InputError(f"a sequence is a number, not {sequence!r}")
    if not 0 <= sequence <= _MAX_SEQUENCE + 1 - count:
        raise InputError(f"a sequence is from 0 to {_MAX_SEQUENCE}, not {sequence}")
    return sequence
