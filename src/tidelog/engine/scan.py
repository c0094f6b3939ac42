"""Scans of a bucket, in either direction, and reads of many objects at once: values come in batches.

    rows of the index (C) ─> with their values, where these are small
                          ─> batches of rows -> hot values from files, cold ones by ColdReader.begin_scan (both C)
                                └── the next batches are placed and fetched while the reader consumes this one

Invariants
- A scan reads one state, however long it takes and whatever is applied meanwhile: it pins its seq.
- A reader of a few objects fetches a few: batches begin small and grow, nothing is fetched ahead before the first is
  consumed, and nothing beyond the limit.
- What is held is bounded: at most `_BATCHES_AHEAD + 1` batches, each of at most `_BATCH_BYTES`, or one larger value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import NamedTuple

import msgspec

from tidelog.engine.cold.reader import ColdReader, RowsAhead, Value, ValuesAhead
from tidelog.engine.entry import StoredObject, Tier
from tidelog.engine.mvcc.cells import INLINE, POINTER, Cell, at, object_prefix, objects_of
from tidelog.engine.mvcc.retention import Pin, forgotten
from tidelog.engine.mvcc.versions import WITH_CRC, WITH_DATA, WITH_VALUE, Row
from tidelog.engine.reads import EngineStat, check_limit, check_names, check_text
from tidelog.engine.scan_iterator import Lists, Scan
from tidelog.engine.wal.scan_values import PLAIN_COLUMNS, ScannedRows, batches_of
from tidelog.engine.wal.value import decode_value
from tidelog.errors import GapError, InputError, NotFoundError

# Small values of a store that are in the order of keys come with one request for each blob file that has some.
_FIRST_ROWS = 64
_FIRST_BYTES = 512 << 10
_BATCH_ROWS = 8192
_BATCH_BYTES = 8 << 20
_BATCHES_AHEAD = 3
# Each is so much larger than the one before, and one more is on its way: a long scan soon has its large requests.
_GROWTH = 4
# Where nothing comes from the store: values that are taken while the processor's cache has them cost half.
_HOT_BYTES = 1 << 20

_ScannedAhead = tuple[ScannedRows, RowsAhead | None]
"""Rows, and their values that the store is asked for, if some are."""


class EngineScans(EngineStat):
    """The calls of an engine that read many objects."""

    def scan(
        self,
        bucket: str,
        start: str | None = None,
        end: str | None = None,
        *,
        prefix: str = "",
        reverse: bool = False,
        limit: int | None = None,
        with_values: bool = False,
        seq: int | None = None,
    ) -> Scan:
        """Yields the objects of a bucket from the key `start` on and before the key `end` whose keys start with the
        prefix, in the order of keys or in reverse, as of a seq: one state, whatever is applied meanwhile.

        With values they have `data` and `metadata`; those in the store are fetched in batches, ahead of the reader.
        `seek(key)` of the iterator moves it.
        """
        check_names(bucket)
        for what, text in (("prefix", prefix), ("start", start), ("end", end)):
            check_text(what, "" if text is None and what != "prefix" else text)
        check_limit(limit)
        pin = self.pin(seq)
        if self._buckets.created(bucket, pin.seq) is None:
            pin.check()
            raise self._no_bucket(bucket, pin.seq)
        wanted = _Range(bucket, prefix, start, end, bool(reverse), limit, bool(with_values))

        def begin(key: str | None) -> Lists:
            nonlocal pin
            if key is None:
                return self._scanned(pin, wanted)
            before, pin = pin, pin.again()
            before.release()
            return self._scanned(pin, wanted.beginning_at(key))

        return Scan(begin)

    def _scanned(self, pin: Pin, wanted: _Range) -> Lists:
        with pin:
            rows = self._versions.objects(
                wanted.bucket,
                wanted.prefix,
                pin.seq,
                start=wanted.start,
                end=wanted.end,
                reverse=wanted.reverse,
                columns=WITH_DATA if wanted.with_values else WITH_CRC,
            )
            lists = _limited(rows, wanted.limit)
            for found in self._with_values(wanted, lists, pin.seq) if wanted.with_values else lists:
                pin.check()
                if self._standing.is_closed:
                    raise self._standing.closed_error()
                yield found

    def _with_values(self, wanted: _Range, lists: Iterator[list[Row]], at: int) -> Iterator[list[Row]]:
        """Small values come with their rows, which are most of the work then; others are looked up."""
        for has_values, run in groupby(lists, _has_values):
            if has_values:
                yield from run
            else:
                yield from self._scanned_places(wanted.bucket, run, at, is_reverse=wanted.reverse)

    def _scanned_places(
        self, bucket: str, lists: Iterator[list[Row]], at: int, *, is_reverse: bool
    ) -> Iterator[list[Row]]:
        """Rows with the places of their values: the same with the values."""
        if self._is_placed_elsewhere:  # the store has them by the places of another log
            wanted_ones = (_Wanted.of(bucket, row) for row in chain.from_iterable(lists))
            for found in self._values_of(wanted_ones, at, are_scanned=True):
                yield [(one.key, one.cell.size, one.seq, one.cell.crc, *value) for one, value, _ in found]
            return
        waiting: deque[_ScannedAhead] = deque()
        size = _BatchSize()
        wanted, prefix, ahead = batches_of(lists, size.following()), objects_of(bucket)[0], 0
        try:
            while True:
                while len(waiting) <= ahead and (rows := next(wanted, None)) is not None:
                    yield from self._begin_rows(bucket, ScannedRows(rows, prefix, is_reverse=is_reverse), waiting)
                if not waiting:
                    return
                size.are_cold = waiting[0][1] is not None
                yield from self._taken_rows(bucket, waiting, at)
                ahead = min(ahead + 1, _BATCHES_AHEAD) if size.are_cold else 0
        finally:
            for _, begun in waiting:
                if begun is not None:
                    begun.forget()

    def _begin_rows(self, bucket: str, scanned: ScannedRows, waiting: deque[_ScannedAhead]) -> Iterator[list[Row]]:
        cold = self._cold_left(bucket, scanned)
        if cold is not None and not waiting:
            yield []  # where they are may have to be asked
        begun = None if cold is None else cold.begin_scan(scanned, in_background=bool(waiting))
        waiting.append((scanned, begun))

    def _cold_left(self, bucket: str, scanned: ScannedRows) -> ColdReader | None:
        """Takes the values that are on this disk; returns what reads the store if others are left, and are there."""
        if scanned.missing:
            self._local.read_values(scanned)
        if self._cold is None or not scanned.missing or None not in scanned.values:
            return None
        self._cold.take_from_disk(scanned)
        left = (row for row, value in zip(scanned.rows, scanned.values, strict=True) if value is None)
        is_cold = any(self._tier_of(_Wanted.of(bucket, row).cell) == "cold" for row in left)
        return self._cold if is_cold else None

    def _taken_rows(self, bucket: str, waiting: deque[_ScannedAhead], at: int) -> Iterator[list[Row]]:
        if waiting[0][1] is not None:
            yield []
        scanned, ahead = waiting.popleft()
        if ahead is not None:
            ahead.take()
        yield scanned.finished(lambda row: self._row_again(bucket, row, at))

    def _row_again(self, bucket: str, row: Row, at: int) -> Row:
        """A row whose value was not found with others: moved since it was looked up, in a file of its own, in a
        compressed object, or lost, which is told now.
        """
        try:
            found = self.read(bucket, row[0], at)
        except (GapError, NotFoundError) as error:
            if at < self._kept_from():  # another process has moved the start of history
                raise forgotten(self._kept_from()) from error
            raise
        return *row[:4], found.data, found.metadata

    def read_many(self, keys: Iterable[tuple[str, str]], seq: int | None = None) -> list[StoredObject | None]:
        """Returns the objects of these (bucket, key) as of one seq, in their order; None for those that do not exist.

        Values in the store are fetched together: neighbours with one request, several requests at once.
        """
        wanted = checked_keys(keys)
        with self.pin(seq) as at:
            found = [self._versions.find(bucket, key, at) for bucket, key in wanted]
            answer: list[StoredObject | None] = [None] * len(wanted)
            there = (
                _Wanted(*wanted[number], one.seq, one.cell, number)
                for number, one in enumerate(found)
                if one is not None
            )
            for values in self._values_of(there, at):
                for one, (data, metadata), tier in values:
                    answer[one.number] = StoredObject(data, metadata, one.seq, tier)
        return answer

    def _read_many_here(self, wanted: Sequence[tuple[str, str]], seq: int | None) -> list[StoredObject | None] | None:
        """Like `read_many`, from this disk alone; None if a value has left it."""
        answer: list[StoredObject | None] = []
        with self.pin(seq) as at:
            for bucket, key in wanted:
                found = self._versions.find(bucket, key, at)
                one = None if found is None else self._found_here(found)
                if found is not None and one is None:
                    return None
                answer.append(one)
        return answer

    def _values_of(self, wanted: Iterator[_Wanted], seq: int, *, are_scanned: bool = False) -> Iterator[list[_Got]]:
        """The values of some versions, in their order, in batches; an empty one before each wait for a store.

        Those that are scanned are neighbours in compacted data, and no reads that bring a value back to this disk.
        """
        waiting: deque[_Batch] = deque()
        ahead, most_rows, most_bytes = 0, _FIRST_ROWS, _FIRST_BYTES
        try:
            while True:
                while len(waiting) <= ahead and (some := _some(wanted, most_rows, most_bytes)):
                    stored = [self._stored_here(one.cell) for one in some]
                    if None in stored:
                        yield []  # where they are may have to be asked
                    waiting.append(self._begin(some, stored, are_scanned=are_scanned))
                    most_rows = min(_GROWTH * most_rows, _BATCH_ROWS)
                    most_bytes = min(_GROWTH * most_bytes, _BATCH_BYTES)
                if not waiting:
                    return
                if waiting[0].ahead is not None:
                    yield []
                yield self._taken(waiting.popleft(), seq)
                ahead = min(ahead + 1, _BATCHES_AHEAD)
        finally:
            for batch in waiting:
                batch.forget()

    def _begin(self, wanted: list[_Wanted], stored: list[bytes | None], *, are_scanned: bool) -> _Batch:
        cold = [one for one, here in zip(wanted, stored, strict=True) if here is None]
        if not cold or self._cold is None:
            return _Batch(wanted, stored, [one.cell for one in cold], None)
        try:
            cells = [self._placed(one.bucket, one.key, one.seq, one.cell) for one in cold]
        except NotFoundError as error:
            return _Batch(wanted, stored, [], _Unplaced(error))
        keys = [one.version for one in cold] if are_scanned else []
        return _Batch(wanted, stored, cells, self._cold.begin_many(cells, keys))

    def _taken(self, batch: _Batch, at: int) -> list[_Got]:
        try:
            cold = iter(batch.ahead.take() if batch.ahead is not None else map(self._read_cold, batch.cold))
            return [
                _Got(one, decode_value(here, one.cell.codec, one.cell.size, one.cell.crc, one.cell.lsn), "hot")
                if here is not None
                else _Got(one, _present(next(cold)), "cold")
                for one, here in zip(batch.wanted, batch.stored, strict=True)
            ]
        except (GapError, NotFoundError) as error:
            if at < self._kept_from():  # another process has moved the start of history
                raise forgotten(self._kept_from()) from error
            # Some were moved since they were looked up. Those that are lost are named now.
            return [self._got_again(one, at) for one in batch.wanted]

    def _got_again(self, wanted: _Wanted, at: int) -> _Got:
        found = self.read(wanted.bucket, wanted.key, at)
        return _Got(wanted, (found.data, found.metadata), found.tier)


class _Range(NamedTuple):
    """What a scan is about."""

    bucket: str
    prefix: str
    start: str | None
    end: str | None
    reverse: bool
    limit: int | None
    with_values: bool

    def beginning_at(self, key: str) -> _Range:
        """The part of it from a key on; in reverse, up to the key."""
        if self.reverse:
            behind = key + "\0"  # no key has a NUL in it
            return self._replace(end=behind if self.end is None else min(behind, self.end))
        return self._replace(start=key if self.start is None else max(key, self.start))


class PrefetchReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a prefetch did: so many `objects`, of so many `bytes` as they are stored, were brought to this disk;
    `already_here` were on it; for `left_out` there was no room.
    """

    objects: int
    bytes: int
    already_here: int
    left_out: int


class EnginePrefetch(EngineScans):
    """The call of an engine with a disk that brings cold values back to it."""

    def prefetch(self, bucket: str, prefix: str = "", *, seq: int | None = None) -> PrefetchReport:
        """Brings the values of all objects of a bucket whose keys start with the prefix to this disk, as of a seq, in
        the order of keys, as far as `disk_cache_bytes` has room; neighbours come with one request. They leave it like
        those that were read often.
        """
        check_names(bucket)
        check_text("prefix", prefix)
        brought = brought_bytes = already_here = left_out = 0
        room = 0 if self._cold is None else self._cold.disk_room_bytes
        with self.pin(seq) as at:
            if self._buckets.created(bucket, at) is None:
                raise self._no_bucket(bucket, at)
            rows = chain.from_iterable(self._versions.objects(bucket, prefix, at, columns=WITH_VALUE))
            wanted = (_Wanted.of(bucket, row) for row in rows)
            while some := _some(wanted, _BATCH_ROWS, _BATCH_BYTES):
                cold: list[_Wanted] = []
                for one in some:
                    stored_bytes = one.cell.size if one.cell.inline is not None else one.cell.stored_bytes
                    if self._tier_of(one.cell) == "hot":
                        already_here += 1
                    elif stored_bytes <= room:
                        cold.append(one)
                        room -= stored_bytes
                    else:
                        left_out += 1
                for one, is_here in zip(cold, self._brought(cold, at), strict=True):
                    brought += is_here
                    brought_bytes += is_here * max(one.cell.size, one.cell.stored_bytes)
                    left_out += not is_here
        return PrefetchReport(objects=brought, bytes=brought_bytes, already_here=already_here, left_out=left_out)

    def _brought(self, wanted: list[_Wanted], at_seq: int) -> list[bool]:
        if not wanted or self._cold is None:
            return []
        try:
            cells = [self._placed(one.bucket, one.key, one.seq, one.cell) for one in wanted]
            return self._cold.bring_back(cells, [one.version for one in wanted])
        except (GapError, NotFoundError) as error:
            if at_seq < self._kept_from():  # another process has moved the start of history
                raise forgotten(self._kept_from()) from error
            for one in wanted:  # moved since they were looked up, if they are not lost
                self._got_again(one, at_seq)
            return [False] * len(wanted)


class _Wanted(NamedTuple):
    """A version whose value is wanted."""

    bucket: str
    key: str
    seq: int
    cell: Cell
    number: int = 0

    @classmethod
    def of(cls, bucket: str, row: Row) -> _Wanted:
        key, size, seq, crc, codec, lsn, position, stored_bytes, inline = row
        flags = POINTER if inline is None else INLINE
        return cls(bucket, key, seq, Cell(flags, 0, size, crc, codec, lsn, position, stored_bytes, inline))

    @property
    def version(self) -> bytes:
        """The key of the version in the tree."""
        return at(object_prefix(self.bucket, self.key), self.seq)


class _Got(NamedTuple):
    """The same with its value, and where that was."""

    wanted: _Wanted
    value: Value
    tier: Tier


class _Unplaced:
    """Values one of which is not in the store. When they are taken it is looked why."""

    def __init__(self, error: NotFoundError) -> None:
        self._error = error

    def take(self) -> list[Value | None]:
        raise self._error

    def forget(self) -> None:
        """Nothing is on its way."""


class _Batch(NamedTuple):
    """Versions with their stored values as far as they are on this disk; the others are on their way."""

    wanted: list[_Wanted]
    stored: list[bytes | None]
    cold: list[Cell]
    ahead: ValuesAhead | _Unplaced | None

    def forget(self) -> None:
        if self.ahead is not None:
            self.ahead.forget()


def _has_values(rows: list[Row]) -> bool:
    return len(rows[0]) == PLAIN_COLUMNS


def _limited(batches: Iterator[list[Row]], limit: int | None) -> Iterator[list[Row]]:
    """The first rows, no list of them empty."""
    for rows in batches:
        if limit is not None and len(rows) >= limit:
            yield rows[:limit]
            return
        yield rows
        limit = None if limit is None else limit - len(rows)


class _BatchSize:
    """Rows and bytes of one batch after the other: large ones only while values come from the store."""

    def __init__(self) -> None:
        self.are_cold = False

    def following(self) -> Iterator[tuple[int, int]]:
        rows, size = _FIRST_ROWS, _FIRST_BYTES
        while True:
            yield rows, size
            rows, size = min(_GROWTH * rows, _BATCH_ROWS), min(_GROWTH * size, _BATCH_BYTES)
            size = size if self.are_cold else min(size, _HOT_BYTES)


def _some(wanted: Iterator[_Wanted], most_rows: int, most_bytes: int) -> list[_Wanted]:
    """The next ones, as many as one batch holds."""
    taken: list[_Wanted] = []
    left = most_bytes
    for one in islice(wanted, most_rows):
        taken.append(one)
        left -= max(one.cell.size, one.cell.stored_bytes)
        if left <= 0:
            break
    return taken


def _present(value: Value | None) -> Value:
    assert value is not None, "a deletion is not among the cells"
    return value


def checked_keys(keys: object) -> Sequence[tuple[str, str]]:
    """Pairs of a bucket and a key, if they are."""
    if isinstance(keys, str) or not hasattr(keys, "__iter__"):
        raise InputError(f"keys must be pairs of a bucket and a key, not {type(keys).__name__}")
    wanted: list[tuple[str, str]] = []
    for pair in keys:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"keys must be pairs of a bucket and a key, and one is {pair!r}")
        check_names(*pair)
        wanted.append((pair[0], pair[1]))
    return wanted
