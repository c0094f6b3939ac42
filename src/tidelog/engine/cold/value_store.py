"""Value files in the store: how they are uploaded, read by ranges, copied to replicas and removed.

    value file of an entry that is final -> uploaded in parts -> its record may ship -> it may leave the disk

Invariants
- What the manifest covers is complete: a record that names a value file is shipped after that file was uploaded. So
  every file of a seq at or below the published high-water mark is in the store, as long as a version refers to it.
- A file has the same name and content wherever its entry is applied: uploading it again, by whomever, changes nothing.
- Everything is verified on its way: what is damaged on this disk is not uploaded, and damage is not replicated.
- A file is deleted from the store when no version in the owner's index refers to it and history no longer reaches back
  to the versions that did. A replica has the files that the store has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from threading import Lock
from typing import Any, Protocol, TypeVar

from tidelog.engine.sst.value_file import (
    Reference,
    ValueName,
    ValueReader,
    check_value_file,
    decode_reference,
    parse_value_name,
)
from tidelog.engine.value_files import ValueFiles
from tidelog.engine.wal.operations import OperationRecord
from tidelog.engine.wal.value import CODEC_FILE, decode_value
from tidelog.errors import DataError, NotFoundError, RetryError, TidelogError
from tidelog.store.keys import EngineKeys
from tidelog.store.object_store import ObjectStore

_Answer = TypeVar("_Answer")


class Source(Protocol):
    """A store to read from."""

    def read_range(self, key: str, start: int, length: int) -> memoryview: ...


class ColdValue:
    """A value file in the store, or in a replica if it is not there or not good. Thread-safe.

    `copies` yields the stores that may have it, `submit` runs a call in a thread that may wait for them, `on_used` is
    called with the bytes that are asked for.
    """

    def __init__(
        self,
        keys: EngineKeys,
        reference: Reference,
        copies: Callable[[], Iterator[Source]],
        submit: Callable[[Callable[[], list[memoryview]]], Future[list[memoryview]]],
        on_used: Callable[[int], None],
    ) -> None:
        self._key = keys.values_prefix + str(reference.name)
        self._reference = reference
        self._copies = copies
        self._submit = submit
        self._on_used = on_used

    def metadata(self) -> dict[str, Any]:
        """The metadata, with one request at most."""
        return self._first_good(ValueReader.metadata)

    def value(self) -> bytes:
        """All of it."""
        self._on_used(self._reference.value_bytes)
        return self._first_good(ValueReader.value)

    def verify(self) -> None:
        """Reads all of it, piece by piece."""
        self._first_good(_read_through)

    def data(self, offset: int, length: int) -> bytes:
        """Bytes of the data, as far as there are any."""
        return b"".join(self.pieces(offset, length))

    def pieces(self, offset: int, length: int) -> list[memoryview]:
        """The same as it was read, without a copy."""
        self._on_used(min(length, max(0, self._reference.name.size - offset)))
        return self._first_good(lambda value: value.pieces(offset, length))

    def close(self) -> None:
        """Nothing is held."""

    def fetch(self, offset: int, length: int) -> Future[list[memoryview]]:
        """The same, by a thread that may wait for the store."""
        return self._submit(lambda: self.pieces(offset, length))

    def _first_good(self, read: Callable[[ValueReader], _Answer]) -> _Answer:
        """If no copy is good, raises the first failure."""
        failures: list[TidelogError] = []
        for source in self._copies():
            try:
                return read(self._reader(source))
            except (DataError, NotFoundError, RetryError) as error:
                failures.append(error)
        raise failures[0]

    def _reader(self, source: Source) -> ValueReader:
        return ValueReader(
            self._reference, lambda position, length: source.read_range(self._key, position, length), self._key
        )


def _read_through(value: ValueReader) -> None:
    for _ in value.verified():
        pass


def value_of(source: Source, keys: EngineKeys, record: OperationRecord, lsn: int) -> tuple[bytes, dict[str, Any]]:
    """Data and metadata of a put in a shipped log, wherever its value is. NotFoundError if it had a file of its own,
    which was removed since with the last version that referred to it.
    """
    stored = record.stored
    if record.codec == CODEC_FILE:
        reference = decode_reference(stored, record.size, record.crc, lsn)
        key = keys.values_prefix + str(reference.name)
        stored = ValueReader(reference, lambda at, size: source.read_range(key, at, size), key).value()
    return decode_value(stored, record.codec, record.size, record.crc, lsn)


def stored_values(objects: ObjectStore, keys: EngineKeys) -> dict[ValueName, int]:
    """The value files in a store, and their bytes."""
    prefix = keys.values_prefix
    found = ((parse_value_name(info.key.removeprefix(prefix)), info.size) for info in objects.list(prefix))
    return {name: size for name, size in found if name is not None}


class ValueStore:
    """The value files of an engine in its store, as its owner treats them. Thread-safe."""

    def __init__(self, objects: ObjectStore, keys: EngineKeys, local: ValueFiles) -> None:
        self._objects = objects
        self._keys = keys
        self._local = local
        self._uploaded: set[ValueName] = set()
        self._stored: set[ValueName] | None = None
        """All in the store, once they were listed."""
        self._uploading = Lock()

    def pending(self, high_water_mark: int, low_water_mark: int) -> list[ValueName]:
        """Those that must be uploaded before the records up to the low-water mark are shipped, in their order."""
        found = (name for name in self._local.names() if high_water_mark < name.seq <= low_water_mark)
        return sorted(name for name in found if name not in self._uploaded)

    def upload(self, high_water_mark: int, low_water_mark: int) -> None:
        """Uploads them."""
        with self._uploading:
            for name in self.pending(high_water_mark, low_water_mark):
                with self._objects.open_writer(self._keys.values_prefix + str(name)) as writer:
                    for data in self._local.checked_pieces(name):
                        writer.write(data)
                self._uploaded.add(name)
                if self._stored is not None:
                    self._stored.add(name)

    def remove_unused(self, used: Collection[ValueName], up_to_seq: int, verify: Callable[[], None]) -> None:
        """Deletes the files of entries up to a seq that no version refers to, after a check of the claim."""
        if self._stored is None:
            self._stored = set(stored_values(self._objects, self._keys))
        unused = {name for name in self._stored if name.seq <= up_to_seq and name not in used}
        if unused:
            verify()
            self._objects.delete([self._keys.values_prefix + str(name) for name in unused])
            self._stored -= unused


def copy_values(
    source: ObjectStore, target: ObjectStore, keys: EngineKeys, high_water_mark: int, on_copied: Callable[[int], None]
) -> None:
    """Copies the value files that a manifest with this mark needs."""
    wanted = stored_values(source, keys)
    there = stored_values(target, keys) if wanted else {}
    for name, size in wanted.items():
        if name.seq <= high_water_mark and there.get(name) != size:
            _copy(source, target, keys.values_prefix + str(name), name, size)
            on_copied(size)


def delete_values(source: ObjectStore, target: ObjectStore, keys: EngineKeys, high_water_mark: int) -> None:
    """Deletes from a replica the value files that the source no longer has."""
    there = [name for name in stored_values(target, keys) if name.seq <= high_water_mark]
    if there:
        kept = stored_values(source, keys)
        target.delete([keys.values_prefix + str(name) for name in there if name not in kept])


def _copy(source: ObjectStore, target: ObjectStore, key: str, name: ValueName, size: int) -> None:
    with target.open_writer(key) as writer:
        for data in check_value_file(name, size, lambda at, length: source.read_range(key, at, length), key):
            writer.write(data)
