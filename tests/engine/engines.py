"""Engines for tests: opened over any disk, compared with the model, fed with random entries."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
from tests.engine.model import Model

from tidelog.clock import Clock, ManualClock
from tidelog.engine.core import Core
from tidelog.engine.engine import Engine
from tidelog.engine.entry import (
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
)
from tidelog.engine.reader import EngineReader
from tidelog.engine.settings import EngineSettings
from tidelog.errors import NotFoundError
from tidelog.files import Files, LocalFiles

SMALL = EngineSettings(rotate_max_bytes=16 << 10, buffer_pool_bytes=64 * 8192, checks_invariants=True)
"""Files that end soon and few pages: what is rare with the defaults happens all the time."""
WITH_VALUE_FILES = msgspec.structs.replace(SMALL, large_value_bytes=1024)
"""The same, and what the log has no room for is common."""


def open_local(
    directory: Path, files: Files | None = None, settings: EngineSettings = SMALL, clock: Clock | None = None
) -> Engine:
    """An engine without a store, and with nothing in the background."""
    core = Core.open(directory, settings, files or LocalFiles(), clock or ManualClock())
    return Engine(core, runs_in_background=False)


def copy_alive(source: str | Path, target: str | Path) -> None:
    """What a process leaves on the disk that is killed now. A file that is being replaced is the old or the new one."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.tmp"))


def assert_same(engine: Engine, model: Model, seqs: list[int] | None = None) -> None:
    """The engine has what the model has, at its newest seq and at others."""
    assert engine.applied_seq == model.applied_seq
    for seq in [engine.applied_seq, *(seqs or [])]:
        assert_state(engine, model, seq)
    assert engine.digest() == model.digest()


def assert_state(engine: Engine | EngineReader, model: Model, seq: int) -> None:
    """One state, read in every way."""
    state = model.at(seq)
    assert engine.list_buckets(seq) == sorted(state)
    for name, bucket in state.items():
        listed = [(item.key, item.size, item.seq) for item in engine.list_objects(name, seq=seq)]
        assert listed == [(key, len(one.data), one.seq) for key, one in sorted(bucket.objects.items())]
        scanned = [(one.key, one.data, one.metadata, one.seq) for one in engine.scan(name, with_values=True, seq=seq)]
        assert scanned == [(key, one.data, one.metadata, one.seq) for key, one in sorted(bucket.objects.items())]
        assert [one.key for one in engine.scan(name, reverse=True, seq=seq)] == [key for key, *_ in scanned[::-1]]
        for key, one in bucket.objects.items():
            found = engine.read(name, key, seq)
            assert (found.data, found.metadata, found.seq) == (one.data, one.metadata, one.seq)
        if scanned:
            key, data, metadata, put_seq = scanned[seq % len(scanned)]
            middle = len(data or b"") // 2
            assert engine.read(name, key, seq, offset=middle, length=7).data == (data or b"")[middle:][:7]
            with engine.open_object(name, key, seq) as file:
                assert (file.read(), file.metadata, file.seq) == (data, metadata, put_seq)
    assert engine.digest(seq) == model.digest(seq)


def is_missing(engine: Engine, bucket: str, key: str, seq: int | None = None) -> bool:
    """Whether there is no such object."""
    try:
        engine.read(bucket, key, seq)
    except NotFoundError:
        return True
    return False


class RandomEntries:
    """Entries that meet each other: few names, all kinds, values of all sizes, some that are refused."""

    def __init__(self, seed: object, buckets: int = 3, keys: int = 12, largest: int = 2000) -> None:
        self._random = random.Random(str(seed))
        self._buckets = [f"bucket-{number}" for number in range(buckets)]
        self._keys = [f"key/{number}" if number % 3 else f"key-{'long' * 60}-{number}" for number in range(keys)]
        self._largest = largest

    def entry(self) -> Entry:
        """The next one."""
        if self._random.random() < 0.2:
            return Batch([self._operation() for _ in range(self._random.randint(1, 5))])
        return self._operation()

    def entries(self, count: int, first_seq: int = 1) -> list[tuple[int, Entry]]:
        """Several, with seqs that have gaps between them."""
        seqs, seq = [], first_seq
        for _ in range(count):
            seqs.append(seq)
            seq += self._random.choice((1, 1, 1, 2, 17))
        return [(number, self.entry()) for number in seqs]

    def _operation(self) -> Operation:
        choose = self._random
        bucket, key = choose.choice(self._buckets), choose.choice(self._keys)
        match choose.choices(range(6), (3, 1, 1, 14, 4, 4))[0]:
            case 0:
                return CreateBucket(bucket)
            case 1:
                return DeleteBucket(bucket)
            case 2:
                return DeleteBucket(bucket, force=choose.random() < 0.3)
            case 3:
                size = choose.choice((0, 1, 20, 100, 150, 900, self._largest))
                metadata = {"type": "text/plain", "n": choose.randrange(9)} if choose.random() < 0.3 else {}
                return PutObject(bucket, key, choose.randbytes(size), metadata)
            case 4:
                return DeleteObject(bucket, key)
            case _:
                return CopyObject(choose.choice(self._buckets), choose.choice(self._keys), bucket, key)
