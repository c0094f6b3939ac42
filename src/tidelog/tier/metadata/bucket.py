"""A metadata store in the bucket itself: one object an entry, changed by conditional writes.

    <key>    a stamped value (`stamp.py`); its etag is the version

Invariants
- Creating is If-None-Match, replacing is If-Match. `bucket_probe.py` has proved, before the first write, that the
  server honours both.
- No two writes have the same bytes, so an etag never comes back, although it is a checksum of the content.
- A write without an answer is looked for by its stamp before it is made again.
- A conditional delete leaves a `deleted` stamp behind: stores have no delete on a condition. It reads as "not there",
  and creating the key again replaces it, on the condition that it is still the same one.
- A range is not a snapshot: what changes while it is read is in it or not.

Why one key at a time is enough for the catalog
A server changes one object at a time, so `supports_multi_key` is False and descriptor and `cur` are two steps. They
are safe in this order: descriptor first, then `cur`.
1. The descriptor is the truth. It is created under the one key that its start offset gives it, after its object is
   complete: the moment it exists, the segment is published, with all that a reader needs. It is overwritten only by
   a compaction, and never the newest one (`replacement_switch.py` has that argument).
2. `cur` is a hint at the newest descriptor, moved forward by compare-and-swap only. A crash between the steps leaves
   it behind the truth, never ahead of it. Readers and publishers take it as a place to start and list on from there,
   so they find the newer descriptor anyway; the next publisher moves it. (The other order could make it point at
   nothing.)
3. Segments are contiguous, so there is always exactly one next key: end + 1. Two publishers want the same key, and
   one gets it; the other sees a conflict, reads, and either finds its own stamp (it was published already) or stops.
4. An owner that was paused and wakes up checks its epoch before it publishes, but cannot do both in one step here. So
   the new owner, after its claim of the epoch and before it accepts anything, takes the next key itself, with a
   reservation: an entry that has its epoch and no object. (Where an earlier owner's reservation is, it replaces that,
   on its version.) If the old owner's descriptor got there first, the new owner conflicts, reads on and takes the key
   behind it; otherwise the old owner conflicts, for ever. The new owner replaces its reservation by its first
   descriptor with If-Match. Thus no offset is published twice, whoever sleeps for how long.
5. Deleting goes the other way: the descriptor first (on its version), then the object. A crash between leaves an
   object without a descriptor, which nobody reads and the sweep removes. A descriptor that a very late owner creates
   over a `deleted` stamp is below the topic's start offset, which never goes back: no reader gets there, and the
   sweep takes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from tidelog.errors import ConflictError, InputError, NotFoundError
from tidelog.tier.daemon_pool import DaemonPool
from tidelog.tier.keys import check_key, check_prefix, is_key
from tidelog.tier.metadata import stamp
from tidelog.tier.metadata.bucket_probe import prove_conditional_writes
from tidelog.tier.metadata.store import Check, Entry, MetadataStore, Put, Write
from tidelog.tier.metadata.undecided import settle
from tidelog.tier.object_store import ObjectInfo, ObjectStore

_READS_AT_ONCE = 8
_READ_AHEAD = 32


class _Found(NamedTuple):
    """An object as it is, `deleted` stamps included."""

    stamped: stamp.Stamped
    etag: str


class BucketMetadataStore(MetadataStore):
    """Metadata in an object store. With `read_only` nothing is written, not even to prove anything."""

    supports_multi_key = False
    supports_leases = False
    floor_is_cheap = False

    def __init__(self, objects: ObjectStore, *, read_only: bool = False) -> None:
        self.url = f"bucket:{objects.url}"
        self._objects = objects
        self._read_only = read_only
        if not read_only:
            prove_conditional_writes(objects)
        self._readers = DaemonPool(_READS_AT_ONCE, "bucket-metadata")

    def get(self, key: str) -> Entry | None:
        found = self._find(check_key(key))
        return None if found is None or found.stamped.is_deleted else Entry(key, found.stamped.value, found.etag)

    def floor(self, prefix: str, key: str) -> Entry | None:
        """Lists the names up to the key, a thousand a request, and reads one value."""
        check_key(key)
        before = []
        for info in self._list(check_prefix(prefix), prefix):
            if info.key > key:
                break
            before.append(info.key)
        return next((entry for name in reversed(before) if (entry := self.get(name)) is not None), None)

    def close(self) -> None:
        self._readers.shutdown(wait=False)  # it may be asking a store that does not answer

    # Reading

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        found: list[Entry] = []
        infos = self._list(prefix, start)
        while limit is None or len(found) < limit:
            size = _READ_AHEAD if limit is None else min(_READ_AHEAD, limit - len(found))
            names = [info.key for info in islice(infos, size)]
            if not names:
                break
            # What vanished since it was listed is not there.
            found.extend(entry for entry in self._readers.map(self.get, names) if entry is not None)
        return found

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        return list(islice((info.key for info in self._list(prefix, start) if self._is_there(info)), limit))

    def _list(self, prefix: str, start: str) -> Iterator[ObjectInfo]:
        """Listings of stores start behind a key, ours at it. What is no key of ours is somebody else's object."""
        if start != prefix and is_key(start):
            with contextlib.suppress(NotFoundError):
                yield self._objects.head(start)
        behind = None if start == prefix else start
        yield from (info for info in self._objects.list(prefix, start_after=behind) if is_key(info.key))

    def _is_there(self, info: ObjectInfo) -> bool:
        """Only what has the size of a `deleted` stamp has to be read to be told from one."""
        return info.size != stamp.DELETED_SIZE or self.get(info.key) is not None

    def _find(self, key: str) -> _Found | None:
        try:
            data, etag = self._objects.get(key)
        except NotFoundError:
            return None
        return _Found(stamp.decode(data, key), etag)

    # Writing

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        if self._read_only:
            raise InputError(f"{self.url} was opened for reading only")
        check = checks[0] if checks else None
        if not writes:
            return self._verify(check)
        write = writes[0]
        if isinstance(write, Put):
            return self._put(write, check)
        if check is None:
            self._objects.delete(write.key)
            return {}
        if check.version is None:
            return self._verify(check)
        self._store(write.key, stamp.new_write_id(), b"", check.version, is_deleted=True)
        return {}

    def purge(self, keys: Sequence[str]) -> None:
        """Takes the stamps away."""
        self._objects.delete([check_key(key) for key in keys])

    def _verify(self, check: Check | None) -> Mapping[str, str]:
        if check is not None:
            found = self.get(check.key)
            if check.version != (None if found is None else found.version):
                raise _conflict(check.key)
        return {}

    def _put(self, write: Put, check: Check | None) -> Mapping[str, str]:
        write_id = stamp.new_write_id()
        if check is None:
            data = stamp.encode(write_id, write.value)
            return settle(
                lambda: {write.key: self._objects.put(write.key, data)}, lambda: self._landed(write.key, write_id)
            )
        return self._store(write.key, write_id, write.value, check.version)

    def _store(
        self, key: str, write_id: str, value: bytes, version: str | None, *, is_deleted: bool = False
    ) -> Mapping[str, str]:
        data = stamp.encode(write_id, value, is_deleted=is_deleted)

        def write() -> Mapping[str, str]:
            if version is not None:
                return {key: self._objects.put_if_match(key, data, version)}
            return {key: self._create(key, data)}

        return settle(write, lambda: self._landed(key, write_id))

    def _create(self, key: str, data: bytes) -> str:
        try:
            return self._objects.put_if_absent(key, data)
        except ConflictError:
            found = self._find(key)
            if found is None or not found.stamped.is_deleted:
                raise
            return self._objects.put_if_match(key, data, found.etag)

    def _landed(self, key: str, write_id: str) -> Mapping[str, str] | None:
        found = self._find(key)
        return {key: found.etag} if found is not None and found.stamped.write_id == write_id else None


def _conflict(key: str) -> ConflictError:
    return ConflictError(f"{key} was changed by somebody else", hint="Read it again and decide")
