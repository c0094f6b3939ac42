"""Taking a log's directory: one process owns it at a time.

A topic's directory is covered by the lock of the log directory that it is in: whoever has opened that has all topics,
with one descriptor for all of them. Whoever takes a topic's directory by itself, as a repair does, takes both.
"""

from __future__ import annotations

from pathlib import Path

from tidelog.files import Files, Lock
from tidelog.log.names import LOCK, ROOT_LOCK, TOPIC


class _Locks:
    """Several, taken in this order."""

    def __init__(self, *locks: Lock) -> None:
        self._locks = locks

    def release(self) -> None:
        for lock in reversed(self._locks):
            lock.release()

    def abandon(self) -> None:
        for lock in self._locks:
            lock.abandon()


def take_directory(files: Files, directory: Path) -> Lock:
    """Takes it at once, or raises LockedError."""
    above = directory.parent.parent / ROOT_LOCK
    if not files.exists(directory / TOPIC) or not files.exists(above):
        return files.lock(directory / LOCK)
    first = files.lock(above)
    try:
        return _Locks(first, files.lock(directory / LOCK))
    except BaseException:
        first.release()
        raise
