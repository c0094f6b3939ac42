"""The part of the hot tier that follows access: cold values that are read often come back to this disk.

    read once      remembered (the ghost queue: positions alone, of about as many bytes as there is room for)
    read again     written to the newest file of `cache/` (the main queue: files, oldest first)
    no room        the oldest file goes; of its values those that were read since stay, at the end of the queue

That is the main and the ghost queue of S3-FIFO: admission by the second read, and second chance (FIFO with
reinsertion) for what is in. Scans of many values do not count as reads, so they displace nothing. In front of it,
`cold_cache_bytes` of memory hold what was fetched last (LRU), and serve what came by reading ahead.

    <number>.tcache    values as their cells say them, one after the other; when the file is full, or the engine closed:
                       its index, [u64 position][u64 byte][u32 length] a value, and [u32 count][u32 crc32][magic]
    <name>.tval        a large value (`sst/value_file.py`), by itself

Invariants
- The disk holds at most `disk_cache_bytes` of them. A value counts as 1 KiB at least, which bounds the memory of the
  index too.
- Nothing depends on it. Every value is verified by the checksum of its cell when it is read; one that is damaged,
  missing or of another log is a miss. A file without a good index is removed at opening, and nothing is ever synced.
- A file that cannot be written costs a value its place, never a read its answer. A full disk gets the oldest back.
"""

from __future__ import annotations

import contextlib
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec

from tidelog.engine.mvcc.cells import Cell
from tidelog.engine.sst.value_file import Reference, ValueName, parse_value_name
from tidelog.engine.value_files import OpenValue, opened_file
from tidelog.engine.wal.value import decode_value
from tidelog.errors import DataError
from tidelog.files import TEMPORARY_SUFFIX, File, Files, is_full_disk
from tidelog.log.frame import crc32

CACHE: Final = "cache"
_SUFFIX = ".tcache"
_MAGIC = b"TCACHE01"
_ENTRY = struct.Struct("<QQI")
_END = struct.Struct("<II8s")
# A file is the unit of eviction: a sixteenth of the room, but not so small that there are thousands.
_FILES = 16
_LEAST_FILE_BYTES = 64 << 10
_LEAST_CHARGE = 1 << 10
_MOST_USES = 3
_REMEMBERED = 65_536

Key = int | ValueName
"""A value of the log by its position, a large one by the name of its file."""


class DiskCacheStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of the cold values on this disk. `admitted` came back, `kept` got a second chance, `evicted` left."""

    bytes: int
    capacity_bytes: int
    values: int
    hits: int
    admitted: int
    kept: int
    evicted: int


class _Entry:
    """A value: in which file it is, where, and how often it was read since it came, up to 3."""

    __slots__ = ("byte", "file", "length", "uses")

    def __init__(self, file: _CacheFile, byte: int, length: int, uses: int = 0) -> None:
        self.file = file
        self.byte = byte
        self.length = length
        self.uses = uses


class _CacheFile:
    """A file of the queue. It is closed when it has left and nobody reads it any more."""

    def __init__(self, path: Path, file: File | None) -> None:
        self.path = path
        self.file = file
        """None for a large value, which each reader opens by itself."""
        self.keys: list[Key] = []
        self.end = 0
        self.charge = 0
        self.readers = 0
        self.is_gone = False

    def close_if_unused(self) -> None:
        if self.is_gone and not self.readers and self.file is not None:
            self.file.close()
            self.file = None


class DiskCache:
    """Cold values on this disk, up to a number of bytes. Thread-safe."""

    def __init__(self, files: Files, directory: Path, capacity_bytes: int) -> None:
        self._files = files
        self._directory = directory / CACHE
        self.capacity_bytes = capacity_bytes
        self._file_bytes = max(_LEAST_FILE_BYTES, capacity_bytes // _FILES)
        self._queue: deque[_CacheFile] = deque()
        self._entries: dict[Key, _Entry] = {}
        self._seen: OrderedDict[Key, int] = OrderedDict()
        self._seen_bytes = 0
        self._bytes = 0
        self._number = 0
        self._staged = count()
        self._active: _CacheFile | None = None
        self._hits = self._admitted = self._kept = self._evicted = 0
        self._mutex = Lock()
        """For everything that is remembered; held for moments."""
        self._writing = Lock()
        """Taken first, by those who change files. Readers never wait for it."""
        self._is_closed = False
        self._load()

    # Reading

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def has(self, key: Key) -> bool:
        """Whether a value is here, as far as is known."""
        return key in self._entries

    def get(self, cell: Cell) -> bytes | None:
        """The stored value that a cell points to, verified; None if it is not here."""
        if cell.position not in self._entries:
            return None
        with self._reading(cell.position) as (entry, file):
            stored = None if file is None else _read(file, entry.byte, entry.length)
        try:
            if stored is not None and len(stored) == entry.length:
                decode_value(stored, cell.codec, cell.size, cell.crc, cell.lsn)
                self._hits += 1
                return stored
        except DataError:
            pass
        self._forget(cell.position)
        return None

    def open(self, reference: Reference) -> OpenValue | None:
        """A large value, to be read by ranges; None if it is not here."""
        entry = self._entries.get(reference.name)
        if entry is None:
            return None
        try:
            file = opened_file(self._files, entry.file.path)
            if file is not None and file.size() == reference.file_bytes:
                self._hits += 1
                entry.uses = min(entry.uses + 1, _MOST_USES)
                return OpenValue(file, reference, entry.file.path)
            if file is not None:
                file.close()
        except OSError:
            pass
        self._forget(reference.name)
        return None

    @contextlib.contextmanager
    def _reading(self, key: Key) -> Iterator[tuple[_Entry, File | None]]:
        """The entry of a value, with its file, which is not closed meanwhile."""
        with self._mutex:
            entry = self._entries.get(key)
            if entry is None or entry.file.is_gone:
                entry = _NOTHING
            entry.file.readers += 1
            entry.uses = min(entry.uses + 1, _MOST_USES)
        try:
            yield entry, entry.file.file
        finally:
            with self._mutex:
                entry.file.readers -= 1
                entry.file.close_if_unused()

    def _forget(self, key: Key) -> None:
        with self._mutex:
            self._entries.pop(key, None)

    # Admission

    def is_read_again(self, key: Key, size: int) -> bool:
        """Notes a read of a value that had to be fetched, or was in memory. Returns whether it was read before, as far
        as is remembered: then it should come back.
        """
        if size > self.capacity_bytes // 4:
            return False
        with self._mutex:
            known = self._seen.pop(key, None)
            if known is not None:
                self._seen_bytes -= known
                return key not in self._entries
            self._seen[key] = size
            self._seen_bytes += size
            while self._seen_bytes > self.capacity_bytes or len(self._seen) > _REMEMBERED:
                self._seen_bytes -= self._seen.popitem(last=False)[1]
        return False

    def add(self, position: int, stored: bytes) -> bool:
        """Writes a value, as its cell says it, to this disk; returns whether it is there now."""
        charge = max(len(stored), _LEAST_CHARGE)
        if charge > self.capacity_bytes // 4 or self._is_closed:
            return False
        with self._writing:
            if position in self._entries:
                return True
            try:
                self._make_room(charge)
                self._append(position, stored, 0)
            except OSError as error:
                self._failed(error)
                return False
        self._admitted += 1
        return True

    def add_file(self, name: ValueName, file_bytes: int, pieces: Callable[[], Iterator[bytes | memoryview]]) -> bool:
        """The same for a large value, from the verified pieces of its file. What these raise is raised."""
        if file_bytes > self.capacity_bytes // 4 or self._is_closed:
            return False
        if name in self._entries:
            return True
        # Without the lock: a store that hangs holds up nobody else.
        staged = self._directory / f"{name}.{next(self._staged)}{TEMPORARY_SUFFIX}"
        position = 0
        try:
            file = self._create(staged)
            try:
                for piece in pieces():
                    file.write_at(position, piece)
                    position += len(piece)
            finally:
                file.close()
            with self._writing:
                if name in self._entries or self._is_closed:
                    self._remove(staged)
                    return not self._is_closed
                self._make_room(file_bytes)
                path = self._directory / str(name)
                self._files.rename(staged, path)
                self._take_in(path, name, file_bytes)
        except OSError as error:
            self._remove(staged)
            with self._writing:
                self._failed(error)
            return False
        except BaseException:
            self._remove(staged)
            raise
        self._admitted += 1
        return True

    def _take_in(self, path: Path, name: ValueName, file_bytes: int) -> None:
        with self._mutex:
            file = _CacheFile(path, None)
            file.keys.append(name)
            file.end = file.charge = file_bytes
            self._entries[name] = _Entry(file, 0, file_bytes)
            self._bytes += file_bytes
            # Before the file that is being filled, which is always the last.
            self._queue.insert(len(self._queue) - (self._active is not None), file)

    def _append(self, position: int, stored: bytes, uses: int) -> None:
        active = self._active
        if active is None:
            path = self._directory / f"{self._number:08d}{_SUFFIX}"
            active = _CacheFile(path, self._create(path))
            self._number += 1
            with self._mutex:
                self._active = active
                self._queue.append(active)
        assert active.file is not None
        active.file.write_at(active.end, stored)
        with self._mutex:
            self._entries[position] = _Entry(active, active.end, len(stored), uses)
            active.keys.append(position)
            active.end += len(stored)
            charge = max(len(stored), _LEAST_CHARGE)
            active.charge += charge
            self._bytes += charge
        if active.charge >= self._file_bytes:
            self._seal()

    def _create(self, path: Path) -> File:
        if not self._files.is_directory(self._directory):
            self._files.make_directory(self._directory)
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(path)
        return self._files.create(path)

    def _seal(self) -> None:
        """Writes the index of the file that is being filled, so that it can be used after the engine was reopened."""
        active, self._active = self._active, None
        if active is not None and active.file is not None:
            found = ((key, self._entries.get(key)) for key in active.keys)
            entries = [
                _ENTRY.pack(key, entry.byte, entry.length)
                for key, entry in found
                if entry is not None and entry.file is active and isinstance(key, int)
            ]
            index = b"".join(entries)
            active.file.write_at(active.end, index + _END.pack(len(entries), crc32(index), _MAGIC))

    # Eviction

    def _make_room(self, charge: int) -> None:
        """Evicts the oldest files until so many bytes fit in."""
        while self._queue and self._bytes + charge > self.capacity_bytes:
            self._evict_oldest()

    def _evict_oldest(self, *, with_second_chance: bool = True) -> None:
        """Of the values that were read since they came, up to half a file is kept: so that there is room afterwards,
        whatever was read.
        """
        oldest = self._queue[0]
        if oldest is self._active:
            self._seal()
        if with_second_chance and oldest.file is None and self._stays(oldest):
            return
        kept = self._worth_keeping(oldest) if with_second_chance else []
        self._drop_oldest()
        for position, stored, uses in kept:
            self._append(position, stored, uses - 1)
            self._kept += 1
            self._evicted -= 1

    def _stays(self, oldest: _CacheFile) -> bool:
        """Whether a large value was read since it came: then it goes to the end of the queue."""
        entry = self._entries.get(oldest.keys[0])
        if entry is None or not entry.uses:
            return False
        entry.uses -= 1
        self._kept += 1
        with self._mutex:
            self._queue.remove(oldest)
            self._queue.insert(len(self._queue) - (self._active is not None), oldest)
        return True

    def _drop_oldest(self) -> None:
        with self._mutex:
            oldest = self._queue.popleft()
            for key in oldest.keys:
                entry = self._entries.get(key)
                if entry is not None and entry.file is oldest:
                    del self._entries[key]
                    self._evicted += 1
            self._bytes -= oldest.charge
            oldest.is_gone = True
            oldest.close_if_unused()
        self._remove(oldest.path)

    def _worth_keeping(self, oldest: _CacheFile) -> list[tuple[int, bytes, int]]:
        used = [
            (entry.uses, key, entry)
            for key in oldest.keys
            if isinstance(key, int)
            and (entry := self._entries.get(key)) is not None
            and entry.file is oldest
            and entry.uses
        ]
        left, kept = oldest.charge // 2, []
        for uses, key, entry in sorted(used, key=lambda one: -one[0]):
            left -= max(entry.length, _LEAST_CHARGE)
            if left < 0 or oldest.file is None:
                break
            stored = _read(oldest.file, entry.byte, entry.length)
            if stored is not None and len(stored) == entry.length:
                kept.append((key, stored, uses))
        return kept

    def _failed(self, error: OSError) -> None:
        """The next value goes into another file. A disk that is full gets room back."""
        with self._mutex:
            self._active = None
        if is_full_disk(error) and self._queue:
            with contextlib.suppress(OSError):
                self._evict_oldest(with_second_chance=False)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            self._files.remove(path)

    # Opening and closing

    def _load(self) -> None:
        """Finds what an earlier process has left; removes what is not whole."""
        try:
            names = self._files.list(self._directory)
        except OSError:
            return
        for name in names:
            path, value = self._directory / name, parse_value_name(name)
            with contextlib.suppress(OSError):
                if value is not None and self.capacity_bytes:
                    file = self._files.open(path)
                    size = file.size()
                    file.close()
                    self._take_in(path, value, size)
                elif not (name.endswith(_SUFFIX) and self.capacity_bytes and self._loaded(path)):
                    self._files.remove(path)
        with contextlib.suppress(OSError):
            self._make_room(0)

    def _loaded(self, path: Path) -> bool:
        """Whether a file has a good index, which is taken in."""
        stem = path.name.removesuffix(_SUFFIX)
        if not stem.isascii() or not stem.isdigit():
            return False
        self._number = max(self._number, int(stem) + 1)
        file = self._files.open(path)
        found = _index_of(file)
        if not found:
            file.close()
            return False
        kept = _CacheFile(path, file)
        with self._mutex:
            for position, byte, length in found:
                self._entries[position] = _Entry(kept, byte, length)
                kept.keys.append(position)
                kept.charge += max(length, _LEAST_CHARGE)
            self._bytes += kept.charge
            self._queue.append(kept)
        return True

    def close(self) -> None:
        """Leaves everything as the next process will find it. Idempotent."""
        with self._writing:
            if self._is_closed:
                return
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._seal()
            with self._mutex:
                self._entries.clear()
                while self._queue:
                    file = self._queue.popleft()
                    file.is_gone = True
                    file.close_if_unused()

    def statistics(self) -> DiskCacheStatistics:
        with self._mutex:
            return DiskCacheStatistics(
                bytes=self._bytes,
                capacity_bytes=self.capacity_bytes,
                values=len(self._entries),
                hits=self._hits,
                admitted=self._admitted,
                kept=self._kept,
                evicted=self._evicted,
            )


_NOTHING = _Entry(_CacheFile(Path(), None), 0, 0)


def _read(file: File, byte: int, length: int) -> bytes | None:
    try:
        return file.read_at(byte, length)
    except OSError:
        return None


def _index_of(file: File) -> list[tuple[int, int, int]]:
    """Position, byte and length of the values in a file; none if it has no good index."""
    size = file.size()
    end = file.read_at(max(0, size - _END.size), _END.size)
    if len(end) != _END.size:
        return []
    count, crc, magic = _END.unpack(end)
    values_bytes = size - _END.size - count * _ENTRY.size
    if magic != _MAGIC or values_bytes < 0:
        return []
    index = file.read_at(values_bytes, count * _ENTRY.size)
    if len(index) != count * _ENTRY.size or crc32(index) != crc:
        return []
    found = list(_ENTRY.iter_unpack(index))
    return found if all(byte + length <= values_bytes for _, byte, length in found) else []
