"""`engine.ckpt`: where the last complete checkpoint is in the log, and what was known when it began.

Invariants
- It is replaced only after the pages that were dirty when the checkpoint began are on the disk and the record of its
  end is synced: redo may begin at `begin_lsn` from the moment that the file is there.
- It is a copy of that record. Without it the record is looked for in the log, and the same state is found.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.engine.known_results import KnownResults
from tidelog.errors import DataError
from tidelog.files import Files, explained

MASTER = "engine.ckpt"
_KIND = "engine-checkpoint"
_VERSION = 1


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint says. Tables and marks are those of the moment at which it began."""

    begin_lsn: int
    begin_position: int
    time_us: int
    applied_seq: int
    low_water_mark: int
    high_water_mark: int
    history_start_seq: int
    next_page: int
    dirty_pages: dict[int, int]
    transactions: dict[int, int]
    results: KnownResults | None = None
    """What became of the last entries; None where that is not known."""


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
