"""Taking in: each row once, at a place that was written down before, and nothing in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cold.published import KEYS
from tests.log.workbench import wait_until
from tests.staging.staged_commits import LocalTopic, area_of, hand_over, local_topic, row, rows, stage

from tidelog.errors import BackpressureError, DiskFullError, StoreUnavailableError
from tidelog.log import LogSettings
from tidelog.log.directory import is_ingested
from tidelog.log.frame import encode_many
from tidelog.log.repair import LOST_PAYLOAD
from tidelog.staging import rows as staging_rows
from tidelog.staging.area import StagingArea
from tidelog.staging.document import StagingDocument, decode_staging, encode_staging
from tidelog.testing import FaultyFiles, FaultyMetadata, FaultyStore

DIRECTORY = Path("/data/shop/orders")


class Bench:
    """A disk, a store and metadata, and whoever hands rows over."""

    def __init__(self) -> None:
        self.files = FaultyFiles()
        self.objects = FaultyStore()
        self.metadata = FaultyMetadata()
        # The writer's own connections: what fails for the owner does not fail for it.
        self.area: StagingArea = area_of(self.objects.another_client(), self.metadata.another_client())

    @contextmanager
    def open(self, settings: LogSettings | None = None) -> Iterator[LocalTopic]:
        with local_topic(DIRECTORY, self.files, self.objects, self.metadata, settings) as topic:
            yield topic

    @property
    def document(self) -> StagingDocument:
        return decode_staging(self.metadata.contents()[KEYS.staging], KEYS.staging)

    def staged_keys(self) -> list[str]:
        return list(self.objects.contents())


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(params=["in memory", "read twice", "written beside"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small consignments are kept in memory between the check and the appending, large ones are read again, or are
    written beside the log."""
    if request.param != "in memory":
        monkeypatch.setattr(staging_rows, "_KEPT_BYTES", 0)
        monkeypatch.setattr(LocalTopic, "is_local", request.param == "written beside")
    return str(request.param)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """All consignments are written beside the log, some rows at a time."""
    monkeypatch.setattr(staging_rows, "_KEPT_BYTES", 0)
    monkeypatch.setattr(LocalTopic, "is_local", True)


def test_what_waits_is_there_when_the_topic_is_opened(bench: Bench, kept: str) -> None:
    """In order of the commits and of the parts, and what was staged is gone."""
    hand_over(bench.area, "etl", 0, rows(0, 7), parts=3)
    hand_over(bench.area, "etl", 1, rows(1, 2))
    with bench.open() as topic:
        assert topic.payloads() == rows(0, 7) + rows(1, 2)
        assert topic.log.durable_offset == 9
        statistics = topic.taker.statistics()
    assert (statistics.staged_commits, statistics.rows, statistics.pending) == (2, 9, 0)
    assert bench.staged_keys() == []
    assert bench.document.pending == ()
    status = bench.area.status("etl", 1)
    assert (status.state, status.first_offset, status.next_offset) == ("taken", 7, 9)


def test_nothing_is_taken_in_twice(bench: Bench) -> None:
    """Opened again, looked at again, committed again: the rows are there once."""
    hand_over(bench.area, "etl", 0, rows(0, 3))
    for _ in range(2):
        with bench.open() as topic:
            topic.taker.ingest()
            hand_over(bench.area, "etl", 0, rows(0, 3))
            topic.taker.ingest()
            assert topic.payloads() == rows(0, 3)


def test_a_version_without_rows_is_taken_in(bench: Bench) -> None:
    """It is done, at the place where the log was."""
    with bench.open() as topic:
        topic.log.append(b"one")
        bench.area.commit("etl", 0, [])
        topic.taker.ingest()
        assert bench.area.status("etl", 0).state == "taken"
        assert topic.payloads() == [b"one"]


def test_other_appends_wait_meanwhile(bench: Bench, kept: str) -> None:
    """A consignment has consecutive offsets, however many threads append beside it."""
    settings = LogSettings(append_queue_max_messages=8)
    with bench.open(settings) as topic:
        stop = threading.Event()

        def append() -> None:
            while not stop.is_set():
                topic.log.append(b"other", timeout_seconds=60)

        threads = [threading.Thread(target=append) for _ in range(3)]
        for thread in threads:
            thread.start()
        for version in range(5):
            hand_over(bench.area, "etl", version, rows(version, 50), parts=4)
            topic.taker.ingest()
        stop.set()
        for thread in threads:
            thread.join(60)
        found = topic.payloads()
    for version in range(5):
        first = found.index(row(version, 0))
        assert found[first : first + 50] == rows(version, 50)
    assert len([one for one in found if one != b"other"]) == 250


def test_an_append_that_waits_too_long_hears_why(bench: Bench) -> None:
    """It used no offset."""
    with bench.open() as topic:
        topic.log.hold_appends()
        with pytest.raises(BackpressureError, match="ingest of staged rows"):
            topic.log.append(b"x", timeout_seconds=0.01)
        topic.log.release_appends()
        assert topic.log.append(b"x") == 0


def damage(bench: Bench, key: str) -> None:
    data = bytearray(bench.objects.contents()[key])
    data[-1] ^= 1
    bench.objects.tamper(key, bytes(data))


def test_a_damaged_part_is_refused_before_any_row_is_there(bench: Bench, kept: str) -> None:
    """The others go on, and whoever waits for it hears why."""
    parts = stage(bench.area, "etl", 0, rows(0, 9), parts=3)
    bench.area.commit("etl", 0, parts)
    hand_over(bench.area, "other", 0, rows(1, 3))
    damage(bench, parts[2].key)
    with bench.open() as topic:
        assert topic.payloads() == rows(1, 3)
        assert topic.taker.statistics().refused == 1
    assert bench.area.status("etl", 0).state == "refused"
    assert "checksum" in str(bench.area.status("etl", 0).error)


@pytest.mark.parametrize("what", ["part", "manifest"])
def test_a_missing_object_is_refused(bench: Bench, kept: str, what: str) -> None:
    """And written again under the same version it comes in."""
    parts = stage(bench.area, "etl", 0, rows(0, 9), parts=3)
    bench.area.commit("etl", 0, parts)
    key = parts[1].key if what == "part" else bench.document.pending[0].manifest
    bench.objects.delete(key)
    with bench.open() as topic:
        assert topic.payloads() == []
        assert hand_over(bench.area, "etl", 0, rows(0, 9)) == "committed"
        topic.taker.ingest()
        assert topic.payloads() == rows(0, 9)
    assert bench.area.status("etl", 0).state == "taken"
    assert bench.staged_keys() == []


@pytest.mark.parametrize("change", ["fewer rows", "more bytes", "another part", "other numbers", "another manifest"])
def test_what_is_not_what_was_committed_is_refused(bench: Bench, kept: str, change: str) -> None:
    """Counts, sizes, checksums and the numbers of the rows all have to agree."""
    parts = stage(bench.area, "etl", 0, rows(0, 4), parts=2)
    bench.area.commit("etl", 0, parts)
    frames = encode_many(0, rows(0, 2)).buffer
    changed = {
        "fewer rows": encode_many(0, rows(0, 1)).buffer,
        "more bytes": frames + b"\0",
        "another part": encode_many(0, rows(1, 2)).buffer,
        "other numbers": encode_many(1, rows(0, 2)).buffer,
    }
    if change == "another manifest":
        bench.objects.tamper(bench.document.pending[0].manifest, b"{}")
    else:
        bench.objects.tamper(parts[0].key, changed[change])
    with bench.open() as topic:
        assert topic.payloads() == []
    assert bench.area.status("etl", 0).state == "refused"


def test_a_row_that_is_too_large_is_refused(bench: Bench, kept: str) -> None:
    """The owner's bound counts, as for every append."""
    hand_over(bench.area, "etl", 0, [b"x" * ((1 << 20) + 1)])
    with bench.open() as topic:
        assert topic.payloads() == []
    assert "max_message_bytes" in str(bench.area.status("etl", 0).error)


def test_a_store_without_an_answer_refuses_nothing(bench: Bench, kept: str) -> None:
    """It is looked at again later, and the topic is open meanwhile."""
    hand_over(bench.area, "etl", 0, rows(0, 3))
    bench.objects.fail("*", times=None)
    with bench.open() as topic:
        assert topic.log.append(b"first") == 0
        assert topic.taker.look() == 1
        assert topic.taker.statistics().last_error is not None
        bench.objects.heal()
        topic.taker.look()
        assert topic.payloads() == [b"first", *rows(0, 3)]
        assert topic.taker.statistics().last_error is None


def test_a_store_that_fails_in_the_middle_holds_the_others_back(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is appended in between would be taken for rows: it waits until the rest is there."""
    monkeypatch.setattr(staging_rows, "_KEPT_BYTES", 0)
    with bench.open() as topic:
        parts = stage(bench.area, "etl", 0, rows(0, 9), parts=3)
        bench.area.commit("etl", 0, parts)
        # A part is two ranges: the check reads them, and then the first that is read again fails.
        bench.objects.fail("read_range", nth=3, times=None, matching=Path(parts[1].key).name)
        with pytest.raises(StoreUnavailableError):
            topic.taker.ingest()
        assert topic.log.next_offset == 3
        with pytest.raises(BackpressureError):
            topic.log.append(b"x", timeout_seconds=0.01)
        bench.objects.heal()
        topic.taker.look()
        assert topic.log.append(b"x") == 9
        assert topic.payloads() == [*rows(0, 9), b"x"]


def test_a_full_disk_in_the_middle_holds_the_others_back(bench: Bench) -> None:
    """It goes on with the next row once there is room."""
    with bench.open(LogSettings(append_queue_max_messages=2)) as topic:
        hand_over(bench.area, "etl", 0, rows(0, 40), parts=8)
        bench.files.capacity_bytes = 600
        with pytest.raises(DiskFullError):
            topic.taker.ingest()
        assert topic.taker.look() == 1
        bench.files.capacity_bytes = None
        wait_until(lambda: topic.taker.look() == 1 and not topic.taker.statistics().pending, "room on the disk")
        topic.log.append(b"x")
        assert topic.payloads() == [*rows(0, 40), b"x"]


@pytest.mark.parametrize("fault", ["unavailable", "unanswered", "late"])
def test_a_place_that_may_be_written_keeps_others_away(bench: Bench, kept: str, fault: str) -> None:
    """Doubles or loses, otherwise: messages that stand where the rows of a consignment are said to be."""
    with bench.open() as topic:
        hand_over(bench.area, "etl", 0, rows(0, 3))
        bench.metadata.fail("commit", fault)  # type: ignore[arg-type]
        bench.metadata.fail("get", nth=3, times=None)
        with pytest.raises(StoreUnavailableError):
            topic.taker.ingest()
        with pytest.raises(BackpressureError):
            topic.log.append(b"x", timeout_seconds=0.01)
        bench.metadata.heal()
        bench.metadata.land_late_writes()
        topic.taker.look()
        topic.log.append(b"x")
        assert topic.payloads() == [*rows(0, 3), b"x"]


def test_a_document_that_cannot_be_read_holds_nobody_back(bench: Bench, kept: str) -> None:
    """Nothing was written yet: the appends go on, and it is tried again later."""
    with bench.open() as topic:
        hand_over(bench.area, "etl", 0, rows(0, 3))
        bench.metadata.fail("get", nth=2, times=None)
        with pytest.raises(StoreUnavailableError):
            topic.taker.ingest()
        assert topic.log.append(b"x") == 0
        bench.metadata.heal()
        topic.taker.look()
        assert topic.payloads() == [b"x", *rows(0, 3)]


def prepared_names(bench: Bench) -> list[str]:
    return [name for name in bench.files.list(DIRECTORY) if is_ingested(name)]


def test_rows_that_are_written_beside_need_no_second_reading(bench: Bench, beside: None) -> None:
    """They are checked while they are written, and become files of the usual size."""
    payloads = rows(0, 40, size=50)
    hand_over(bench.area, "etl", 0, payloads, parts=3)
    with bench.open(LogSettings(rotate_max_bytes=500)) as topic:
        assert topic.payloads() == payloads
        spans = topic.log.file_spans()
        topic.log.append(b"x", sync=True)
        assert topic.payloads() == [*payloads, b"x"]
        assert topic.log.statistics().writes == 1
    assert len(spans) > 4
    assert max(span.size for span in spans) <= 500
    # Ranges of 64 bytes: each of a part once, and one for the byte that must not be there.
    assert bench.objects.traffic.requests["read_range"] <= sum(-(-14 * 66 // 64) + 1 for _ in range(3))


@pytest.mark.parametrize("damaged", [None, 0, 1, 2, 3])
def test_two_threads_write_beside(
    bench: Bench, beside: None, monkeypatch: pytest.MonkeyPatch, damaged: int | None
) -> None:
    """The order is that of the parts, and damage in any of them refuses all of them and leaves no file."""
    monkeypatch.setattr(staging_rows, "_LEAST_LANE_BYTES", 1)
    parts = stage(bench.area, "etl", 0, rows(0, 40), parts=4)
    bench.area.commit("etl", 0, parts)
    if damaged is not None:
        damage(bench, parts[damaged].key)
    with bench.open(LogSettings(rotate_max_bytes=200)) as topic:
        assert topic.payloads() == ([] if damaged is not None else rows(0, 40))
        assert topic.log.append(b"x") == (0 if damaged is not None else 40)
        assert prepared_names(bench) == []
    assert bench.area.status("etl", 0).state == ("taken" if damaged is None else "refused")


def test_an_interrupt_while_threads_write_beside(bench: Bench, beside: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """They end, nothing is left and nobody is held back; it comes in with the next look."""

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with bench.open() as topic, monkeypatch.context() as patches:
        patches.setattr(staging_rows, "_LEAST_LANE_BYTES", 1)
        patches.setattr(staging_rows, "wait", interrupt)
        hand_over(bench.area, "etl", 0, rows(0, 40), parts=4)
        with pytest.raises(KeyboardInterrupt):
            topic.taker.ingest()
        assert topic.log.append(b"x") == 0
        assert prepared_names(bench) == []
        patches.undo()
        topic.taker.look()
        assert topic.payloads() == [b"x", *rows(0, 40)]


def test_a_store_that_fails_before_all_is_written_beside_holds_nobody_back(bench: Bench, beside: None) -> None:
    """Nothing of it is in the log yet: it is begun anew later, wherever the log ends then."""
    parts = stage(bench.area, "etl", 0, rows(0, 9), parts=3)
    with bench.open() as topic:
        bench.area.commit("etl", 0, parts)
        bench.objects.fail("read_range", times=None, matching=Path(parts[1].key).name)
        with pytest.raises(StoreUnavailableError):
            topic.taker.ingest()
        assert topic.log.append(b"x") == 0
        assert prepared_names(bench) == []
        bench.objects.heal()
        topic.taker.look()
        assert topic.payloads() == [b"x", *rows(0, 9)]


def test_no_room_beside_the_log_holds_nobody_back(bench: Bench, beside: None) -> None:
    """What was written goes, so that there is room for others."""
    with bench.open() as topic:
        topic.log.append(b"x", sync=True)
        hand_over(bench.area, "etl", 0, rows(0, 40), parts=8)
        bench.files.capacity_bytes = 600
        with pytest.raises(DiskFullError):
            topic.taker.ingest()
        assert prepared_names(bench) == []
        assert topic.log.append(b"y", sync=True) == 1
        bench.files.capacity_bytes = None
        topic.taker.look()
        assert topic.payloads() == [b"x", b"y", *rows(0, 40)]


def place_by_hand(bench: Bench, first_offset: int) -> None:
    """As an owner that died after it had written down the place."""
    document = bench.document
    placed = document.placed(document.pending[0].id, first_offset, 0)
    bench.metadata.put(KEYS.staging, encode_staging(placed))


@pytest.mark.parametrize("there", [0, 1, 5, 9])
def test_a_new_owner_goes_on_with_the_next_row(bench: Bench, kept: str, there: int) -> None:
    """Whatever of it the log has, the rest comes in, before anything else."""
    with bench.open() as topic:
        topic.log.append_many([b"a", b"b"])
    hand_over(bench.area, "etl", 0, rows(0, 9), parts=2)
    place_by_hand(bench, 2)
    topic = LocalTopic(DIRECTORY, bench.files, bench.objects, bench.metadata, LogSettings())
    topic.log.append_many(rows(0, 9)[:there])
    topic.close()
    with bench.open() as topic:
        assert topic.payloads() == [b"a", b"b", *rows(0, 9)]
    status = bench.area.status("etl", 0)
    assert (status.state, status.first_offset, status.next_offset) == ("taken", 2, 11)
    assert bench.staged_keys() == []


def test_a_place_behind_the_end_is_given_up(bench: Bench, kept: str) -> None:
    """The end of the log was lost: the rows are placed anew, where the log goes on now."""
    with bench.open() as topic:
        topic.log.append_many([b"a", b"b"])
    hand_over(bench.area, "etl", 0, rows(0, 3))
    place_by_hand(bench, 7)
    with bench.open() as topic:
        assert topic.payloads() == [b"a", b"b", *rows(0, 3)]


def test_a_topic_that_is_half_taken_in_is_not_opened_without_the_rest(bench: Bench) -> None:
    """While the store gives no answer: what is appended now would stand among the rows."""
    hand_over(bench.area, "etl", 0, rows(0, 9))
    place_by_hand(bench, 0)
    with LocalTopicWithout(bench) as topic:
        topic.log.append_many(rows(0, 4))
    bench.objects.fail("*", times=None)
    with pytest.raises(StoreUnavailableError), bench.open():
        pass
    bench.objects.heal()
    with bench.open() as topic:
        assert topic.payloads() == rows(0, 9)


class LocalTopicWithout:
    """A log that was opened without looking at what waits."""

    def __init__(self, bench: Bench) -> None:
        self._topic = LocalTopic(DIRECTORY, bench.files, bench.objects, bench.metadata, LogSettings())

    def __enter__(self) -> LocalTopic:
        return self._topic

    def __exit__(self, *_: object) -> None:
        self._topic.close()


@pytest.mark.parametrize("what", ["part", "manifest"])
def test_rows_that_are_lost_half_way_leave_marks(bench: Bench, what: str) -> None:
    """The topic is not blocked for ever, and whoever reads sees that something is missing."""
    parts = stage(bench.area, "etl", 0, rows(0, 9), parts=3)
    bench.area.commit("etl", 0, parts)
    place_by_hand(bench, 0)
    with LocalTopicWithout(bench) as topic:
        topic.log.append_many(rows(0, 4))
    bench.objects.delete(parts[1].key if what == "part" else bench.document.pending[0].manifest)
    lost = 2 if what == "part" else 5
    with bench.open() as topic:
        assert topic.payloads() == [*rows(0, 4), *[LOST_PAYLOAD] * lost, *rows(0, 9)[4 + lost :]]
        assert topic.taker.statistics().lost_rows == lost
        assert topic.log.append(b"x") == 9


def test_closing_in_the_middle_is_gone_on_with(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was appended before the end counts, the rest comes in at the next opening."""
    monkeypatch.setattr(staging_rows, "_ROWS_AT_ONCE", 1)
    hand_over(bench.area, "etl", 0, rows(0, 200), parts=4)
    topic = LocalTopic(DIRECTORY, bench.files, bench.objects, bench.metadata, LogSettings(append_queue_max_messages=1))
    thread = threading.Thread(target=topic.taker.look)
    thread.start()
    wait_until(lambda: topic.log.next_offset > 3, "some rows")
    topic.close()
    thread.join(60)
    assert not thread.is_alive()
    with bench.open() as topic:
        assert topic.payloads() == rows(0, 200)
