"""Trees with a log in memory, and a kernel and its twin side by side."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.oracles import page_images, pages, tree
from tests.oracles import updates as updates_oracle
from tests.twins import outcome

from tidelog import _native
from tidelog.engine.btree import page
from tidelog.engine.btree import page as updates
from tidelog.engine.btree.buffer_pool import BufferPool
from tidelog.engine.btree.page_file import PageFile
from tidelog.engine.btree.tree import Tree
from tidelog.files import Files
from tidelog.log.frame import Frames, encode_many
from tidelog.testing import FaultyFiles

PATH = Path("/engine/pages.db")
STRUCTURE_HEADER = bytes([2, 0, 0, 0]) + (32).to_bytes(4, "little") + bytes(24)

_ORACLES: tuple[Any, ...] = (pages, page_images, tree, updates_oracle)


def kernel_and_twin(name: str) -> tuple[Any, Any]:
    """A function of the kernel that is in use, and its twin."""
    for twin in _ORACLES:
        function = getattr(twin, name, None)
        if function is not None and function.__module__ == twin.__name__:
            return getattr(_native, name), function
    raise AssertionError(f"no function {name}")


def both(name: str, *arguments: Any) -> tuple[Any, ...]:
    """The outcome of a call, the same by kernel and twin, which leave the same bytes behind; the kernel's are kept."""
    others = copy.deepcopy(arguments)
    kernel, twin = kernel_and_twin(name)
    native = outcome(kernel, *arguments)
    assert native == outcome(twin, *others)
    assert arguments == others
    return native


class RecordedTree:
    """A tree whose records are kept in a list: the LSN of a record is its place, from 1 on."""

    def __init__(self, files: Files | None = None, size_bytes: int = 1 << 24) -> None:
        self.files = files or new_files()
        self.records: list[bytes] = []
        self.pool = BufferPool(PageFile.create(self.files, PATH), size_bytes, is_durable=self._is_recorded)
        self.tree = Tree(self.pool, self.log)
        self.tree.create()
        self.tree.settle()

    def _is_recorded(self, lsn: int) -> bool:
        return lsn <= len(self.records)

    def log(self, page_updates: bytes) -> int:
        """Adds a record."""
        self.records.append(STRUCTURE_HEADER + page_updates)
        return len(self.records)

    def insert(self, key: bytes, value: bytes) -> None:
        """Prepares, logs, inserts."""
        self._change(updates.Update(0, updates.INSERT, key, value))

    def replace(self, key: bytes, value: bytes) -> None:
        """Prepares, logs, replaces."""
        self._change(updates.Update(0, updates.REPLACE, key, value, self.tree.get(key) or b""))

    def remove(self, key: bytes) -> None:
        """Prepares, logs, removes."""
        self._change(updates.Update(0, updates.REMOVE, key, b"", self.tree.get(key) or b""))

    def _change(self, update: updates.Update) -> None:
        room = 0 if update.what == updates.REMOVE else page.CELL_HEADER_BYTES + len(update.key) + len(update.value)
        update = update._replace(page=self.tree.prepare(update.key, room))
        self.tree.apply(update, self.log(updates.encode(update)))

    def frames(self, count: int | None = None) -> Frames:
        """The records as frames of a log."""
        return encode_many(1, self.records[:count])


@contextlib.contextmanager
def meanwhile(*works: Callable[[], object]) -> Iterator[None]:
    """Each piece of work is done over and over in a thread of its own until the block ends; failures come out there."""
    stop, failures = threading.Event(), list[BaseException]()

    def repeat(work: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the test
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    for failure in failures:
        raise failure


def new_files() -> FaultyFiles:
    """A file system in memory with a place for the page file."""
    files = FaultyFiles()
    files.make_directories(PATH.parent)
    return files


def empty_tree(size_bytes: int = 1 << 24) -> Tree:
    """A tree without pages, as recovery or a restore finds it; it must not log."""
    return Tree(BufferPool(PageFile.create(new_files(), PATH), size_bytes), _must_not_log)


def _must_not_log(_updates: bytes) -> int:
    raise AssertionError("nothing is logged here")
