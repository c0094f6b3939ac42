"""An in-memory file system that crashes, fills up and fails where a test says so.

Invariants
- It keeps the contract of `tidelog.files.Files` (one suite runs over this and the real one); paths are resolved from
  one root that always exists.
- A crash preserves what was synced, and beyond that what the policy of `after_crash` grants (see `survival`).
- A dead file system never changes again, so `after_crash` may be called any number of times.
- Closing files and releasing locks works in a dead process too: the operating system does that for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from tidelog.errors import LockedError
from tidelog.files import File, Files, Lock, ReadsRanges
from tidelog.testing import survival
from tidelog.testing.faults import Call, Crashing, DiskFailure, Faults
from tidelog.testing.survival import (
    ContentChange,
    DirectoryNode,
    FileNode,
    Node,
    Policy,
    directory_at,
    find,
    next_change_number,
    node_at,
    os_error,
    parent_of,
)

# Open files and held locks of a faulty disk.


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


class FaultyFile(ReadsRanges):
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
            fitting_bytes = max(
                0, len(self._node.content) - position + self._device.free_bytes()
            )  # a gap takes room, too
            written = whole[: fitting_bytes if failure is None else min(fitting_bytes, failure.partial_bytes)]
            if written or not whole:
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
                hint="Close it there, open this directory with read_only=True, or tidelog.connect() to its server",
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


ChangingOperation = Literal[
    "create",
    "write_at",
    "sync",
    "truncate",
    "rename",
    "remove",
    "make_directory",
    "remove_directory",
    "sync_directory",
]
LookingOperation = Literal["open", "read_at", "size", "list", "exists", "is_directory", "lock", "free_bytes"]
Operation = ChangingOperation | LookingOperation
OPERATIONS: frozenset[str] = frozenset(get_args(ChangingOperation) + get_args(LookingOperation))


class FaultyFiles(Crashing, Files):
    """A disk in memory. Give it to the product in place of `LocalFiles`.

    crash_at        the changing call with this number (from 1) raises Crash instead of taking effect
    torn_bytes      if that call is a write, this many of its bytes take effect
    capacity_bytes  room for the contents of files; a write beyond it is cut there and raises ENOSPC
    on_call         called with every changing call before it takes effect, on the calling thread
    faults          in place of `crash_at` and `on_call`: a plan of what goes wrong that is shared with another store
    """

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        torn_bytes: int = 0,
        capacity_bytes: int | None = None,
        on_call: Callable[[Call], None] | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.faults = faults or Faults(crash_at=crash_at, on_call=on_call)
        self._torn_bytes = torn_bytes
        self._device = Device(self.faults, DirectoryNode(), capacity_bytes)

    @property
    def capacity_bytes(self) -> int | None:
        """Room for contents; None: unlimited. May be set at any time."""
        return self._device.capacity_bytes

    @capacity_bytes.setter
    def capacity_bytes(self, capacity_bytes: int | None) -> None:
        self._device.capacity_bytes = capacity_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Size of the write that the crash interrupted; 0 when it was no write."""
        write = self._device.interrupted_write
        return 0 if write is None else len(write.data)

    def fail(
        self,
        operation: Operation,
        *,
        nth: int = 1,
        times: int | None = 1,
        error: int = errno.EIO,
        partial_bytes: int = 0,
        matching: str = "*",
    ) -> None:
        """The `nth` call of `operation` from now on, and the `times - 1` after it, raise OSError (None: until `heal`).

        `matching` narrows it to file names (as in a shell). A failing write takes effect for its first `partial_bytes`;
        a failing sync loses unsynced data for good.
        """
        if operation not in OPERATIONS:
            raise ValueError(f"no operation {operation!r}, only {', '.join(sorted(OPERATIONS))}")
        self.faults.fail(operation, nth=nth, times=times, error=error, partial_bytes=partial_bytes, matching=matching)

    def heal(self) -> None:
        """Ends all failures; there is room again. What was lost stays lost."""
        self.faults.heal()
        self.capacity_bytes = None

    def after_crash(
        self,
        policy: Policy = "lose",
        *,
        seed: int = 0,
        torn_bytes: int | None = None,
        crash_at: int | None = None,
        faults: Faults | None = None,
    ) -> FaultyFiles:
        """The file system after a restart; this one stays unchanged. Locks are released.

        `torn_bytes` (by default those this one was made with) of the interrupted write count as written. `crash_at`
        cuts the next life short; `faults` in its place is what it shares with others.
        """
        fresh = FaultyFiles(crash_at=crash_at, capacity_bytes=self.capacity_bytes, faults=faults)
        with self._device.lock:
            root = self._copy_with_torn_write(self._torn_bytes if torn_bytes is None else torn_bytes)
        fresh._device.root = survival.after_crash(root, policy, seed)
        return fresh

    def tree(self) -> dict[str, bytes | None]:
        """Every path with its content as the process sees it; None for directories."""
        with self._device.lock:
            return self._device.root.contents()

    def image(self) -> object:
        """Equal for two file systems that show the same and would keep the same."""
        return self.tree(), self.after_crash("lose").tree()

    def create(self, path: Path) -> File:
        with self._device.changing("create", str(path)):
            directory = parent_of(self._device.root, path)
            if path.name in directory.entries:
                raise os_error(errno.EEXIST, path)
            node = FileNode()
            directory.change(next_change_number(), {path.name: node})
        return FaultyFile(self._device, path, node, write=True)

    def open(self, path: Path, *, write: bool = False) -> File:
        self.faults.look("open", str(path))
        with self._device.lock:
            node = node_at(self._device.root, path)
        if isinstance(node, DirectoryNode):
            raise os_error(errno.EISDIR, path)
        return FaultyFile(self._device, path, node, write=write)

    def list(self, directory: Path) -> list[str]:
        self.faults.look("list", str(directory))
        with self._device.lock:
            return sorted(directory_at(self._device.root, directory).entries)

    def exists(self, path: Path) -> bool:
        self.faults.look("exists", str(path))
        with self._device.lock:
            return find(self._device.root, path) is not None

    def is_directory(self, path: Path) -> bool:
        self.faults.look("is_directory", str(path))
        with self._device.lock:
            return isinstance(find(self._device.root, path), DirectoryNode)

    def make_directory(self, path: Path) -> None:
        with self._device.changing("make_directory", str(path)):
            found = find(self._device.root, path)
            if isinstance(found, FileNode):
                raise os_error(errno.ENOTDIR, path)
            if found is None:
                parent_of(self._device.root, path).change(next_change_number(), {path.name: DirectoryNode()})

    def remove(self, path: Path) -> None:
        with self._device.changing("remove", str(path)):
            if isinstance(node_at(self._device.root, path), DirectoryNode):
                raise os_error(errno.EISDIR, path)
            self._forget_name(path)

    def remove_directory(self, path: Path) -> None:
        with self._device.changing("remove_directory", str(path)):
            if directory_at(self._device.root, path).entries:
                raise os_error(errno.ENOTEMPTY, path)
            self._forget_name(path)

    def rename(self, source: Path, target: Path) -> None:
        with self._device.changing("rename", str(target)):
            root = self._device.root
            node, replaced = node_at(root, source), find(root, target)
            source_parent, target_parent = parent_of(root, source), parent_of(root, target)
            if node is replaced:
                return
            _check_replaceable(node, replaced, target)
            number = next_change_number()
            if source_parent is target_parent:
                target_parent.change(number, {source.name: None, target.name: node})
            else:
                target_parent.change(number, {target.name: node})
                source_parent.change(number, {source.name: None})

    def sync_directory(self, path: Path) -> None:
        with self._device.changing_or_failing("sync_directory", str(path)) as failure:
            directory = directory_at(self._device.root, path)
            if failure is not None:
                directory.forget_unsynced()
                raise failure.as_error(str(path))
            directory.sync()

    def lock(self, path: Path) -> Lock:
        self.faults.look("lock", str(path))
        with self._device.lock:
            node = find(self._device.root, path)
            if node is None:
                node = FileNode()
                parent_of(self._device.root, path).change(next_change_number(), {path.name: node})
            if isinstance(node, DirectoryNode):
                raise os_error(errno.EISDIR, path)
            return FaultyLock(path, node)

    def free_bytes(self, path: Path) -> int:
        self.faults.look("free_bytes", str(path))
        with self._device.lock:
            node_at(self._device.root, path)
            return self._device.free_bytes()

    def _forget_name(self, path: Path) -> None:
        parent_of(self._device.root, path).change(next_change_number(), {path.name: None})

    def _copy_with_torn_write(self, torn_bytes: int) -> DirectoryNode:
        copies: dict[Node, Node] = {}
        root = survival.copy(self._device.root, copies)
        write = self._device.interrupted_write
        # A file that was removed while it was open has no copy, and nothing of it is left to tear.
        node = None if write is None else copies.get(write.node)
        if write is not None and isinstance(node, FileNode):
            node.change(ContentChange(write.position, write.data[:torn_bytes]))
        return root


def _check_replaceable(node: Node, replaced: Node | None, target: Path) -> None:
    if isinstance(replaced, DirectoryNode):
        if isinstance(node, FileNode):
            raise os_error(errno.EISDIR, target)
        if replaced.entries:
            raise os_error(errno.ENOTEMPTY, target)
    elif replaced is not None and isinstance(node, DirectoryNode):
        raise os_error(errno.ENOTDIR, target)
