"""What "synced" means for the engine's log, by `wal_sync_mode`.

    fdatasync   contents and size of a file: what every other log here does
    fsync       its times too
    none        nothing; what was written is the system's business

Names of files are synced in every mode: they are few, and a file without a name is lost to everybody.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tidelog.files import File, Files, LocalFiles
from tidelog.log.wrapped_files import WrappedFiles

SyncMode = Literal["fsync", "fdatasync", "none"]


def files_in_mode(files: Files, mode: SyncMode) -> Files:
    """The same files, synced as the mode says. A disk that is played by a test knows one kind of sync."""
    if mode == "none":
        return UnsyncedFiles(files)
    if mode == "fsync" and type(files) is LocalFiles:
        return _FullySyncedFiles()
    return files


class _FullySyncedFiles(LocalFiles):
    _syncs_times = True


class UnsyncedFiles(WrappedFiles):
    """Files whose contents are never synced."""

    def create(self, path: Path) -> File:
        return _UnsyncedFile(self.below.create(path))

    def open(self, path: Path, *, write: bool = False) -> File:
        return _UnsyncedFile(self.below.open(path, write=write))


class _UnsyncedFile:
    def __init__(self, file: File) -> None:
        self._file = file
        self.write_at = file.write_at
        self.read_at = file.read_at
        self.truncate = file.truncate
        self.size = file.size
        self.close = file.close

    def sync(self) -> None:
        """The system has it, and that is enough."""
