"""What `tidelog engine verify` looks at in the files of an engine, without a lock and without changing anything.

Invariants
- A page that the log makes anew when the engine is opened may be anything in the page file: it was being written.
- What an owner is doing meanwhile is no problem: a page is read again before it counts as damaged.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tidelog.cli.engine_wal import Damage, Piece, walk
from tidelog.engine.master import CheckpointState, read_master
from tidelog.engine.operation_record import OperationRecord
from tidelog.engine.page import PAGE_BYTES, check_page, verify_crc
from tidelog.engine.record import (
    CheckpointBeginRecord,
    CheckpointEndRecord,
    Record,
    RollbackEndRecord,
    decode_record,
)
from tidelog.engine.updates import decode as decode_updates
from tidelog.errors import DataError
from tidelog.files import File, LocalFiles
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.examine import examine_log
from tidelog.log.frame import HEADER_BYTES
from tidelog.log.repair import is_lost

OnDone = Callable[[int], None]
_CHUNK_PAGES = 256
_ATTEMPTS = 5
_WAIT_SECONDS = 0.05
_ZEROS = bytes(PAGE_BYTES)
PAGES = "pages.db"
_MADE_LSN = struct.Struct("<24xQ")


class Finding(NamedTuple):
    """Something wrong: in which part, and what."""

    part: str
    text: str


class LogCheck:
    """Every record of the log, in order."""

    def __init__(self, root: Path) -> None:
        self._wal = root / "wal"
        self.findings: list[Finding] = []
        self.records = 0
        self.bytes = 0
        self.has_damage = False
        """Whether records are missing: then the state that they lead to cannot be known."""
        self.changed_pages: set[int] = set()
        """Pages that opening makes anew, or changes."""
        self.state, reason = read_master(LocalFiles(), root)
        self.made_lsn = made_lsn_of(root / PAGES)
        self._ends: list[CheckpointState] = []
        self._positions: dict[int, int] = {}
        self._first_lsn: int | None = None
        self._next_lsn = 0
        self._position: int | None = None
        self._completed_seq = 0
        if reason is not None:
            self._add("checkpoint", f"engine.ckpt: {reason}")

    def run(self, on_done: OnDone) -> None:
        """Reads all of it, twice: its frames, then the records in them."""
        if not self._wal.is_dir():
            self.has_damage = True
            self._add("log", f"there is no directory {self._wal}")
            return
        self._check_frames(on_done)
        done = self.bytes
        for one in walk(self._wal):
            if isinstance(one, Damage):
                self._position = None
            else:
                self._take(one)
                done += one.size
                on_done(done)
        if not self.has_damage:
            self._check_checkpoint()

    def _check_frames(self, on_done: OnDone) -> None:
        examined = examine_log(self._wal, on_progress=lambda done, _: on_done(done))
        self.bytes = examined.total_bytes
        for problem in examined.problems:
            if problem.is_torn_tail and self._grows(problem.file, examined.files[-1].size):
                continue
            self.has_damage = self.has_damage or not problem.is_torn_tail
            self._add("log", str(problem))

    def _grows(self, name: str, size: int) -> bool:
        """A frame without an end in a file that grows is one that is being written."""
        time.sleep(_WAIT_SECONDS * 4)
        return (self._wal / name).stat().st_size > BINDING_BYTES + size

    def _take(self, piece: Piece) -> None:
        frames = piece.frames
        if self._first_lsn is None:
            self._first_lsn = frames.first_offset
            self._position = 0 if self._first_lsn == 1 else None
        for lsn, payload in enumerate(frames.payloads(), frames.first_offset):
            self.records += 1
            self._check_record(lsn, payload)
            if self._position is not None:
                self._position += HEADER_BYTES + len(payload)
        self._next_lsn = frames.next_offset

    def catch_up(self) -> None:
        """What was written since: an owner goes on."""
        for one in walk(self._wal, self._next_lsn):
            if isinstance(one, Piece):
                self._take(one)

    def _check_record(self, lsn: int, payload: bytes) -> None:
        if is_lost(payload):
            self.has_damage = True
            self._add("log", f"LSN {lsn}: a repair could not save it")
            return
        try:
            record = decode_record(payload, lsn)
            pages = {update.page for update in decode_updates(getattr(record, "updates", b""), lsn)}
        except DataError as error:
            self.has_damage = True
            self._add("log", error.message)
            return
        if lsn > self.made_lsn and (self.state is None or lsn >= self.state.begin_lsn):
            self.changed_pages |= pages
        self._note(record, lsn)

    def _note(self, record: Record, lsn: int) -> None:
        match record:
            case OperationRecord():
                self._note_operation(record, lsn)
            case RollbackEndRecord():
                self._completed_seq = record.target_seq
            case CheckpointBeginRecord():
                self._note_begin(record, lsn)
            case CheckpointEndRecord():
                self._ends.append(record.state)

    def _note_operation(self, record: OperationRecord, lsn: int) -> None:
        if not record.is_last:
            return
        if record.transaction <= self._completed_seq:
            self._add("log", f"LSN {lsn}: seq {record.transaction} comes after seq {self._completed_seq}")
        self._completed_seq = record.transaction

    def _note_begin(self, record: CheckpointBeginRecord, lsn: int) -> None:
        if self._position is not None and self._position != record.position:
            self._add("log", f"LSN {lsn}: it says that it is at position {record.position}, and is at {self._position}")
        self._position = record.position
        self._positions[lsn] = record.position

    def _check_checkpoint(self) -> None:
        """`engine.ckpt` is a copy of what the log says, or of a restore: then the log begins where it does."""
        state = self.state
        if state is None:
            if self._first_lsn not in (None, 1) and not self._ends:
                self._add("checkpoint", f"there is none, and the log begins at LSN {self._first_lsn}")
            return
        if self._positions.get(state.begin_lsn) == state.begin_position and state in self._ends:
            return
        if self._first_lsn in (None, state.begin_lsn) and state.begin_lsn not in self._positions:
            return
        self._add(
            "checkpoint", f"engine.ckpt tells of a checkpoint at LSN {state.begin_lsn} that the log does not have"
        )

    def _add(self, part: str, text: str) -> None:
        self.findings.append(Finding(part, text))


class PageCheck:
    """Every page of the page file."""

    def __init__(self, root: Path, log: LogCheck) -> None:
        self._path = root / PAGES
        self._log = log
        self.findings: list[Finding] = []
        self.pages = 0

    def run(self, on_done: OnDone) -> None:
        """Reads all of it; once more if an owner has put another file in its place meanwhile."""
        for _ in range(_ATTEMPTS):
            self.findings = []
            if self._is_done(on_done):
                return
            self._log.catch_up()

    def _is_done(self, on_done: OnDone) -> bool:
        """Whether the file that was read is still the one that counts."""
        try:
            file, inode = LocalFiles().open(self._path), self._path.stat().st_ino
        except FileNotFoundError:
            self._note_missing()
            return True
        try:
            self._read(file, on_done)
        finally:
            file.close()
        return not self.findings or not self._path.exists() or self._path.stat().st_ino == inode

    def _read(self, file: File, on_done: OnDone) -> None:
        # An owner may have put this file in the place of the one that was there when the log was read.
        self._log.made_lsn = max(self._log.made_lsn, _made_lsn_in(file.read_at(0, _MADE_LSN.size)))
        self.pages = count = -(-file.size() // PAGE_BYTES)
        for first in range(0, count, _CHUNK_PAGES):
            data = file.read_at(first * PAGE_BYTES, _CHUNK_PAGES * PAGE_BYTES)
            for index in range(min(_CHUNK_PAGES, count - first)):
                self._check(first + index, data[index * PAGE_BYTES : (index + 1) * PAGE_BYTES])
            on_done((first + _CHUNK_PAGES) * PAGE_BYTES)
        self._check_end()

    def _check_end(self) -> None:
        """Every page that there was at the last checkpoint was written by it, unless all were written anew since."""
        state = self._log.state
        known = 0 if state is None or self._log.made_lsn >= state.begin_lsn else state.next_page
        missing = [page for page in range(self.pages, known) if page not in self._log.changed_pages]
        if missing:
            text = f"{self._path} ends before page {missing[0]}; the last checkpoint knew {known - 1}"
            self.findings.append(Finding("pages", text))

    def _note_missing(self) -> None:
        if self._log.state is not None and self._log.state.next_page > 1:
            self.findings.append(Finding("pages", f"{self._path} is gone"))

    def _check(self, page_id: int, data: bytes) -> None:
        fault = fault_of(data, page_id)
        for _ in range(_ATTEMPTS):
            if fault is None or page_id in self._log.changed_pages:
                return
            time.sleep(_WAIT_SECONDS)
            self._log.catch_up()
            fault = fault_of(self._again(page_id), page_id)
        if fault is not None:
            byte = page_id * PAGE_BYTES
            self.findings.append(Finding("pages", f"{self._path}, byte {byte}: page {page_id}: {fault}"))

    def _again(self, page_id: int) -> bytes:
        file = LocalFiles().open(self._path)
        try:
            return file.read_at(page_id * PAGE_BYTES, PAGE_BYTES)
        finally:
            file.close()


def made_lsn_of(path: Path) -> int:
    """The LSN up to which records are of another page file than this one; 0 where that cannot be told."""
    try:
        with path.open("rb") as file:
            return _made_lsn_in(file.read(_MADE_LSN.size))
    except FileNotFoundError:
        return 0


def _made_lsn_in(header: bytes) -> int:
    return int(_MADE_LSN.unpack(header)[0]) if len(header) == _MADE_LSN.size else 0


def fault_of(data: bytes, page_id: int) -> str | None:
    """What is wrong with a page by itself. One of zeros was never written: the tree says whether that matters."""
    if len(data) < PAGE_BYTES:
        return "the file ends in the middle of it"
    if data == _ZEROS and page_id:
        return None
    if not verify_crc(data):
        return "a checksum that does not match"
    return check_page(data, page_id) if page_id else None
