"""One suite for the offsets of consumer groups, wherever a directory keeps them: in memory, on disk, in a catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import pytest

import tidelog
from tidelog.errors import DataError, FencedError, InputError, NotFoundError
from tidelog.service.kafka.groups.store import GroupRecord, GroupStore
from tidelog.store.keys import TopicKeys, group_cursor, group_key, group_of_cursor
from tidelog.store.metadata.base import MAX_VALUE_BYTES
from tidelog.topics.directory import LogDirectory
from tidelog.topics.subscription.group_offsets import GroupOffset, OffsetKey

KINDS = ["memory", "local", "sqlite", "bucket", "memory-store"]
LASTING = ["local", "sqlite", "bucket"]
ORDERS = "shop/orders"


class Place:
    """Opens a directory of one kind again and again."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path

    def open(self, node: str = "a") -> LogDirectory:
        if self.kind == "memory":
            return tidelog.open(None)
        if self.kind == "memory-store":
            return tidelog.open(None, store="memory://")
        if self.kind == "local":
            return tidelog.open(self.path / node)
        url = "bucket" if self.kind == "bucket" else f"sqlite://{self.path}/metadata.db"
        return tidelog.open(self.path / node, store=f"file://{self.path}/store", metadata=url)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return Place(request.param, tmp_path)


@pytest.fixture
def log(place: Place) -> Iterator[LogDirectory]:
    with place.open() as opened:
        yield opened


def key(partition: int = 0, group: str = "billing", topic: str = ORDERS) -> OffsetKey:
    return OffsetKey(group, topic, partition)


def offsets(log: LogDirectory, topic: str | None = None) -> dict[OffsetKey, tuple[int, int, str]]:
    found = log._group_offsets.load(topic)
    return {one: value[:3] for one, value in found.items() if not isinstance(value, DataError)}


def committed(offset: int) -> tuple[int, int, str]:
    return (offset, -1, "")


def test_offsets_are_kept_by_group_and_partition(log: LogDirectory) -> None:
    """With the leader epoch and the text of the client; names of groups have any characters."""
    log.topic(ORDERS, partitions=3)
    log.topic("shop/audit")
    named = key(group="a group / with Ünicode", topic="shop/audit")
    changes = {
        key(0): GroupOffset(5, 7, "checkpoint 1"),
        key(2): GroupOffset(0),
        key(2, "other"): GroupOffset(9),
        named: GroupOffset(1),
    }
    assert log._group_offsets.store(changes) == {}
    assert offsets(log) == {one: tuple(value)[:3] for one, value in changes.items()}
    assert offsets(log, "shop/audit") == {named: committed(1)}
    assert log._group_offsets.store({key(0): GroupOffset(6), key(2): None, named: None}) == {}
    assert offsets(log) == {key(0): committed(6), key(2, "other"): committed(9)}
    stored = log._group_offsets.load()[key(0)]
    assert isinstance(stored, GroupOffset)
    assert stored.committed_us > 0


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_they_survive_the_directory(place: Place) -> None:
    """Also once the log that they belong to is open."""
    with place.open() as log:
        log.topic(ORDERS, partitions=2).partition(1).append_many([b"x"] * 5)
        assert log._group_offsets.store({key(1): GroupOffset(3, metadata="m")}) == {}
    with place.open() as log:
        assert offsets(log) == {key(1): (3, -1, "m")}
        log.topic(ORDERS).partition(1)
        assert offsets(log) == {key(1): (3, -1, "m")}


@pytest.mark.parametrize("place", LASTING, indirect=True)
def test_one_beyond_the_end_of_a_log_is_moved_back_when_it_is_opened(place: Place) -> None:
    """Those offsets are given to other messages now."""
    with place.open() as log:
        log.topic(ORDERS).append_many([b"x"] * 5)
        log._group_offsets.store({key(): GroupOffset(50)})
    with place.open() as log:
        log.topic(ORDERS)
        assert offsets(log) == {key(): committed(5)}


def test_subscriptions_and_groups_do_not_see_each_other(log: LogDirectory) -> None:
    """They may have the same names."""
    topic = log.topic(ORDERS)
    topic.subscribe("billing").close()
    assert log._group_offsets.store({key(): GroupOffset(0)}) == {}
    assert topic.subscriptions() == ["billing"]
    topic.delete_subscription("billing")
    assert offsets(log) == {key(): committed(0)}
    with pytest.raises(InputError, match="_groups"):
        topic.subscribe("_groups")


def test_a_topic_takes_its_offsets_with_it_when_it_is_deleted(log: LogDirectory) -> None:
    """A new topic of the same name begins without any."""
    for name, partitions in ((ORDERS, 2), ("shop/audit", 1)):
        log.topic(name, partitions=partitions)
        assert log._group_offsets.store({key(partitions - 1, topic=name): GroupOffset(0)}) == {}
        log.delete_topic(name)
        log.topic(name, partitions=partitions)
        assert offsets(log) == {}


def test_a_topic_that_is_not_there_is_not_made(log: LogDirectory) -> None:
    """The others of the same call are stored."""
    log.topic(ORDERS)
    failed = log._group_offsets.store(
        {key(): GroupOffset(1), key(1): GroupOffset(1), key(topic="shop/none"): GroupOffset(1)}
    )
    assert {one: type(error) for one, error in failed.items()} == {
        key(1): InputError,
        key(topic="shop/none"): NotFoundError,
    }
    assert offsets(log) == {key(): committed(1)}
    assert log.topics() == [ORDERS]


def test_a_write_that_meets_a_deletion_leaves_nothing_behind(log: LogDirectory) -> None:
    """The write has found the topic, and waits for its turn while the topic is deleted."""
    log.topic(ORDERS)
    has_found, failed = Event(), dict[OffsetKey, Exception]()
    original = log._group_offsets._log_of

    def find(topic: str, partition: int):  # type: ignore[no-untyped-def]
        found = original(topic, partition)
        has_found.set()
        return found

    log._group_offsets._log_of = find  # type: ignore[method-assign]
    log._group_offsets.writing.acquire()
    writer = Thread(target=lambda: failed.update(log._group_offsets.store({key(): GroupOffset(1)})))
    writer.start()
    assert has_found.wait(60)
    log._topics.pop(next(iter(log._topics)))._delete_storage()
    log._group_offsets.writing.release()
    writer.join(60)
    assert [type(error) for error in failed.values()] == [NotFoundError]
    assert offsets(log) == {}


def test_a_name_that_no_key_can_hold_is_refused(log: LogDirectory) -> None:
    """Too long once it is escaped, or empty."""
    log.topic(ORDERS)
    failed = log._group_offsets.store({key(group="ü" * 100): GroupOffset(1), key(group=""): GroupOffset(1)})
    assert [type(error) for error in failed.values()] == [InputError, InputError]


@pytest.mark.parametrize("kind", ["sqlite", "bucket"])
def test_a_node_that_lost_a_topic_changes_nothing_there(kind: str, tmp_path: Path) -> None:
    """Offsets of other topics in the same call are stored."""
    place = Place(kind, tmp_path)
    with place.open("a") as old:
        old.topic("shop/audit")
        old.topic(ORDERS).append_many([b"x"] * 5)
        old.topic(ORDERS).ship()
        assert old._group_offsets.store({key(): GroupOffset(2)}) == {}
        with place.open("b") as new:
            new.topic(ORDERS, take_over=True)
            failed = old._group_offsets.store({key(): GroupOffset(4), key(topic="shop/audit"): GroupOffset(0)})
            assert {one: type(error) for one, error in failed.items()} == {key(): FencedError}
            assert offsets(new) == {key(): committed(2), key(topic="shop/audit"): committed(0)}
            assert new._group_offsets.store({key(): GroupOffset(3)}) == {}
            assert offsets(new)[key()] == committed(3)


def test_offsets_of_a_directory_that_is_given_a_store_come_along(tmp_path: Path) -> None:
    """As cursors of subscriptions do."""
    with tidelog.open(tmp_path / "a") as log:
        log.topic(ORDERS).append_many([b"x"] * 5)
        log._group_offsets.store({key(): GroupOffset(4)})
    url = f"sqlite://{tmp_path}/elsewhere.db"
    with tidelog.open(tmp_path / "a", store=f"file://{tmp_path}/store", metadata=url) as log:
        log.topic(ORDERS)
        assert offsets(log) == {key(): committed(4)}


def test_a_damaged_one_is_an_error_and_hides_no_other(tmp_path: Path) -> None:
    """It is never taken for one that is not there; the next commit replaces it."""
    with tidelog.open(tmp_path / "a") as log:
        log.topic(ORDERS)
        log._group_offsets.store({key(): GroupOffset(0), key(group="other"): GroupOffset(0)})
        metadata = log._metadata(False)
        assert metadata is not None
        metadata.put(TopicKeys("shop", "orders").subscription(group_cursor("billing")), b'{"offset": -1}')
        found = log._group_offsets.load()
        assert isinstance(found[key()], DataError)
        assert isinstance(found[key(group="other")], GroupOffset)
        assert log._group_offsets.store({key(): GroupOffset(0)}) == {}
        assert offsets(log)[key()] == committed(0)


def test_offsets_of_one_call_are_one_transaction(tmp_path: Path) -> None:
    """However many partitions there are: one sync of the disk."""
    for given in ({}, {"store": f"file://{tmp_path}/store", "metadata": f"sqlite://{tmp_path}/metadata.db"}):
        with tidelog.open(tmp_path / f"a{len(given)}", **given) as log:  # type: ignore[arg-type]
            log.topic(ORDERS, partitions=50)
            log._group_offsets.store({key(number): GroupOffset(0) for number in range(50)})
            metadata = log._metadata(True) if log._tier is None else log._tier.catalog("shop", "orders").metadata
            assert metadata is not None
            before = metadata.change_mark()
            assert isinstance(before, int)
            log._group_offsets.store({key(number): GroupOffset(1) for number in range(50)})
            assert metadata.change_mark() == before + 1


def test_names_of_groups_are_escaped_one_to_one() -> None:
    """Building and parsing are inverse."""
    names = ["a", "A", "a b", "a_b", "a_20b", "_groups", ".", "..", "ü", "a/b"]
    cursors = [group_cursor(name) for name in names]
    assert len(set(cursors)) == len(names)
    assert [group_of_cursor(cursor) for cursor in cursors] == names
    assert [group_of_cursor(text) for text in ("_groups/a_b", "_groups/", "other/a", "a", "_groups/a/b")] == [None] * 5


# The members of groups


def test_members_are_kept_by_group_and_node(place: Place) -> None:
    """Other nodes of the same installation have groups of their own; what is damaged or too large is left out."""
    with place.open() as log:
        ours, theirs = GroupStore(log._shared_metadata, "a"), GroupStore(log._shared_metadata, "b")
        records = {f"group {number}/ü": GroupRecord("classic", "consumer", number, b"members") for number in range(3)}
        assert ours.store(records) == {}
        assert theirs.store({"group 0/ü": GroupRecord("consumer", "consumer", None, b"")}) == {}
        assert ours.load() == records
        large = GroupRecord("classic", "consumer", None, bytes(MAX_VALUE_BYTES))
        assert ours.store({"group 0/ü": None, "group 1/ü": large}) == {}
        metadata, root = log._shared_metadata()
        metadata.put(group_key("damaged", "a", root), b"damaged")
        assert list(ours.load()) == ["group 2/ü"]
        assert list(theirs.load()) == ["group 0/ü"]
        assert offsets(log) == {}
