"""Looks at every frame of a log directory and says all that is wrong with it, without changing anything.

Opening stops at the first damage; this goes on behind it, so that one run tells everything and a repair can be planned
from it. A run is a stretch of good frames with consecutive offsets; whatever lies between two runs is damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from tidelog.errors import offsets_text
from tidelog.files import File, Files
from tidelog.log.beginning import header_offset, offset_behind_gap, oldest_offset
from tidelog.log.bound_files import BoundFiles, header_problem, is_foreign
from tidelog.log.checkpoint import Checkpoint, read_checkpoint
from tidelog.log.damage import find_good_frames, is_misnumbered
from tidelog.log.frame import HEADER_BYTES, Frames, Stop
from tidelog.log.names import wal_files, wal_name
from tidelog.log.scanner import FileScanner
from tidelog.log.settings import MIB, LogSettings
from tidelog.log.start_mark import read_start

_CHUNK_BYTES = 2 * MIB
# How many messages a file that is missing or cut short can have held, at most, with the usual settings.
_MAX_LOST_A_FILE = LogSettings().rotate_max_bytes // (HEADER_BYTES + 1)

OnProgress = Callable[[int, int], None]
Unreadable = Callable[[Frames], Iterable[tuple[int, str]]]
"""Which of some frames mean nothing to the layer above, by their index, and why."""


class Run(msgspec.Struct, frozen=True):
    """Good frames for `first_offset` to `next_offset - 1` in the bytes from `start` to `end`."""

    start: int
    end: int
    first_offset: int
    next_offset: int


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong at a byte of a file; the offsets are those that are lost by it, when that is known."""

    file: str
    byte: int
    reason: str
    lost_first: int | None = None
    lost_last: int | None = None
    is_torn_tail: bool = False
    is_unreadable: bool = False
    """The frame is as it was written, and the layer above cannot make anything of it."""

    def __str__(self) -> str:
        text = f"{self.file}, byte {self.byte}: {self.reason}"
        if self.is_torn_tail:
            return f"{text} (a torn tail; opening cuts it)"
        if self.lost_first is None:
            return text
        return f"{text}; lost: {offsets_text(self.lost_first, self.lost_last or self.lost_first)}"


class FileExamination(msgspec.Struct, frozen=True, kw_only=True):
    """One WAL file."""

    name: str
    seq: int
    size: int
    runs: tuple[Run, ...]
    problems: tuple[Problem, ...]
    created_us: int | None
    min_time_us: int | None
    max_time_us: int | None
    known_next_offset: int | None
    """Where it ended, or went on, when the checkpoint was written."""
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


class LogExamination(msgspec.Struct, frozen=True, kw_only=True):
    """A whole directory."""

    files: tuple[FileExamination, ...]
    checkpoint: Checkpoint | None
    checkpoint_problem: str | None
    marked_start: int | None = None
    """Where the log is marked to begin."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        return tuple(problem for file in self.files for problem in file.problems)

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


def examine_log(
    directory: Path,
    *,
    files: Files | None = None,
    time_field: int | None = None,
    on_progress: OnProgress | None = None,
    unreadable: Unreadable | None = None,
) -> LogExamination:
    """Reads every frame. Takes no lock: in a log that is being written, the last frame may look torn."""
    files = files or BoundFiles(examining=True)
    checkpoint, problem = read_checkpoint(files, directory)
    listed = wal_files(files.list(directory))
    marked_start = read_start(files, directory)
    sizes, firsts = zip(*(_glance(files, directory / name) for _, name in listed), strict=True) if listed else ((), ())
    found: list[FileExamination] = []
    expected: int | None = None
    for index, (seq, name) in enumerate(listed):
        one = _FileWalk(name, seq, checkpoint, time_field, unreadable, is_last=index == len(listed) - 1)
        if on_progress is not None:
            one.on_bytes = _progress_from(on_progress, sum(sizes[:index]), sum(sizes))
        one.marked_start = marked_start
        one.following_offset = firsts[index + 1] if index + 1 < len(listed) else None
        file = files.open(directory / name)
        try:
            examined = one.walk(file, expected, found[-1].seq if found else seq)
        finally:
            file.close()
        found.append(examined)
        expected = examined.next_offset if examined.next_offset is not None else expected
    found += _missing_files(checkpoint, found[-1].seq if found else -1)
    return LogExamination(
        files=_without_missing_start(found, marked_start),
        checkpoint=checkpoint,
        checkpoint_problem=problem,
        marked_start=marked_start,
    )


def _without_missing_start(found: list[FileExamination], marked_start: int | None) -> tuple[FileExamination, ...]:
    """The same, with a problem of the oldest file when it begins well, and behind what the log began with."""
    oldest = found[0].runs[0] if found and found[0].runs else None
    if oldest is None or marked_start is None or oldest.start or oldest.first_offset <= marked_start:
        return tuple(found)
    reason = "the log began before it, with files that are gone"
    problem = _loss(found[0].name, 0, reason, marked_start, oldest.first_offset - 1)
    return msgspec.structs.replace(found[0], problems=(problem, *found[0].problems)), *found[1:]


def _missing_files(checkpoint: Checkpoint | None, last_seq: int) -> list[FileExamination]:
    """Files behind the last one that the checkpoint knows: they had been synced and are gone."""
    gone = [] if checkpoint is None else [file for file in checkpoint.files if file.seq > last_seq]
    return [
        FileExamination(
            name=(name := wal_name(file.seq)),
            seq=file.seq,
            size=0,
            runs=(),
            problems=(_loss(name, 0, "the file is gone", file.first_offset, file.next_offset - 1),),
            created_us=file.created_us,
            min_time_us=None,
            max_time_us=None,
            known_next_offset=file.next_offset,
        )
        for file in gone
    ]


def _loss(file: str, byte: int, reason: str, first: int, last: int) -> Problem:
    lost_first, lost_last = (first, last) if last >= first else (None, None)
    return Problem(file=file, byte=byte, reason=reason, lost_first=lost_first, lost_last=lost_last)


class _FileWalk:
    """Gathers the runs of one file and what lies between them."""

    def __init__(
        self,
        name: str,
        seq: int,
        checkpoint: Checkpoint | None,
        time_field: int | None,
        unreadable: Unreadable | None,
        *,
        is_last: bool,
    ) -> None:
        self.on_bytes: Callable[[int], None] = lambda _: None
        self.following_offset: int | None = None
        self.marked_start: int | None = None
        self._name = name
        self._seq = seq
        self._checkpoint = checkpoint
        self._hint = checkpoint.file(seq) if checkpoint is not None else None
        self._time_field = time_field
        self._unreadable = unreadable
        self._is_last = is_last
        self._runs: list[Run] = []
        self._problems: list[Problem] = []
        self._times: list[int] = []
        self._header_problem: str | None = None

    def walk(self, file: File, expected: int | None, seq_before: int) -> FileExamination:
        size = file.size()
        self._header_problem = header_problem(file)
        if self._header_problem is not None:
            self._add(0, self._header_problem, None)
        if is_foreign(file):
            return self._result(size)
        position, offset = 0, self._begin(file, expected, seq_before)
        while True:
            run, stop = self._run(file, position, offset, size)
            if run.end > run.start:
                self._runs.append(run)
            if stop is Stop.END:
                break
            behind = self._behind(file, run, stop, size)
            if behind is None:
                self._note_end(run, stop, is_misnumbered(file, run.end, size, run.next_offset))
                break
            self._note(run, stop, behind)
            position, offset = behind
        return self._result(size)

    def _behind(self, file: File, run: Run, stop: Stop, size: int) -> tuple[int, int] | None:
        """Where good frames go on: (byte, offset). They may do so at once, if the frames themselves agree on a gap."""
        if stop is Stop.WRONG_OFFSET:
            offset = offset_behind_gap(file, run.next_offset, max_jump=0, position=run.end)
            if offset is not None:
                return run.end, offset
        known = self._known_next_offset(run)
        return find_good_frames(
            *(file, run.end, size, run.next_offset), min_offset=run.next_offset, known_next_offset=known
        )

    def _known_next_offset(self, run: Run) -> int:
        """How far the file goes by what others say; the header of the next file is believed only within reason."""
        known = 0 if self._hint is None else self._hint.next_offset
        following = self.following_offset or 0
        return max(known, following) if following - run.next_offset <= _MAX_LOST_A_FILE else known

    def _begin(self, file: File, expected: int | None, seq_before: int) -> int:
        """The offset at which the file should begin; a jump ahead of the file before it is a loss of its own."""
        if expected is None:
            return oldest_offset(self._checkpoint, self._seq, file, 0, self.marked_start)
        known = self._hint.first_offset if self._hint is not None else None
        max_jump = _MAX_LOST_A_FILE * (self._seq - seq_before)
        if self.following_offset is not None and self.following_offset > expected:
            # A single header that the next file contradicts is not believed: it would push all files behind it out.
            max_jump = min(max_jump, self.following_offset - expected - 1)
        found = offset_behind_gap(file, expected, known, max_jump)
        if found is None:
            return expected
        self._add(0, "the file begins later than the one before it ends", (expected, found - 1))
        return found

    def _run(self, file: File, position: int, offset: int, size: int) -> tuple[Run, Stop]:
        scanner = FileScanner(file, position, offset, _CHUNK_BYTES)
        while (frames := scanner.read(size)) is not None:
            self._take_times(frames)
            self._note_unreadable(frames, scanner.position)
            self.on_bytes(scanner.position)
        return Run(position, scanner.position, offset, scanner.offset), scanner.stop

    def _note_unreadable(self, frames: Frames, end: int) -> None:
        """`end` is the byte of the file at which the last of them ends."""
        for index, reason in () if self._unreadable is None else self._unreadable(frames):
            byte = end - frames.end + frames.start_of(index)
            self._problems.append(Problem(file=self._name, byte=byte, reason=reason, is_unreadable=True))

    def _take_times(self, frames: Frames) -> None:
        times = None if self._time_field is None else frames.field_range(self._time_field)
        if times is not None:
            self._times = [min(times[0], *self._times), max(times[1], *self._times)] if self._times else list(times)

    def _note_end(self, run: Run, stop: Stop, was_whole: bool) -> None:
        is_torn_tail = self._is_last and not was_whole
        self._problems.append(Problem(file=self._name, byte=run.end, reason=stop.reason, is_torn_tail=is_torn_tail))

    def _note(self, run: Run, stop: Stop, behind: tuple[int, int]) -> None:
        if behind[1] > run.next_offset:
            self._add(run.end, stop.reason, (run.next_offset, behind[1] - 1))
        else:
            self._add(run.end, f"{stop.reason}, though nothing is missing", None)

    def _add(self, byte: int, reason: str, lost: tuple[int, int] | None) -> None:
        first, last = lost if lost is not None else (None, None)
        self._problems.append(Problem(file=self._name, byte=byte, reason=reason, lost_first=first, lost_last=last))

    def _result(self, size: int) -> FileExamination:
        if not size and not self._is_last:
            self._add(0, "the file is empty and another one follows", None)
        self._note_missing_end(size)
        return FileExamination(
            name=self._name,
            seq=self._seq,
            size=size,
            runs=tuple(self._runs),
            problems=tuple(self._problems),
            created_us=None if self._hint is None else self._hint.created_us,
            min_time_us=self._times[0] if self._times else None,
            max_time_us=self._times[1] if self._times else None,
            known_next_offset=None if self._hint is None else self._hint.next_offset,
            header_problem=self._header_problem,
        )

    def _note_missing_end(self, size: int) -> None:
        """The last file ends before what the checkpoint says was synced; behind others the next file tells."""
        if self._hint is None or not self._is_last:
            return
        next_offset = self._runs[-1].next_offset if self._runs else self._hint.first_offset
        if next_offset < self._hint.next_offset:
            reason = "the file ends before what had been synced"
            self._problems.append(_loss(self._name, size, reason, next_offset, self._hint.next_offset - 1))


def _glance(files: Files, path: Path) -> tuple[int, int | None]:
    """The size of a file, and the offset in its first header."""
    file = files.open(path)
    try:
        return file.size(), header_offset(file)
    finally:
        file.close()


def _progress_from(on_progress: OnProgress, before: int, total: int) -> Callable[[int], None]:
    return lambda position: on_progress(before + position, total)
