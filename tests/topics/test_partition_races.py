"""One name is created with and without partitions at the same moment: one of them wins, and nothing is hidden."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.cold.ownership import Ownership
from tidelog.errors import ConflictError, HeldError, InputError, StoreUnavailableError
from tidelog.store import document
from tidelog.topics.names import TopicName
from tidelog.topics.open import TopicOpener
from tidelog.topics.partitioned import PartitionedTopic

NAME = "shop/orders"
Nodes = tuple[tidelog.LogDirectory, tidelog.LogDirectory]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tidelog.LogDirectory]:
    with tidelog.open(tmp_path / "data") as opened:
        yield opened


@pytest.fixture(params=["sqlite", "bucket"])
def nodes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """Two nodes over one store, whose metadata can change several keys at once, or one at a time."""
    monkeypatch.setattr(document, "FIRST_PAUSE_SECONDS", 0)
    metadata = "bucket" if request.param == "bucket" else f"sqlite://{tmp_path}/metadata.db"
    with ExitStack() as stack:
        one, two = (
            stack.enter_context(tidelog.open(tmp_path / name, store=f"file://{tmp_path}/bucket", metadata=metadata))
            for name in ("one", "two")
        )
        yield one, two


def once(before: Callable[[], object], call: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
    """The call, with something that happens right before or after it the first time."""
    waiting = [before]

    def called(*arguments: Any, **options: Any) -> Any:
        if not after and waiting:
            waiting.pop()()
        result = call(*arguments, **options)
        if after and waiting:
            waiting.pop()()
        return result

    return called


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def everything(log: tidelog.LogDirectory, name: str = NAME) -> list[bytes]:
    return sorted(message.value or b"" for message in log.topic(name).read())


def test_thread_that_creates_a_plain_topic_gets_the_partitions_of_another(
    log: tidelog.LogDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages would be hidden behind them."""
    divide = lambda: in_thread(lambda: log.topic(NAME, partitions=3))  # noqa: E731
    monkeypatch.setattr(log._opener, "layout", once(divide, log._opener.layout, after=True))
    topic: object = log.topic(NAME)
    assert isinstance(topic, PartitionedTopic)
    topic.append(b"a")
    assert everything(log) == [b"a"]


def test_threads_that_create_one_name_lose_nothing(tmp_path: Path) -> None:
    """Whichever was first: what was appended through either is read by name, now and later."""
    names = [f"shop/t{number}" for number in range(12)]
    with tidelog.open(tmp_path) as log:
        for name in names:
            both = threading.Barrier(2)

            def create(count: int | None, name: str = name, both: threading.Barrier = both) -> None:
                both.wait()
                topic = log.topic(name) if count is None else log.topic(name, partitions=count)
                topic.append(b"%d" % (count or 1), sync=True)

            threads = [threading.Thread(target=create, args=(count,)) for count in (None, 3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert everything(log, name) == [b"1", b"3"]
    with tidelog.open(tmp_path) as log:
        assert [everything(log, name) for name in names] == [[b"1", b"3"]] * len(names)


def test_node_that_creates_a_plain_topic_is_refused_after_partitions(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked for partitions before there were some; then it finds them."""
    one, two = nodes
    divide = lambda: two.topic(NAME, partitions=3).append(b"two", partition=0, sync="shipped")  # noqa: E731
    assert one._tier is not None
    monkeypatch.setattr(one._tier, "open_log", once(divide, one._tier.open_log))
    with pytest.raises(ConflictError, match="with partitions at the same moment"):
        one.topic(NAME)
    again: object = one.topic(NAME)
    assert isinstance(again, PartitionedTopic)
    again.append(b"one", partition=1, sync="shipped")
    two.close()
    assert everything(one) == [b"one", b"two"]
    one.delete_topic(NAME)
    assert not one.has_topic(NAME)


def test_node_that_creates_partitions_is_refused_after_a_plain_topic(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had found no such topic; later it can add partitions to it."""
    one, two = nodes
    create = lambda: one.topic(NAME).append(b"one", sync="shipped")  # noqa: E731
    monkeypatch.setattr(two._opener, "exists", once(create, two._opener.exists, after=True))
    with pytest.raises(ConflictError, match="without partitions at the same moment"):
        two.topic(NAME, partitions=3)
    assert everything(one) == [b"one"]
    with pytest.raises(HeldError):
        two.topic(NAME, partitions=3)
    one.close()
    two.topic(NAME, partitions=3).append(b"two", partition=2)
    assert everything(two) == [b"one", b"two"]


def test_plain_topic_waits_for_no_claim_of_partitions(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a node records partitions it holds the name: the other is refused, and finds them a moment later."""
    one, two = nodes
    refused: list[BaseException] = []

    def create() -> None:
        with pytest.raises((HeldError, ConflictError)) as caught:
            one.topic(NAME)
        refused.append(caught.value)

    document_type = document.VersionedDocument
    monkeypatch.setattr(document_type, "create", once(create, document_type.create))
    two.topic(NAME, partitions=2)
    assert refused
    found: object = one.topic(NAME)
    assert isinstance(found, PartitionedTopic)


def test_nodes_that_create_the_same_partitions_both_get_them(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """As several nodes do when they start; the larger number counts."""
    one, two = nodes
    other = lambda: one.topic(NAME, partitions=4)  # noqa: E731
    monkeypatch.setattr(TopicOpener, "_create_layout", once(other, TopicOpener._create_layout))
    assert two.topic(NAME, partitions=3).partitions == 4
    assert one.topic(NAME, partitions=4).partitions == 4


def test_partitions_that_another_node_adds_are_used(nodes: Nodes) -> None:
    """By a handle from before, and by who asks for as many."""
    one, two = nodes
    topic = one.topic(NAME, partitions=2)
    other = two.topic(NAME, partitions=5)
    assert (topic.partitions, other.partitions) == (2, 5)
    topic.partition(3).append(b"one", sync="shipped")
    assert topic.partitions == 5
    assert two.topic(NAME, partitions=6) is other
    assert one.topic(NAME, partitions=6) is topic
    assert (topic.partitions, other.partitions) == (6, 6)
    with pytest.raises(InputError, match="partitions 0 to 5, not 6"):
        topic.partition(6)


def test_creation_cut_off_before_its_claim_ends_leaves_a_topic(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partitions are recorded: they are used, and go with the topic."""
    one, two = nodes
    with monkeypatch.context() as cut:
        cut.setattr(Ownership, "remove", fail)
        with pytest.raises(StoreUnavailableError):
            one.topic(NAME, partitions=2)
    one.topic(NAME, partitions=2).append(b"one", partition=0, sync="shipped")
    one.close()
    assert everything(two) == [b"one"]
    two.delete_topic(NAME)
    assert (two.has_topic(NAME), two.topics()) == (False, [])


def test_creation_cut_off_after_its_claim_is_made_again(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is claimed, and nothing is recorded: the next one takes what is there for a topic that is empty."""
    one, two = nodes
    with monkeypatch.context() as cut:
        cut.setattr(document.VersionedDocument, "create", fail)
        cut.setattr(Ownership, "remove", fail)
        with pytest.raises(StoreUnavailableError):
            one.topic(NAME, partitions=2)
    one.close()
    two.topic(NAME, partitions=2).append(b"two", partition=0)
    assert everything(two) == [b"two"]
    two.delete_topic(NAME)
    assert two.topics() == []


def fail(*_: object) -> None:
    raise StoreUnavailableError("the store does not answer")


def test_partitions_that_another_node_records_while_one_is_opened_are_found(nodes: Nodes) -> None:
    """Lost: a new topic's partitions could not be opened at first where two nodes began with it at the same moment."""
    one, two = nodes
    name = TopicName("shop", "orders")
    with two._opener.reading_once(name):
        assert two._opener.layout(name) is None
        one.topic(NAME, partitions=4).append(b"value", partition=0)
        assert two.topic(NAME, partitions=4).partition(1).append(b"value") == 0
        asked = two._opener.layout(name)
    assert asked is not None
    assert asked.count == 4
