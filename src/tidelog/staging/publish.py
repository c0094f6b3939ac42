"""Publishes staged parts as objects of the topic, as they are: the bytes that a task wrote are not written again.

Only a process that opens the topic for a while and has nothing of it on its disk does this, before its log is opened:
the parts follow what the catalog has. Whatever cannot be published so is left for the ingest (`ingest.py`).

Which staged commits
- Large ones of large parts: small rows of many tasks belong into one object, and the ingest makes that.
- All their parts name the topic's log in their header, which the topic was created with, or had when they were written.
- Objects are not to be compressed.

Invariants
- As in the ingest, the first offset of a staged commit is recorded before the first of its parts is published, and all
  of its rows are verified before that. So its first offset and the end of the catalog tell how many of its rows are
  there. An object has all rows of a part: the next owner resumes at a part, here or in the ingest.
- A part is copied inside the store, under the name of the next object of this owner, and is published before the next
  one is copied. Staged parts stay until the ingest clears them away: what fails here is done again from them.
- Damage is not judged here: the ingest finds it too, and refuses what is damaged.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import msgspec

from tidelog.clock import Clock
from tidelog.cold.catalog import Catalog, Descriptor, largest_frame_bytes
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.reader import History
from tidelog.cold.settings import TierSettings
from tidelog.cold.shipper import refuse_older_catalog, refuse_to_overwrite
from tidelog.cold.upload import OffsetIndexBuilder
from tidelog.errors import DataError, MessageTooLargeError, NotFoundError
from tidelog.events import tell
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.frame import Frames
from tidelog.staging.area import StagedPart, read_whole_part
from tidelog.staging.document import StagedCommit, StagingDocument, decode_staging, encode_staging
from tidelog.staging.ledger import OwnedLedger
from tidelog.staging.rows import CheckRows, parts_of
from tidelog.store.document import VersionedDocument
from tidelog.store.keys import ObjectId
from tidelog.store.object_store import ObjectStore

_logger = logging.getLogger("tidelog.cold")
_LEAST_BYTES = 16 << 20
_LEAST_MEAN_PART_BYTES = 4 << 20
_READS_AT_ONCE = 2
_LEFT_TO_INGEST = (DataError, NotFoundError, MessageTooLargeError)


def staged_log_id(objects: ObjectStore, catalog: Catalog) -> str | None:
    """The id that a topic without an owner is to be created with: the first rows that wait for it name it."""
    if catalog.owner() is not None:
        return None
    found = VersionedDocument(catalog.metadata, catalog.keys.staging, encode_staging, decode_staging).read()
    waiting = () if found is None else found.value.waiting
    if not waiting or not _is_large(waiting[0]):
        return None
    with contextlib.suppress(*_LEFT_TO_INGEST):
        return parts_of(objects, waiting[0])[0].log_id or None
    return None


class StagedPublisher:
    """Publishes what waits for a topic that this process has just claimed. `check_rows` raises when rows must not
    become messages."""

    def __init__(
        self,
        owned: OwnedCatalog,
        history: History,
        settings: TierSettings,
        clock: Clock,
        time_field: int,
        check_rows: CheckRows,
    ) -> None:
        self._owned = owned
        self._history = history
        self._objects = history.objects
        self._settings = settings
        self._clock = clock
        self._time_field = time_field
        self._check_rows = check_rows
        self._ledger = OwnedLedger(owned)
        self._has_looked = False

    def publish(self, next_offset: int) -> int:
        """Publishes the staged commits that wait, in order, up to the first one that is for the ingest. Returns the
        next offset of the catalog."""
        document = self._ledger.load()[0]
        if self._settings.ship_compression != "none" or not any(_is_large(one) for one in document.waiting):
            return next_offset
        document = self._ledger.change(lambda known: known.settled(next_offset))
        for one in document.waiting:
            try:
                next_offset = self._publish_one(one, next_offset)
            except _IngestInsteadError:
                break
        return next_offset

    def _publish_one(self, one: StagedCommit, next_offset: int) -> int:
        if not one.is_within(next_offset):
            if not _is_large(one):
                raise _IngestInsteadError
            try:
                parts = self._parts_left(one, next_offset)
                looked = self._verified(parts)
            except _LEFT_TO_INGEST as error:
                raise _IngestInsteadError from error
            if one.first_offset is None:
                self._ledger.change(_placing(one, next_offset, self._owned.epoch))
            for part, found in zip(parts, looked, strict=True):
                next_offset = self._publish_part(part, found, next_offset)
        now_us = self._clock.now_us()
        self._ledger.change(lambda known: known.taken(one.id, now_us))
        return next_offset

    def _parts_left(self, one: StagedCommit, next_offset: int) -> Sequence[StagedPart]:
        """Those that are not in the catalog."""
        parts = parts_of(self._objects, one)
        log_id, most_bytes = self._owned.ownership.owner.log_id, self._settings.max_object_bytes
        mean_bytes = one.bytes // max(1, len(parts))
        if mean_bytes < _LEAST_MEAN_PART_BYTES or any(
            part.log_id != log_id or part.bytes > most_bytes + BINDING_BYTES for part in parts
        ):
            raise _IngestInsteadError
        if one.first_offset is None:
            return parts
        begins = list(accumulate((part.rows for part in parts), initial=one.first_offset))
        if next_offset not in begins:
            raise _IngestInsteadError  # an owner that ingested has shipped a piece of a part
        return parts[begins.index(next_offset) :]

    def _verified(self, parts: Sequence[StagedPart]) -> list[_Looked]:
        with ThreadPoolExecutor(_READS_AT_ONCE, "tidelog-publish") as threads:
            return list(threads.map(self._look_through, parts))

    def _look_through(self, part: StagedPart) -> _Looked:
        looked = _Looked(self._settings, BINDING_BYTES)
        for frames in read_whole_part(self._history.fetcher, part):
            self._check_rows(frames)
            looked.add(frames, self._time_field)
        return looked

    def _publish_part(self, part: StagedPart, looked: _Looked, first_offset: int) -> int:
        began = self._clock.monotonic()
        name = ObjectId(first_offset, first_offset + part.rows - 1, self._owned.epoch)
        key = self._owned.catalog.keys.object(name)
        refuse_to_overwrite(self._owned, self._objects, name)
        if not self._has_looked:
            refuse_older_catalog(self._owned, self._objects)
            self._has_looked = True
        self._objects.copy(part.key, key)
        info = self._objects.head(key)
        if info.size != part.bytes:
            raise DataError(f"{key} has {info.size} bytes, and {part.key} has {part.bytes}", operation="publish")
        newest = self._owned.catalog.newest()
        times = (None if newest is None else newest.reached_time_us, looked.last_time_us)
        descriptor = Descriptor(
            object_id=str(name),
            start_offset=name.start,
            end_offset=name.end,
            first_time_us=looked.first_time_us,
            last_time_us=looked.last_time_us,
            reached_time_us=max((time for time in times if time is not None), default=None),
            size=info.size,
            raw_size=part.bytes - BINDING_BYTES,
            etag=info.etag,
            checksum=part.checksum,
            codec="none",
            epoch=name.epoch,
            created_us=self._clock.now_us(),
            log_id=part.log_id,
            offset_index=tuple((first_offset + row, position) for row, position in looked.index.entries()),
            largest_bytes=looked.largest_bytes,
        )
        self._owned.publish(descriptor)
        tell(
            _logger,
            "object_shipped",
            **{self._owned.catalog.keys.noun: self._owned.catalog.keys.subject},
            object=descriptor.object_id,
            first_offset=descriptor.start_offset,
            next_offset=descriptor.next_offset,
            bytes=descriptor.size,
            raw_bytes=descriptor.raw_size,
            epoch=descriptor.epoch,
            seconds=self._clock.monotonic() - began,
        )
        return descriptor.next_offset


class _IngestInsteadError(Exception):
    """A staged commit that cannot be published as it is."""


class _Looked:
    """What a descriptor says about the rows of a part, which are numbered from 0."""

    def __init__(self, settings: TierSettings, header_bytes: int) -> None:
        self.index = OffsetIndexBuilder(settings.ship_index_messages, settings.ship_index_bytes)
        self.first_time_us: int | None = None
        self.last_time_us: int | None = None
        self.largest_bytes: int | msgspec.UnsetType = msgspec.UNSET
        self._position = header_bytes

    def add(self, frames: Frames, time_field: int) -> None:
        start = frames.start_of(0)
        self.index.add_frames(frames, self._position - start)
        self._position += frames.end - start
        self.largest_bytes = largest_frame_bytes(frames, self.largest_bytes)
        if (times := frames.field_range(time_field)) is not None:
            first, last = self.first_time_us, self.last_time_us
            self.first_time_us = times[0] if first is None else min(first, times[0])
            self.last_time_us = times[1] if last is None else max(last, times[1])


def _is_large(one: StagedCommit) -> bool:
    return one.bytes >= _LEAST_BYTES


def _placing(one: StagedCommit, offset: int, epoch: int) -> Callable[[StagingDocument], StagingDocument]:
    return lambda known: known.placed(one.id, offset, epoch)
