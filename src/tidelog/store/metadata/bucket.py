"""A metadata store in the bucket itself: one object per entry, changed by conditional writes.

    <key>    a stamped value (`base.py`); its etag is the version

Invariants
- Creating is If-None-Match, replacing is If-Match. `bucket.py` has proved, before the first write, that the
  server honours both.
- No two writes have the same bytes, so an etag is never reused, although it is a checksum of the content.
- A write without an answer is searched for by its stamp before it is retried.
- A conditional delete leaves a `deleted` stamp: stores have no conditional delete. It reads as "not there", and
  creating the key again replaces it, on the condition that it is still the same one.
- A range is not a snapshot: what changes while it is read is in it or not.
- The bucket may hold the copy of a catalog whose truth is elsewhere (`published.py`); its owner document says so. A
  store that is open for writing refuses every key of such a topic, reading included: a copy may be behind, and whoever
  writes or deletes must not decide by it.

Why one key at a time is enough for the catalog
A server changes one object at a time, so `supports_multi_key` is False and descriptor and `cur` are two steps. They
are safe in this order: descriptor first, then `cur`.
1. The descriptor is the truth. It is created under the one key that its start offset gives it, after its object is
   complete: the moment it exists, the segment is published, with all that a reader needs. It is overwritten only by
   a compaction, and never the newest one (`cold/rewrite_commit.py` has that argument).
2. `cur` is a hint at the newest descriptor, moved forward by compare-and-swap only. A crash between the steps leaves
   it older than the truth, never newer. Readers and publishers start at it and list on from there, so they find the
   newer descriptor anyway; the next publisher moves it. (The other order could make it point at nothing.)
3. Segments are contiguous, so there is always exactly one next key: end + 1. Two publishers want the same key, and
   one gets it; the other sees a conflict, reads, and either finds its own stamp (it was published already) or stops.
4. An owner that was paused and wakes up checks its epoch before it publishes, but cannot do both in one step here. So
   the new owner, after its claim of the epoch and before it accepts anything, takes the next key itself, with a
   reservation: an entry that has its epoch and no object. (If an earlier owner's reservation is there, it replaces
   that, on its version.) If the old owner's descriptor got there first, the new owner conflicts, reads on and takes
   the key after it; otherwise the old owner conflicts, for ever. The new owner replaces its reservation by its first
   descriptor with If-Match. Thus no offset is published twice, however long any owner sleeps.
5. Deleting uses the opposite order: the descriptor first (on its version), then the object. A crash between leaves an
   object without a descriptor, which nobody reads and orphan removal deletes. A descriptor that a very late owner
   creates over a `deleted` stamp is below the topic's start offset, which never goes back: no reader gets there, and
   orphan removal deletes it.
"""

from __future__ import annotations

import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import islice
from threading import Lock
from typing import NamedTuple

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import ConfigError, ConflictError, DataError, Hint, InputError, NotFoundError, TidelogError
from tidelog.store.keys import check_key, check_prefix, is_key, parse_owned_key
from tidelog.store.metadata import base as stamp
from tidelog.store.metadata.base import Check, Entry, MetadataStore, Put, Write, settle
from tidelog.store.object_store import ObjectInfo, ObjectStore
from tidelog.store.scheduler import DaemonPool

# Proves that an object store honours conditional writes, before metadata is trusted to it.
#
# Some servers that speak S3 take If-None-Match and If-Match and ignore them: two owners would then overwrite each other
# without a word. So every answer that the metadata store relies on is asked for once, on an object of its own.


PREFIX = "tidelog-probe/"
_HINT = (
    "Keep the metadata in sqlite:///path or etcd://host:port, or use a server that honours If-None-Match and If-Match"
)


def prove_conditional_writes(objects: ObjectStore) -> None:
    """ConfigError when the store cannot be trusted with metadata; nothing stays behind."""
    if not objects.supports_conditional_update:
        raise ConfigError(f"{objects.url} cannot replace an object on a condition", hint=_HINT)
    key = f"{PREFIX}{secrets.token_hex(16)}"
    try:
        _prove(objects, key)
    except ConflictError as error:
        raise _refused(objects, "refuses a write whose condition holds") from error
    finally:
        with contextlib.suppress(TidelogError):  # what went wrong before is what has to be seen
            objects.delete(key)


def _prove(objects: ObjectStore, key: str) -> None:
    first = objects.put_if_absent(key, b"first")
    _must_conflict(objects, "ignores If-None-Match", lambda: objects.put_if_absent(key, b"again"))
    second = objects.put_if_match(key, b"second", first)
    _must_conflict(objects, "ignores If-Match", lambda: objects.put_if_match(key, b"stale", first))
    found = objects.get(key)
    if found != (b"second", second) or first == second:
        raise _refused(objects, "does not show what was just written")
    if [info.key for info in objects.list(PREFIX) if info.key == key] != [key]:
        raise _refused(objects, "does not list what was just written")
    objects.delete(key)
    _must_conflict(objects, "ignores If-Match", lambda: objects.put_if_match(key, b"gone", second))


def _must_conflict(objects: ObjectStore, fault: str, write: Callable[[], str]) -> None:
    try:
        write()
    except ConflictError:
        return
    raise _refused(objects, fault)


def _refused(objects: ObjectStore, fault: str) -> ConfigError:
    return ConfigError(f"{objects.url} cannot hold metadata: the server {fault}", hint=_HINT)


# Entries of stores in which an etag stands for a content for ever, by store, key, size and etag. A listing tells which
# of them are still there, so a catalog of small objects is read once in a process, not once for every look at it.


_KNOWN_BYTES = 16 << 20
_ENTRY_BYTES = 500


class _KnownEntries:
    """The entries that were read last, up to some bytes; for all threads."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._entries: OrderedDict[tuple[Hashable, ...], Entry] = OrderedDict()
        self._guard = Lock()

    def get(self, of: tuple[Hashable, ...]) -> Entry | None:
        with self._guard:
            if of in self._entries:
                self._entries.move_to_end(of)
            return self._entries.get(of)

    def put(self, of: tuple[Hashable, ...], entry: Entry) -> None:
        with self._guard:
            if of in self._entries:
                return
            self._entries[of] = entry
            self._bytes += _ENTRY_BYTES + len(entry.value)
            while self._bytes > self._most_bytes:
                _, dropped = self._entries.popitem(last=False)
                self._bytes -= _ENTRY_BYTES + len(dropped.value)


_KNOWN = _KnownEntries(_KNOWN_BYTES)
_READS_AT_ONCE = 8
_WRITES_AT_ONCE = 8
_READ_AHEAD = 32


class _Found(NamedTuple):
    """An object as it is, `deleted` stamps included."""

    stamped: stamp.Stamped
    etag: str


DAMAGED = b"\x00"
"""What a damaged copy reads as: no document is this, so the truth replaces it."""
COPY_OF = "copy_of"
"""The field of an owner document that makes the catalog in a bucket a copy: the URL of the metadata store."""


def copy_of(owner: Entry | None) -> str | None:
    """Of which metadata store a catalog with this owner document is a copy; None for one that is no copy."""
    try:
        document = {} if owner is None else msgspec.json.decode(owner.value, type=dict[str, object])
    except JSON_ERRORS:
        return None
    return str(document[COPY_OF]) if COPY_OF in document else None


def copy_error(prefix: str, url: str, authority: str) -> ConfigError:
    """For callers that would write, or delete objects, by a copy."""
    lost = "If it is lost, `tidelog topic rebuild-catalog`, or `tidelog engine rebuild-manifest`, makes a new one"
    return ConfigError(
        f"the catalog below {prefix} in {url} is a copy, for reading: the metadata store is {authority}",
        hint=Hint(
            f"Name that one: metadata={authority!r}, or the directory it is in. {lost}",
            command=f"Name that one: --metadata {authority}, or the directory it is in. {lost}",
        ),
    )


class BucketMetadataStore(MetadataStore):
    """Metadata in an object store. With `read_only` nothing is written, not even to prove anything.

    With `proves_late` the proof is made before the first write: until then the store may be out of reach.
    `takes_copies` is for `published.py`, which writes copies, proves by itself what has to be proved, and replaces
    copies that are damaged (`DAMAGED`).
    """

    supports_multi_key = False
    supports_leases = False
    floor_is_cheap = False

    def __init__(
        self,
        objects: ObjectStore,
        *,
        read_only: bool = False,
        proves_late: bool = False,
        takes_copies: bool = False,
    ) -> None:
        self.url = f"bucket:{objects.url}"
        self._objects = objects
        self._read_only = read_only
        self._takes_copies = takes_copies
        self._must_prove = self._refuses_copies = not (read_only or takes_copies)
        self._no_copies: set[str] = set()
        if not proves_late:
            self._prove()
        self._readers = DaemonPool(_READS_AT_ONCE, "bucket-metadata")

    def _prove(self) -> None:
        if self._must_prove:
            prove_conditional_writes(self._objects)
            self._must_prove = False

    def get(self, key: str) -> Entry | None:
        entry = self._entry(check_key(key))
        self._refuse_copy(key, entry)
        return entry

    @property
    def writes_at_once(self) -> int:
        return _WRITES_AT_ONCE

    def get_many(self, keys: Sequence[str]) -> dict[str, Entry]:
        """Several at a time, if there are many."""
        found = map(self.get, keys) if len(keys) < _READS_AT_ONCE else self._readers.map(self.get, keys)
        return {entry.key: entry for entry in found if entry is not None}

    def _entry(self, key: str) -> Entry | None:
        found = self._find(key)
        return None if found is None or found.stamped.is_deleted else Entry(key, found.stamped.value, found.etag)

    def _refuse_copy(self, key: str, entry: Entry | None = None) -> None:
        """`entry` is the one under the key, if that was read: an owner document is not read twice."""
        owned = parse_owned_key(key) if self._refuses_copies else None
        if owned is None or owned.prefix in self._no_copies:
            return
        with contextlib.suppress(DataError):  # what cannot be understood is for its reader to say
            heads = (entry if key == head else self._entry(head) for head in owned.heads)
            authority = copy_of(next((head for head in heads if head is not None), None))
            if authority is not None:
                raise copy_error(owned.prefix, self.url, authority)
            self._no_copies.add(owned.prefix)

    def floor(self, prefix: str, key: str) -> Entry | None:
        """Lists the names up to the key, a thousand a request, and reads one value."""
        check_key(key)
        self._refuse_copy(prefix)
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
        self._refuse_copy(prefix)
        found: list[Entry] = []
        infos = self._list(prefix, start)
        while limit is None or len(found) < limit:
            some = list(islice(infos, _READ_AHEAD if limit is None else min(_READ_AHEAD, limit - len(found))))
            if not some:
                break
            found += self._entries(some)
        return found

    def listed(
        self, prefix: str, takes: Callable[[str], bool], *, start: str | None = None, limit: int | None = None
    ) -> list[Entry]:
        prefix, start, limit = stamp.checked_range(prefix, start, limit)
        self._refuse_copy(prefix)
        infos = islice((info for info in self._list(prefix, start) if self._is_there(info)), limit)
        return self._entries([info for info in infos if takes(info.key)])

    def _entries(self, infos: Sequence[ObjectInfo]) -> list[Entry]:
        """What is under listed keys; what vanished since it was listed is not there."""
        store = self._objects.identity
        found = {} if store is None else {one.key: entry for one in infos if (entry := _KNOWN.get((store, *one[:3])))}
        for entry in found.values():
            self._refuse_copy(entry.key, entry)
        unknown = [one for one in infos if one.key not in found]
        names = [one.key for one in unknown]
        read = map(self.get, names) if len(names) == 1 else self._readers.map(self.get, names)
        for info, entry in zip(unknown, read, strict=True):
            if entry is not None:
                found[info.key] = entry
            if entry is not None and store is not None and entry.version == info.etag:
                _KNOWN.put((store, *info[:3]), entry)
        return [found[one.key] for one in infos if one.key in found]

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        self._refuse_copy(prefix)
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
        found = self._objects.find(key)
        if found is None:
            return None
        try:
            return _Found(stamp.decode(found.data, key), found.etag)
        except DataError:
            if not self._takes_copies:
                raise
            return _Found(stamp.Stamped("", DAMAGED, False), found.etag)

    # Writing

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        if self._read_only:
            raise InputError(f"{self.url} was opened for reading only")
        for key in (*checks, *writes):
            self._refuse_copy(key.key)
        self._prove()
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
        """Takes the stamps away, where a commit has left some."""
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
    return ConflictError(f"{key} was changed concurrently", hint="Read it again, then decide whether to write")
