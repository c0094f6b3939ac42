"""Verifies an engine on this disk: its WAL, its page file, the index as a whole, and every value.

    WAL files -> frames, records    pages.db -> pages    state -> tree, versions, values    store (`store.py`)

Invariants
- Nothing is changed. Files are read without a lock, beside an owner: a page is read again before it counts as damaged,
  and one that redo rebuilds when the engine is opened may contain anything: it was being written.
- The state is that of an open engine, or of one that is recovered in an overlay (`overlay.py`). Versions that an open
  engine removes meanwhile are not a finding, and those that it applies meanwhile are left to the next time.
- Every value is read and compared with the checksum of its version, on this disk and in the store.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tidelog.engine.btree.page import PAGE_BYTES, check_page, verify_crc
from tidelog.engine.mvcc.cells import BUCKETS, Cell, decode_bucket, decode_cell, seq_of
from tidelog.engine.recovery.checkpoint import read_master
from tidelog.engine.sst.value_file import reference_of
from tidelog.engine.verify.describe import describe_key
from tidelog.engine.verify.store import FIX, about_engine, checked_record, verify_store
from tidelog.engine.wal.operations import OperationRecord
from tidelog.engine.wal.records import (
    CheckpointBeginRecord,
    CheckpointEndRecord,
    CheckpointState,
    Record,
    RollbackEndRecord,
)
from tidelog.engine.wal.value import CODEC_FILE, decode_value
from tidelog.errors import DataError, NotFoundError, TidelogError
from tidelog.files import File, Files, LocalFiles
from tidelog.findings import About, Finding, OnStep, VerifyReport, ignore_step
from tidelog.log.binding import bound
from tidelog.log.frame import HEADER_BYTES
from tidelog.log.verify import LogWalk, Piece
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore

if TYPE_CHECKING:
    from tidelog.engine.cold.reader import ColdReader
    from tidelog.engine.core import Core

WAL = "wal"
PAGES = "pages.db"
OnDone = Callable[[int], None]
_CHUNK_PAGES = 256
_ATTEMPTS = 5
_WAIT_SECONDS = 0.05
_COLD_BATCH = 50_000
_ZEROS = bytes(PAGE_BYTES)
_MADE_LSN = struct.Struct("<24xQ")


Place = Callable[[bytes, Cell], Cell]
"""Where the store has the value of a version, by its key in the tree."""


def at_its_place(key: bytes, cell: Cell) -> Cell:
    """The log here is the one that is shipped."""
    return cell


class EngineVerification:
    """The steps of a verification, and what they found. Take those that are possible, then the report."""

    def __init__(
        self,
        root: Path,
        name: str,
        *,
        files: Files | None = None,
        fix: str = FIX,
        on_step: OnStep = ignore_step,
    ) -> None:
        self._root = root
        self._files = files or LocalFiles()
        self._on_step = on_step
        self.about = about_engine(name, fix)
        self.findings: list[Finding] = []
        self.read: dict[str, int] = {}

    def check_files(self, durable_lsn: int = 0) -> bool:
        """The log, which an owner knows to be synced up to an LSN, and the page file.

        Returns whether the log is whole: if not, the state cannot be known.
        """
        log = LogCheck(self._root, self.about, self._files, durable_lsn)
        log.run(self._on_step)
        pages = PageCheck(self._root, log, self._files)
        pages.run(lambda done: self._on_step("reading pages", done, pages.pages * PAGE_BYTES))
        self.findings += [*log.findings, *pages.findings]
        self.read |= {"records": log.records, "log_bytes": log.bytes, "pages": pages.pages}
        return not log.has_damage

    def check_state(
        self, core: Core, reader: ColdReader | None, *, cold: bool, is_live: bool = False, place: Place = at_its_place
    ) -> None:
        """The index, and every value that it points to; those in the store only if `cold`. `place` says where the store
        has one.
        """
        check = StateCheck(core, reader, self.about, reads_store=cold, is_live=is_live, place=place)
        check.run(self._on_step)
        self.findings += check.findings
        self.read |= {
            "tree_pages": check.tree_pages,
            "versions": check.versions,
            "hot_values": check.hot_values,
            "cold_values": check.cold_values,
        }

    def check_store(
        self, objects: ObjectStore, metadata: MetadataStore, keys: EngineKeys, applied_seq: int | None
    ) -> None:
        """Everything that the manifest and the catalog name."""
        found = verify_store(objects, metadata, keys, applied_seq, self._on_step)
        self.findings += found.findings
        self.read |= found.read

    def report(self) -> VerifyReport:
        return VerifyReport(subject=self.about.subject, findings=tuple(self.findings), read=self.read)


def verify_open_engine(
    core: Core, reader: ColdReader | None, *, cold: bool, place: Place = at_its_place
) -> VerifyReport:
    """An engine that is open in this process, while it is used."""
    keys = EngineKeys() if reader is None else reader.keys
    check = EngineVerification(core.directory, keys.name, files=core.files)
    if check.check_files(core.wal.durable_lsn):
        check.check_state(core, reader, cold=cold, is_live=True, place=place)
    if cold and reader is not None:
        check.check_store(reader.store, reader.catalog.metadata, keys, None)
    return check.report()


class LogCheck:
    """Every record of the log, in order, in one pass."""

    def __init__(self, root: Path, about: About, files: Files, durable_lsn: int = 0) -> None:
        self._durable_lsn = durable_lsn
        self._wal = root / WAL
        self._files = files
        self.about = about
        self.findings: list[Finding] = []
        self.records = 0
        self.bytes = 0
        self.has_damage = False
        """Whether records are missing: then the state that they lead to cannot be known."""
        self.changed_pages: set[int] = set()
        """Pages that opening rebuilds or changes."""
        self.state, reason = read_master(files, root)
        self.made_lsn = _made_lsn_of(files, root / PAGES)
        self._ends: list[CheckpointState] = []
        self._positions: dict[int, int] = {}
        self._first_lsn: int | None = None
        self._next_lsn = 0
        self._position: int | None = None
        self._completed_seq = 0
        if reason is not None:
            self.findings.append(about.finding("checkpoint", root / "engine.ckpt", reason))

    def run(self, on_step: OnStep) -> None:
        if not self._files.is_directory(self._wal):
            self.has_damage = True
            self._add("frames", f"there is no directory {self._wal}")
            return
        walk = self._walk(0, waits=True)
        for one in walk:
            if isinstance(one, Finding):
                self.has_damage = self.has_damage or one.severity == "error"
                self._position = None
                self.findings.append(one)
            else:
                self._take(one)
                on_step("reading the log", self.bytes, walk.total_bytes)
        if not self.has_damage:
            self._check_checkpoint()

    def _walk(self, start: int, *, waits: bool) -> LogWalk:
        files = bound(self._files, examining=True)
        walk = LogWalk(self._wal, start, files=files, about=self.about, least_offset=1, waits=waits)
        walk.durable_offset = self._durable_lsn + 1
        return walk

    def catch_up(self) -> None:
        """What was written since: an owner goes on."""
        for one in self._walk(self._next_lsn, waits=False):
            if isinstance(one, Piece):
                self._take(one)

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
        self.bytes += piece.size

    def _check_record(self, lsn: int, payload: bytes) -> None:
        try:
            record, updates = checked_record(payload, lsn)
        except DataError as error:
            self.has_damage = True
            self._add("record", error.message)
            return
        if lsn > self.made_lsn and (self.state is None or lsn >= self.state.begin_lsn):
            self.changed_pages |= {update.page for update in updates}
        self._note(record, lsn)

    def _note(self, record: Record, lsn: int) -> None:
        match record:
            case OperationRecord():
                if record.is_last:
                    if record.transaction <= self._completed_seq:
                        self._add(
                            "record", f"LSN {lsn}: seq {record.transaction} comes after seq {self._completed_seq}"
                        )
                    self._completed_seq = record.transaction
            case RollbackEndRecord():
                self._completed_seq = record.target_seq
            case CheckpointBeginRecord():
                if self._position is not None and self._position != record.position:
                    said = f"it says that it is at position {record.position}, and is at {self._position}"
                    self._add("record", f"LSN {lsn}: {said}")
                self._position = self._positions[lsn] = record.position
            case CheckpointEndRecord():
                self._ends.append(record.state)

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
        reason = f"engine.ckpt tells of a checkpoint at LSN {state.begin_lsn} that the log does not have"
        self._add("checkpoint", reason)

    def _add(self, kind: str, message: str) -> None:
        self.findings.append(self.about.finding(kind, None, message))


class PageCheck:
    """Every page of the page file."""

    def __init__(self, root: Path, log: LogCheck, files: Files) -> None:
        self._path = root / PAGES
        self._log = log
        self._files = files
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
            file = self._files.open(self._path)
        except FileNotFoundError:
            if self._log.state is not None and self._log.state.next_page > 1:
                self._add("it is gone")
            return True
        try:
            self._read(file, on_done)
        finally:
            file.close()
        return not self.findings or _made_lsn_of(self._files, self._path) <= self._log.made_lsn

    def _read(self, file: File, on_done: OnDone) -> None:
        # An owner may have put this file in the place of the one that was there when the log was read.
        self._log.made_lsn = max(self._log.made_lsn, _made_lsn_in(file.read_at(0, _MADE_LSN.size)))
        self.pages = count = -(-file.size() // PAGE_BYTES)
        for first in range(0, count, _CHUNK_PAGES):
            data = file.read_at(first * PAGE_BYTES, _CHUNK_PAGES * PAGE_BYTES)
            for index in range(min(_CHUNK_PAGES, count - first)):
                self._check(first + index, data[index * PAGE_BYTES : (index + 1) * PAGE_BYTES])
            on_done(min(first + _CHUNK_PAGES, count) * PAGE_BYTES)
        self._check_end()

    def _check_end(self) -> None:
        """Checks that every page of the last checkpoint was written by it, unless the file was rewritten since."""
        state = self._log.state
        known = 0 if state is None or self._log.made_lsn >= state.begin_lsn else state.next_page
        missing = [page for page in range(self.pages, known) if page not in self._log.changed_pages]
        if missing:
            self._add(f"it ends before page {missing[0]}; the last checkpoint knew {known - 1}")

    def _check(self, page_id: int, data: bytes) -> None:
        fault = fault_of(data, page_id)
        for _ in range(_ATTEMPTS):
            if fault is None or page_id in self._log.changed_pages:
                return
            time.sleep(_WAIT_SECONDS)
            self._log.catch_up()
            fault = fault_of(self._again(page_id), page_id)
        if fault is not None:
            self._add(f"page {page_id}: {fault}", page_id * PAGE_BYTES)

    def _again(self, page_id: int) -> bytes:
        file = self._files.open(self._path)
        try:
            return file.read_at(page_id * PAGE_BYTES, PAGE_BYTES)
        finally:
            file.close()

    def _add(self, message: str, byte: int | None = None) -> None:
        self.findings.append(self._log.about.finding("page", self._path, message, byte=byte))


def _made_lsn_of(files: Files, path: Path) -> int:
    """The LSN up to which records are of another page file than this one; 0 where that cannot be told."""
    try:
        file = files.open(path)
    except FileNotFoundError:
        return 0
    try:
        return _made_lsn_in(file.read_at(0, _MADE_LSN.size))
    finally:
        file.close()


def _made_lsn_in(header: bytes) -> int:
    return int(_MADE_LSN.unpack(header)[0]) if len(header) == _MADE_LSN.size else 0


def fault_of(data: bytes, page_id: int) -> str | None:
    """What is wrong with a page by itself. One of zeros was never written: the tree says whether that matters."""
    if len(data) < PAGE_BYTES:
        return "the file ends in the middle of it"
    if data == _ZEROS and page_id:
        return None
    if not verify_crc(data):
        return "checksum does not match"
    return check_page(data, page_id) if page_id else None


class _Waiting(NamedTuple):
    """A version whose value is in the store."""

    position: int
    key: bytes
    value: bytes
    cell: Cell


class StateCheck:
    """The index as a whole, and every value that it points to."""

    def __init__(
        self,
        core: Core,
        reader: ColdReader | None,
        about: About,
        *,
        reads_store: bool,
        is_live: bool = False,
        place: Place = at_its_place,
    ) -> None:
        self._core = core
        self._place = place
        self._reader = reader
        self._about = about
        self._reads_store = reads_store
        self._is_live = is_live
        self._applied_seq = core.marks.applied_seq
        self._waiting: list[_Waiting] = []
        self.findings: list[Finding] = []
        self.tree_pages = 0
        self.versions = 0
        self.hot_values = 0
        self.cold_values = 0

    def run(self, on_step: OnStep) -> None:
        """Looks at the tree, then at every version in it."""
        total = self._check_tree()
        self._check_marks()
        try:
            for key, value in self._core.tree.scan():
                self.versions += 1
                self._check(key, value)
                if len(self._waiting) >= _COLD_BATCH:
                    self._read_waiting()
                if self.versions % 1000 == 0:
                    on_step("reading values", self.versions, total)
        except DataError as error:
            self.findings.append(self._about.finding("index", None, error.message))
        self._read_waiting()

    def _check_tree(self) -> int:
        """How many versions there are to look at."""
        try:
            try:
                report = self._core.tree.check()
            except DataError:
                with self._core.applying:  # an open engine may have changed pages between two looks
                    report = self._core.tree.check()
        except DataError as error:
            self.findings.append(self._about.finding("index", None, error.message))
            return 0
        self.tree_pages = report.pages
        return report.cells

    def _check_marks(self) -> None:
        marks = self._core.marks
        if not marks.high_water_mark <= marks.low_water_mark <= marks.applied_seq:
            text = f"high-water {marks.high_water_mark}, low-water {marks.low_water_mark}, applied {marks.applied_seq}"
            self.findings.append(self._about.finding("marks", None, f"they are not in order: {text}"))

    def _check(self, key: bytes, value: bytes) -> None:
        if self._is_live and seq_of(key) > self._applied_seq:
            return
        try:
            if seq_of(key) > self._applied_seq:
                raise DataError(f"it is of seq {seq_of(key)}, and the last one is {self._applied_seq}")
            if key[:1] == BUCKETS:
                decode_bucket(value)
                return
            cell = decode_cell(value)
            if not cell.is_tombstone:
                self._check_value(key, value, cell)
        except TidelogError as error:
            self._add(key, value, error)

    def _check_value(self, key: bytes, value: bytes, cell: Cell) -> None:
        stored = cell.inline
        if cell.codec == CODEC_FILE:
            self._check_file(cell)
            return
        if stored is None:
            stored = self._core.wal.read_stored(cell.position, cell.stored_bytes)
        if stored is not None:
            decode_value(stored, cell.codec, cell.size, cell.crc, cell.lsn)
            self.hot_values += 1
        elif self._reader is None:
            raise NotFoundError(f"its value, at position {cell.position}, has left this disk, and no store is known")
        elif self._reads_store:
            self._waiting.append(_Waiting(cell.position, key, value, self._place(key, cell)))

    def _check_file(self, cell: Cell) -> None:
        """A value with a file of its own, which is read piece by piece."""
        reference = reference_of(cell)
        opened = self._core.values.open(reference)
        if opened is not None:
            with contextlib.closing(opened):
                opened.verify()
            self.hot_values += 1
        elif self._reader is None:
            raise NotFoundError(f"its value, in {reference.name}, has left this disk, and no store is known")
        elif self._reads_store:
            self._reader.open_value(reference).verify()
            self.cold_values += 1

    def _read_waiting(self) -> None:
        """In the order of the log: neighbours come with one request."""
        for _, key, value, cell in sorted(self._waiting):
            assert self._reader is not None
            try:
                self._reader.read(cell)
                self.cold_values += 1
            except (DataError, NotFoundError) as error:
                self._add(key, value, error)
        self._waiting = []

    def _add(self, key: bytes, value: bytes, error: TidelogError) -> None:
        if self._is_live and self._core.tree.get(key) != value:
            return  # it was removed meanwhile, and its value with it
        found = self._about.finding("value", error.path, f"{describe_key(key)}: {error.message}")
        self.findings.append(found)
