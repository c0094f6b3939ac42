"""Maps times to seqs: which seq had been reached at a time, sampled from the WAL's own records.

Operation records contain their apply time. Which of them count is recorded elsewhere, because of rollbacks:

    in the store       the manifest lists what was rolled back: the first entry of each object that counts is a sample,
                       and its object is found by bisection
    on the disk        low-water marks are in the WAL: what is at or below one was applied before it, and is never
                       rolled back

Invariants
- The answer is never too late: every entry up to the returned seq was applied at or before the time. It may be too
  early, by about one object, or by the time between two low-water marks.
- Samples of a log that was dropped after compaction stay valid while the engine runs.
- Clocks may jump. That moves the answer within what the WAL says, and never beyond the marks: the caller ensures that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tidelog.cold.reader import History
from tidelog.engine.cold.manifest import Manifest
from tidelog.engine.cold.shipping import Shipping
from tidelog.engine.cold.store_link import StoreLink
from tidelog.engine.core import Core
from tidelog.engine.wal.files import WalSpan
from tidelog.engine.wal.record_header import CHECKPOINT_END, MARKS, OPERATION, decode_operation_head
from tidelog.engine.wal.records import CheckpointEndRecord, MarksRecord, decode_record
from tidelog.engine.wal.ship_watermark import is_rolled_back
from tidelog.log.frame import Frames
from tidelog.store.scheduler import DaemonPool

# An object begins with a few page images, as a rule, and then comes an entry.
_LOOKED_AT = 4096


class Sample(NamedTuple):
    """An entry, and when it was applied."""

    seq: int
    time_us: int


class _Operation(NamedTuple):
    lsn: int
    seq: int
    time_us: int


def _operations(frames: Frames) -> Iterator[_Operation]:
    buffer, lengths = memoryview(frames.buffer), memoryview(frames.lengths).cast("I")
    for index, at in enumerate(memoryview(frames.positions).cast("Q")):
        if buffer[at] == OPERATION:
            lsn = frames.first_offset + index
            head = decode_operation_head(buffer[at : at + lengths[index]], lsn)
            yield _Operation(lsn, head.seq, head.time_us)


class ShippedTimes:
    """Times of the log of an engine that has a store."""

    def __init__(self, core: Core, shipping: Shipping) -> None:
        self._core = core
        self._shipping = shipping
        self._samples: dict[int, Sample] = {}

    def seq_at(self, time_us: int) -> int:
        """The last seq that is known to have been reached at a time; 0 when none is."""
        with self._shipping.linked() as link:
            manifest = link.published
            newest = self._sample(link, manifest, manifest.high_water_lsn) if manifest.high_water_lsn else None
            if newest is not None and newest.time_us <= time_us:
                return newest.seq
            return self._bisected(link, manifest, time_us)

    def _bisected(self, link: StoreLink, manifest: Manifest, time_us: int) -> int:
        catalog, found = link.owned.catalog, self._remembered(time_us)
        low, high = max(1, catalog.start_offset()), manifest.shipped_lsn
        while low < high:
            piece = catalog.at((low + high) // 2)
            if piece is None:
                return found
            sample = self._sample(link, manifest, piece.start_offset)
            if sample is None or sample.time_us > time_us:
                high = piece.start_offset
            else:
                found, low = max(found, sample.seq), piece.next_offset
        return found

    def _remembered(self, time_us: int) -> int:
        """By samples of a log that may have been dropped since. They stay true: what is shipped is not rolled back."""
        return max([sample.seq for sample in self._samples.values() if sample.time_us <= time_us], default=0)

    def _sample(self, link: StoreLink, manifest: Manifest, lsn: int) -> Sample | None:
        """The first entry from an LSN on that counts; None if there is none nearby."""
        if lsn not in self._samples:
            stop_lsn = min(lsn + _LOOKED_AT, manifest.high_water_lsn + 1)
            found = self._first_that_counts(link, manifest, lsn, stop_lsn)
            if found is None:
                return None
            self._samples[lsn] = found
        return self._samples[lsn]

    def _first_that_counts(self, link: StoreLink, manifest: Manifest, lsn: int, stop_lsn: int) -> Sample | None:
        for frames in self._frames(link, lsn, stop_lsn):
            for operation in _operations(frames):
                if not is_rolled_back(manifest.rolled_back, operation.lsn):
                    return Sample(operation.seq, operation.time_us)
        return None

    def _frames(self, link: StoreLink, lsn: int, stop_lsn: int) -> Iterator[Frames]:
        wal = self._core.wal
        return wal.batches(lsn, stop_lsn) if lsn >= wal.first_lsn else _shipped(link, lsn, stop_lsn)


def _shipped(link: StoreLink, lsn: int, stop_lsn: int) -> Iterator[Frames]:
    fetchers = DaemonPool(1, "tidelog-times")
    try:
        yield from History(link.owned.catalog, link.objects, fetchers).frames(lsn, stop_lsn)
    finally:
        fetchers.shutdown(wait=False, cancel_futures=True)


class LocalTimes:
    """Times of the log of an engine that is on its disk alone."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._first_times: dict[int, int] = {}

    def seq_at(self, time_us: int) -> int:
        """The last seq that is known to have been reached at a time; 0 when none is."""
        behind = 0  # a mark in a file without operations: it counts if none before it is later
        self._core.wal.commit()  # marks count once they are on the disk, and no other caller waits for them
        for span in reversed(self._core.wal.spans()):
            first_time_us = self._first_time(span)
            if first_time_us is not None and first_time_us > time_us:
                behind = 0
                continue
            mark, is_cut = _last_mark(self._frames(span), time_us)
            mark = mark if is_cut else max(mark, behind)
            if first_time_us is None:
                behind = mark
            elif mark:
                return mark
        return 0

    def _first_time(self, span: WalSpan) -> int | None:
        """When the first operation of a file was applied; None without one."""
        if span.first_lsn not in self._first_times:
            for frames in self._frames(span):
                found = next(_operations(frames), None)
                if found is not None:
                    self._first_times[span.first_lsn] = found.time_us
                    break
        return self._first_times.get(span.first_lsn)

    def _frames(self, span: WalSpan) -> Iterator[Frames]:
        wal = self._core.wal
        return wal.batches(span.first_lsn, min(span.next_lsn, wal.durable_lsn + 1))


def _last_mark(pieces: Iterable[Frames], time_us: int) -> tuple[int, bool]:
    """The last low-water mark before the first operation that is later than a time, and whether one is."""
    mark = 0
    for frames in pieces:
        buffer, later = frames.buffer, _first_later(frames, time_us)
        for index, at in enumerate(memoryview(frames.positions).cast("Q")[:later]):
            if buffer[at] in (MARKS, CHECKPOINT_END):
                mark = max(mark, _mark_in(frames.payloads(index, index + 1)[0], frames.first_offset + index))
        if later < frames.count:
            return mark, True
    return mark, False


def _first_later(frames: Frames, time_us: int) -> int:
    """The index of the first operation that is later than a time; the number of records when none is."""
    later = (one.lsn - frames.first_offset for one in _operations(frames) if one.time_us > time_us)
    return next(later, frames.count)


def _mark_in(payload: bytes, lsn: int) -> int:
    record = decode_record(payload, lsn)
    if isinstance(record, MarksRecord):
        return record.low_water_mark
    return record.state.low_water_mark if isinstance(record, CheckpointEndRecord) else 0
