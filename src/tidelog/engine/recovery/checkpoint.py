"""Fuzzy checkpoints: entries are applied while one is taken, and crash recovery starts at the last complete one.

    CHECKPOINT_BEGIN -> flush the pages that were dirty then -> CHECKPOINT_END -> engine.ckpt

Invariants
- From the begin record on, the first change of every page is preceded by its image in the WAL. So redo, which starts
  there, needs no page from the file that was being written when the power failed.
- The end record is written once all pages that were dirty at the beginning are synced in the page file, and counts once
  `engine.ckpt` names it. A crash before leaves the previous checkpoint as the last.
- After a failure that requires reopening, no checkpoint is begun or ended: it would hide what undo starts from.
- Only the two records are written under the engine's lock; pages are not.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Lock

import msgspec

from tidelog.clock import Clock
from tidelog.codec import decode_document, encode_document
from tidelog.engine.btree.buffer_pool import BufferPool
from tidelog.engine.btree.tree import Tree
from tidelog.engine.mvcc.known_results import ResultTable
from tidelog.engine.mvcc.retention import Marks
from tidelog.engine.wal.records import CheckpointState, encode_checkpoint_begin, encode_checkpoint_end
from tidelog.engine.wal.wal import Wal
from tidelog.errors import DataError, InputError, LogFailedError
from tidelog.events import tell
from tidelog.files import Files, explained

_logger = logging.getLogger("tidelog.engine")


class Checkpointer:
    """Takes checkpoints of one engine, one at a time."""

    def __init__(
        self,
        *,
        directory: Path,
        files: Files,
        clock: Clock,
        tree: Tree,
        pool: BufferPool,
        wal: Wal,
        marks: Marks,
        results: ResultTable,
        applying: AbstractContextManager[object],
        last: CheckpointState | None,
    ) -> None:
        self.last = last
        self.history_start_seq = 0 if last is None else last.history_start_seq
        """Versions that were replaced at or before this seq may be gone: states before it are not to be read."""
        self.count = 0
        self.seconds = 0.0
        self._directory = directory
        self._files = files
        self._clock = clock
        self._tree = tree
        self._pool = pool
        self._wal = wal
        self._marks = marks
        self._results = results
        self._applying = applying
        self.one_at_a_time = Lock()
        """Held while a checkpoint is made. Before the engine's own lock, where both are wanted."""
        self._is_stopped = False
        self._ended_lsn = self.redo_lsn

    def stop(self) -> None:
        """The engine has failed: the checkpoint that was made last stays the last."""
        self._is_stopped = True

    @property
    def redo_lsn(self) -> int:
        """Where opening would begin: nothing of the log from here on may leave the disk."""
        return 1 if self.last is None else self.last.begin_lsn

    @property
    def is_current(self) -> bool:
        """Whether nothing has happened since the last one: another would say the same."""
        last, marks = self.last, self._marks
        if last is None or self._wal.next_lsn != self._ended_lsn or self._pool.dirty_pages():
            return False
        now = (marks.accepted_seq, marks.low_water_mark, marks.high_water_mark, self.history_start_seq)
        return now == (last.applied_seq, last.low_water_mark, last.high_water_mark, last.history_start_seq)

    def checkpoint(self) -> CheckpointState:
        """Takes a checkpoint; it is complete when this returns."""
        with self.one_at_a_time:
            begin = self._clock.monotonic()
            with self._applying:
                self._check_not_stopped()
                state = self._begin()
            self._pool.flush(list(state.dirty_pages))
            with self._applying:
                self._check_not_stopped()
                self._wal.add(encode_checkpoint_end(state))
                self._wal.commit()
                ended_lsn = self._wal.next_lsn
            write_master(self._files, self._directory, state)
            self.last, self._ended_lsn = state, ended_lsn
            self.count += 1
            self.seconds = self._clock.monotonic() - begin
            tell(
                _logger,
                "checkpoint",
                engine=self._directory,
                seq=state.applied_seq,
                lsn=state.begin_lsn,
                pages=len(state.dirty_pages),
                seconds=self.seconds,
            )
            return state

    def _check_not_stopped(self) -> None:
        if self._is_stopped:
            raise LogFailedError(
                "the engine failed", operation="checkpoint", path=self._directory, hint="Open it again"
            )

    def _begin(self) -> CheckpointState:
        """Everything that is in memory at this moment, and from here on images come first."""
        position, time_us = self._wal.next_position, self._clock.now_us()
        lsn = self._wal.add(encode_checkpoint_begin(position, time_us))
        self._wal.commit()
        self._tree.image_floor = lsn
        return CheckpointState(
            begin_lsn=lsn,
            begin_position=position,
            time_us=time_us,
            applied_seq=self._marks.accepted_seq,  # all of it is on the disk by now, visible or not
            low_water_mark=self._marks.low_water_mark,
            high_water_mark=self._marks.high_water_mark,
            history_start_seq=self.history_start_seq,
            next_page=self._tree.next_page,
            dirty_pages=self._pool.dirty_pages(),
            transactions={},
            results=self._results.known_up_to(self._marks.accepted_seq),
        )


# `engine.ckpt`, the master record: the location of the last complete checkpoint in the WAL, and the state when it
# began; and `restore.json`, the marker of a restore in progress.
#
# Invariants
# - It is replaced only after the pages that were dirty when the checkpoint began are synced and the end record is
#   synced: redo may start at `begin_lsn` as soon as the file exists.
# - It is a copy of that record. Without it the record is searched for in the WAL, and the same state is found.


MASTER = "engine.ckpt"
_KIND = "engine-checkpoint"
_VERSION = 1


def write_master(files: Files, directory: Path, state: CheckpointState) -> None:
    """Replaces it, durably."""
    with explained("checkpoint", directory / MASTER):
        files.write_atomically(directory / MASTER, encode_document(_KIND, _VERSION, state))


def read_master(files: Files, directory: Path) -> tuple[CheckpointState | None, str | None]:
    """The checkpoint, or None and why it cannot be used."""
    try:
        data = files.read(directory / MASTER)
    except FileNotFoundError:
        return None, None
    try:
        return decode_document(_KIND, _VERSION, data, CheckpointState), None
    except DataError as error:
        return None, str(error)


# `restore.json`: a restore into this directory has begun. While it is there, the directory is no engine.


MARKER = "restore.json"
_MARKER_KIND = "engine-restore"


class RestoreMarker(msgspec.Struct, frozen=True):
    """From which store, since when, and as which node; of a lazy one also what is read there meanwhile."""

    store: str
    begun_us: int
    node: str = ""
    is_lazy: bool = False
    name: str | None = None
    metadata: str | None = None
    metadata_root: str | None = None


def write_marker(files: Files, directory: Path, marker: RestoreMarker) -> None:
    """Durable when it returns."""
    files.write_atomically(directory / MARKER, encode_document(_MARKER_KIND, _VERSION, marker))


def read_marker(files: Files, directory: Path) -> RestoreMarker:
    """What is in it; DataError when it is not ours."""
    return decode_document(_MARKER_KIND, _VERSION, files.read(directory / MARKER), RestoreMarker)


def refuse_half_restored(files: Files, directory: Path) -> None:
    """InputError for a directory into which a restore was cut off."""
    if files.exists(directory / MARKER):
        raise InputError(
            "a restore into this directory was cut off",
            operation="open engine",
            path=directory,
            hint="Run the restore again: it starts over in the same directory",
        )
