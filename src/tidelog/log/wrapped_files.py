"""Files over other files: everything is passed on, and a subclass changes what it is for."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from tidelog.files import File, Files, Lock


class WrappedFiles(Files):
    """The same files as those below."""

    def __init__(self, files: Files) -> None:
        self.below = files

    def create(self, path: Path) -> File:
        return self.below.create(path)

    def open(self, path: Path, *, write: bool = False) -> File:
        return self.below.open(path, write=write)

    def list(self, directory: Path) -> list[str]:
        return self.below.list(directory)

    def exists(self, path: Path) -> bool:
        return self.below.exists(path)

    def is_directory(self, path: Path) -> bool:
        return self.below.is_directory(path)

    def is_link(self, path: Path) -> bool:
        return self.below.is_link(path)

    def make_directory(self, path: Path) -> None:
        self.below.make_directory(path)

    def remove(self, path: Path) -> None:
        self.below.remove(path)

    def remove_directory(self, path: Path) -> None:
        self.below.remove_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self.below.rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self.below.sync_directory(path)

    def lock(self, path: Path) -> Lock:
        return self.below.lock(path)

    def free_bytes(self, path: Path) -> int:
        return self.below.free_bytes(path)

    def device(self, path: Path) -> Hashable:
        return self.below.device(path)
