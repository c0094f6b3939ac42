"""The cold side of a directory: its topics are listed in a few requests, opened whole or not at all, closed quickly."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from tests.cold.station import DIRECTORY, TIME_FIELD
from tests.log.workbench import LIMIT_SECONDS, wait_until

from tidelog.clock import ManualClock
from tidelog.cold.settings import TierSettings
from tidelog.cold.tiered_log import Tier, TieredLog
from tidelog.errors import FencedError, LockedError, StoreUnavailableError
from tidelog.log import LogSettings
from tidelog.store import scheduler as background_module
from tidelog.store.keys import TopicKeys
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import FaultyFiles, FaultyMetadata, FaultyStore

EAGER = TierSettings(
    ship_interval_seconds=0.01, ship_min_bytes=1, ship_max_delay_seconds=0, ownership_check_seconds=0.01
)


class Bench:
    """A tier over stores in memory."""

    def __init__(self, metadata: MetadataStore | None = None, *, background: bool = False, root: str = "tidelog"):
        self.files = FaultyFiles()
        self.objects = FaultyStore()
        self.metadata = metadata or FaultyMetadata()
        self.tier = Tier(
            self.objects,
            self.metadata,
            files=self.files,
            clock=ManualClock(),
            node="a",
            root=root,
            runs_in_background=background,
        )

    def open(self, settings: TierSettings = EAGER, name: str = "orders", first_offset: int = 0) -> TieredLog:
        return self.tier.open_log(
            *(DIRECTORY.parent / name, "shop", name, LogSettings(), settings),
            time_field=TIME_FIELD,
            first_offset=first_offset,
        )


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.tier.close()


def add_topic(bench: Bench, namespace: str, name: str, *, keys: int = 1) -> None:
    topic = TopicKeys(namespace, name)
    for number in range(keys):
        bench.metadata.put(topic.descriptor(number), b"{}")
    bench.metadata.put(topic.owner, b"{}")


# Listing


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_topics_are_listed_in_one_request_each(kind: str) -> None:
    """However many entries each of them has."""
    store = FaultyStore()
    bench = Bench(BucketMetadataStore(store) if kind == "bucket" else None)
    for name in ("a", "b", "c"):
        add_topic(bench, "shop", name, keys=300)
    if isinstance(bench.metadata, FaultyMetadata):
        bench.metadata.reset_traffic()
    store.reset_traffic()
    assert list(bench.tier.topics()) == [("shop", "a"), ("shop", "b"), ("shop", "c")]
    if isinstance(bench.metadata, FaultyMetadata):
        assert bench.metadata.traffic.request_count == 4
    else:
        assert store.traffic.request_count <= 8
    bench.tier.close()


def test_small_topics_are_listed_many_in_a_request(bench: Bench) -> None:
    """Loss prevented: a leader of a thousand partitions, which lists them now and then, asked etcd for each of them."""
    names = [f"{number:03}" for number in range(120)]
    for name in names:
        add_topic(bench, "shop", name, keys=4)
    assert isinstance(bench.metadata, FaultyMetadata)
    bench.metadata.reset_traffic()
    assert list(bench.tier.topics()) == [("shop", name) for name in names]
    assert bench.metadata.traffic.request_count <= 4


def test_names_that_begin_alike_are_all_found(bench: Bench) -> None:
    """Nothing is skipped that sorts close to a topic."""
    names = ["a", "a-", "a-b", "a.b", "a0", "a00", "aa", "a_", "b", "A", "0", "z"]
    for name in names:
        add_topic(bench, "shop", name, keys=3)
        add_topic(bench, "shop-2", name)
    found = list(bench.tier.topics())
    assert sorted(found) == sorted([(space, name) for space in ("shop", "shop-2") for name in names])


def test_keys_that_are_no_topics_are_passed_over(bench: Bench) -> None:
    """Of other installations, and of nobody."""
    prefix = "tidelog/storage/topics/"
    for key in (
        prefix + "loose",
        prefix + "shop/loose",
        "tidelog/storage/epoch-floor",
        "other/storage/topics/a/b/owner",
    ):
        bench.metadata.put(key, b"{}")
    add_topic(bench, "shop", "orders")
    assert list(bench.tier.topics()) == [("shop", "orders")]


@pytest.mark.parametrize("kinds", [("staging",), ("replays/nightly",), ("staging", "replays/nightly", "replays/other")])
def test_what_is_only_spoken_of_is_no_topic(bench: Bench, kinds: tuple[str, ...]) -> None:
    """Rows that wait for a name, or a replay into it, make a topic of it when somebody opens it, and not before."""
    keys = TopicKeys("shop", "later")
    for kind in kinds:
        bench.metadata.put(keys.metadata_prefix + kind, b"{}")
    assert list(bench.tier.topics()) == []
    bench.metadata.put(keys.owner, b"{}")
    assert list(bench.tier.topics()) == [("shop", "later")]


def test_installations_in_one_store_are_apart() -> None:
    """Each root has its topics, its owners and its epochs."""
    metadata = FaultyMetadata()
    one = Bench(metadata, root="one")
    two = Bench(metadata, root="two")
    one.open().close()
    assert list(one.tier.topics()) == [("shop", "orders")]
    assert list(two.tier.topics()) == []
    for bench in (one, two):
        bench.tier.close()


# Opening


def test_a_topic_is_opened_where_it_is_asked_to_begin(bench: Bench) -> None:
    """Only while it has no past."""
    log = bench.open(first_offset=40)
    assert (log.start_offset, log.next_offset, log.shipped_offset) == (40, 40, 40)
    log.log.append(b"x" * 20, sync=True)
    log.close()
    again = bench.open(first_offset=90)
    assert again.next_offset == 41
    again.close()


@pytest.mark.parametrize("nth", range(1, 24))
def test_a_topic_that_cannot_be_opened_is_let_go(bench: Bench, nth: int) -> None:
    """Whichever question gets no answer: the lock of its directory is given back, and it can be opened later."""
    assert isinstance(bench.metadata, FaultyMetadata)
    bench.metadata.fail("get", nth=nth, times=None)
    with contextlib.suppress(StoreUnavailableError):
        bench.open().close()
    bench.metadata.heal()
    log = bench.open()
    with pytest.raises(LockedError):
        bench.open()
    log.close()


def test_what_is_appended_is_shipped_in_the_background() -> None:
    """Nobody has to ask."""
    bench = Bench(background=True)
    log = bench.open()
    log.log.append(b"x" * 20, sync=True)
    wait_until(lambda: log.shipped_offset == 1, "the shipper")
    log.close()
    bench.tier.close()


def test_an_owner_that_was_replaced_hears_of_it_by_itself() -> None:
    """Within the time of a check it takes no more appends; what it has can be read."""
    bench = Bench(background=True)
    log = bench.open(TierSettings(ownership_check_seconds=0.01, ship_interval_seconds=1000))
    log.log.append(b"x" * 20, sync=True)
    assert isinstance(bench.metadata, FaultyMetadata)
    other = Bench(bench.metadata)
    second = other.open()
    wait_until(lambda: log.statistics().fenced, "the check")
    with pytest.raises(FencedError):
        log.log.append(b"late")
    with pytest.raises(FencedError):
        log.ship()
    with pytest.raises(FencedError):
        log.prune()
    assert log.log.next_offset == 1
    log.close()
    second.close()
    for one in (bench, other):
        one.tier.close()


# Closing


def test_closing_does_not_wait_for_a_store_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several topics in the middle of an upload that never ends: all are closed after one patience."""
    monkeypatch.setattr(background_module, "_PATIENCE_SECONDS", 0.3)
    bench = Bench(background=True)
    may_answer, hanging = threading.Event(), threading.Semaphore(0)

    def hang(operation: str, _key: str) -> None:
        if operation == "publish":
            hanging.release()
            assert may_answer.wait(LIMIT_SECONDS)

    bench.objects.on_request = hang
    logs = [bench.open(name=f"orders{number}") for number in range(3)]
    for log in logs:
        log.log.append(b"x" * 20, sync=True)
    for _ in logs:
        assert hanging.acquire(timeout=LIMIT_SECONDS)
    begin = time.monotonic()
    for log in logs:
        log.close()
    bench.tier.close()
    took_seconds = time.monotonic() - begin
    may_answer.set()
    assert took_seconds < LIMIT_SECONDS / 2


def test_closing_is_quick_and_may_be_done_twice(bench: Bench) -> None:
    """An idle tier has nothing to wait for."""
    logs = [bench.open(name=f"orders{number}") for number in range(20)]
    begin = time.monotonic()
    for log in logs:
        log.close()
        log.close()
    bench.tier.close()
    bench.tier.close()
    assert time.monotonic() - begin < LIMIT_SECONDS


def test_closing_neither_ships_nor_loses(bench: Bench) -> None:
    """What is not shipped is on the disk, and is shipped after the next opening."""
    log = bench.open()
    log.log.append(b"x" * 20)
    log.close()
    assert bench.objects.contents() == {}
    again = bench.open()
    assert again.ship() == 1
    again.close()
