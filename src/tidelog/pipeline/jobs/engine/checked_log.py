"""Verifies objects of an engine's log while their records are read for something else: nothing is fetched twice.

Invariants
- An object is verified as `check_log_object` does, with the bytes that the reader gets; where these are not what they
  must be it is fetched once more, as everywhere.
- Only objects that come with one request are verified here, and only those that the part has whole. Others, and those
  that the reader did not come to, have no result: somebody else reads them.
- The thread that fetched an object verifies it. Nothing is held for it beyond what the reader holds.
"""

from __future__ import annotations

from typing import cast

from tidelog.cold.catalog import Descriptor
from tidelog.engine.verify.store import LogObject, check_log_object
from tidelog.engine.wal.replay import ShippedLog
from tidelog.errors import TidelogError
from tidelog.pipeline.source.entry_batches import LogPart
from tidelog.store.object_store import ObjectInfo, ObjectStore


class CheckedPart(LogPart, frozen=True, kw_only=True):
    """A range of an engine's log whose objects are verified; `high_water_lsn` is the manifest's last entry's record."""

    high_water_lsn: int


class Checking:
    """The store from which a part is read; `found` is what was verified so far."""

    def __init__(self, part: CheckedPart) -> None:
        self._opened = part.place.opened()
        self._high_water_lsn = part.high_water_lsn
        self.settings = self._opened.objects.settings
        self.found: list[LogObject] = []
        whole = (one for one in part.descriptors if _is_whole(one, part))
        self._to_check = {self._opened.keys.object(one.name): one for one in whole}

    def log(self, part: LogPart) -> ShippedLog:
        """The log of the part, read through this."""
        return part.log(cast(ObjectStore, self))  # a reader of history asks for ranges, and nothing else

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """As the store's; an object that comes whole is verified first."""
        data = self._opened.objects.read_range(key, start, length)
        descriptor = self._to_check.get(key)
        if descriptor is not None and start == 0 and length > descriptor.size:
            self._check(key, descriptor, data)
        return data

    def _check(self, key: str, descriptor: Descriptor, data: memoryview) -> None:
        if self._to_check.pop(key, None) is None:
            return
        fetched = cast(ObjectStore, _Fetched(self._opened.objects, descriptor, data))
        try:
            found = check_log_object(fetched, self._opened.keys, descriptor, self._high_water_lsn)
        except TidelogError:  # the store gives no answer now; the object is read once more, elsewhere
            return
        self.found.append(found)


class _Fetched:
    """A store of which an object was fetched: what is asked for first is there, the second time the store is asked.

    One byte more than the descriptor tells of was asked for, so the size is known. Whether the object was written
    again, with the same bytes, is not.
    """

    def __init__(self, objects: ObjectStore, descriptor: Descriptor, data: memoryview) -> None:
        self._objects = objects
        self._descriptor = descriptor
        self._data: memoryview | None = data if len(data) == descriptor.size else None

    def head(self, key: str) -> ObjectInfo:
        said = self._descriptor
        return self._objects.head(key) if self._data is None else ObjectInfo(key, said.size, said.etag, said.created_us)

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        data, self._data = self._data, None
        return self._objects.read_range(key, start, length) if data is None else data[start : start + length]


def _is_whole(one: Descriptor, part: LogPart) -> bool:
    return part.start_lsn <= one.start_offset and one.next_offset <= part.stop_lsn
