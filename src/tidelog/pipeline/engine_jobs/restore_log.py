"""What a worker does for the rows of a restored engine: pieces of the shipped log, and of a state, become runs.

Invariants
- A piece of the log ends where it ends, in the middle of an entry too. An entry belongs to the piece in which its first
  record is: that one reads on until the entry is complete, and the next one leaves the rest of it alone.
- Which records count is decided by `restore_replay`, as in a restore by one process.
- Blocks of a state are compared with their checksum before they are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from tidelog.engine.cell_blocks import decode_block
from tidelog.engine.manifest import Manifest
from tidelog.engine.record_header import LAST, OPERATION
from tidelog.engine.restore_replay import Replay
from tidelog.engine.restore_runs import Changes
from tidelog.engine.row_file import BlockPlace
from tidelog.errors import CorruptionError, DataError
from tidelog.files import LocalFiles
from tidelog.pipeline.engine_jobs.restore_files import Run, Values, Workshop, write_run
from tidelog.pipeline.engines.store_place import EnginePlace
from tidelog.tier.descriptor import Descriptor

_CHANGES_BYTES = 64 << 20
_RUNS_A_PIECE = 1 << 16


class LogPiece(msgspec.Struct, frozen=True, kw_only=True):
    """Records of the log from an LSN up to another (exclusive). `manifest` says which of them count."""

    place: EnginePlace
    workshop: Workshop
    number: int
    first_lsn: int
    stop_lsn: int
    manifest: Manifest


class LogRuns(msgspec.Struct, frozen=True, kw_only=True):
    """What the entries that begin in a piece have changed, oldest run first."""

    number: int
    entries: int
    history_start_seq: int
    runs: tuple[Run, ...]


class StatePiece(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that follow each other in one object of a state."""

    place: EnginePlace
    workshop: Workshop
    number: int
    key: str
    values: Values
    blocks: tuple[BlockPlace, ...]


class RunWriter:
    """Takes what `Changes` has gathered, as runs of a piece."""

    def __init__(self, workshop: Workshop, number: int) -> None:
        self.runs: list[Run] = []
        self._workshop = workshop
        self._number = number

    def add(self, rows: list[tuple[bytes, bytes]]) -> int:
        """Another run, newer than those before."""
        rank = 1 + self._number * _RUNS_A_PIECE + len(self.runs)
        run = write_run(self._workshop.path("log", self._number), rank, rows)
        self.runs.append(run)
        return sum(block.rows for block in run.blocks)


def read_log(piece: LogPiece) -> LogRuns:
    """The changes of one piece of the log."""
    opened = piece.place.opened()
    writer = RunWriter(piece.workshop, piece.number)
    changes = Changes(writer, _CHANGES_BYTES)
    replay = PieceReplay(piece.place.catalog(), opened.objects, opened.fetchers, changes, piece.first_lsn)
    replay.run_piece(piece.manifest, piece.stop_lsn)
    changes.flush()
    return LogRuns(
        number=piece.number,
        entries=replay.entries,
        history_start_seq=replay.history_start_seq,
        runs=tuple(writer.runs),
    )


class PieceReplay(Replay):
    """A replay of one piece of the log."""

    def run_piece(self, manifest: Manifest, stop_lsn: int) -> None:
        """Up to an LSN, and then to the end of the entry that is open there."""
        end_lsn = manifest.high_water_lsn + 1
        self.run(msgspec.structs.replace(manifest, high_water_lsn=stop_lsn - 1), lambda size: None)
        if self._is_open and stop_lsn < end_lsn:
            self._finish_open(end_lsn)

    _is_open = False
    _is_finishing = False

    def _finish_open(self, end_lsn: int) -> None:
        reader = self._history.read(self.lsn, end_lsn)
        self._is_finishing = True
        try:
            while self._is_open and (batch := reader.next_batch()) is not None:
                self._look_at(batch)
        finally:
            reader.close()

    def _look_at_record(self, record: memoryview, lsn: int) -> None:
        if self._is_finishing and (not self._is_open or record[0] != OPERATION):
            return
        super()._look_at_record(record, lsn)

    def _look_at_operation(self, flags: int, seq: int, previous_lsn: int, updates: bytes, lsn: int) -> None:
        is_continued = bool(previous_lsn) and self._is_open and seq == self._open_seq
        if (previous_lsn and not is_continued) or (self._is_finishing and not is_continued):
            self._is_open = (
                False  # the beginning is in the piece before; or another entry begins, and this one never ended
            )
            return
        super()._look_at_operation(flags, seq, previous_lsn, updates, lsn)
        self._is_open = not flags & LAST


def keep_state(piece: StatePiece) -> Run:
    """Brings blocks of a state to the new directory, each of them checked."""
    path = piece.workshop.path("state", piece.number)
    first, last = piece.blocks[0], piece.blocks[-1]
    objects = piece.place.opened().objects
    data = objects.read_range(piece.key, first.byte, last.byte + last.size - first.byte)
    blocks = tuple(
        BlockPlace(one.byte - first.byte, one.size, one.rows, one.first_key, one.last_key) for one in piece.blocks
    )
    for at in blocks:
        try:
            decode_block(data[at.byte : at.byte + at.size])
        except DataError as error:
            byte = first.byte + at.byte
            raise CorruptionError(error.message, path=piece.key, byte=byte, operation="restore") from error
    file = LocalFiles().create(path)
    try:
        file.write_at(0, data)
    finally:
        file.close()
    return Run(path=str(path), rank=0, values=piece.values, blocks=blocks)


def cut_log(objects: Iterable[Descriptor], first_lsn: int, stop_lsn: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of LSNs of about the same size: small objects together, large ones in parts."""
    begin, gathered = first_lsn, 0
    for one in objects:
        start, stop = max(one.start_offset, first_lsn), min(one.next_offset, stop_lsn)
        parts = max(1, one.raw_size // part_bytes)
        for cut in (start + (stop - start) * part // parts for part in range(1, parts + 1)):
            gathered += one.raw_size // parts
            if gathered >= part_bytes and cut > begin:
                yield begin, cut
                begin, gathered = cut, 0
    if begin < stop_lsn:
        yield begin, stop_lsn
