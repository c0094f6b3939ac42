"""What a worker does about its memory, about reading ahead, and about what is no message."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tidelog.cold.fetch import ColdReadCounters, Fetcher, FetchSettings, RangeStream
from tidelog.errors import GapError
from tidelog.log.frame import encode_many
from tidelog.log.tail_cache import framed_batch
from tidelog.pipeline.source.topics import _gathered
from tidelog.pipeline.tasks import KernelReadAhead, reading_ahead
from tidelog.store.scheduler import DaemonPool
from tidelog.store.urls import open_store
from tidelog.topics.message import encode_message

# Reads a file of 4 MiB again and again, and says how many pages were mapped for that; 0 where that is not ours to say.
_READING = """
import resource, sys
from tidelog.pipeline.tasks import keep_memory
is_told = keep_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def read():
    with open(sys.argv[1], "rb", buffering=0) as file:
        return len(file.read())
read()
before = faults()
for _ in range(20):
    read()
print(faults() - before if is_told else 0)
"""

# Runs a function that loads a module, as a task does, and says how many objects a collection after it still looks at.
_LOADING = """
import gc
from tidelog.pipeline.tasks import _Tuned
def load(batches):
    import asyncio, email.mime.text, unittest.mock
    yield from batches
kept = len(gc.get_objects())
assert list(_Tuned(load)(iter([1, 2]))) == [1, 2]
frozen = gc.get_freeze_count()
assert list(_Tuned(load)(iter([]))) == []
print(kept, len(gc.get_objects()), frozen, gc.get_freeze_count())
"""


def test_collections_after_tasks_do_not_look_at_what_is_loaded() -> None:
    """Modules that a task has loaded are left out once the task is done; a task that loads nothing changes nothing."""
    program = subprocess.run([sys.executable, "-c", _LOADING], capture_output=True, text=True, check=True)
    before, after, frozen, frozen_later = map(int, program.stdout.split())
    assert frozen > before
    assert after < before / 20
    assert frozen_later <= frozen


def test_the_kernel_reads_ahead_in_directories_and_threads_in_stores() -> None:
    """Who fetches ahead follows from the kind of store."""
    assert isinstance(reading_ahead("file:///somewhere"), KernelReadAhead)
    assert isinstance(reading_ahead("s3://bucket/prefix"), DaemonPool)


def test_announcing_begins_nothing(tmp_path: Path) -> None:
    """What is announced is not fetched: whoever wants it can still take it over, whether it is there or not."""
    (tmp_path / "there").write_bytes(b"bytes")
    ahead = KernelReadAhead(tmp_path)
    for key in ("there", "missing"):
        assert ahead.submit(_never, key, 0, 5).cancel()


def test_ranges_are_the_same_without_threads(tmp_path: Path) -> None:
    """A stream of ranges over a directory whose name has a space is the object, byte by byte."""
    store = tmp_path / "a store"
    store.mkdir()
    content = os.urandom(100_000)
    objects = open_store(store.as_uri())
    objects.put("topic/object", content)
    fetcher = Fetcher(objects, reading_ahead(store.as_uri()), ColdReadCounters(), FetchSettings(range_bytes=999))
    stream = RangeStream(fetcher, "topic/object", 0, len(content), len(content), ahead=True)
    assert b"".join(iter(stream.next, None)) == content


def test_a_worker_uses_its_memory_again(tmp_path: Path) -> None:
    """Twenty reads of 4 MiB map fewer pages than one of them has."""
    file = tmp_path / "range"
    file.write_bytes(bytes(4 << 20))
    done = subprocess.run([sys.executable, "-c", _READING, str(file)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1024


def test_what_is_no_message_is_passed_over_or_named(caplog: pytest.LogCaptureFixture) -> None:
    """Rows before it come first; then an error names it, or it alone is left out and that is said."""
    good, bad = encode_message(b"v", None, None, 0), struct.pack("<BBHIqII", 1, 0, 0, 0, -(1 << 62), 0, 0)
    batch = framed_batch(encode_many(5, [good, bad, bad, good]), 5, 9)
    plain = _gathered(batch, ["offset", "value"], 100, skips_gaps=False)
    assert next(plain).count == 1
    with pytest.raises(GapError, match=r"message 6 has an impossible timestamp.*failOnDataLoss=false") as caught:
        next(plain)
    assert (caught.value.first, caught.value.last) == (6, 6)
    skipping = list(_gathered(batch, ["offset", "value"], 100, skips_gaps=True))
    assert [columns.offsets for columns in skipping] == [struct.pack("<q", 5), struct.pack("<q", 8)]
    assert ["message 6" in caplog.text, "message 7" in caplog.text] == [True, True]


def _never(key: str, start: int, length: int) -> bytes:
    raise AssertionError(f"{key} was fetched")
