"""The change feed of an engine: what was applied, entry by entry, from the log wherever it is.

    store: objects of the log, up to the manifest's high-water mark  ──┐
                                                                       ├──> entries that count, in order ──> changes
    disk: files of the log, from the first that is there on          ──┘

Invariants
- Every entry from `start_seq` on comes once, in the order of seqs, refused ones too; none that was rolled back before
  the feed came to it. If what was given out is rolled back afterwards, the feed ends with ConflictError; with
  `committed` it stays behind the low-water mark, where nothing is rolled back.
- Which records count is decided as in every replay (`wal/replay.py`).
- A feed keeps its place as (seq, LSN): what leaves the disk meanwhile is read from the store. What is in neither any
  more is an error that says where the log begins; nothing is skipped.
- The log in a store that another replica ships has other LSNs. A follower finds its place by seq, and takes from the
  store only what comes before the first entry on its own disk: after that it may have what it will roll back.
- A feed does not keep an engine alive that its user has dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import islice
from threading import Event
from typing import Any, NamedTuple, Protocol

import msgspec

from tidelog.engine.aio import TaskThreads, reading_here_or_cold
from tidelog.engine.cold.manifest import Manifest
from tidelog.engine.cold.reader import ColdReader
from tidelog.engine.cold.value_store import ColdValue
from tidelog.engine.core import Core
from tidelog.engine.entry import (
    Batch,
    CopyObject,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
    Result,
    operations,
)
from tidelog.engine.mvcc.cells import MAX_SEQ
from tidelog.engine.mvcc.retention import History, Marks, rolled_back
from tidelog.engine.reads import News, Standing, check_text, checked_seq
from tidelog.engine.sst.value_file import PIECE_BYTES, Reference, decode_reference
from tidelog.engine.value_files import OpenValue
from tidelog.engine.wal.operations import PUT_OBJECT, OperationRecord, decode_operation, operation_of
from tidelog.engine.wal.record_header import PART_OF_BATCH, decode_header
from tidelog.engine.wal.replay import (
    Chosen,
    EntrySelection,
    LogRange,
    ShippedLog,
    counting,
    first_counting,
    log_range,
    missing_records,
    packed_ranges,
    records_of,
)
from tidelog.engine.wal.ship_watermark import SeqIndex
from tidelog.engine.wal.value import CODEC_FILE
from tidelog.errors import GapError, NotFoundError, OffsetOutOfRangeError
from tidelog.store.aio import twin_of
from tidelog.store.scheduler import Lazy

_TAKEN_AT_ONCE = 256
MAX_LSN = (1 << 64) - 1


class Change(msgspec.Struct, frozen=True):
    """An entry of an engine's log, and what became of it. `seq, entry = change` takes the first two."""

    seq: int
    entry: Entry
    result: Result

    def __iter__(self) -> Iterator[Any]:
        return iter((self.seq, self.entry))


class FeedLog(Protocol):
    """The log that a feed reads: that of an open engine, or what its store has of it."""

    @property
    def marks(self) -> Marks: ...

    @property
    def history(self) -> History: ...

    @property
    def first_lsn(self) -> int:
        """The oldest record on this disk."""
        ...

    def check(self) -> None:
        """Raises if the engine is closed."""
        ...

    def open_value(self, reference: Reference) -> OpenValue | ColdValue:
        """A value that has a file of its own."""
        ...

    def piece(self, first_seq: int, last_seq: int, lsn: int | None, *, may_wait: bool) -> Piece | None:
        """The records of the entries with these seqs, none of which begins before an LSN, if that is known; None if
        the store has to be asked and the caller may not wait for it.

        Where a piece ends before the last of them, the caller comes again for the rest.
        """
        ...


class _NotHereError(Exception):
    """What comes next is in the store, and the thread may not wait for that."""


class Feed:
    """One reader of changes. For one thread at a time."""

    def __init__(
        self,
        log: FeedLog,
        tasks: Lazy[TaskThreads],
        start_seq: int,
        *,
        prefix: str,
        with_values: bool,
        committed: bool,
        up_to: int | None,
    ) -> None:
        self._log = log
        self._tasks = tasks
        self._next_seq = start_seq
        self._next_lsn: int | None = None
        """No entry that is still to come begins before it; None while that is not known."""
        self._prefix = prefix
        self._with_values = with_values
        self._committed = committed
        self._up_to = up_to
        self._rollbacks = log.history.rollbacks
        self._running: Iterator[Change] | None = None
        self._is_in_store = False
        """Whether what is running reads the store."""
        self._may_wait = True

    def take(self, most: int, *, may_wait: bool = True) -> list[Change] | None:
        """So many of the next ones at most, none if there are no more. Without `may_wait` only those before the first
        that is in the store: None if that is the next one.
        """
        if self._is_in_store and not may_wait:
            return None
        self._may_wait = may_wait
        running = self.available() if self._running is None else self._running
        self._running = None
        found: list[Change] = []
        try:
            found.extend(islice(running, most))  # keeps those before an error
        except _NotHereError:
            return found or None
        if len(found) == most:
            self._running = running
        return found

    def available(self) -> Iterator[Change]:
        while (target := self._target()) >= self._next_seq:
            first_lsn = self._log.first_lsn
            try:
                yield from self._up_to_target(target)
            except (OffsetOutOfRangeError, NotFoundError):
                if self._log.first_lsn == first_lsn:
                    raise
                # Files have left the disk meanwhile: they are in the store.

    def _target(self) -> int:
        self._log.check()
        rollbacks = self._log.history.rollbacks
        if self._log.history.was_rolled_back(self._next_seq - 1, self._rollbacks):
            raise rolled_back(self._next_seq - 1)
        self._rollbacks = rollbacks
        marks = self._log.marks
        target = marks.low_water_mark if self._committed else marks.applied_seq
        return target if self._up_to is None else min(self._up_to, target)

    def _up_to_target(self, target: int) -> Iterator[Change]:
        """Those of one piece of the log."""
        self._is_in_store = False
        piece = self._log.piece(self._next_seq, target, self._next_lsn, may_wait=self._may_wait)
        if piece is None:
            raise _NotHereError
        self._is_in_store = piece.is_in_store
        for change, lsn in self._entries(piece.chosen):
            if self._log.history.rollbacks != self._rollbacks:
                return  # what was read may be gone
            self._next_seq, self._next_lsn = change.seq + 1, lsn + 1
            if not self._prefix or any(_touches(part, self._prefix) for part in operations(change.entry)):
                yield change
        if self._log.history.rollbacks == self._rollbacks:
            self._next_seq, self._next_lsn = piece.last_seq + 1, piece.next_lsn or self._next_lsn
        self._is_in_store = False

    def _entries(self, chosen: Iterator[Chosen]) -> Iterator[tuple[Change, int]]:
        """With the LSN of the last record of each."""
        gathered: list[OperationRecord] = []
        parts: list[Operation] = []
        for frames, indexes in chosen:
            for lsn, raw in records_of(frames, indexes):
                record = decode_operation(bytes(raw), lsn)
                gathered.append(record)
                parts.append(self._operation(record, lsn))
                if record.is_last:
                    yield _change(gathered, parts), lsn
                    gathered, parts = [], []

    def _operation(self, record: OperationRecord, lsn: int) -> Operation:
        if record.op == PUT_OBJECT and (record.is_refused or not self._with_values):
            return PutObject(record.bucket, record.key, b"")
        if record.codec == CODEC_FILE:
            reference = decode_reference(record.stored, record.size, record.crc, lsn)
            with contextlib.closing(self._log.open_value(reference)) as value:
                if isinstance(value, ColdValue) and not self._may_wait:
                    raise _NotHereError
                return PutObject(
                    record.bucket, record.key, ValuePieces(self._log, reference, self._tasks), value.metadata()
                )
        return operation_of(record, lsn)


class ValuePieces(Iterator[bytes], AsyncIterator[bytes]):
    """The data of a put that has a file of its own, read when it is asked for, once: by `for`, or by a task with
    `async for`, which leaves the event loop free.
    """

    def __init__(self, log: FeedLog, reference: Reference, tasks: Lazy[TaskThreads]) -> None:
        self._log = log
        self._reference = reference
        self._tasks = tasks
        self._value: OpenValue | ColdValue | None = None
        self._offset = 0

    def _opened(self) -> OpenValue | ColdValue:
        if self._value is None:
            self._value = self._log.open_value(self._reference)
        return self._value

    def _next_piece(self) -> bytes:
        """Empty at the end."""
        if self._offset >= self._reference.name.size:
            self.close()
            return b""
        piece = self._opened().data(self._offset, PIECE_BYTES)
        self._offset += PIECE_BYTES
        return piece

    def __next__(self) -> bytes:
        piece = self._next_piece()
        if not piece:
            raise StopIteration
        return piece

    async def __anext__(self) -> bytes:
        if self._offset >= self._reference.name.size:
            self.close()
            raise StopAsyncIteration
        tasks = self._tasks()
        is_cold = isinstance(await tasks.read(self._opened), ColdValue)
        return await (tasks.read_cold if is_cold else tasks.read)(self._next_piece)

    def close(self) -> None:
        """Nobody wants the rest."""
        value, self._value, self._offset = self._value, None, self._reference.name.size
        if value is not None:
            value.close()

    def __del__(self) -> None:
        self.close()


def _change(records: list[OperationRecord], parts: list[Operation]) -> Change:
    last = records[-1]
    entry: Entry = Batch(parts) if last.flags & PART_OF_BATCH else parts[0]
    if last.is_refused:
        return Change(last.transaction, entry, Result(last.transaction, "refused", last.reason))
    changed = any(record.updates for record in records)
    return Change(last.transaction, entry, Result(last.transaction, "applied" if changed else "nothing"))


def _touches(operation: Operation, prefix: str) -> bool:
    """Whether an operation writes an object whose bucket/key begins like this, or may delete some with their bucket."""
    match operation:
        case PutObject(bucket, key) | DeleteObject(bucket, key) | CopyObject(_, _, bucket, key):
            return f"{bucket}/{key}".startswith(prefix)
        case _:
            whole = f"{operation.bucket}/"
            return whole.startswith(prefix) or prefix.startswith(whole)


class Piece(NamedTuple):
    """A piece of a log: the records of all entries up to a seq, and where those after it begin, if that is known."""

    chosen: Iterator[Chosen]
    last_seq: int
    next_lsn: int | None = None
    is_in_store: bool = False


class ChangeLog:
    """The log of an engine, on its disk and in its store, for any number of feeds. Thread-safe."""

    def __init__(self, core: Core, cold: ColdReader | None, standing: Standing, *, follows: bool = False) -> None:
        """`follows`: another replica ships to the store."""
        self._follows = follows
        self.marks = core.marks
        self.history = core.history
        self._wal = core.wal
        self._values = core.values
        self._entry_ends = core.entry_ends
        self._cold = cold
        self._standing = standing

    @property
    def first_lsn(self) -> int:
        """The oldest record on this disk."""
        return self._wal.first_lsn

    def check(self) -> None:
        """Raises if the engine is closed."""
        if self._standing.is_closed:
            raise self._standing.closed_error()

    def open_value(self, reference: Reference) -> OpenValue | ColdValue:
        """As `FeedLog` says."""
        here = self._values.open(reference)
        if here is not None or self._cold is not None:
            return here or self._cold.open_value(reference)  # type: ignore[union-attr]
        raise NotFoundError(f"{reference.name} is no longer there", hint="Its version was removed since")

    def piece(self, first_seq: int, last_seq: int, lsn: int | None, *, may_wait: bool) -> Piece | None:
        """As `FeedLog` says."""
        first_lsn, stop_lsn = self._wal.first_lsn, self._wal.durable_lsn + 1
        index = self._entry_ends()
        index.learn_disk(stop_lsn, first_lsn)
        if lsn is None or self._follows:  # then it may be an LSN of the store
            before = index.at_or_before(first_seq - 1)
            lsn = before.lsn + 1 if before.lsn or first_lsn <= 1 else None
        if lsn is not None and lsn >= first_lsn:
            return Piece(self._on_disk(index, lsn, stop_lsn, first_seq, last_seq), last_seq)
        if self._cold is not None and not may_wait:
            return None
        manifest = None if self._cold is None else self._cold.manifest()
        if self._cold is None or manifest is None:
            raise _gone(first_seq, f"it begins at LSN {first_lsn} on this disk, and no store is known")
        here_seq = self._first_seq_on_disk(index, first_lsn, stop_lsn) if self._follows else None
        if manifest.high_water_mark < first_seq or (here_seq is not None and here_seq <= first_seq):
            # All that is not in the store is on the disk.
            lsn = first_lsn if self._follows else max(first_lsn, manifest.high_water_lsn + 1)
            return Piece(self._on_disk(index, lsn, stop_lsn, first_seq, last_seq), last_seq)
        if here_seq is not None:
            last_seq = min(last_seq, here_seq - 1)
        return piece_in_store(self._cold, manifest, first_seq, last_seq, None if self._follows else lsn)

    def _first_seq_on_disk(self, index: SeqIndex, lsn: int, stop_lsn: int) -> int | None:
        """The first entry of which nothing has left the disk."""
        for frames, indexes in self._on_disk(index, lsn, stop_lsn, 0, MAX_SEQ):
            for at_lsn, raw in records_of(frames, indexes):
                return decode_header(raw, at_lsn).transaction
        return None

    def _on_disk(self, index: SeqIndex, lsn: int, stop_lsn: int, first_seq: int, last_seq: int) -> Iterator[Chosen]:
        dead = packed_ranges(index.rolled_back_below(stop_lsn))
        selection = EntrySelection(stop_lsn, first_seq, last_seq, dead)
        for frames in self._wal.batches(lsn, stop_lsn):
            yield from selection.feed(frames, 0, frames.count)
            if selection.is_done:
                return


class StoredChangeLog:
    """What the store has of an engine's log, for feeds without the engine. Thread-safe."""

    first_lsn = MAX_LSN

    def __init__(self, marks: Marks, history: History, cold: ColdReader, check: Callable[[], None]) -> None:
        self.marks = marks
        self.history = history
        self.check = check
        self._cold = cold

    def open_value(self, reference: Reference) -> OpenValue | ColdValue:
        """As `FeedLog` says."""
        return self._cold.open_value(reference)

    def piece(self, first_seq: int, last_seq: int, lsn: int | None, *, may_wait: bool) -> Piece | None:
        """As `FeedLog` says."""
        if not may_wait:
            return None
        manifest = self._cold.manifest()
        if manifest is None:
            raise _gone(first_seq, "the manifest is gone from the store")
        return piece_in_store(self._cold, manifest, first_seq, last_seq, lsn)


def piece_in_store(cold: ColdReader, manifest: Manifest, first_seq: int, last_seq: int, lsn: int | None) -> Piece:
    """The records of the entries with these seqs, as far as they are in the store."""
    chosen = _in_store(cold, manifest, first_seq, last_seq, lsn)
    if last_seq < manifest.high_water_mark:
        return Piece(chosen, last_seq, is_in_store=True)
    return Piece(chosen, manifest.high_water_mark, manifest.high_water_lsn + 1, is_in_store=True)


def _in_store(cold: ColdReader, manifest: Manifest, first_seq: int, last_seq: int, lsn: int | None) -> Iterator[Chosen]:
    known = _lsn_before(manifest, first_seq) if lsn is None else lsn
    begin = max(known, cold.catalog.start_offset())
    log = cold.shipped_log()
    if begin > known:  # the log no longer has its beginning
        first = first_counting(log, _range(manifest, begin, 0, manifest.high_water_mark))
        begins = None if first is None else _seq_at(log, first)
        if begins is None or begins > first_seq:
            more = "nothing of it is left" if begins is None else f"it begins with seq {begins}"
            raise _gone(first_seq, more)
    yield from counting(log, _range(manifest, begin, first_seq, min(last_seq, manifest.high_water_mark)))


def _range(manifest: Manifest, start_lsn: int, first_seq: int, last_seq: int) -> LogRange:
    whole = log_range(manifest, start_lsn)
    return msgspec.structs.replace(whole, first_seq=first_seq, last_seq=last_seq)


def _seq_at(log: ShippedLog, lsn: int) -> int:
    with contextlib.closing(log.read(lsn, lsn + 1)) as batches:
        for batch in batches:
            assert batch.frames is not None, "what comes from objects is framed"
            return decode_header(batch.frames.payloads(batch.start, batch.start + 1)[0], lsn).transaction
    raise missing_records(lsn, lsn + 1)


def _lsn_before(manifest: Manifest, seq: int) -> int:
    """An LSN at or before the first record of the entries from a seq on, as far as the manifest knows."""
    return max((lsn for at, lsn in manifest.known_ends if at < seq), default=1)


def _gone(seq: int, begins: str) -> GapError:
    return GapError(
        f"entries from seq {seq} on are no longer in the log: {begins}",
        first=seq,
        last=seq,
        hint="Scan the state at `applied_seq`, and follow the changes after it",
    )


class ChangeCalls:
    """The change feed of an engine."""

    _change_log: Lazy[FeedLog]
    _news: News
    _tasks: Lazy[TaskThreads]

    def changes(
        self,
        start_seq: int = 1,
        *,
        follow: bool = False,
        prefix: str = "",
        with_values: bool = False,
        committed: bool = False,
    ) -> Iterator[Change]:
        """Yields (seq, entry, result) of what was applied from a seq on, in order, up to `applied_seq`; with `follow`
        it waits for more. Refused entries are among them; their puts have no data.

        `committed` stays at or below `low_water_mark`: that is never rolled back. `prefix` selects entries that write
        objects whose "bucket/key" starts with it. Puts have data and metadata with `with_values`, otherwise none; data
        that has a file of its own (`large_value_bytes`) is an iterator of bytes, for tasks an asynchronous one too.
        If what was yielded is rolled back, the feed ends with ConflictError; GapError if the log does not reach back.
        """
        feed = self._feed(start_seq, follow=follow, prefix=prefix, with_values=with_values, committed=committed)
        return _followed(feed, self._news) if follow else feed.available()

    @twin_of(changes)
    async def changes_async(
        self,
        start_seq: int = 1,
        *,
        follow: bool = False,
        prefix: str = "",
        with_values: bool = False,
        committed: bool = False,
    ) -> AsyncIterator[Change]:
        feed = self._feed(start_seq, follow=follow, prefix=prefix, with_values=with_values, committed=committed)
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before the engine
                loop.call_soon_threadsafe(woken.set)

        def take(may_wait: bool) -> list[Change] | None:
            return feed.take(_TAKEN_AT_ONCE, may_wait=may_wait)

        with self._news.listening(wake):
            while True:
                woken.clear()
                while found := await reading_here_or_cold(self, take):
                    for change in found:
                        yield change
                if not follow:
                    return
                await woken.wait()

    def _feed(self, start_seq: int, *, follow: bool, prefix: str, with_values: bool, committed: bool) -> Feed:
        log = self._change_log()
        log.check()
        checked_seq(start_seq, least=0)
        check_text("prefix", prefix)
        up_to = None if follow else log.marks.applied_seq
        how: dict[str, Any] = {"prefix": prefix, "with_values": with_values, "committed": committed, "up_to": up_to}
        return Feed(log, self._tasks, max(1, start_seq), **how)


def _followed(feed: Feed, news: News) -> Iterator[Change]:
    woken = Event()
    with news.listening(woken.set):
        while True:
            woken.clear()
            yield from feed.available()
            woken.wait()
