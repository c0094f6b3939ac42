"""Verifies every frame of a log directory and finds all damage, without changing anything.

    LogWalk -> good frames and findings, in order        verify_files -> what each file has, for a repair or a listing

Invariants
- Recovery stops at the first damage; a walk continues after it, so that one run finds everything and a repair can be
  planned from it. A run is a stretch of good frames with consecutive offsets; anything between two runs is damage.
- It takes no lock. Files that leave the disk meanwhile are left out; with `waits`, an incomplete last frame in a file
  that grows is one that its owner is writing right now.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.codec import MAX_OFFSET
from tidelog.files import File, Files
from tidelog.findings import TORN_TAIL, UNREADABLE, About, Finding
from tidelog.log.binding import BoundFiles, header_problem, is_foreign
from tidelog.log.directory import wal_files, wal_name
from tidelog.log.frame import HEADER_BYTES, Frames, Stop
from tidelog.log.recovery import (
    BEYOND_ALL_OFFSETS,
    find_good_frames,
    first_impossible_byte,
    header_offset,
    is_misnumbered,
    offset_after_gap,
    oldest_offset,
    read_start,
)
from tidelog.log.segment import Checkpoint, FileScanner, read_checkpoint
from tidelog.log.settings import MIB, LogSettings

_CHUNK_BYTES = 2 * MIB
# How many messages a file that is missing or cut short can have held, at most, with the usual settings.
_MAX_LOST_A_FILE = LogSettings().rotate_max_bytes // (HEADER_BYTES + 1)
_GROWTH_WAIT_SECONDS = 0.2
REPAIR = "`tidelog repair` says what can be done"
UNREADABLE_FIX = (
    "The bytes are as they were written, and no message can be read from them: "
    '`consume --skip-gaps` and on_gap="skip" leave out that one'
)

OnProgress = Callable[[int, int], None]
Unreadable = Callable[[Frames], Iterable[tuple[int, str]]]
"""Which of some frames mean nothing to the layer above, by their index, and why."""


class Run(msgspec.Struct, frozen=True):
    """Good frames for `first_offset` to `next_offset - 1` in the bytes from `start` to `end`."""

    start: int
    end: int
    first_offset: int
    next_offset: int


class Piece(NamedTuple):
    """Good frames of a file; their buffer begins at this byte of it."""

    file: str
    byte: int
    frames: Frames

    @property
    def size(self) -> int:
        """Bytes that the frames take."""
        return self.frames.end - self.frames.start_of(0)


class FileFindings(msgspec.Struct, frozen=True, kw_only=True):
    """One WAL file."""

    name: str
    seq: int
    size: int
    runs: tuple[Run, ...]
    findings: tuple[Finding, ...]
    created_us: int | None = None
    min_time_us: int | None = None
    max_time_us: int | None = None
    known_next_offset: int | None = None
    """Where it ended or continued when the checkpoint was written."""
    header_problem: str | None = None
    """What is wrong with the header that binds it to its log."""

    @property
    def frames(self) -> int:
        return sum(run.next_offset - run.first_offset for run in self.runs)

    @property
    def first_offset(self) -> int | None:
        return self.runs[0].first_offset if self.runs else None

    @property
    def next_offset(self) -> int | None:
        return self.runs[-1].next_offset if self.runs else None


class LogFindings(msgspec.Struct, frozen=True, kw_only=True):
    """A whole directory."""

    files: tuple[FileFindings, ...] = ()
    checkpoint: Checkpoint | None = None
    checkpoint_problem: str | None = None
    marked_start: int | None = None
    """Where the log is marked to begin."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for file in self.files for finding in file.findings)

    @property
    def first_offset(self) -> int | None:
        """Where the log begins as its mark or the checkpoint knows it; a damaged first frame cannot tell."""
        first = next((file.first_offset for file in self.files if file.first_offset is not None), None)
        if self.marked_start is not None and first is not None and self.marked_start < first:
            return self.marked_start
        if self.checkpoint is None or not self.files:
            return None
        return self.checkpoint.first_offset_of(self.files[0].seq)

    @property
    def frames(self) -> int:
        return sum(file.frames for file in self.files)

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)


def verify_files(
    directory: Path,
    *,
    files: Files | None = None,
    subject: str | None = None,
    time_field: int | None = None,
    on_progress: OnProgress | None = None,
    unreadable: Unreadable | None = None,
    waits: bool = False,
    durable_offset: int = 0,
) -> LogFindings:
    """Reads every frame. In a log that is being written, the last frame may look torn, unless it `waits`.

    What is bad below `durable_offset`, as an owner knows it, is never a torn tail.
    """
    about = About(subject or str(directory), fix=REPAIR)
    walk = LogWalk(directory, files=files, about=about, unreadable=unreadable, waits=waits)
    walk.durable_offset = durable_offset
    times: dict[str, tuple[int, int]] = {}
    done, total = 0, walk.total_bytes
    for one in walk:
        if isinstance(one, Piece):
            done += one.size
            if time_field is not None and (found := one.frames.field_range(time_field)) is not None:
                known = times.get(one.file, found)
                times[one.file] = min(known[0], found[0]), max(known[1], found[1])
            if on_progress is not None:
                on_progress(done, total)
    return LogFindings(
        files=tuple(
            msgspec.structs.replace(file, min_time_us=times[file.name][0], max_time_us=times[file.name][1])
            if file.name in times
            else file
            for file in walk.walked
        ),
        checkpoint=walk.checkpoint,
        checkpoint_problem=walk.checkpoint_problem,
        marked_start=walk.marked_start,
    )


class _Listed(NamedTuple):
    """A file as it was when the walk began, with the offset in its first header."""

    seq: int
    name: str
    size: int
    first_offset: int | None


class LogWalk:
    """One pass over the files of a log: good frames, and findings in the order of the bytes.

    It begins with the file that holds `start`; frames below that are left out.
    """

    def __init__(
        self,
        directory: Path,
        start: int = 0,
        *,
        files: Files | None = None,
        about: About | None = None,
        least_offset: int = 0,
        unreadable: Unreadable | None = None,
        waits: bool = False,
    ) -> None:
        self.directory = directory
        self.start = start
        self.files = files or BoundFiles(examining=True)
        self.unreadable = unreadable
        self.waits = waits
        self.least_offset = least_offset
        self.durable_offset = 0
        """Everything below is known to have been synced."""
        self.walked: list[FileFindings] = []
        """What is known of each file that was passed."""
        self._about = about or About(str(directory), fix=REPAIR)
        self.checkpoint, self.checkpoint_problem = read_checkpoint(self.files, directory)
        self.marked_start = read_start(self.files, directory)
        self._listed = self._list()
        self.total_bytes = sum(one.size for one in self._listed)

    def _list(self) -> list[_Listed]:
        found: list[_Listed] = []
        first = 0
        for seq, name in wal_files(self.files.list(self.directory)):
            try:
                file = self.files.open(self.directory / name)
            except FileNotFoundError:
                continue  # it has left the disk since it was listed
            try:
                found.append(_Listed(seq, name, file.size(), header_offset(file)))
            finally:
                file.close()
        for index, one in enumerate(found):
            if one.first_offset is not None and one.first_offset > self.start:
                break
            first = index if one.first_offset is not None else first
        return found[first:] if self.start else found

    def finding(self, name: str, byte: int, message: str, lost: tuple[int, int | None] | None = None) -> Finding:
        """Something wrong with a file, and which offsets it takes."""
        return self._about.finding("frames", self.directory / name, message, *(lost or ()), byte=byte)

    def __iter__(self) -> Iterator[Piece | Finding]:
        expected: int | None = None
        for index, listed in enumerate(self._listed):
            following = self._listed[index + 1] if index + 1 < len(self._listed) else None
            before = self.walked[-1].seq if self.walked else listed.seq
            try:
                file = self.files.open(self.directory / listed.name)
            except FileNotFoundError:
                expected = None
                continue
            try:
                walk = _FileWalk(self, listed, following, file)
                for one in walk.run(expected, before):
                    if isinstance(one, Finding):
                        if one.last_offset is None or one.last_offset >= self.start:
                            yield one
                    elif one.frames.next_offset > self.start:
                        skipped = max(0, self.start - one.frames.first_offset)
                        yield one._replace(frames=one.frames.slice(skipped, one.frames.count)) if skipped else one
            finally:
                file.close()
            self.walked.append(walk.result())
            expected = walk.runs[-1].next_offset if walk.runs else expected
        yield from self._missing_files()
        yield from self._missing_start()

    def _missing_files(self) -> Iterator[Finding]:
        """Files after the last one that the checkpoint knows: they had been synced and are gone."""
        last_seq = self.walked[-1].seq if self.walked else -1
        for file in () if self.checkpoint is None else self.checkpoint.files:
            if file.seq <= last_seq:
                continue
            name = wal_name(file.seq)
            gone = self.finding(name, 0, "the file is gone", _lost(file.first_offset, file.next_offset))
            self.walked.append(
                FileFindings(
                    name=name,
                    seq=file.seq,
                    size=0,
                    runs=(),
                    findings=(gone,),
                    created_us=file.created_us,
                    known_next_offset=file.next_offset,
                )
            )
            yield gone

    def _missing_start(self) -> Iterator[Finding]:
        """The oldest file begins well, but after where the log began."""
        self.marked_start = read_start(self.files, self.directory)  # moved before files go: as new as the files
        first = self.walked[0] if self.walked and not self.start else None
        oldest = first.runs[0] if first is not None and first.runs else None
        if first is None or oldest is None or self.marked_start is None:
            return
        if oldest.start or oldest.first_offset <= self.marked_start:
            return
        reason = "the log began before it, and those files are missing"
        gone = self.finding(first.name, 0, reason, (self.marked_start, oldest.first_offset - 1))
        self.walked[0] = msgspec.structs.replace(first, findings=(gone, *first.findings))
        yield gone


def _lost(first: int, end: int) -> tuple[int, int] | None:
    return (first, end - 1) if end > first else None


class _FileWalk:
    """One file: its runs, and what lies between them. `offset` is the one that must come next."""

    def __init__(self, walk: LogWalk, listed: _Listed, following: _Listed | None, file: File) -> None:
        self._walk = walk
        self._name = listed.name
        self._seq = listed.seq
        self._file = file
        self._size = file.size()
        self._is_last = following is None
        self._following_offset = None if following is None else following.first_offset
        self._hint = None if walk.checkpoint is None else walk.checkpoint.file(listed.seq)
        self._header_problem = header_problem(file)
        self._findings: list[Finding] = []
        self._stop, self._end = Stop.END, 0
        self.offset = 0
        self.runs: list[Run] = []

    def run(self, expected: int | None, seq_before: int) -> Iterator[Piece | Finding]:
        if self._header_problem is not None:
            yield self._found(0, self._header_problem)
        if not is_foreign(self._file):
            yield from self._begin(expected, seq_before)
            position: int | None = 0
            while position is not None:
                yield from self._good(position)
                position = yield from self._damaged()
        if not self._size and not self._is_last:
            yield self._found(0, "the file is empty and another one follows")
        yield from self._missing_end()

    def _begin(self, expected: int | None, seq_before: int) -> Iterator[Finding]:
        """The offset at which the file should begin; a jump ahead of the file before it is a loss of its own."""
        walk, file = self._walk, self._file
        if expected is None:
            self.offset = oldest_offset(walk.checkpoint, self._seq, file, walk.least_offset, walk.marked_start)
            return
        known = self._hint.first_offset if self._hint is not None else None
        max_jump = _MAX_LOST_A_FILE * (self._seq - seq_before)
        if self._following_offset is not None and self._following_offset > expected:
            # A single header that the next file contradicts is not trusted: it would displace all files after it.
            max_jump = min(max_jump, self._following_offset - expected - 1)
        found = offset_after_gap(file, expected, known, max_jump)
        self.offset = expected if found is None else found
        if found is not None:
            yield self._found(0, "the file begins later than the one before it ends", (expected, found - 1))

    def _good(self, position: int) -> Iterator[Piece | Finding]:
        """Good frames from a byte on; a run of them, if there are any."""
        first = self.offset
        scanner = FileScanner(self._file, position, first, _CHUNK_BYTES)
        byte = position
        while (frames := scanner.read(self._size)) is not None:
            piece = Piece(self._name, byte, frames)
            byte, self.offset = scanner.position, scanner.offset
            yield piece
            for index, reason in () if self._walk.unreadable is None else self._walk.unreadable(frames):
                place = piece.byte + frames.start_of(index)
                yield self._found(place, reason, kind=UNREADABLE, fix=UNREADABLE_FIX)
        self._stop, self._end = scanner.stop, byte
        if self.offset > MAX_OFFSET + 1:
            self._stop, self._end = Stop.END, first_impossible_byte(self._file, position, first, byte)
            self.offset = max(first, MAX_OFFSET + 1)
            yield self._found(self._end, BEYOND_ALL_OFFSETS)
        if self._end > position:
            self.runs.append(Run(position, self._end, first, self.offset))

    def _damaged(self) -> Generator[Finding, None, int | None]:
        """What is wrong after a run; returns the byte at which good frames continue, None where none do."""
        if self._stop is Stop.END:
            return None
        after = self._after()
        if after is None:
            yield from self._end_of_good()
            return None
        if after[1] > self.offset:
            yield self._found(self._end, self._stop.reason, (self.offset, after[1] - 1))
        else:
            yield self._found(self._end, f"{self._stop.reason}, though nothing is missing")
        self.offset = after[1]
        return after[0]

    def _after(self) -> tuple[int, int] | None:
        """Where good frames continue: (byte, offset), here if the frames themselves agree on a gap."""
        file, end, offset = self._file, self._end, self.offset
        if self._stop is Stop.WRONG_OFFSET:
            found = offset_after_gap(file, offset, max_jump=0, position=end)
            if found is not None:
                return end, found
        # The header of the next file is believed only within reason.
        known = 0 if self._hint is None else self._hint.next_offset
        following = self._following_offset or 0
        known = max(known, following) if following - offset <= _MAX_LOST_A_FILE else known
        return find_good_frames(file, end, self._size, offset, min_offset=offset, known_next_offset=known)

    def _end_of_good(self) -> Iterator[Finding]:
        is_torn = self._is_last and self.offset >= self._walk.durable_offset
        is_torn = is_torn and not is_misnumbered(self._file, self._end, self._size, self.offset)
        if not is_torn:
            yield self._found(self._end, self._stop.reason, (self.offset, None))
            return
        if self._walk.waits:
            time.sleep(_GROWTH_WAIT_SECONDS)
            if self._file.size() > self._size:
                return
        message = f"{self._stop.reason}: a torn tail, which opening cuts"
        yield self._found(self._end, message, (self.offset, None), kind=TORN_TAIL, severity="warning", fix=None)

    def _missing_end(self) -> Iterator[Finding]:
        """The last file ends before what the checkpoint says was synced; for earlier files the next file tells."""
        if self._hint is None or not self._is_last:
            return
        next_offset = self.runs[-1].next_offset if self.runs else self._hint.first_offset
        if next_offset < self._hint.next_offset:
            lost = _lost(next_offset, self._hint.next_offset)
            yield self._found(self._size, "the file ends before its last synced byte", lost)

    def _found(self, byte: int, message: str, lost: tuple[int, int | None] | None = None, **changes: object) -> Finding:
        found = msgspec.structs.replace(self._walk.finding(self._name, byte, message, lost), **changes)
        self._findings.append(found)
        return found

    def result(self) -> FileFindings:
        hint = self._hint
        return FileFindings(
            name=self._name,
            seq=self._seq,
            size=self._size,
            runs=tuple(self.runs),
            findings=tuple(self._findings),
            created_us=None if hint is None else hint.created_us,
            known_next_offset=None if hint is None else hint.next_offset,
            header_problem=self._header_problem,
        )
