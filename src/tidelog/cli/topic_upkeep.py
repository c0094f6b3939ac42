"""`tidelog topic ship`, `seal` and `prune`: what an owner does by itself, done now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

from tidelog.cli.session import Session
from tidelog.cli.topic_show import TopicArgument, usage

if TYPE_CHECKING:
    from tidelog.cli.output import OnDone, Row
    from tidelog.tier.shipper_statistics import ShipperStatistics
    from tidelog.topics.storage import LogDirectory
    from tidelog.topics.topic import Topic

from tidelog.cli.topic_choice import (
    AllOption,
    TakeOverOption,
    TopicsArgument,
    chosen_topics,
    exit_if_any_failed,
    is_sealed,
    require_kept,
    require_ours,
    require_store,
    rows_of_each,
)

_SHIPPED_COLUMNS = ("topic", "shipped_offset", "messages", "objects", "bytes")
_PRUNED_COLUMNS = ("topic", "start_offset", "hot_start_offset", "messages", "objects", "object_bytes", "file_bytes")
_LOOK_SECONDS = 0.2


def ship(
    session: Session,
    topics: TopicsArgument = None,
    every: AllOption = False,
    take_over: TakeOverOption = False,
) -> None:
    """Brings everything that is on this disk to the store, now, and says how far each topic is there.

    A topic of which nothing is on this disk is left as it is. One that another node owns is refused (left out with
    --all), because opening it here would take it over.
    """
    with session.open(runs_in_background=False) as log:
        require_store(log)
        names = chosen_topics(session, log, topics, every, take_over)
        rows = rows_of_each(session, names, lambda name: _ship(session, log, name, take_over))
    session.output.rows(_SHIPPED_COLUMNS, rows)
    exit_if_any_failed(rows)


def _ship(session: Session, log: LogDirectory, name: str, take_over: bool) -> Row:
    files, _ = usage(log.root / name)
    if not files:
        return _shipped(name, _shipped_offset(log, name), 0, 0, 0)
    topic = log.topic(name, take_over=take_over)
    before = _shipper(topic)
    with session.output.progress(f"shipping {name}", before.lag_bytes) as on_done, _watched(topic, on_done):
        shipped = topic.ship()
    after = _shipper(topic)
    objects = after.objects_created - before.objects_created
    return _shipped(name, shipped, shipped - before.shipped_offset, objects, after.bytes_uploaded)


def _shipped(name: str, shipped_offset: int, messages: int, objects: int, size: int) -> Row:
    return dict(zip(_SHIPPED_COLUMNS, (name, shipped_offset, messages, objects, size), strict=True))


def _shipped_offset(log: LogDirectory, name: str) -> int:
    from tidelog.cli.topic_choice import catalog_of

    catalog = catalog_of(log, name)
    assert catalog is not None, "there is a store"
    return catalog.next_offset()


def _shipper(topic: Topic) -> ShipperStatistics:
    tier = topic.statistics().tier
    assert tier is not None and tier.shipper is not None, "an owner has a shipper"
    return tier.shipper


@contextmanager
def _watched(topic: Topic, on_done: OnDone) -> Iterator[None]:
    """Tells how many bytes have been shipped, object by object, while the body ships them."""
    with _repeated(lambda: on_done(_shipper(topic).raw_bytes_uploaded)):
        yield


@contextmanager
def _repeated(look: Callable[[], None]) -> Iterator[None]:
    """Looks a few times a second while the body runs."""
    done = Event()

    def run() -> None:
        while not done.wait(_LOOK_SECONDS):
            look()

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def seal(session: Session, topic: TopicArgument, take_over: TakeOverOption = False) -> None:
    """Hands a topic over: ships everything, writes down where the next owner goes on, and clears this disk of it.

    Whoever opens it next, here or on another node, goes on without a gap. It asks nothing, because nothing is lost: to
    have it back, open it again, for example with `tidelog produce`.
    """
    from tidelog.cli.topic_names import require_topic

    with session.open(runs_in_background=False) as log:
        store = require_store(log).objects.url
        require_topic(log, topic)
        require_kept(log, topic)
        was_sealed = is_sealed(log, topic)
        if not was_sealed:
            require_ours(log, topic, take_over)
            opened = log.topic(topic, take_over=take_over)
            lag_bytes = _shipper(opened).lag_bytes
            with session.output.progress(f"shipping {topic}", lag_bytes) as on_done, _watched(opened, on_done):
                opened.ship()
            opened.seal()
        next_offset = _shipped_offset(log, topic)
    if session.as_json:
        session.output.document({"topic": topic, "sealed": True, "next_offset": next_offset, "store": store})
        return
    done = "was sealed already" if was_sealed else "is sealed"
    session.output.note(f"{topic} {done}: everything below offset {next_offset} is in {store}")
    session.output.note(f"its next owner opens it with that store and goes on at offset {next_offset}")


def prune(
    session: Session,
    topics: TopicsArgument = None,
    every: AllOption = False,
    take_over: TakeOverOption = False,
) -> None:
    """Deletes what the retention settings say, now, and says what went.

    retention_seconds and retention_bytes delete messages for good; local_retention_seconds and local_retention_bytes
    remove files from this disk that the store has. Without any of them nothing is deleted.
    """
    with session.open(runs_in_background=False) as log:
        names = chosen_topics(session, log, topics, every, take_over)
        rows = rows_of_each(session, names, lambda name: _prune(log, name, take_over))
    session.output.rows(_PRUNED_COLUMNS, rows)
    exit_if_any_failed(rows)


def _prune(log: LogDirectory, name: str, take_over: bool) -> Row:
    topic = log.topic(name, take_over=take_over)
    start_before, (_, bytes_before) = topic.start_offset, usage(log.root / name)
    topic.prune()
    _, bytes_after = usage(log.root / name)
    tier = topic.statistics().tier
    retention = None if tier is None else tier.retention
    return {
        "topic": name,
        "start_offset": topic.start_offset,
        "hot_start_offset": topic.hot_start_offset,
        "messages": topic.start_offset - start_before,
        "objects": None if retention is None else retention.cold_objects_removed,
        "object_bytes": None if retention is None else retention.cold_bytes_removed,
        "file_bytes": max(0, bytes_before - bytes_after),
    }
