"""Retention of a topic that is owned: the store by its limits, the disk only as far as the store has a copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cold.published import KINDS
from tests.cold.station import DIRECTORY, FRAME_BYTES, Node, Stores

from tidelog.cold.retention import Pruner
from tidelog.cold.settings import TierSettings
from tidelog.errors import FencedError, StoreUnavailableError, TidelogError
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.directory import wal_files
from tidelog.testing import FaultyMetadata

FILE_BYTES = 3 * FRAME_BYTES
OBJECT_BYTES = BINDING_BYTES + FILE_BYTES
SHIPPED = TierSettings(max_object_bytes=FILE_BYTES)


@pytest.fixture(params=KINDS)
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    """Ten files of three messages, one an hour: seven of them shipped, an object each."""
    with Node(Stores(request.param)).open(SHIPPED) as node:
        fill(node)
        yield node


@pytest.fixture
def simple() -> Iterator[Node]:
    """The same over stores that can be made to fail."""
    with Node(Stores()).open(SHIPPED) as node:
        fill(node)
        yield node


def fill(node: Node) -> None:
    for number in range(10):
        node.append(3)
        if number == 6:
            node.shipper.ship()
        node.stores.clock.advance(3600)


def pruner(node: Node, **settings: int) -> Pruner:
    return Pruner(
        *(node.log, node.owned, node.stores.objects, TierSettings(**settings), node.stores.clock),  # type: ignore[arg-type]  # numbers
        lambda: node.shipper.shipped_offset,
    )


def files(node: Node) -> int:
    return len(wal_files(node.files.list(DIRECTORY)))


def objects(node: Node) -> list[int]:
    return [one.start_offset for one in node.stores.descriptors()]


def metadata_of(node: Node) -> FaultyMetadata:
    assert isinstance(node.stores.metadata, FaultyMetadata)
    return node.stores.metadata


def test_nothing_goes_when_nothing_is_set(node: Node) -> None:
    """The default is to keep everything, everywhere."""
    pruner(node).prune()
    assert (files(node), len(objects(node)), node.log.start_offset) == (10, 7, 0)


def test_local_files_go_by_size_as_far_as_they_are_shipped(node: Node) -> None:
    """With the smallest limit all that the store has goes, and not one file more."""
    one = pruner(node, local_retention_bytes=1)
    one.prune()
    assert (node.log.start_offset, files(node)) == (21, 3)
    assert objects(node) == list(range(0, 21, 3))
    assert one.statistics().local_bytes_removed == 7 * FILE_BYTES
    node.shipper.ship()
    one.prune()
    assert (node.log.start_offset, files(node)) == (27, 1)


def test_local_files_go_by_age(node: Node) -> None:
    """What is older than five hours leaves the disk, and stays in the store."""
    pruner(node, local_retention_seconds=5 * 3600).prune()
    assert node.log.start_offset == 15
    assert len(objects(node)) == 7


def test_a_limit_that_is_kept_removes_nothing(node: Node) -> None:
    """Ten files fit."""
    pruner(node, local_retention_bytes=10 * FILE_BYTES, local_retention_seconds=1_000_000).prune()
    assert files(node) == 10


def test_the_topic_is_cut_by_age(node: Node) -> None:
    """Objects older than six hours go for good, their files with them, and the start moves."""
    one = pruner(node, retention_seconds=6 * 3600)
    one.prune()
    assert (one.start_offset, node.stores.catalog.start_offset(), node.log.start_offset) == (12, 12, 12)
    assert objects(node) == [12, 15, 18]
    assert len(node.stores.object_keys()) == 3
    statistics = one.statistics()
    assert (statistics.cold_objects_removed, statistics.cold_bytes_removed) == (4, 4 * OBJECT_BYTES)


def test_the_topic_is_cut_by_size(node: Node) -> None:
    """The oldest objects go while there is too much."""
    one = pruner(node, retention_bytes=2 * OBJECT_BYTES)
    one.prune()
    assert (objects(node), one.start_offset) == ([15, 18], 15)


def test_what_is_not_shipped_never_goes(node: Node) -> None:
    """However old and however much: it has no other copy."""
    pruner(node, retention_seconds=1, retention_bytes=1, local_retention_bytes=1, local_retention_seconds=1).prune()
    assert (node.log.start_offset, node.log.next_offset) == (21, 30)
    assert node.shipper.ship() == 30


def test_a_file_whose_object_is_gone_stays(simple: Node) -> None:
    """The store is asked before a file goes; the first doubt ends it."""
    simple.stores.objects.delete(simple.stores.object_keys()[2])
    lost = next(one for one in simple.stores.descriptors() if one.start_offset == 6)
    simple.stores.objects.delete(simple.stores.catalog.keys.object(lost.name))
    pruner(simple, local_retention_bytes=1).prune()
    assert simple.log.start_offset <= 6


@pytest.mark.parametrize("operation", ["get", "floor"])
def test_what_could_not_be_asked_removes_nothing(simple: Node, operation: str) -> None:
    """An outage is an error, not a permission."""
    one = pruner(simple, local_retention_bytes=1)
    metadata_of(simple).fail(operation, times=None)
    with pytest.raises(StoreUnavailableError):
        one.prune()
    assert files(simple) == 10


def test_a_store_that_cannot_be_asked_removes_nothing(simple: Node) -> None:
    """The objects must have been seen just now."""
    simple.stores.objects.fail("head", times=None)
    with pytest.raises(StoreUnavailableError):
        pruner(simple, local_retention_bytes=1).prune()
    assert files(simple) == 10


@pytest.mark.parametrize("limits", [{"local_retention_bytes": 1}, {"retention_bytes": 1}])
def test_a_replaced_owner_removes_nothing(node: Node, limits: dict[str, int]) -> None:
    """Neither from the store nor from its own disk: it may be needed for a rescue."""
    one = pruner(node, **limits)
    with Node(node.stores, "b").open():
        with pytest.raises(FencedError):
            one.prune()
        with pytest.raises(FencedError):
            one.prune_if_due()
    assert (files(node), len(objects(node))) == (10, 7)


@pytest.mark.parametrize("operation", ["delete", "commit"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_interrupted_deletion_is_finished_and_the_start_is_known(simple: Node, operation: str, nth: int) -> None:
    """After an outage in the middle the next look finishes it, and readers begin where the topic begins now."""
    one = pruner(simple, retention_bytes=2 * OBJECT_BYTES)
    store = simple.stores.objects if operation == "delete" else metadata_of(simple)
    store.fail(operation, nth=nth)
    with pytest.raises(StoreUnavailableError):
        one.prune()
    one.prune()
    assert objects(simple) == [15, 18]
    assert one.start_offset == simple.stores.catalog.start_offset() == 15
    assert simple.log.start_offset == 15


@pytest.mark.parametrize("fault", ["unanswered", "late"])
def test_a_start_whose_move_is_undecided_is_looked_up(simple: Node, fault: str) -> None:
    """It may have moved without an answer: the next look goes by what the store says."""
    one = pruner(simple, retention_bytes=2 * OBJECT_BYTES)
    metadata_of(simple).fail("commit", fault)  # type: ignore[arg-type]  # both are faults
    with pytest.raises(StoreUnavailableError):
        one.prune()
    metadata_of(simple).land_late_writes()
    one.prune()
    assert one.start_offset == simple.stores.catalog.start_offset() == 15
    assert objects(simple) == [15, 18]


def test_the_start_is_known_as_soon_as_it_has_moved(simple: Node) -> None:
    """Also while the objects below it cannot be deleted: nobody may read them any more."""
    one = pruner(simple, retention_bytes=2 * OBJECT_BYTES)
    simple.stores.objects.fail("delete", times=None)
    with pytest.raises(StoreUnavailableError):
        one.prune()
    assert one.start_offset == simple.stores.catalog.start_offset() == 15


def test_what_an_earlier_owner_left_half_done_is_finished(simple: Node) -> None:
    """The start is the written plan; whoever owns the topic next carries it out."""
    simple.owned.move_start(9)
    one = pruner(simple)
    assert one.start_offset == 9
    one.prune()
    assert objects(simple)[0] == 9
    assert simple.log.start_offset == 9


def test_errors_in_the_background_are_counted_and_told(simple: Node) -> None:
    """They are counted, and a success clears the last one."""
    one = pruner(simple, local_retention_bytes=1, retention_interval_seconds=7)
    simple.stores.objects.fail("head", times=1)
    with pytest.raises(StoreUnavailableError):
        one.prune_if_due()
    failed = one.statistics()
    assert failed.errors == 1
    assert "not available" in (failed.last_error or "")
    assert one.prune_if_due() == 7
    assert (one.statistics().errors, one.statistics().last_error) == (1, None)
    assert files(simple) == 3


def test_a_disk_that_fails_at_removing_is_an_error_of_ours(simple: Node) -> None:
    """Nothing else gets out, and the next look goes on there."""
    one = pruner(simple, local_retention_bytes=1)
    simple.files.fail("remove")
    with pytest.raises(TidelogError):
        one.prune()
    one.prune()
    assert files(simple) == 3
