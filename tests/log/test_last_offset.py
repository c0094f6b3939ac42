"""The end of all offsets: a message there is refused before anything is used, and what lies beyond is named damage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from tests.log.workbench import DIRECTORY, contents, payload, payloads

import tidelog
from tidelog.errors import CorruptionError, DataError, InputError
from tidelog.log import Log, LogSettings
from tidelog.log.binding import bound
from tidelog.log.directory import start_name, wal_name
from tidelog.log.frame import encode_many
from tidelog.log.repair import plan_repair
from tidelog.log.verify import verify_files
from tidelog.log.view import LogView
from tidelog.testing import FaultyFiles

# Kafka and Spark have signed numbers of 64 bits, for offsets and for the end of a range of them.
LAST = 2**63 - 2
APPENDS: list[Callable[[Log], object]] = [
    lambda log: log.append(payload(9)),
    lambda log: log.append(payload(9), sync=True),
    lambda log: log.append_many(payloads(1)),
    lambda log: asyncio.run(log.append_async(payload(9))),
    lambda log: asyncio.run(log.append_many_async(payloads(1))),
]


def open_at(files: FaultyFiles, first_offset: int, settings: LogSettings | None = None) -> Log:
    return Log.open(DIRECTORY, settings, files=bound(files), first_offset=first_offset)


@pytest.mark.parametrize("append", APPENDS)
def test_an_append_behind_the_last_offset_is_refused_and_the_log_goes_on(append: Callable[[Log], object]) -> None:
    """Without this the message was accepted, and the log failed for everybody when it came to write it."""
    files = FaultyFiles()
    with closing(open_at(files, LAST - 1)) as log:
        assert [log.append(payload(number)) for number in range(2)] == [LAST - 1, LAST]
        with pytest.raises(InputError, match=rf"the largest offset is {LAST}.*append to another topic"):
            append(log)
        assert log.next_offset == LAST + 1
        log.flush()
        assert contents(log) == [(LAST - 1, payload(0)), (LAST, payload(1))]
    with closing(open_at(files, 0)) as log:
        assert [offset for offset, _ in contents(log)] == [LAST - 1, LAST]
        with pytest.raises(InputError):
            append(log)


def test_several_messages_are_refused_together() -> None:
    """All or none: fewer of them are accepted."""
    with closing(open_at(FaultyFiles(), LAST - 1)) as log:
        with pytest.raises(InputError, match="3 more messages"):
            log.append_many(payloads(3))
        assert log.append_many(payloads(2)) == range(LAST - 1, LAST + 1)


def test_rows_that_are_taken_in_are_refused() -> None:
    """As frames and as prepared files, before any of them gets an offset."""
    with closing(open_at(FaultyFiles(), LAST - 1)) as log:
        first = log.hold_appends()
        with pytest.raises(InputError):
            log.append_held(encode_many(0, payloads(3)))
        prepared = log.prepare_files(first)
        with pytest.raises(InputError, match="The log has nothing of it"):
            prepared.write(encode_many(0, payloads(3)))
        prepared.write(encode_many(0, payloads(2)))
        log.adopt_held(prepared.finish())
        log.release_appends()
        assert [offset for offset, _ in contents(log)] == [LAST - 1, LAST]


@pytest.mark.parametrize("first_offset", [-1, LAST + 2, 2**64])
def test_a_log_cannot_begin_behind_all_offsets(first_offset: int, tmp_path: Path) -> None:
    """Neither a log nor a topic, of which nothing is made then."""
    with pytest.raises(InputError, match="the first offset of a log must be between 0 and"):
        open_at(FaultyFiles(), first_offset)
    with tidelog.open(tmp_path / "data") as log:
        with pytest.raises(InputError, match="the first offset of a log must be between 0 and"):
            log.topic("shop/orders", first_offset=first_offset)
        assert log.topics() == []


def with_frames(first_offset: int, count: int) -> FaultyFiles:
    """A disk with a log whose one file has these frames, as a writer without bounds would leave it."""
    files = FaultyFiles()
    bound(files).make_directories(DIRECTORY)
    file = bound(files).create(DIRECTORY / wal_name(0))
    file.write_at(0, encode_many(first_offset, payloads(count)).buffer)
    file.close()
    return files


@pytest.mark.parametrize(("first_offset", "byte"), [(LAST - 1, 2 * 36), (LAST + 1, 0), (2**64 - 3, 0)])
def test_a_file_with_offsets_beyond_all_is_damage(first_offset: int, byte: int) -> None:
    """Opening, also for reading, names file and byte; a repair keeps what can be and puts the file aside."""
    files = with_frames(first_offset, 3)
    for open_log in (lambda: open_at(files, 0), lambda: LogView(DIRECTORY, files=bound(files))):
        with pytest.raises(CorruptionError, match=f"offsets above {LAST}") as caught:
            open_log()
        assert (caught.value.path, caught.value.byte) == (DIRECTORY / wal_name(0), byte)
    examination = verify_files(DIRECTORY, files=bound(files, examining=True))
    assert [(one.byte, one.severity) for one in examination.findings] == [(byte, "error")]
    plan_repair(DIRECTORY, files=bound(files, examining=True)).apply()
    with closing(open_at(files, 5)) as log:
        assert [offset for offset, _ in contents(log)] == [LAST - 1, LAST][: byte // 36]


def test_a_mark_beyond_all_offsets_is_damage() -> None:
    """It is named; without it the log is as it was."""
    files = with_frames(0, 3)
    files.create(DIRECTORY / start_name(LAST + 2)).close()
    with pytest.raises(DataError, match=rf"a log cannot begin at offset {LAST + 2}.*wal\.start-"):
        open_at(files, 0)
    files.remove(DIRECTORY / start_name(LAST + 2))
    with closing(open_at(files, 0)) as log:
        assert log.next_offset == 3


def test_the_last_offsets_are_shipped_and_read_from_the_store(tmp_path: Path) -> None:
    """Objects, catalog and a new owner get along with them, and the new owner refuses the next message too."""
    store = (tmp_path / "store").as_uri()
    with tidelog.open(tmp_path / "one", store=store, metadata="bucket") as log:
        topic = log.topic("shop/orders", first_offset=LAST - 1)
        topic.append_many([b"a", b"b"], sync=True)
        assert topic.ship() == LAST + 1
        topic.seal()
    with tidelog.open(tmp_path / "two", store=store, metadata="bucket") as log:
        topic = log.topic("shop/orders")
        assert [(message.offset, message.value) for message in topic.read(LAST - 1)] == [
            (LAST - 1, b"a"),
            (LAST, b"b"),
        ]
        with pytest.raises(InputError, match="append to another topic"):
            topic.append(b"c")
