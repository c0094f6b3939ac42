"""Retention without a store: the oldest files go by age and size, in the background and when asked."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from tests.cold.station import DIRECTORY, FRAME_BYTES, Node, Stores
from tests.log.workbench import Gate, Threads, calls_of, wait_until

from tidelog.cold.retention import LocalPruner
from tidelog.cold.settings import TierSettings
from tidelog.errors import TidelogError
from tidelog.log.directory import wal_files
from tidelog.store.scheduler import Background

FILE_BYTES = 3 * FRAME_BYTES


@pytest.fixture
def node() -> Iterator[Node]:
    """Ten files of three messages, one an hour."""
    with Node(Stores()) as node:
        node.open_log()
        for _ in range(10):
            node.append(3)
            node.stores.clock.advance(3600)
        yield node


def pruner(node: Node, **settings: float) -> LocalPruner:
    return LocalPruner(node.log, TierSettings(**settings), node.stores.clock)  # type: ignore[arg-type]  # numbers


def files(node: Node) -> int:
    return len(wal_files(node.files.list(DIRECTORY)))


def test_nothing_goes_when_nothing_is_set(node: Node) -> None:
    """The default is to keep everything."""
    one = pruner(node)
    assert not one.has_work
    one.prune()
    assert files(node) == 10


def test_files_go_by_age(node: Node) -> None:
    """All of whose messages are too old."""
    pruner(node, retention_seconds=5 * 3600).prune()
    assert node.log.start_offset == 15


def test_files_go_by_size(node: Node) -> None:
    """The oldest first, until what is left fits."""
    one = pruner(node, retention_bytes=4 * FILE_BYTES)
    assert one.has_work
    one.prune()
    assert (node.log.start_offset, files(node)) == (18, 4)
    one.prune()
    assert files(node) == 4


def test_the_newest_file_stays(node: Node) -> None:
    """However small the limits are: it may be written to, and it knows where the log goes on."""
    node.stores.clock.advance(1_000_000)
    pruner(node, retention_seconds=1, retention_bytes=1).prune()
    assert (files(node), node.log.next_offset) == (1, 30)


def test_quiet_topic_becomes_empty_by_age(node: Node) -> None:
    """Loss prevented: messages that had to be deleted stayed for ever where no later message came."""
    node.stores.clock.advance(1_000_000)
    pruner(node, retention_seconds=1).prune()
    assert (node.log.start_offset, node.log.next_offset, files(node)) == (30, 30, 1)
    node.append(1)
    assert (node.log.start_offset, node.log.next_offset) == (30, 31)


def test_newest_file_loses_only_what_is_too_old(node: Node) -> None:
    """A file that is written to is not kept whole, and nothing younger than the limit goes."""
    node.append(2)
    node.stores.clock.advance(100)
    node.append(1)
    pruner(node, retention_seconds=50).prune()
    assert (node.log.start_offset, node.log.next_offset) == (32, 33)


def test_messages_that_are_needed_stay(node: Node) -> None:
    """A subscription that holds retention back keeps its messages in the newest file, too."""
    node.stores.clock.advance(1_000_000)
    one = pruner(node, retention_seconds=1)
    one.keep_from = lambda: 28
    one.prune()
    assert node.log.start_offset == 28


def test_it_happens_by_itself(node: Node) -> None:
    """In the background, again and again, until it is stopped."""
    background = Background(1, "test")
    one = pruner(node, retention_bytes=2 * FILE_BYTES, retention_interval_seconds=0.01)
    one.start(background)
    wait_until(lambda: files(node) == 2, "the first look")
    node.append(6)
    wait_until(lambda: node.log.start_offset >= 30, "the next look")
    one.stop()
    node.append(9)
    time.sleep(0.1)
    assert files(node) >= 5
    background.close()


def test_an_error_in_the_background_is_tried_again(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that fails once is told in the log, and the next look goes on."""
    background = Background(1, "test")
    node.files.fail("remove")
    one = pruner(node, retention_bytes=1, retention_interval_seconds=0.01)
    one.start(background)
    wait_until(lambda: files(node) == 1, "the second look")
    one.stop()
    background.close()
    assert "retention failed" in caplog.text


def test_who_asks_hears_of_an_error(node: Node) -> None:
    """By hand it raises."""
    node.files.fail("remove")
    with pytest.raises(TidelogError):
        pruner(node, retention_bytes=1).prune()


def test_by_hand_and_in_the_background_at_once_leaves_no_hole(node: Node) -> None:
    """The second waits until the first has removed what it is at."""
    one = pruner(node, retention_bytes=1)
    with Gate(node.files, "remove") as gate, Threads() as threads:
        threads.start(one.prune)
        gate.wait_until_reached()
        second = threads.start(one.prune)
        second.join(0.05)
        assert len(calls_of(node.files, "remove")) == 1
        gate.open()
    assert files(node) == 1


def test_stopping_before_starting_is_fine(node: Node) -> None:
    """There is nothing to stop."""
    pruner(node, retention_bytes=1).stop()
