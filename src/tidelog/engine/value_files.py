"""Large values on this disk: each has a file of its own, in `values/` beside the log (`sst/value_file.py` draws it).

    stream -> 7.tmp, synced -> (engine's lock) renamed, directory synced -> record in the log, which names it
                 └── a stream that breaks, or an entry that is refused: removed

Invariants
- A file is whole and durable under its name before a record names it. So a value that is in the index is readable,
  and a crash leaves at most files that no record names: those of later seqs than the last applied one and unfinished
  ones are removed when the engine is opened, others by the next collection of garbage.
- Files of rolled-back entries go with the rollback. The same entry again makes the same file.
- A file leaves the disk when the store has it (it is uploaded before a record that names it is shipped), oldest read
  first, while log and value files together exceed `local_retention_bytes`; or when no version refers to it.
- A reader that has a file open reads it to its end, whatever becomes of its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from itertools import count
from pathlib import Path
from threading import Lock

from tidelog.engine.entry import (
    MAX_STREAM_BYTES,
    Batch,
    PutFile,
    PutObject,
    is_large,
    operations,
    pieces_of,
    taken_data,
)
from tidelog.engine.sst.value_file import (
    Reference,
    ValueName,
    ValueReader,
    ValueWriter,
    check_value_file,
    parse_value_name,
)
from tidelog.engine.txn.read_set import Carried, Guarded, batch_of
from tidelog.errors import InputError
from tidelog.files import TEMPORARY_SUFFIX, File, Files, ReadsRanges, explained

VALUES = "values"


class OpenValue:
    """A value whose file is open. Close it."""

    def __init__(self, file: File, reference: Reference, path: Path) -> None:
        self.close = file.close
        self._reader = reader = ValueReader(reference, file.read_at, str(path))
        self.data = reader.data
        self.metadata = reader.metadata
        self.value = reader.value

    def verify(self) -> None:
        """Reads all of it, piece by piece."""
        for _ in self._reader.verified():
            pass


class StagedFile:
    """A value that was written and synced, and has no name yet."""

    def __init__(self, owner: ValueFiles, path: Path, writer: ValueWriter) -> None:
        self._owner = owner
        self.path: Path | None = path
        self.size = writer.size
        self.crc = writer.crc
        self.metadata_bytes = writer.metadata_bytes

    def install(self, seq: int, order: int) -> Reference:
        """Gives it its name: that of the entry which puts it."""
        reference = Reference(ValueName(seq, order, self.size, self.crc), self.metadata_bytes)
        assert self.path is not None, "it is installed once"
        self._owner.install(self.path, reference)
        self.path = None
        return reference


class ValueFiles:
    """The value files of one engine. Thread-safe; `install` and `remove_above` are called with the engine's lock."""

    def __init__(self, files: Files, directory: Path, large_value_bytes: int) -> None:
        self._files = files
        self._directory = directory
        self.large_value_bytes = large_value_bytes
        self._numbers = count()
        self._mutex = Lock()
        self._sizes: dict[ValueName, int] = {}
        """By name, least recently read first."""
        self._has_directory = files.is_directory(directory)
        self.installed_bytes = 0
        """Of all files that were installed since the engine was opened."""

    def load(self, applied_seq: int) -> None:
        """Finds out what is there, and removes what a crash has left."""
        if not self._has_directory:
            return
        with explained("open engine", self._directory):
            for name in self._files.list(self._directory):
                found = parse_value_name(name)
                if found is not None and found.seq <= applied_seq:
                    file = opened_file(self._files, self._directory / name)
                    if file is not None:
                        self._sizes[found] = file.size()
                        file.close()
                elif found is not None or name.endswith(TEMPORARY_SUFFIX):
                    self._files.remove(self._directory / name)

    # Writing

    @contextlib.contextmanager
    def staged(
        self, entries: list[tuple[int, Carried]], writes: Callable[[int], bool]
    ) -> Iterator[list[tuple[int, Carried]]]:
        """The same entries with their large values in files. Those that were not installed are removed afterwards.

        `writes` says whether the entry of a seq is new: of others only size and checksum are of interest.
        """
        made: list[StagedFile] = []
        try:
            yield [(seq, self._staged(entry, made, writes=writes(seq))) for seq, entry in entries]
        finally:
            for one in made:
                if one.path is not None:
                    with contextlib.suppress(OSError):
                        self._files.remove(one.path)

    def _staged(self, entry: Carried, made: list[StagedFile], *, writes: bool) -> Carried:
        if type(entry) is PutObject:
            return self._stage(entry, made, writes=writes)
        parts = operations(batch_of(entry))
        done = [self._stage(part, made, writes=writes) if isinstance(part, PutObject) else part for part in parts]
        if isinstance(entry, Guarded):
            return Guarded(Batch(done), entry.reads)
        return Batch(done) if isinstance(entry, Batch) else done[0]

    def _stage(self, put: PutObject, made: list[StagedFile], *, writes: bool) -> PutObject:
        """The put with its value in a file, or with its bytes if these are few."""
        if not is_large(put.data, self.large_value_bytes):
            return put
        data = taken_data(put)
        pieces = pieces_of(data)
        first = bytearray()
        while len(first) <= self.large_value_bytes and (piece := next(pieces, None)) is not None:
            first += piece
        if len(first) <= self.large_value_bytes:
            return _replaced(put, bytes(first))
        file, path = self._create() if writes else (_Nowhere(), self._directory)
        try:
            writer = ValueWriter(file, put.metadata)
            self._write(writer, first, path)
            first.clear()
            self._write_rest(writer, data, pieces, path)
            with explained("put", path):
                writer.finish()
                file.sync()
        except BaseException:
            file.close()
            if writes:
                with contextlib.suppress(OSError):
                    self._files.remove(path)
            raise
        file.close()
        staged = StagedFile(self, path, writer)
        if writes:
            made.append(staged)
        return PutFile(
            put.bucket,
            put.key,
            b"",
            put.metadata,
            if_absent=put.if_absent,
            if_match=put.if_match,
            if_match_crc=put.if_match_crc,
            file=staged,
            size=writer.size,
            crc=writer.crc,
        )

    def _write_rest(self, writer: ValueWriter, data: object, pieces: Iterator[bytes | memoryview], path: Path) -> None:
        """Writes what a stream still has: straight into the buffer where it can do that. What the stream raises is no
        error of this disk.
        """
        readinto = getattr(data, "readinto", None)
        if not callable(readinto):
            for piece in pieces:
                self._write(writer, piece, path)
            return
        while count := readinto(writer.room):
            with explained("put", path):
                writer.filled(count)
            _check_size(writer.size)

    def _write(self, writer: ValueWriter, piece: bytes | bytearray | memoryview, path: Path) -> None:
        _check_size(writer.size + len(piece))
        with explained("put", path):
            writer.write(piece)

    def _create(self) -> tuple[File, Path]:
        with explained("put", self._directory):
            if not self._has_directory:
                self._files.make_directories(self._directory)
                self._has_directory = True
            path = self._directory / f"{next(self._numbers)}{TEMPORARY_SUFFIX}"
            return self._files.create(path), path

    def install(self, staged: Path, reference: Reference) -> None:
        """Gives a file its name, durably."""
        with explained("put", staged):
            self._files.rename(staged, self._path(reference.name))
            self._files.sync_directory(self._directory)
        with self._mutex:
            self._sizes[reference.name] = reference.file_bytes
            self.installed_bytes += reference.file_bytes

    def remove_above(self, seq: int) -> None:
        """Removes the files of entries after a seq: they were taken back."""
        self.remove(name for name in self.names() if name.seq > seq)

    # Reading

    def has(self, name: ValueName) -> bool:
        """Whether a value is on this disk."""
        return name in self._sizes

    def open(self, reference: Reference) -> OpenValue | None:
        """The file of a value; None if it is not on this disk."""
        name = reference.name
        if name not in self._sizes:
            return None
        path = self._path(name)
        try:
            with explained("read", path):
                file = opened_file(self._files, path)
        finally:
            with self._mutex:  # the next to leave the disk is the one that was not read for the longest time
                if (size := self._sizes.pop(name, None)) is not None:
                    self._sizes[name] = size
        return None if file is None else OpenValue(file, reference, path)

    # What is there, and what may go

    def names(self) -> list[ValueName]:
        """All on this disk, least recently read first."""
        with self._mutex:
            return list(self._sizes)

    @property
    def bytes(self) -> int:
        """What they take on this disk."""
        with self._mutex:
            return sum(self._sizes.values())

    def bytes_above(self, seq: int) -> int:
        """What the values of later entries take."""
        with self._mutex:
            return sum(size for name, size in self._sizes.items() if name.seq > seq)

    def remove(self, names: Iterator[ValueName] | Collection[ValueName]) -> int:
        """Removes files; returns how many bytes that frees."""
        freed = 0
        for name in names:
            with self._mutex:
                freed += self._sizes.pop(name, 0)
            with explained("remove", self._directory), contextlib.suppress(FileNotFoundError):
                self._files.remove(self._path(name))
        return freed

    def evict(self, room_bytes: int, is_stored: Callable[[ValueName], bool]) -> int:
        """Removes files that the store has while all of them take more than this; returns the bytes freed."""
        over, freed = self.bytes - room_bytes, 0
        for name in self.names() if over > 0 else ():
            if freed >= over:
                break
            if is_stored(name):
                freed += self.remove([name])
        return freed

    def checked_pieces(self, name: ValueName) -> Iterator[memoryview]:
        """The bytes of a file as they are stored, verified, in pieces."""
        path = self._path(name)
        with explained("ship", path):
            file = self._files.open(path)
            try:
                yield from check_value_file(name, file.size(), file.read_at, str(path))
            finally:
                file.close()

    def _path(self, name: ValueName) -> Path:
        return self._directory / str(name)


class NoValueFiles(ValueFiles):
    """Where there is no disk."""

    def __init__(self) -> None:
        self._sizes = {}


class _Nowhere(ReadsRanges):
    """A file that keeps nothing: for what was applied before."""

    def write_at(self, position: int, data: bytes | memoryview) -> None: ...

    def read_at(self, position: int, size: int) -> bytes:
        return b""

    def sync(self) -> None: ...

    def truncate(self, size: int) -> None: ...

    def size(self) -> int:
        return 0

    def close(self) -> None: ...


def _check_size(size: int) -> None:
    if size > MAX_STREAM_BYTES:
        raise InputError(f"data has more than {MAX_STREAM_BYTES} bytes; put it into several objects")


def opened_file(files: Files, path: Path) -> File | None:
    """A file that another thread may remove; None if it has."""
    try:
        return files.open(path)
    except FileNotFoundError:  # it has left the disk just now
        return None


def _replaced(put: PutObject, data: bytes) -> PutObject:
    return PutObject(
        put.bucket,
        put.key,
        data,
        put.metadata,
        if_absent=put.if_absent,
        if_match=put.if_match,
        if_match_crc=put.if_match_crc,
    )
