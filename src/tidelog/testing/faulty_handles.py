"""Open files and held locks of a faulty disk."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tidelog.errors import LockedError
from tidelog.testing.faults import DiskFailure, Faults
from tidelog.testing.nodes import ContentChange, DirectoryNode, FileNode, os_error

_UNLIMITED_FREE_BYTES = 1 << 50


class InterruptedWrite(NamedTuple):
    """The write that the crash cut short."""

    node: FileNode
    position: int
    data: bytes


class Device:
    """What all handles of one disk share: its faults, its room and the lock under which it changes."""

    def __init__(self, faults: Faults, root: DirectoryNode, capacity_bytes: int | None) -> None:
        self.faults = faults
        self.root = root
        self.capacity_bytes = capacity_bytes
        self.interrupted_write: InterruptedWrite | None = None
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def changing(self, operation: str, path: str) -> Iterator[None]:
        """Around the effect of a call that either happens or does not."""
        with self.changing_or_failing(operation, path) as failure:
            if failure is not None:
                raise failure.as_error(path)
            yield

    @contextlib.contextmanager
    def changing_or_failing(
        self, operation: str, path: str, write: InterruptedWrite | None = None
    ) -> Iterator[DiskFailure | None]:
        """Around the effect of a call whose failure has an effect of its own, which the block acts out."""

        def interrupt() -> None:
            self.interrupted_write = write

        failure = self.faults.enter(operation, path, interrupt)
        assert failure is None or isinstance(failure, DiskFailure)
        with self.lock:
            # Another thread may have met the crash in the meantime, and a dead disk does not change.
            self.faults.check_alive()
            yield failure

    def free_bytes(self) -> int:
        """Room left for contents."""
        if self.capacity_bytes is None:
            return _UNLIMITED_FREE_BYTES
        files = {node for _, node in self.root.walk() if isinstance(node, FileNode)}
        return max(0, self.capacity_bytes - sum(len(node.content) for node in files))


class FaultyFile:
    """An open file."""

    def __init__(self, device: Device, path: Path, node: FileNode, *, write: bool) -> None:
        self._device = device
        self._path = str(path)
        self._node = node
        self._writable = write
        self._open = True

    def write_at(self, position: int, data: bytes | memoryview) -> None:
        self._check_open(write=True)
        whole = bytes(data)
        interrupted = InterruptedWrite(self._node, position, whole)
        with self._device.changing_or_failing("write_at", self._path, interrupted) as failure:
            fitting_bytes = max(0, len(self._node.content) - position) + self._device.free_bytes()
            written = whole[: fitting_bytes if failure is None else min(fitting_bytes, failure.partial_bytes)]
            self._node.change(ContentChange(position, written))
        if failure is not None:
            raise failure.as_error(self._path)
        if len(written) < len(whole):
            raise os_error(errno.ENOSPC, self._path)

    def read_at(self, position: int, size: int) -> bytes:
        self._device.faults.look("read_at", self._path)
        self._check_open()
        with self._device.lock:
            return bytes(self._node.content[position : position + size])

    def sync(self) -> None:
        self._check_open()
        with self._device.changing_or_failing("sync", self._path) as failure:
            if failure is not None:
                self._node.forget_unsynced()
                raise failure.as_error(self._path)
            self._node.sync()

    def truncate(self, size: int) -> None:
        self._check_open(write=True)
        with self._device.changing("truncate", self._path):
            self._node.change(ContentChange(size, None))

    def size(self) -> int:
        self._device.faults.look("size", self._path)
        self._check_open()
        return len(self._node.content)

    def close(self) -> None:
        self._open = False

    def _check_open(self, *, write: bool = False) -> None:
        if not self._open or (write and not self._writable):
            raise os_error(errno.EBADF, self._path)


class FaultyLock:
    """A held lock. It belongs to the file, not to its name, as with flock."""

    def __init__(self, path: Path, node: FileNode) -> None:
        if node.locked:
            raise LockedError(
                f"{path.parent} is already open in process {node.content.decode('ascii', 'replace')}",
                path=path,
                hint="Close it there, or open this directory with read_only=True",
            )
        node.locked = True
        node.change(ContentChange(0, None))
        node.change(ContentChange(0, str(os.getpid()).encode("ascii")))
        self._node: FileNode | None = node

    def release(self) -> None:
        node, self._node = self._node, None
        if node is not None:
            node.locked = False

    def abandon(self) -> None:
        self._node = None
