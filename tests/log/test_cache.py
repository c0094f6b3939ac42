"""The cache against a plain list: whatever it drops is in a file, and what it gives is what was appended."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.campaign import examples, run_machine
from tests.log.workbench import DIRECTORY, contents, payload, payloads

from tidelog.log import Log
from tidelog.log.append_queue import AppendQueue
from tidelog.log.frame import Frames, encode_many, writable_frames
from tidelog.log.settings import LogSettings
from tidelog.log.tail_cache import Chunk, CommonBound
from tidelog.log.writer import frames_of
from tidelog.testing import FaultyFiles

values = st.binary(min_size=1, max_size=60)


def write_to_file(append_queue: AppendQueue, chunks: list[Chunk]) -> Frames:
    """What the writer does with chunks, less the file."""
    frames = frames_of(chunks)
    append_queue.wrote(frames.next_offset)
    append_queue.chunks_written(chunks, frames)
    return frames


class CacheMachine(RuleBasedStateMachine):
    """Random appends, writes and reads; `messages` is all that was ever appended, `in_files` how much is in files."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[bytes] = []
        self.first_offset = 0
        self.in_files = 0
        self.taken: list[Chunk] = []

    @initialize(
        first_offset=st.integers(0, 1 << 40),
        max_messages=st.integers(0, 20),
        max_bytes=st.one_of(st.just(1 << 30), st.integers(0, 3000)),
        batch_bytes=st.sampled_from([1, 100, 400, 1 << 20]),
    )
    def begin(self, first_offset: int, max_messages: int, max_bytes: int, batch_bytes: int) -> None:
        self.first_offset = first_offset
        self.max_messages, self.max_bytes = max_messages, max_bytes
        self.append_queue = AppendQueue(
            first_offset,
            LogSettings(cache_max_messages=max_messages, cache_max_bytes=max_bytes, fsync_max_batch_bytes=batch_bytes),
        )
        self.cache = self.append_queue.cache

    @property
    def next_offset(self) -> int:
        return self.first_offset + len(self.messages)

    @rule(value=values)
    def append(self, value: bytes) -> None:
        assert self.append_queue.try_append(value) == self.next_offset
        self.messages.append(value)

    @rule(several=st.lists(values, max_size=12))
    def append_many(self, several: list[bytes]) -> None:
        assert self.append_queue.append_many(several) == self.next_offset
        self.messages += several

    @rule(offset=st.integers(0, 1 << 40), several=st.lists(values, max_size=12), writable=st.booleans())
    def append_frames(self, offset: int, several: list[bytes], writable: bool) -> None:
        frames = encode_many(offset, several)
        if writable:
            frames = writable_frames(offset, bytearray(frames.buffer), frames.positions, frames.lengths)
        assert self.append_queue.append_frames(frames) == self.next_offset
        self.messages += several

    @precondition(lambda self: not self.taken)
    @rule()
    def take(self) -> None:
        self.taken = self.append_queue.take()
        if not self.taken:
            assert self.in_files == len(self.messages)
        else:
            assert self.taken[0].first_offset == self.first_offset + self.in_files

    @precondition(lambda self: self.taken)
    @rule()
    def write(self) -> None:
        frames = write_to_file(self.append_queue, self.taken)
        wanted = self.messages[self.in_files : self.in_files + frames.count]
        assert frames == encode_many(self.first_offset + self.in_files, wanted)
        self.in_files += frames.count
        self.taken = []

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        offset = data.draw(st.integers(max(0, self.first_offset - 2), self.next_offset + 2))
        stop = data.draw(st.integers(offset + 1, self.next_offset + 5))
        batch = self.cache.read(offset, stop)
        index = offset - self.first_offset
        if batch is None:
            assert index < self.in_files or index >= len(self.messages)
            return
        assert (batch.first_offset, batch.next_offset <= stop) == (offset, True)
        found = batch.payloads()
        assert found
        assert found == self.messages[index : batch.next_offset - self.first_offset]

    @invariant()
    def keeps_what_is_not_in_a_file(self) -> None:
        if self.messages:
            assert self.cache.start_offset <= self.first_offset + self.in_files
            for index in {self.in_files, len(self.messages) - 1} & set(range(self.in_files, len(self.messages))):
                assert self.cache.read(self.first_offset + index, 1 << 62) is not None

    @invariant()
    def knows_what_it_holds(self) -> None:
        if self.messages:
            assert self.append_queue.held_bytes == sum(map(len, self.messages[self.in_files :]))
            assert self.append_queue.has_work == (self.in_files < len(self.messages))

    @invariant()
    def stays_within_its_bounds(self) -> None:
        if self.messages:
            assert self.cache.cached_messages <= self.max_messages
            assert self.cache.cached_bytes <= self.max_bytes
            assert self.cache.cached_messages == self.first_offset + self.in_files - self.cache.start_offset

    def teardown(self) -> None:
        offset, found = self.cache.start_offset if self.messages else self.next_offset, list[bytes]()
        first_index = offset - self.first_offset
        while offset < self.next_offset:
            batch = self.cache.read(offset, 1 << 62)
            assert batch is not None
            found += batch.payloads()
            offset = batch.next_offset
        assert found == self.messages[first_index:]


@pytest.mark.deeper
def test_a_cache_behaves_like_a_list() -> None:
    """Whatever is appended, written and dropped, reads find what a list would hold."""
    run_machine(CacheMachine, 40, steps=40)


@given(st.integers(1, 3000))
@settings(max_examples=examples(20))
def test_dropped_chunks_leave_no_trace(count: int) -> None:
    """However many chunks went through, the newest ones are found and the others cost nothing."""
    append_queue = AppendQueue(0, LogSettings(cache_max_messages=3))
    for value in payloads(count):
        append_queue.try_append(value)
        write_to_file(append_queue, append_queue.take())
    assert append_queue.cache.cached_messages == min(count, 3)
    assert len(append_queue.cache._chunks) < 2048
    for offset in range(max(0, count - 3), count):
        batch = append_queue.cache.read(offset, count)
        assert batch is not None
        assert batch.payloads()[0] == payload(offset)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> CommonBound:
    """The logs of the test have one for themselves."""
    made = CommonBound(20_000)
    monkeypatch.setattr("tidelog.log.writer.caches", made)
    return made


def test_all_caches_of_a_process_have_one_bound(bound: CommonBound) -> None:
    """Hundreds of busy topics would take gigabytes: the log that was written to longest ago gives up its messages."""
    files, value = FaultyFiles(), bytes(4_000)
    with contextlib.ExitStack() as opened:
        directories = [Path(f"/log-{number}") for number in range(3)]
        logs = [opened.enter_context(contextlib.closing(Log.open(place, files=files))) for place in directories]
        for log in logs:
            for _ in range(4):
                log.append(value, sync=True)
                assert bound.used_bytes <= 20_000
        assert [log.statistics().cached_messages for log in logs] == [0, 0, 4]
        assert [[value for _, value in contents(log)] for log in logs] == [[value] * 4] * 3
        logs[0].append(value, sync=True)
        assert [log.statistics().cached_messages for log in logs] == [1, 0, 3]
        assert bound.used_bytes == sum(log.statistics().cached_bytes for log in logs)
    assert bound.used_bytes == 0


def test_one_log_beyond_the_common_bound_shrinks_its_own_cache(bound: CommonBound) -> None:
    """There is nobody else to take it from."""
    values = [b"%d" % number * 4_000 for number in range(10)]
    with contextlib.closing(Log.open(DIRECTORY, files=FaultyFiles())) as log:
        for value in values:
            log.append(value, sync=True)
        assert log.statistics().cached_messages == 4
        assert [value for _, value in contents(log)] == values
