"""The object store that dies and fails: what a crash leaves in it, what its callers are told, what it counts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tidelog.errors import (
    AccessDeniedError,
    ConflictError,
    InputError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.store.object_store import ObjectStore
from tidelog.testing import (
    STORE_FAULTS,
    Crash,
    CrashPlan,
    Faults,
    FaultyFiles,
    FaultyStore,
    History,
    ManualClock,
    StoreFault,
    crash_machine_everywhere,
    faults,
)

DIRECTORY = Path("/d")
GUIDE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "testing.md"


def write_object(store: ObjectStore, key: str, *parts: bytes) -> None:
    """Through a writer."""
    with store.open_writer(key) as writer:
        for part in parts:
            writer.write(part)


def both_ways(store: FaultyStore) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What there is after a crash if the interrupted call was not done, and if it was."""
    return store.after_crash(torn_bytes=0).contents(), store.after_crash(torn_bytes=1).contents()


class TestCrashes:
    """The death of the process."""

    def test_the_last_call_was_done_or_was_not(self) -> None:
        """The dead cannot tell, so both are there to be looked at."""
        store = FaultyStore(crash_at=2)
        store.put("a", b"old")
        with pytest.raises(Crash, match=r"store\.put a"):
            store.put("a", b"new")
        assert both_ways(store) == ({"a": b"old"}, {"a": b"new"})

    @pytest.mark.parametrize(
        ("use", "done"),
        [
            (lambda store, etag: store.put_if_absent("b", b"new"), {"a": b"old", "b": b"new"}),
            (lambda store, etag: store.put_if_match("a", b"new", etag), {"a": b"new"}),
            (lambda store, etag: store.copy("a", "b"), {"a": b"old", "b": b"old"}),
            (lambda store, etag: store.delete("a"), {}),
            (lambda store, etag: write_object(store, "b", b"new"), {"a": b"old", "b": b"new"}),
        ],
        ids=["put_if_absent", "put_if_match", "copy", "delete", "publish"],
    )
    def test_every_changing_call_can_be_the_last(
        self, use: Callable[[FaultyStore, str], object], done: dict[str, bytes]
    ) -> None:
        """Done whole, or not at all."""
        store = FaultyStore(crash_at=2)
        etag = store.put("a", b"old")
        with pytest.raises(Crash):
            use(store, etag)
        assert both_ways(store) == ({"a": b"old"}, done)

    def test_a_condition_holds_for_the_last_call_too(self) -> None:
        """A create that would have been refused is not done by dying."""
        store = FaultyStore(crash_at=2)
        store.put("a", b"old")
        with pytest.raises(Crash):
            store.put_if_absent("a", b"new")
        assert both_ways(store) == ({"a": b"old"}, {"a": b"old"})

    def test_a_dead_client_can_do_nothing(self) -> None:
        """Neither look nor write, and the store does not change."""
        store = FaultyStore()
        store.put("a", b"old")
        writer = store.open_writer("b")
        store.crash()
        uses: list[Callable[[], object]] = [
            lambda: store.get("a"),
            lambda: store.head("a"),
            lambda: store.read_range("a", 0, 1),
            lambda: list(store.list()),
            lambda: store.put("a", b"new"),
            lambda: store.delete("a"),
            lambda: store.open_writer("c"),
            lambda: writer.write(b"x"),
        ]
        for use in uses:
            with pytest.raises(Crash):
                use()
        assert store.contents() == {"a": b"old"}

    def test_what_is_found_afterwards_is_another_life(self) -> None:
        """It changes by itself, with nothing planned, and can be cut again."""
        store = FaultyStore()
        etag = store.put("a", b"old")
        store.fail("get", times=None)
        store.crash()
        found = store.after_crash("lose", crash_at=2)
        assert found.get("a") == (b"old", etag)
        found.put("b", b"new")
        assert store.contents() == {"a": b"old"}
        with pytest.raises(Crash):
            found.put("c", b"")

    def test_another_client_lives_on(self) -> None:
        """The store is not on the machine that died."""
        store = FaultyStore(crash_at=1)
        other = store.another_client()
        with pytest.raises(Crash):
            store.put("a", b"by the first")
        other.put("a", b"by the second")
        assert store.contents() == {"a": b"by the second"}

    def test_many_deletes_are_cut_between_keys(self) -> None:
        """No store deletes many objects in one step."""
        store = FaultyStore()
        for key in ("a", "b", "c"):
            store.put(key, b"")
        dying = store.after_crash(crash_at=2)
        with pytest.raises(Crash):
            dying.delete(["a", "b", "c"])
        assert [list(found) for found in both_ways(dying)] == [["b", "c"], ["c"]]

    def test_disk_and_store_have_one_numbering(self) -> None:
        """A driver can cut between the two; each fails for itself."""
        faults = Faults()
        files, store = FaultyFiles(faults=faults), FaultyStore(faults=faults)
        files.make_directory(DIRECTORY)
        store.put("a", b"")
        files.sync_directory(DIRECTORY)
        assert [str(call) for call in files.calls] == ["1 make_directory /d", "2 store.put a", "3 sync_directory /d"]
        store.fail("list")
        assert files.list(DIRECTORY) == []
        with pytest.raises(StoreUnavailableError):
            list(store.list())
        files.crash()
        with pytest.raises(Crash):
            store.get("a")

    def test_the_driver_tries_both_at_every_call(self) -> None:
        """Every state between two calls is found, and none twice for one cut."""
        found: list[tuple[str, ...]] = []

        def workload(store: FaultyStore, _: History) -> None:
            store.put("a", b"")
            store.delete("a")

        def check(store: FaultyStore, _: History) -> None:
            found.append(tuple(store.contents()))

        crash_machine_everywhere(lambda call: FaultyStore(crash_at=call), workload, check, CrashPlan(seeds=3))
        assert found == [(), ("a",), ("a",), (), ()]


class TestUploads:
    """Large objects, in parts."""

    def test_parts_are_invisible_until_they_are_published(self) -> None:
        """A crash in the middle leaves an upload, never an object."""
        store = FaultyStore(part_bytes=4, crash_at=3)
        with pytest.raises(Crash, match=r"store\.upload_part big"):
            write_object(store, "big", b"01234567")
        assert store.contents() == {}
        assert store.uploads() == {"big#1": b"0123"}
        assert store.after_crash(torn_bytes=1).uploads() == {"big#1": b"01234567"}

    def test_every_step_of_an_upload_is_a_call(self) -> None:
        """What is left at the end is sent as the last part; a small object is sent at once."""
        store = FaultyStore(part_bytes=4)
        write_object(store, "big", b"0123", b"45678", b"9")
        write_object(store, "small", b"012")
        operations = [(call.operation, call.path) for call in store.calls]
        assert operations == [
            ("store.begin_upload", "big"),
            ("store.upload_part", "big"),
            ("store.upload_part", "big"),
            ("store.upload_part", "big"),
            ("store.publish", "big"),
            ("store.publish", "small"),
        ]
        assert store.contents() == {"big": b"0123456789", "small": b"012"}
        assert store.uploads() == {}

    def test_an_upload_that_failed_is_aborted(self) -> None:
        """Unless the store cannot be reached for that either."""
        store = FaultyStore(part_bytes=4)
        store.fail("upload_part", nth=2)
        with pytest.raises(StoreUnavailableError):
            write_object(store, "big", b"01234567")
        assert store.uploads() == {}
        store.fail("upload_part", nth=2)
        store.fail("abort_upload")
        with pytest.raises(StoreUnavailableError):
            write_object(store, "big", b"01234567")
        assert list(store.uploads().values()) == [b"0123"]

    def test_what_dead_writers_left_is_listed_and_deleted(self) -> None:
        """By prefix and age, and not if something was sent since."""
        clock = ManualClock()
        store = FaultyStore(part_bytes=4, clock=clock)
        for key in ("x/old", "y/old", "x/new"):
            clock.advance(60 if key == "x/new" else 0)
            store.open_writer(key).write(b"01234")
        old = list(store.unfinished_uploads("x/", modified_before_us=clock.now_us()))
        assert [(info.key.partition("#")[0], info.size) for info in old] == [("x/old", 4)]
        assert len(list(store.unfinished_uploads())) == 3
        growing = list(store.unfinished_uploads("y/"))
        stale = [info._replace(size=0) for info in growing]
        store.delete_unfinished([*old, *old, *stale])
        assert [name.partition("#")[0] for name in store.uploads()] == ["x/new", "y/old"]
        with pytest.raises(InputError):
            store.delete_unfinished([info._replace(key="x/new") for info in growing])


class TestFailures:
    """A store that lives and fails."""

    @pytest.mark.parametrize(
        ("fault", "error", "is_done"),
        [
            ("unavailable", StoreUnavailableError, False),
            ("unanswered", StoreUnavailableError, True),
            ("late", StoreUnavailableError, False),
            ("denied", AccessDeniedError, False),
            ("conflict", ConflictError, False),
            ("not_found", NotFoundError, False),
        ],
    )
    def test_a_write_fails_as_planned(self, fault: StoreFault, error: type[TidelogError], is_done: bool) -> None:
        """Once, and then the store is as good as ever."""
        uses: list[tuple[str, Callable[[FaultyStore], object]]] = [
            ("put", lambda store: store.put("a", b"new")),
            ("put_if_absent", lambda store: store.put_if_absent("a", b"new")),
            ("publish", lambda store: write_object(store, "a", b"new")),
            ("copy", lambda store: store.copy("source", "a")),
        ]
        for operation, use in uses:
            store = FaultyStore()
            store.put("source", b"new")
            store.fail(operation, fault)
            with pytest.raises(error):
                use(store)
            assert ("a" in store.contents()) is is_done
            store.delete("a")
            use(store)
            assert store.contents()["a"] == b"new"

    def test_a_lost_answer_hides_a_conflict(self) -> None:
        """Whether it was done or refused: the caller learns neither."""
        store = FaultyStore()
        store.put("a", b"old")
        store.fail("put_if_absent", "unanswered")
        with pytest.raises(StoreUnavailableError):
            store.put_if_absent("a", b"new")
        assert store.contents() == {"a": b"old"}

    def test_a_late_write_lands_on_what_is_there_then(self) -> None:
        """Its condition is looked at when it is done, not when it was asked for."""
        store = FaultyStore()
        store.fail("put_if_absent", "late", times=2)
        for key in ("a", "b"):
            with pytest.raises(StoreUnavailableError):
                store.put_if_absent(key, b"late")
        store.put("a", b"other")
        survivor = store.after_crash()
        assert store.land_late_writes() == 2
        assert store.contents() == {"a": b"other", "b": b"late"}
        assert store.land_late_writes() == 0
        assert survivor.contents() == {"a": b"other"}
        assert survivor.land_late_writes() == 2

    def test_reads_fail_as_planned(self) -> None:
        """Every way of asking can fail by itself."""
        store = FaultyStore()
        store.put("a", b"hello")
        uses: list[tuple[str, Callable[[], object]]] = [
            ("get", lambda: store.get("a")),
            ("read_range", lambda: store.read_range("a", 0, 1)),
            ("head", lambda: store.head("a")),
            ("list", lambda: list(store.list())),
            ("list_uploads", lambda: list(store.unfinished_uploads())),
        ]
        for operation, use in uses:
            store.fail(operation)
            with pytest.raises(StoreUnavailableError):
                use()
            use()

    def test_answers_arrive_damaged(self) -> None:
        """Cut short or with one wrong bit, at the byte that was asked for; the object itself is whole."""
        store = FaultyStore()
        store.put("a", b"0123456789")
        store.fail("read_range", "truncated")
        assert bytes(store.read_range("a", 2, 6)) == b"234"
        store.fail("read_range", "truncated", at_byte=1)
        assert bytes(store.read_range("a", 2, 6)) == b"2"
        store.fail("read_range", "flipped", at_byte=0)
        assert bytes(store.read_range("a", 2, 6)) == b"334567"
        store.fail("get", "flipped")
        assert store.get("a").data == b"0123446789"
        store.fail("get", "flipped", at_byte=99)
        assert store.get("a").data == b"0123456789"

    def test_an_object_can_rot(self) -> None:
        """Its content changes and nothing tells."""
        store = FaultyStore()
        store.put("a", b"good")
        before = store.head("a")
        store.tamper("a", b"evil")
        assert store.get("a").data == b"evil"
        assert store.head("a") == before

    def test_failures_are_counted_and_narrowed(self) -> None:
        """To the nth call, to so many of them, to names or to whole keys."""
        store = FaultyStore()
        store.fail("put", nth=2, times=2, matching="data-*")
        store.fail("put", times=None, matching="*/segments/*")
        outcome = []
        for key in ("x/data-1", "x/other", "x/data-2", "data-3", "x/data-4", "t/segments/cur", "segments"):
            try:
                store.put(key, b"")
                outcome.append(True)
            except StoreUnavailableError:
                outcome.append(False)
        assert outcome == [True, True, False, False, True, False, True]

    def test_an_outage_ends_when_it_is_healed(self) -> None:
        """One pattern for all operations."""
        store = FaultyStore()
        store.fail("*", times=None)
        for _ in range(3):
            with pytest.raises(StoreUnavailableError):
                store.put("a", b"")
            with pytest.raises(StoreUnavailableError):
                store.head("a")
        store.heal()
        store.put("a", b"")

    def test_plans_that_mean_nothing_are_refused(self) -> None:
        """A test with a slip of the pen does not pass by it."""
        store = FaultyStore()
        for operation, fault in (("putt", "unavailable"), ("get", "broken"), ("put", "flipped"), ("*", "truncated")):
            with pytest.raises(ValueError, match="only"):
                store.fail(operation, fault)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="from 1"):
            store.fail("put", nth=0)

    def test_a_request_may_take_its_time(self) -> None:
        """The hook is called before anything happens and holds nobody else up."""
        arrived, go_on = threading.Event(), threading.Event()

        def wait(operation: str, key: str) -> None:
            if (operation, key) == ("put", "slow"):
                arrived.set()
                assert go_on.wait(120)

        store = FaultyStore(on_request=wait)
        slow = threading.Thread(target=store.put, args=("slow", b""))
        slow.start()
        assert arrived.wait(120)
        store.put("fast", b"")
        assert list(store.contents()) == ["fast"]
        go_on.set()
        slow.join()
        assert list(store.contents()) == ["fast", "slow"]

    def test_a_store_may_be_without_conditional_updates(self) -> None:
        """As some are; what was found after a crash is so too."""
        store = FaultyStore(conditional_update=False)
        etag = store.put("a", b"")
        for each in (store, store.after_crash()):
            assert not each.supports_conditional_update
            with pytest.raises(NotSupportedError):
                each.put_if_match("a", b"", etag)

    def test_every_fault_is_explained(self) -> None:
        """The module and the guide list all of them."""
        assert {fault for fault in STORE_FAULTS if f"\n    {fault}  " not in str(faults.__doc__)} == set()
        assert {fault for fault in STORE_FAULTS if f"\n| `{fault}` | " not in GUIDE.read_text("utf-8")} == set()


class TestCounting:
    """What was asked."""

    def test_requests_and_bytes_are_counted(self) -> None:
        """By operation, failed ones included; what is looked at behind its back is not."""
        store = FaultyStore(part_bytes=4)
        store.put("a", b"0123456789")
        write_object(store, "b", b"01234")
        store.read_range("a", 8, 100)
        store.get("b")
        store.fail("head")
        with pytest.raises(StoreUnavailableError):
            store.head("a")
        store.delete(["a", "b"])
        store.contents()
        assert store.traffic.requests == {
            "put": 1,
            "begin_upload": 1,
            "upload_part": 2,
            "publish": 1,
            "read_range": 1,
            "get": 1,
            "head": 1,
            "delete": 1,
        }
        assert (store.traffic.bytes_written, store.traffic.bytes_read) == (15, 7)
        assert store.traffic.request_count == 9
        store.reset_traffic()
        assert store.traffic == ({}, 0, 0)

    def test_a_listing_is_a_request_for_every_page(self) -> None:
        """And only for those that are looked at."""
        store = FaultyStore()
        for number in range(1500):
            store.put(f"{number:04d}", b"")
        store.reset_traffic()
        assert next(store.list()).key == "0000"
        assert store.traffic.requests == {"list": 1}
        assert len(list(store.list())) == 1500
        assert store.traffic.requests == {"list": 3}

    def test_etags_never_repeat(self) -> None:
        """Not for the same content, and not after a crash or in a copy."""
        store = FaultyStore()
        etags = [store.put("a", b"same") for _ in range(3)]
        store.copy("a", "b")
        etags.append(store.head("b").etag)
        store.delete("a")
        etags.append(store.after_crash().put("a", b"same"))
        assert len(set(etags)) == 5
