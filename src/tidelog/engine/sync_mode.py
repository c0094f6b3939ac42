"""What "synced" means for the engine's log, by `wal_sync_mode`.

    fdatasync   contents and size of a file: what every other log here does
    fsync       its times too
    none        nothing; what was written is the system's business

Names of files are synced in every mode: they are few, and a file without a name is lost to everybody.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Literal

from tidelog.files import File, Files, LocalFiles, Lock

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


class UnsyncedFiles(Files):
    """Files whose contents are never synced."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def create(self, path: Path) -> File:
        return _UnsyncedFile(self._files.create(path))

    def open(self, path: Path, *, write: bool = False) -> File:
        return _UnsyncedFile(self._files.open(path, write=write))

    def list(self, directory: Path) -> list[str]:
        return self._files.list(directory)

    def exists(self, path: Path) -> bool:
        return self._files.exists(path)

    def is_directory(self, path: Path) -> bool:
        return self._files.is_directory(path)

    def is_link(self, path: Path) -> bool:
        return self._files.is_link(path)

    def make_directory(self, path: Path) -> None:
        self._files.make_directory(path)

    def remove(self, path: Path) -> None:
        self._files.remove(path)

    def remove_directory(self, path: Path) -> None:
        self._files.remove_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self._files.rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._files.sync_directory(path)

    def lock(self, path: Path) -> Lock:
        return self._files.lock(path)

    def free_bytes(self, path: Path) -> int:
        return self._files.free_bytes(path)

    def device(self, path: Path) -> Hashable:
        return self._files.device(path)


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
