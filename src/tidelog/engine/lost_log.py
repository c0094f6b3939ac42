"""A log that lost its end or all of it, beside pages and marks that speak of it: noticed when an engine is opened.

What must be there is known from three places, none of which costs an entry anything:

    wal/wal.ckpt    the files, and how much of each was synced when a file was begun, ended or closed
    engine.ckpt     where the last checkpoint began: its record is in the log
    pages.db        a page is never on the disk before the record of its last change

Invariants
- Nothing is changed before files are found to be missing, so that they can be put back.
- With `wal_sync_mode` "none" a power failure may take any end of the log: then only what pages and marks contradict is
  refused.
"""

from __future__ import annotations

from pathlib import Path

from tidelog.engine.master import MASTER, CheckpointState
from tidelog.engine.page_file import PageFile
from tidelog.engine.sync_mode import SyncMode
from tidelog.engine.wal import Wal
from tidelog.errors import DataError
from tidelog.files import Files
from tidelog.log.bound_files import bound
from tidelog.log.checkpoint import Checkpoint, read_checkpoint
from tidelog.log.names import CHECKPOINT, wal_files, wal_name
from tidelog.tier.local_claim import NAME as CLAIM_FILE

_HINT = "Put the files back, or restore the engine from its store into a new directory; its orchestrator has the rest"


def refuse_missing_files(files: Files, wal_directory: Path, state: CheckpointState | None, mode: SyncMode) -> None:
    """DataError when files of the log are gone, or shorter than they were when they were synced."""
    names = files.list(wal_directory) if files.is_directory(wal_directory) else []
    listed = wal_files(names)
    if state is not None and not listed and CLAIM_FILE not in names:  # a restore begins without, and has claimed
        raise DataError(
            f"{MASTER} is there, and no file of the log: the objects were in it", path=wal_directory, hint=_HINT
        )
    known, _ = read_checkpoint(files, wal_directory)
    if known is None or not known.files or mode == "none":
        return
    newest_seq = listed[-1][0] if listed else -1
    if newest_seq < known.file_seq:
        raise DataError(
            f"{wal_name(known.file_seq)} is gone, in which LSN {known.last_offset} was synced",
            path=wal_directory,
            hint=_HINT,
        )
    if newest_seq == known.file_seq:
        _refuse_short_file(files, wal_directory / listed[-1][1], known)


def _refuse_short_file(files: Files, path: Path, known: Checkpoint) -> None:
    synced_bytes = known.files[-1].size
    file = bound(files).open(path)
    try:
        size = file.size()
    finally:
        file.close()
    if size < synced_bytes:
        raise DataError(
            f"the file has {size} bytes, {CHECKPOINT} knows of {synced_bytes}, synced up to LSN {known.last_offset}",
            path=path,
            hint=_HINT,
        )


def refuse_lost_end(wal: Wal, state: CheckpointState | None) -> None:
    """DataError when the record of the last checkpoint is not in the log; a restore begins with an empty one."""
    if state is None or state.begin_lsn < wal.next_lsn:
        return
    if wal.first_lsn < wal.next_lsn or state.begin_lsn > wal.next_lsn:
        raise DataError(
            f"the last checkpoint began at LSN {state.begin_lsn}, and the log ends at LSN {wal.next_lsn - 1}",
            path=wal.log.directory,
            hint=_HINT,
        )


def refuse_older_than_pages(page_file: PageFile, wal: Wal) -> None:
    """DataError when the page file was made behind the end of the log."""
    if page_file.made_lsn >= wal.next_lsn:
        raise DataError(
            f"{page_file.path.name} was made at LSN {page_file.made_lsn}, and the log ends at {wal.next_lsn - 1}",
            path=page_file.path,
            hint=_HINT,
        )
