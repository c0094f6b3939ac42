"""A producer: appends that can be made again without storing anything twice.

Each message has a sequence, a number that grows. The same sequence again is not stored again: whoever does not know
whether an append came through (the process died, the topic moved, an answer was lost) makes it again with its number.

Invariants
- A message is appended if and only if its sequence is above the last one of the producer's name; gaps are fine.
- Of several messages at once those that are new are stored together or not at all.
- Appends of tasks are made in the order in which the tasks came to them: none overtakes one that waits for room.
- After another producer of the same name was opened, this one appends nothing any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import count as count_from
from types import TracebackType
from typing import Self

from tidelog.errors import BackpressureError, ClosedError, FencedError, InputError, TidelogError
from tidelog.log import Log
from tidelog.tier.daemon_pool import in_store_thread
from tidelog.topics.append_line import AppendLine
from tidelog.topics.durability import SHIPPED, Sync, check_sync, wait_shipped, wait_shipped_async
from tidelog.topics.extension import batch_marks, producer_entry
from tidelog.topics.message import Message
from tidelog.topics.payloads import PayloadEncoder, several
from tidelog.topics.producer_registry import ProducerRegistry
from tidelog.units import to_seconds

_MAX_SEQUENCE = (1 << 64) - 1
# What has to be appended from the given sequence on: payloads of the messages with these numbers.
_Encode = Callable[[int, int], list[bytes]]


class Producer:
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
        """Grows with each opening of the name."""
        return self._epoch

    @property
    def last_sequence(self) -> int | None:
        """The highest sequence that is stored, by this producer or one of its name before; None when there is none."""
        with self._entry.lock:
            self._registry.settle(self._entry)
            return self._entry.state.last_sequence

    async def last_sequence_async(self) -> int | None:
        """As `last_sequence`, which may wait for an append of another thread, or read the topic."""
        return await in_store_thread(lambda: self.last_sequence)

    def __repr__(self) -> str:
        return f"<Producer {self.name}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """It appends nothing any more; what it stored is remembered. Closing twice is fine."""
        if not self._is_closed:
            self._is_closed = True
            self._registry.closed(self._entry, self._epoch)

    async def close_async(self) -> None:
        """As `close`, in a worker thread: it may write down what was stored."""
        await in_store_thread(self.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close_async()

    # Appending

    def append(
        self,
        value: bytes | Message,
        *,
        sequence: int | None = None,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> int:
        """Stores a message, unless its sequence is stored already; returns its offset either way.

        Without `sequence` it gets the one behind the last. For a sequence that is stored, but not among the last 1000
        of this name, the offset is -1; so it is for one that is below the last and was never stored: it comes too late.
        """

        if timeout is not None:
            timeout = to_seconds(timeout)
        check_sync(sync, self._registry.tiered)
        log = self._appendable()
        with self._entry.lock:
            first, known = self._begin(sequence, 1)
            if known:
                offset = known[0]
            else:
                mark = producer_entry(self._epoch, first, self._name_bytes)
                payload = self._encoder.one(value, key, headers, timestamp, deliver_at, mark)
                offset = self._append(log, [payload], first, timeout)[0]
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

    async def append_async(
        self,
        value: bytes | Message,
        *,
        sequence: int | None = None,
        key: bytes | None = None,
        headers: Mapping[str, bytes] | None = None,
        timestamp: datetime | None = None,
        deliver_at: datetime | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> int:
        """As `append`, suspending the task."""

        def encode(first: int, skip: int) -> list[bytes]:
            mark = producer_entry(self._epoch, first + skip, self._name_bytes)
            return [self._encoder.one(value, key, headers, timestamp, deliver_at, mark)]

        (offset,) = await self._store_async(sequence, 1, encode, sync, timeout)
        return offset

    async def append_many_async(
        self,
        messages: Iterable[bytes | Message],
        *,
        sequence: int | None = None,
        sync: Sync = False,
        timeout: float | str | None = None,
    ) -> list[int]:
        """As `append_many`, suspending the task."""
        whole = several(messages)
        return await self._store_async(sequence, len(whole), self._many(whole), sync, timeout)

    def _many(self, messages: Sequence[bytes | Message]) -> _Encode:
        def encode(first: int, skip: int) -> list[bytes]:
            fresh = messages[skip:]
            batch = batch_marks(len(fresh)) if len(fresh) > 1 else [b""]
            marks = (producer_entry(self._epoch, number, self._name_bytes) for number in count_from(first + skip))
            return [
                self._encoder.one(message, None, None, None, None, place + mark)
                for message, place, mark in zip(fresh, batch, marks, strict=False)
            ]

        return encode

    # One step: look, append, remember

    def _store(
        self, sequence: int | None, count: int, encode: _Encode, sync: Sync, timeout: float | str | None
    ) -> list[int]:
        timeout = to_seconds(timeout)
        check_sync(sync, self._registry.tiered)
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
        self, sequence: int | None, count: int, encode: _Encode, sync: Sync, timeout: float | str | None
    ) -> list[int]:
        timeout = to_seconds(timeout)
        check_sync(sync, self._registry.tiered)
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

    def _accept_at_once(self, sequence: int | None, count: int, encode: _Encode) -> tuple[list[int], int] | None:
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
        self, sequence: int | None, count: int, encode: _Encode, timeout: float | None
    ) -> tuple[list[int], int]:
        log = self._appendable()
        with self._entry.lock:
            return self._accept(log, sequence, count, encode, timeout)

    def _accept(
        self, log: Log, sequence: int | None, count: int, encode: _Encode, timeout: float | None
    ) -> tuple[list[int], int]:
        """The offsets of all, and how many of them are new."""
        first, offsets = self._begin(sequence, count)
        skip = len(offsets)
        if skip < count:
            offsets += self._append(log, encode(first, skip), first + skip, timeout)
        return offsets, count - skip

    def _begin(self, sequence: int | None, count: int) -> tuple[int, list[int]]:
        """The first sequence, and the offsets of those that are stored already. Called under the lock."""
        entry = self._entry
        if entry.epoch != self._epoch or self._is_closed:
            raise self._unusable()
        if entry.unsure_from is not None:
            self._registry.settle(entry)
        last = entry.state.last_sequence
        first = _checked_sequence(sequence, 0 if last is None else last + 1, count)
        return first, entry.state.stored(first, count)

    def _append(self, log: Log, payloads: list[bytes], sequence: int, timeout: float | None) -> range:
        before, entry = log.next_offset, self._entry
        try:
            offset = log.try_append(payloads[0]) if len(payloads) == 1 else None
            if offset is None:
                offset = log.append_many(payloads, timeout_seconds=timeout)[0]
            for number in range(len(payloads)):
                entry.state.record(self._epoch, sequence + number, offset + number)
        except TidelogError:
            raise  # nothing was accepted
        except BaseException:
            entry.unsure_from = before  # interrupted anywhere: it may be in the topic
            raise
        return range(offset, offset + len(payloads))

    def _unusable(self) -> FencedError | ClosedError:
        if self._entry.epoch == self._epoch:
            return ClosedError(f"the producer {self.name!r} is closed", hint="Open it again: topic.producer(name)")
        return FencedError(
            f"another producer was opened as {self.name!r} and goes on in place of this one",
            operation="append",
            hint="Give each producer that is in use at the same time a name of its own",
        )


def _span(log: Log, offsets: list[int]) -> tuple[int, int]:
    """What has to be synced: for offsets that are not known any more, all there is."""
    last = log.next_offset - 1 if -1 in offsets else offsets[-1]
    first = min(offset for offset in (*offsets, last) if offset >= 0)
    return first, last + 1 - first


def _checked_sequence(sequence: object, default: int, count: int) -> int:
    if sequence is None:
        sequence = default
    if isinstance(sequence, bool) or not isinstance(sequence, int):
        raise InputError(f"a sequence is a number, not {sequence!r}")
    if not 0 <= sequence <= _MAX_SEQUENCE + 1 - count:
        raise InputError(f"a sequence is from 0 to {_MAX_SEQUENCE}, not {sequence}")
    return sequence
