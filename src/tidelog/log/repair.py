"""Repairs a damaged log: first makes a readable plan, then applies it on request.

Invariants
- Every good frame keeps its offset and its bytes. Damaged or missing frames are restored from another copy if one has
  them; offsets that are lost for good get a frame that says so (its payload is the single byte 0), so that the log is
  contiguous again and readers can tell lost from present.
- A damaged file is replaced atomically, after its old content is saved in `removed/`; a crash leaves the old file or
  the new one. Planning and applying again after a crash ends in the same state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tidelog.errors import RetryError, offsets_text
from tidelog.files import TEMPORARY_SUFFIX, Files
from tidelog.log.binding import BoundFiles
from tidelog.log.directory import CHECKPOINT, take_directory
from tidelog.log.frame import encode_many
from tidelog.log.recovery import keep_aside
from tidelog.log.settings import MIB
from tidelog.log.verify import FileFindings, LogFindings, Run, verify_files

LOST_PAYLOAD = b"\x00"
_COPY_BYTES = 4 * MIB
_LOST_BATCH = 65536


def is_lost(payload: bytes) -> bool:
    """Whether a payload only marks an offset whose message a repair could not save."""
    return payload == LOST_PAYLOAD


class OtherCopy(Protocol):
    """The same messages, elsewhere. What it cannot answer it raises; that is never taken for "not there"."""

    def ranges(self, first: int, last: int) -> Sequence[tuple[int, int]]:
        """Which offsets of a range it has, verified: first and last of each stretch, in order."""
        ...

    def payloads(self, first: int, last: int) -> Iterator[list[bytes]]:
        """All payloads of such a stretch, some at a time."""
        ...


class Restored(msgspec.Struct, frozen=True):
    """Offsets that are put back from the other copy; both ends belong to it."""

    first: int
    last: int


Piece = Run | Restored | tuple[int, int]


class _Rewrite(NamedTuple):
    """A file to be rebuilt, from stretches of the old one and of the other copy, and from lost offsets as
    (first, last); of nothing: removed."""

    name: str
    pieces: tuple[Piece, ...]


class RepairPlan:
    """The planned repair. Nothing has happened yet; `apply` does it."""

    def __init__(self, directory: Path, files: Files, planner: _Planner, copy: OtherCopy | None) -> None:
        self.actions = tuple(planner.actions)
        self.lost = tuple(planner.lost)
        self.restored = tuple(planner.restored)
        self._directory = directory
        self._files = files
        self._rewrites = planner.rewrites
        self._copied_from = copy

    @property
    def is_needed(self) -> bool:
        return bool(self._rewrites)

    def apply(self) -> list[Path]:
        """Takes the directory's lock and applies the plan; returns what was set aside."""
        lock = take_directory(self._files, self._directory)
        try:
            current = plan_repair(self._directory, files=self._files, copy=self._copied_from)
            if current.actions != self.actions:
                raise RetryError("the log has changed since the plan was made", hint="Plan the repair again")
            kept = [self._rewrite(rewrite) for rewrite in self._rewrites]
            if self._rewrites and self._files.exists(self._directory / CHECKPOINT):
                # It describes files that were replaced; opening finds everything without it.
                self._files.remove(self._directory / CHECKPOINT)
                self._files.sync_directory(self._directory)
            return [path for path in kept if path is not None]
        finally:
            lock.release()

    def _rewrite(self, rewrite: _Rewrite) -> Path | None:
        """Where the old content is kept; None if the file was already gone."""
        path = self._directory / rewrite.name
        kept = None
        if self._files.exists(path):
            kept = keep_aside(self._files, self._directory, rewrite.name, 0, self._files.read(path))
        if rewrite.pieces:
            self._build(path, rewrite)
        elif kept is not None:
            self._files.remove(path)
        self._files.sync_directory(self._directory)
        return kept

    def _build(self, path: Path, rewrite: _Rewrite) -> None:
        temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
        if self._files.exists(temporary):
            self._files.remove(temporary)
        new = self._files.create(temporary)
        try:
            position = 0
            for data in self._content(path, rewrite):
                new.write_at(position, data)
                position += len(data)
            new.sync()
        finally:
            new.close()
        self._files.rename(temporary, path)

    def _content(self, path: Path, rewrite: _Rewrite) -> Iterator[bytes]:
        for piece in rewrite.pieces:
            if isinstance(piece, Run):
                yield from self._copy(path, piece)
            elif isinstance(piece, Restored):
                yield from self._restore(piece)
            else:
                yield from _lost_frames(*piece)

    def _restore(self, piece: Restored) -> Iterator[bytes]:
        assert self._copied_from is not None, "what is put back was found there"
        offset = piece.first
        for payloads in self._copied_from.payloads(piece.first, piece.last):
            yield encode_many(offset, payloads).buffer
            offset += len(payloads)
        if offset != piece.last + 1:
            raise RetryError("the other copy of the log has changed since", hint="Plan the repair again")

    def _copy(self, path: Path, run: Run) -> Iterator[bytes]:
        old = self._files.open(path)
        try:
            for position in range(run.start, run.end, _COPY_BYTES):
                yield old.read_at(position, min(_COPY_BYTES, run.end - position))
        finally:
            old.close()


def _lost_frames(first: int, last: int) -> Iterator[bytes]:
    for start in range(first, last + 1, _LOST_BATCH):
        count = min(_LOST_BATCH, last + 1 - start)
        yield encode_many(start, [LOST_PAYLOAD] * count).buffer


def plan_repair(directory: Path, *, files: Files | None = None, copy: OtherCopy | None = None) -> RepairPlan:
    """Reads every frame and decides what to do; changes nothing. `copy` may have what is damaged or missing here."""
    files = files or BoundFiles(examining=True)
    planner = _Planner(verify_files(directory, files=files), copy)
    planner.plan()
    return RepairPlan(directory, files, planner, copy)


class _Planner:
    """Goes through the files in order and keeps the offset that must come next."""

    def __init__(self, examination: LogFindings, copy: OtherCopy | None) -> None:
        self._files = examination.files
        self._expected = examination.first_offset
        self._copy = copy
        self.rewrites: list[_Rewrite] = []
        self.actions: list[str] = []
        self.lost: list[tuple[int, int]] = []
        self.restored: list[tuple[int, int]] = []

    def plan(self) -> None:
        for index, file in enumerate(self._files):
            pieces = self._pieces(file, self._start_behind(index))
            if not _is_unchanged(file, pieces, is_last=index == len(self._files) - 1):
                self.rewrites.append(_Rewrite(file.name, tuple(pieces)))
                self._say(file, pieces)

    def _start_behind(self, index: int) -> int | None:
        return next((file.first_offset for file in self._files[index + 1 :] if file.first_offset is not None), None)

    def _pieces(self, file: FileFindings, following: int | None) -> list[Piece]:
        """The good runs, with what is lost between them.

        A damaged end is filled up to the next file, and the end of the log up to what is known to have been synced, so
        that no offset is used twice.
        """
        pieces: list[Piece] = []
        for run in file.runs:
            self._fill(pieces, run.first_offset)
            pieces.append(run)
            self._expected = run.next_offset
        ends_early = bool(file.findings) and (not file.runs or file.runs[-1].end < file.size)
        if ends_early and following is not None:
            self._fill(pieces, following)
        if following is None and file.known_next_offset is not None:
            self._fill(pieces, file.known_next_offset)
        return pieces

    def _fill(self, pieces: list[Piece], offset: int) -> None:
        if self._expected is not None and offset > self._expected:
            pieces += self._mended(self._expected, offset - 1)
            self._expected = offset

    def _mended(self, first: int, last: int) -> Iterator[Piece]:
        """What the other copy has of a range, and as lost what it has not."""
        reached = first
        for start, end in self._copy.ranges(first, last) if self._copy is not None else ():
            if start > reached:
                yield reached, start - 1
            yield Restored(start, end)
            reached = end + 1
        if reached <= last:
            yield reached, last

    def _say(self, file: FileFindings, pieces: list[Piece]) -> None:
        kept = sum(piece.end - piece.start for piece in pieces if isinstance(piece, Run))
        verb = "rewrite" if pieces else "remove"
        self.actions.append(
            f"{verb} {file.name}: {file.frames} good messages are kept ({kept} of {file.size} bytes), "
            "the old file is put aside in removed/"
        )
        for piece in pieces:
            if isinstance(piece, Restored):
                self.restored.append((piece.first, piece.last))
                self.actions.append(f"put {offsets_text(piece.first, piece.last)} back into {file.name} from the store")
            elif not isinstance(piece, Run):
                self.lost.append(piece)
                self.actions.append(f"mark {offsets_text(*piece)} as lost in {file.name}")


def _is_unchanged(file: FileFindings, pieces: list[Piece], *, is_last: bool) -> bool:
    """One run from the first byte to the last, or an empty file at the end, where the next message goes."""
    if file.header_problem is not None:
        return False
    if not pieces:
        return file.size == 0 and is_last
    only = pieces[0]
    return len(pieces) == 1 and isinstance(only, Run) and (only.start, only.end) == (0, file.size)
