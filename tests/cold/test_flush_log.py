"""The flush log: what is acknowledged by the store is found by every later owner, and by nobody twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.log.workbench import LIMIT_SECONDS, wait_until

import tidelog
from tidelog.cold.flush_log import FLUSH_SECONDS, FlushDocument, FlushedLog, Section, collect_flushes, read_sections
from tidelog.cold.lease import NodeLease
from tidelog.cold.tiered_log import TieredLog
from tidelog.errors import ClosedError, ConfigError, DataError, FencedError, NotFoundError, StoreUnavailableError
from tidelog.store.keys import FlushKey, flush_key, flush_object, flushes_prefix, parse_flush_key
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.testing import FaultyStore
from tidelog.topics.directory import LogDirectory
from tidelog.topics.topic import Topic

NAME, OTHER = "shop/orders", "shop/other"
QUIET: dict[str, Any] = {"ship_interval_seconds": 3600, "ship_max_delay_seconds": 3600, "ownership_check_seconds": 3600}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[str], LogDirectory]]:
    """Opens the directory of a node; all of them share a store, and nothing ships by itself."""
    nodes: dict[str, LogDirectory] = {}

    def open_node(name: str) -> LogDirectory:
        store = (tmp_path / "store").as_uri()
        (tmp_path / "store").mkdir(exist_ok=True)
        settings: dict[str, Any] = {"store": store, "metadata": "bucket", "durability": "shipped", **QUIET}
        nodes[name] = tidelog.open(tmp_path / name, **settings)
        return nodes[name]

    yield open_node
    for node in nodes.values():
        node.close()


def tiered(topic: Topic) -> TieredLog:
    assert topic._tiered is not None
    return topic._tiered


def flushed(topic: Topic) -> FlushedLog:
    found = tiered(topic).flushed
    assert found is not None
    return found


def stores(topic: Topic) -> tuple[MetadataStore, ObjectStore]:
    node = tiered(topic).node
    return node.metadata, node.objects


def documents(topic: Topic) -> list[FlushDocument]:
    """Those that name an object."""
    metadata, _ = stores(topic)
    found = [msgspec.json.decode(one.value, type=FlushDocument) for one in metadata.range(flushes_prefix())]
    return [one for one in found if one.object]


def values(topic: Topic) -> list[bytes | None]:
    return [message.value for message in topic.read("earliest")]


def test_acknowledged_messages_outlive_the_disk(opened: Callable[[str], LogDirectory]) -> None:
    """A new owner has all that was acknowledged, at its offsets, and goes on after it."""
    topic = opened("a").topic(NAME)
    topic.append(b"first", sync=True)
    topic.append_many([b"second", b"third"], sync=True)
    assert topic.shipped_offset == 0
    taken = opened("b").topic(NAME, take_over=True)
    assert values(taken) == [b"first", b"second", b"third"]
    assert taken.append(b"fourth", sync=True) == 3
    again = opened("c").topic(NAME, take_over=True)
    assert values(again) == [b"first", b"second", b"third", b"fourth"]


def test_topics_share_a_flush(opened: Callable[[str], LogDirectory]) -> None:
    """However many topics have new messages, they are one object."""
    log = opened("a")
    topics = [log.topic(f"shop/topic-{number}") for number in range(20)]
    flush_log = tiered(topics[0]).node.flush_log()
    flush_log.close()  # nothing is flushed by itself from here on
    waiting = [tiered(topic).wait_shipped(topic.append(b"value")) for topic in topics]
    for topic in topics:
        topic.flush()
    flush_log._round()
    assert all(one.done() for one in waiting)
    (document,) = documents(topics[0])
    _, objects = stores(topics[0])
    assert {section.topic for section in read_sections(objects, document)} == {topic.name for topic in topics}


def test_a_flush_looks_at_the_topics_that_have_changed(opened: Callable[[str], LogDirectory]) -> None:
    """Not at all that a node has: a thousand idle topics cost a busy one nothing."""
    log = opened("a")
    topics = [log.topic(f"shop/topic-{number}") for number in range(10)]
    flush_log = tiered(topics[0]).node.flush_log()
    flush_log.close()  # nothing is flushed by itself from here on
    for _ in range(3):
        flush_log._round()
    waiting = tiered(topics[3]).wait_shipped(topics[3].append(b"value"))
    topics[3].flush()
    assert list(flush_log._due) == [flushed(topics[3])]
    flush_log._round()
    assert waiting.done()
    flush_log._round()
    assert not flush_log._due


def test_a_log_that_was_flushed_before_tells_nobody_any_more(opened: Callable[[str], LogDirectory]) -> None:
    """Each change of `durability` to and fro would leave one more call for each sync."""
    log = opened("a")
    topic = log.topic(NAME)
    before = len(topic._log._append_queue.on_durable)
    for _ in range(3):
        log.configure_topic(NAME, durability="synced")
        assert len(topic._log._append_queue.on_durable) == before - 1
        log.configure_topic(NAME, durability="shipped")
        assert len(topic._log._append_queue.on_durable) == before
    topic.append(b"value", sync=True)
    assert len(documents(topic)) == 1


def test_replaced_owner_acknowledges_nothing_and_its_other_topics_go_on(opened: Callable[[str], LogDirectory]) -> None:
    """The fence ends the generation; the next one has only the topics that are still owned."""
    first = opened("a")
    topic, other = first.topic(NAME), first.topic(OTHER)
    topic.append(b"of a", sync=True)
    other.append(b"first", sync=True)
    taken = opened("b").topic(NAME, take_over=True)
    with pytest.raises(FencedError):
        topic.append(b"of nobody", sync=True)
    other.append(b"second", sync=True)
    assert values(taken) == [b"of a"]
    assert values(opened("c").topic(OTHER, take_over=True)) == [b"first", b"second"]


def test_flushes_are_deleted_once_they_are_shipped(opened: Callable[[str], LogDirectory]) -> None:
    """Objects of the topic have the messages then."""
    topic = opened("a").topic(NAME)
    for number in range(3):
        topic.append(b"%d" % number, sync=True)
    assert len(documents(topic)) == 3
    topic.ship()
    wait_until(lambda: not documents(topic), "the documents of the flushes are deleted")
    _, objects = stores(topic)
    wait_until(lambda: not list(objects.list("storage/flushes/")), "the objects of the flushes are deleted")


def test_collection_leaves_what_a_catalog_lacks(opened: Callable[[str], LogDirectory]) -> None:
    """What ended sessions have left goes when the catalogs have it; a fence stays for each generation."""
    log = opened("a")
    topic, other = log.topic(NAME), log.topic(OTHER)
    topic.append(b"shipped", sync=True)
    other.append(b"not shipped", sync=True)
    metadata, objects = stores(topic)
    orphan = documents(topic)[0].object.replace(".tflush", "-0.tflush")
    objects.put(orphan, b"of an attempt that was cut")
    tiered(topic).node.flush_log().close()
    topic.ship()

    def collect() -> None:
        collect_flushes(metadata, objects, "tidelog", lambda _: False, lambda *_: False)

    collect()
    left = documents(topic)
    assert [section.topic for one in left for section in read_sections(objects, one)].count(OTHER) == 1
    other.ship()
    collect()
    assert documents(topic) == []
    assert list(objects.list("storage/flushes/")) == []
    keys = [parse_flush_key(key) for key in metadata.keys(flushes_prefix())]
    assert [key is not None and key.generation for key in keys] == [0]


def test_topics_of_one_flush_are_shipped_before_it_goes(opened: Callable[[str], LogDirectory]) -> None:
    """A flush stays as long as one of its topics has messages that are nowhere else."""
    log = opened("a")
    topic, other = log.topic(NAME), log.topic(OTHER)
    flush_log = tiered(topic).node.flush_log()
    flush_log.close()  # nothing is flushed by itself from here on
    for one in (topic, other):
        one.append(b"value")
        one.flush()
    flush_log._round()
    metadata, objects = stores(topic)
    topic.ship()
    collect_flushes(metadata, objects, "tidelog", lambda _: False, lambda *_: True)
    assert len(documents(topic)) == 1
    other.ship()
    collect_flushes(metadata, objects, "tidelog", lambda _: False, lambda *_: True)
    assert documents(topic) == []


def test_durability_that_is_not_offered_is_refused(opened: Callable[[str], LogDirectory]) -> None:
    """No acknowledgement says more than what stands behind it: there is no copy on another node's disk."""
    log = opened("a")
    log.topic(NAME)
    with pytest.raises(ConfigError, match="durability must be one of shipped, synced"):
        log.configure_topic(NAME, durability="replicated")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="durability must be one of shipped, synced"):
        log.topic(OTHER, durability="replicated")  # type: ignore[call-overload]
    assert log.topics() == [NAME]


def test_durability_can_be_changed_while_the_topic_is_open(opened: Callable[[str], LogDirectory]) -> None:
    """What was synced before the change is flushed as well."""
    log = opened("a")
    topic = log.topic(NAME)
    topic.append(b"first", sync=True)
    log.configure_topic(NAME, durability="synced")
    assert tiered(topic).flushed is None
    topic.append(b"on the disk", sync=True)
    assert len(documents(topic)) == 1
    log.configure_topic(NAME, durability="shipped")
    topic.append(b"in the store", sync=True)
    assert values(opened("b").topic(NAME, take_over=True)) == [b"first", b"on the disk", b"in the store"]


def test_durability_shipped_needs_a_store(tmp_path: Path) -> None:
    """It is refused where there is none, and synced is what every directory can do."""
    with tidelog.open(tmp_path) as log:
        with pytest.raises(ConfigError, match="durability"):
            log.topic(NAME, durability="shipped")
        log.topic(NAME, durability="synced")


@pytest.mark.parametrize("what", ["objects", "metadata"])
def test_waiters_get_the_error_of_the_store(
    opened: Callable[[str], LogDirectory], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Of either store. The message is on the disk, and flushed when the store answers again."""
    topic = opened("a").topic(NAME)
    metadata, objects = stores(topic)
    place, name = (objects, "put") if what == "objects" else (metadata, "commit")
    work, is_away = getattr(place, name), True

    def fail(*arguments: Any) -> Any:
        if is_away:
            raise StoreUnavailableError("out of reach")
        return work(*arguments)

    monkeypatch.setattr(place, name, fail)
    with pytest.raises(StoreUnavailableError):
        topic.append(b"first", sync=True)
    is_away = False
    wait_until(lambda: flushed(topic).flushed_offset == 1, "the message is flushed")
    topic.append(b"second", sync=True)
    assert values(opened("b").topic(NAME, take_over=True)) == [b"first", b"second"]


def test_closing_fails_those_who_wait(opened: Callable[[str], LogDirectory], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a topic that is closed."""
    log = opened("a")
    topic = log.topic(NAME)
    part = flushed(topic)
    part.close()
    with pytest.raises(ClosedError):
        part.join(0).result(LIMIT_SECONDS)


def test_missing_flush_is_an_error(opened: Callable[[str], LogDirectory]) -> None:
    """What was acknowledged and cannot be read is never taken for nothing."""
    topic = opened("a").topic(NAME)
    topic.append(b"first", sync=True)
    _, objects = stores(topic)
    objects.delete([one.object for one in documents(topic)])
    with pytest.raises(NotFoundError):
        opened("b").topic(NAME, take_over=True)


def _encoded(tmp_path: Path) -> tuple[bytes, FlushDocument]:
    settings: dict[str, Any] = {
        "store": (tmp_path / "store").as_uri(),
        "metadata": "bucket",
        "durability": "shipped",
        **QUIET,
    }
    (tmp_path / "store").mkdir()
    with tidelog.open(tmp_path / "a", **settings) as log:
        topic = log.topic(NAME)
        topic.append_many([b"first", b"second"], sync=True)
        _, objects = stores(topic)
        document = documents(topic)[0]
        return bytes(objects.get(document.object).data), document


@pytest.fixture(scope="module")
def flush(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, FlushDocument]:
    """The bytes of a flush of two messages."""
    return _encoded(tmp_path_factory.mktemp("flush"))


@given(data=st.data())
def test_damaged_table_is_refused(flush: tuple[bytes, FlushDocument], data: st.DataObject) -> None:
    """Any bit of it: what is read back is what was written, or an error."""
    content, document = flush
    store = FaultyStore()
    store.put(document.object, content)
    (section,) = read_sections(store, document)
    bit = data.draw(st.integers(0, section.position * 8 - 1))
    broken = bytearray(content)
    broken[bit // 8] ^= 1 << bit % 8
    store.put(document.object, bytes(broken))
    with pytest.raises(DataError):
        read_sections(store, document)


@given(size=st.integers(0, 200))
def test_table_that_is_cut_short_is_refused(flush: tuple[bytes, FlushDocument], size: int) -> None:
    """However much is there."""
    content, document = flush
    store = FaultyStore()
    (section,) = _sections(store, content, document)
    cut = content[: min(size, section.position - 1)]
    with pytest.raises(DataError):
        _sections(store, cut, FlushDocument(object=document.object, size=len(cut)))


def _sections(store: FaultyStore, content: bytes, document: FlushDocument) -> list[Section]:
    store.put(document.object, content)
    return read_sections(store, document)


def test_damaged_frames_are_refused(opened: Callable[[str], LogDirectory]) -> None:
    """The table is right, and a message is not."""
    topic = opened("a").topic(NAME)
    topic.append(b"first", sync=True)
    _, objects = stores(topic)
    name = documents(topic)[0].object
    content = bytes(objects.get(name).data)
    objects.put(name, content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match="damaged"):
        opened("b").topic(NAME, take_over=True)


def test_keys_of_flushes_are_parsed_back() -> None:
    """Only what was built is parsed."""
    key = FlushKey("node", "session", 3, 17)
    assert parse_flush_key(flush_key(key)) == key
    assert flush_object(key, "token").endswith("-token.tflush")
    assert parse_flush_key(flush_key(key) + "0") is None
    assert parse_flush_key("tidelog/storage/flushes/node/session/3/17") is None


def test_lease_tells_whether_a_session_is_alive(opened: Callable[[str], LogDirectory]) -> None:
    """A session without a heartbeat has ended."""
    topic = opened("a").topic(NAME)
    lease: NodeLease = tiered(topic).node.lease
    assert lease.is_alive(lease.node, lease.session)
    assert not lease.is_alive(lease.node, "0" * 16)


def test_flushes_are_paced(opened: Callable[[str], LogDirectory]) -> None:
    """A topic that is appended to all the time is flushed some times a second, not as often as it is synced."""
    topic = opened("a").topic(NAME)
    begin = time.monotonic()
    answers: list[Future[None]] = []
    while time.monotonic() < begin + 5 * FLUSH_SECONDS:
        offset = topic.append(b"value")
        topic.flush()
        answers.append(tiered(topic).wait_shipped(offset))
    for one in answers:
        one.result(LIMIT_SECONDS)
    seconds = time.monotonic() - begin
    assert tiered(topic).node.flush_log().statistics().flushes <= seconds / FLUSH_SECONDS + 2


def test_generation_that_was_begun_after_the_fence_is_read_too(opened: Callable[[str], LogDirectory]) -> None:
    """A node that lives on flushes its other topics; each of them is found by who takes it over then."""
    first, second = opened("a"), opened("b")
    topic, other = first.topic(NAME), first.topic(OTHER)
    topic.append(b"of a", sync=True)
    other.append(b"first", sync=True)
    assert values(second.topic(NAME, take_over=True)) == [b"of a"]
    other.append(b"second", sync=True)
    assert values(second.topic(OTHER, take_over=True)) == [b"first", b"second"]
