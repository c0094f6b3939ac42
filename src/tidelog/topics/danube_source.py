"""Where Danube keeps its topics, and the frames in there, in bounded memory.

    <wal_root>/<namespace>/<topic>/wal.log               the first file of a topic
    <wal_root>/<namespace>/<topic>/wal.<seq>.log         those behind it
    storage/topics/<namespace>/<topic>/segments/data-<start>-<unix seconds>.dnb1      an object, below the store's URL

Invariants
- Nothing of Danube's is ever changed.
- Names only say in which order files are read. Which offsets are inside, the frames say: Danube records a wrong start
  for some files, and uploads some of them again and again.
- A directory or a store that cannot be read is an error, never an empty topic.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tidelog.errors import InputError, NotFoundError
from tidelog.files import File, Files, LocalFiles
from tidelog.tier.object_store import ObjectInfo, ObjectStore
from tidelog.topics.danube_frames import Event, ReadAt, read_frames

_FIRST_WAL_FILE = "wal.log"
_WAL_FILE = re.compile(r"wal\.([0-9]{1,19})\.log", re.ASCII)
_OBJECT = re.compile(r"storage/topics/([^/]+)/([^/]+)/segments/data-([0-9]{1,20})-([0-9]{1,20})\.dnb1", re.ASCII)
_OBJECTS_PREFIX = "storage/topics/"
_TIDELOG_FILE = "topic.json"


class DanubeFile(NamedTuple):
    """A file or an object: `order` is its place among those of its topic."""

    name: str
    size: int
    order: tuple[int, int]
    opened: Callable[[], AbstractContextManager[ReadAt]]


class DanubeTopic(NamedTuple):
    """A topic in one place: `namespace/topic`, and its files in the order in which they are read."""

    name: str
    files: tuple[DanubeFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def frames(self, max_payload_bytes: int) -> Iterator[Event]:
        """Everything in the files, from the beginning."""
        for file in self.files:
            with file.opened() as read_at:
                yield from read_frames(file.name, file.size, read_at, max_payload_bytes)


# WAL files


def find_wal_topics(directory: Path, files: Files | None = None) -> list[DanubeTopic]:
    """The topic whose WAL directory this is, or all topics below a WAL root."""
    files = files or LocalFiles()
    if not files.is_directory(directory):
        raise NotFoundError(f"there is no directory {directory}", hint="--wal names Danube's WAL directory")
    topic = _wal_topic(files, directory)
    found = [topic] if topic is not None else [*_topics_below(files, directory)]
    if not found:
        raise NotFoundError(
            f"there is no WAL of Danube in {directory}",
            hint="--wal names the directory of a topic, with wal.log in it, or the root with <namespace>/<topic> below",
        )
    return found


def _topics_below(files: Files, root: Path) -> Iterator[DanubeTopic]:
    for namespace in _directories(files, root):
        for directory in _directories(files, namespace):
            if (topic := _wal_topic(files, directory)) is not None:
                yield topic


def _directories(files: Files, parent: Path) -> list[Path]:
    return [parent / name for name in files.list(parent) if files.is_directory(parent / name)]


def _wal_topic(files: Files, directory: Path) -> DanubeTopic | None:
    names = files.list(directory)
    numbered = sorted((seq, name) for name in names if (seq := _wal_seq(name)) is not None)
    if not numbered:
        return None
    if _TIDELOG_FILE in names:
        raise InputError(f"{directory} is a topic of tidelog, not of Danube", hint="Read it with `tidelog consume`")
    for (seq, name), (other_seq, other) in pairwise(numbered):
        if seq == other_seq:
            raise InputError(f"{name} and {other} in {directory} are both file {seq}", hint="Move one of them away")
    whole = directory.absolute()
    found = (_wal_file(files, directory / name, seq) for seq, name in numbered)
    return DanubeTopic(f"{whole.parent.name}/{whole.name}", tuple(found))


def _wal_seq(name: str) -> int | None:
    if name == _FIRST_WAL_FILE:
        return 0
    match = _WAL_FILE.fullmatch(name)
    return None if match is None else int(match[1])


def _wal_file(files: Files, path: Path, seq: int) -> DanubeFile:
    file = files.open(path)
    try:
        return DanubeFile(str(path), file.size(), (seq, 0), partial(_opened, files, path))
    finally:
        file.close()


@contextmanager
def _opened(files: Files, path: Path) -> Iterator[ReadAt]:
    file: File = files.open(path)
    try:
        yield file.read_at
    finally:
        file.close()


# Objects


def find_object_topics(store: ObjectStore, name: str | None = None, *, by_time: bool = False) -> list[DanubeTopic]:
    """The topics that have objects in a store, or the one of this name.

    Objects are read in the order of their offsets; `by_time` in the order in which they were uploaded, which tells the
    lives of a topic apart that used their offsets twice.
    """
    prefix = _OBJECTS_PREFIX if name is None else f"{_OBJECTS_PREFIX}{name}/segments/"
    topics: dict[str, list[DanubeFile]] = {}
    for info in store.list(prefix):
        match = _OBJECT.fullmatch(info.key)
        if match is not None:
            start, seconds = int(match[3]), int(match[4])
            order = (seconds, start) if by_time else (start, seconds)
            topics.setdefault(f"{match[1]}/{match[2]}", []).append(_object(store, info, order))
    if not topics:
        raise NotFoundError(
            f"there are no objects of Danube in {store.url}/{prefix}",
            hint="The URL leads to what is above storage/topics/, the prefix that Danube was given included",
        )
    return [DanubeTopic(topic, _ordered(topics[topic])) for topic in sorted(topics)]


def _ordered(files: Iterable[DanubeFile]) -> tuple[DanubeFile, ...]:
    return tuple(sorted(files, key=lambda file: (file.order, file.name)))


def _object(store: ObjectStore, info: ObjectInfo, order: tuple[int, int]) -> DanubeFile:
    return DanubeFile(info.key, info.size, order, partial(_ranges, store, info.key))


@contextmanager
def _ranges(store: ObjectStore, key: str) -> Iterator[ReadAt]:
    yield lambda position, size: bytes(store.read_range(key, position, size))
