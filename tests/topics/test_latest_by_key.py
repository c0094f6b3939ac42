"""A topic as a table: the newest message of every key, held to a dict."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.topics.storage_modes import Storage, storage_fixture

import tidelog
from tidelog.log import LogSettings
from tidelog.log.settings import KIB
from tidelog.testing import FaultyFiles, ManualClock
from tidelog.topics.directory import LogDirectory
from tidelog.topics.latest_by_key import LatestByKey
from tidelog.topics.topic import Topic

storage = storage_fixture(["local", "shared_fs-sqlite", "object_store-bucket"])
Change = tuple[bytes | None, bytes]
CHANGES = st.lists(st.tuples(st.sampled_from([None, b"", b"a", b"b", b"ab"]), st.sampled_from([b"", b"1", b"2"])))


def table_of(changes: Sequence[Change], first: int = 0, prefix: bytes = b"") -> list[tuple[bytes, bytes, int]]:
    """What the view is to hold: key, value and offset, in order of offset."""
    table: dict[bytes, tuple[bytes, int]] = {}
    for offset, (key, value) in enumerate(changes):
        if key is None or offset < first or not key.startswith(prefix):
            continue
        table.pop(key, None)
        if value:
            table[key] = (value, offset)
    return [(key, value, offset) for key, (value, offset) in table.items()]


def content_of(view: LatestByKey) -> list[tuple[bytes, bytes, int]]:
    """What the view holds."""
    return [(key, message.value or b"", message.offset) for key, message in view.items()]


def append_all(topic: Topic, changes: Sequence[Change]) -> None:
    """One message each."""
    for key, value in changes:
        topic.append(value, key=key)


@given(CHANGES, CHANGES, st.integers(0, 12), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_a_view_is_the_dict_of_the_changes(first: list[Change], later: list[Change], stop: int, values: bool) -> None:
    """Whatever is appended, before the view is made or between two refreshes, it holds what a dict would."""
    with LogDirectory(Path("/data"), files=FaultyFiles(), clock=ManualClock()) as log:
        topic = log.topic("shop/prices")
        append_all(topic, first)
        view = topic.latest_by_key(values=values)
        until = topic.latest_by_key(values=values, stop=stop)
        narrow = topic.latest_by_key(values=values, prefix=b"a")
        assert content_of(view) == table_of(first)
        assert content_of(until) == table_of(first[:stop])
        append_all(topic, later)
        for refreshed in (view, until, narrow):
            refreshed.refresh()
        changes = first + later
        assert content_of(view) == table_of(changes)
        assert content_of(until) == table_of(changes[:stop])
        assert content_of(narrow) == table_of(changes, prefix=b"a")
        assert view.next_offset == len(changes)
        assert [view.offset_of(key) for key in view] == [message.offset for message in view.values()]


@pytest.mark.parametrize("values", [True, False])
def test_a_view_goes_over_bucket_disk_and_memory(storage: Storage, tmp_path: Path, values: bool) -> None:
    """A key whose newest message is only in the store is found as one that was appended just now."""
    changes = [(b"k%d" % (number % 7), b"v%d" % number) for number in range(60)] + [(b"k3", b"")]
    own: dict[str, Any] = {"rotate_max_bytes": 1 * KIB, **({"local_retention_bytes": 1} if storage.has_store else {})}
    with storage.open(tmp_path / "data", **own) as log:
        topic = log.topic("shop/prices")
        append_all(topic, [(b"only-cold", b"x"), *changes])
        if storage.has_store:
            topic.ship()
            topic.prune()
            assert topic.hot_start_offset > 1
        view = topic.latest_by_key(values=values)
        assert content_of(view) == table_of([(b"only-cold", b"x"), *changes])
        topic.append(b"new", key=b"k3")
        assert b"k3" not in view
        view.refresh()
        assert list(view)[-1] == b"k3"
        assert view[b"k3"].value == b"new"


@pytest.mark.parametrize("values", [True, False])
def test_what_retention_deletes_leaves_the_view(values: bool) -> None:
    """A refreshed view is what a new one would be, also where everything it had read is gone."""
    log_settings = LogSettings(rotate_max_bytes=200, cache_max_messages=0)
    with LogDirectory(Path("/data"), log_settings, files=FaultyFiles(), clock=ManualClock()) as log:
        topic = log.topic("shop/prices", retention_bytes=400)
        changes: list[Change] = [(b"old", b"1"), *((b"k%d" % (n % 3), b"%d" % n) for n in range(1, 20))]
        append_all(topic, changes)
        view = topic.latest_by_key(values=values)
        behind = topic.latest_by_key(values=values, stop=3)
        more: list[Change] = [(b"n%d" % (n % 2), b"%d" % n) for n in range(40)]
        append_all(topic, more)
        topic.flush()
        topic.prune()
        assert topic.start_offset > len(changes)
        view.refresh()
        behind.refresh()
        assert content_of(view) == table_of(changes + more, topic.start_offset)
        assert content_of(view) == content_of(topic.latest_by_key())
        assert len(behind) == 0


def test_a_refresh_reads_only_what_is_new(tmp_path: Path) -> None:
    """The topic is gone through once: a second look begins where the first one ended."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic("shop/prices")
        topic.append(b"1", key=b"a")
        view = topic.latest_by_key()
        known = view[b"a"]
        topic.append(b"2", key=b"b")
        assert view.refresh() == 2
        assert view[b"a"] is known
        assert view[b"b"].value == b"2"
        assert view.refresh() == 2


def test_a_lost_message_is_an_error_unless_it_is_passed_over(tmp_path: Path) -> None:
    """The lost one may have been the newest of its key, so nobody is to take the view for complete unasked."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic("shop/prices")
        topic.append(b"1", key=b"a")
        view, skipping = topic.latest_by_key(), topic.latest_by_key(on_gap="skip")
        topic.append(b"2", key=b"b")
        topic._append_lost(2)
        with pytest.raises(tidelog.GapError):
            topic.latest_by_key()
        for _ in range(2):
            with pytest.raises(tidelog.GapError):
                view.refresh()
            assert view.next_offset == 2
            assert list(view) == [b"a", b"b"]
        assert skipping.refresh() == 4
        assert list(skipping) == [b"a", b"b"]


def test_a_view_can_be_refreshed_by_a_task(tmp_path: Path) -> None:
    """The loop goes on meanwhile."""
    with tidelog.open(tmp_path) as log:
        topic = log.topic("shop/prices")
        view = topic.latest_by_key()
        topic.append(b"1", key=b"a")
        assert asyncio.run(view.refresh_async()) == 1
        assert view[b"a"].value == b"1"
        assert repr(view) == "<LatestByKey 1 keys as of 1>"


def test_what_is_not_there_is_a_key_error(tmp_path: Path) -> None:
    """As in every mapping."""
    with tidelog.open(tmp_path) as log:
        for values in (True, False):
            view = log.topic("shop/prices").latest_by_key(values=values)
            with pytest.raises(KeyError):
                view[b"a"]
            assert view.get(b"a") is None
        with pytest.raises(tidelog.InputError):
            log.topic("shop/prices").latest_by_key(prefix="a")  # type: ignore[arg-type]


def test_a_view_works_beside_the_owner(tmp_path: Path) -> None:
    """Who opened the directory for reading only has a view too."""
    with tidelog.open(tmp_path) as log:
        log.topic("shop/prices").append(b"1", key=b"a", sync=True)
        with tidelog.open(tmp_path, read_only=True) as onlooker:
            view = onlooker.topic("shop/prices").latest_by_key(values=False)
            assert view[b"a"].value == b"1"


def test_the_mark_of_a_compacted_topic_is_remembered() -> None:
    """It is a setting of the topic, with and without a store, and only what it can be is accepted."""
    for store in (False, True):
        with tempfile.TemporaryDirectory() as place:
            given: dict[str, Any] = {"store": f"file://{place}/bucket"} if store else {}
            with tidelog.open(f"{place}/data", **given) as log:
                log.topic("shop/prices", compaction="by_key")
                with pytest.raises(tidelog.ConfigError):
                    log.topic("shop/others", compaction="by_luck")  # type: ignore[call-overload]
            with tidelog.open(f"{place}/data") as log:
                assert log.configure_topic("shop/prices") == {"compaction": "by_key"}
