"""The files of an engine's log for whoever only looks: beside the owner, and around damage.

Invariants
- Nothing is changed and no lock is taken. What the owner is writing right now is not there yet.
- Good frames are handed out in order; what lies between them is handed out as damage, with file and byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tidelog.files import File, Files, LocalFiles
from tidelog.log.beginning import header_offset, oldest_offset
from tidelog.log.bound_files import BoundFiles
from tidelog.log.checkpoint import read_checkpoint
from tidelog.log.damage import find_good_frames
from tidelog.log.frame import Frames, Stop
from tidelog.log.names import wal_files
from tidelog.log.scanner import FileScanner

WAL = "wal"
_CHUNK_BYTES = 2 << 20


class Piece(NamedTuple):
    """Good frames; the buffer of the frames begins at this byte of the file."""

    file: str
    byte: int
    frames: Frames

    @property
    def size(self) -> int:
        """Bytes that the frames take."""
        return self.frames.end - self.frames.start_of(0)


class Damage(NamedTuple):
    """No good frame where that of an LSN must be. `next_lsn` is where good ones go on, None where none do."""

    file: str
    byte: int
    lsn: int
    next_lsn: int | None
    reason: str
    is_at_end: bool

    def __str__(self) -> str:
        lost = "" if self.next_lsn is None else f"; lost: LSN {self.lsn} to {self.next_lsn - 1}"
        return f"{self.file}, byte {self.byte}: {self.reason}{lost}"


def wal_bytes(directory: Path) -> int:
    """How much there is to read."""
    return sum((directory / name).stat().st_size for _, name in wal_files(LocalFiles().list(directory)))


def walk(directory: Path, from_lsn: int = 0) -> Iterator[Piece | Damage]:
    """The log from the file on that holds an LSN; frames before it are left out."""
    files = BoundFiles(examining=True)
    listed = wal_files(files.list(directory))
    checkpoint, _ = read_checkpoint(files, directory)
    expected: int | None = None
    for index, (number, name) in enumerate(_from_file_of(files, directory, listed, from_lsn)):
        is_last = name == listed[-1][1]
        try:
            file = files.open(directory / name)
        except FileNotFoundError:
            continue  # it has left the disk since it was listed
        try:
            begin = oldest_offset(checkpoint, number, file, 1) if expected is None else expected
            walking = _FileWalk(file, name, begin, is_last=is_last)
            if index and (gap := walking.gap_at_start()) is not None:
                yield gap
            for one in walking.run():
                yield from _from(one, from_lsn)
            expected = walking.lsn
        finally:
            file.close()


def _from_file_of(files: Files, directory: Path, listed: list[tuple[int, str]], lsn: int) -> list[tuple[int, str]]:
    """Without the files before the one that an LSN is in."""
    first = 0
    for index, (_, name) in enumerate(listed):
        try:
            file = files.open(directory / name)
        except FileNotFoundError:
            continue
        try:
            found = header_offset(file)
        finally:
            file.close()
        if found is not None and found > lsn:
            break
        first = index if found is not None else first
    return listed[first:]


def _from(one: Piece | Damage, lsn: int) -> Iterator[Piece | Damage]:
    if isinstance(one, Damage):
        if one.next_lsn is None or one.next_lsn > lsn:
            yield one
        return
    frames = one.frames
    if frames.next_offset <= lsn:
        return
    skipped = max(0, lsn - frames.first_offset)
    yield one if not skipped else one._replace(frames=frames.slice(skipped, frames.count))


class _FileWalk:
    """One file; `lsn` is the one that comes next."""

    def __init__(self, file: File, name: str, lsn: int, *, is_last: bool) -> None:
        self._file = file
        self._name = name
        self._size = file.size()
        self._is_last = is_last
        self.lsn = lsn

    def gap_at_start(self) -> Damage | None:
        """Records between this file and the one before it that are in neither."""
        found = header_offset(self._file)
        if found is None or found <= self.lsn:
            return None
        scanner = FileScanner(self._file, 0, found, _CHUNK_BYTES)
        if scanner.read(self._size) is None:
            return None
        damage = Damage(self._name, 0, self.lsn, found, "the file begins later than the one before it ends", False)
        self.lsn = found
        return damage

    def run(self) -> Iterator[Piece | Damage]:
        position: int | None = 0
        while position is not None:
            scanner = FileScanner(self._file, position, self.lsn, _CHUNK_BYTES)
            byte = scanner.position
            while (frames := scanner.read(self._size)) is not None:
                yield Piece(self._name, byte, frames)
                byte, self.lsn = scanner.position, scanner.offset
            if scanner.stop is Stop.END:
                return
            damage, position = self._damage_at(byte, scanner.stop)
            yield damage

    def _damage_at(self, byte: int, stop: Stop) -> tuple[Damage, int | None]:
        """What is wrong, and where good frames go on."""
        behind = find_good_frames(self._file, byte, self._size, self.lsn, min_offset=self.lsn)
        is_at_end = behind is None and self._is_last
        next_lsn = None if behind is None else behind[1]
        damage = Damage(self._name, byte, self.lsn, next_lsn, stop.reason, is_at_end)
        if behind is None:
            return damage, None
        self.lsn = behind[1]
        return damage, behind[0]
