"""Opening a topic for writing: where to go on, whose files these are, and that an error is never taken for nothing."""

from __future__ import annotations

import contextlib
import errno

import pytest
from tests.cold.published import KEYS, KINDS, put_object
from tests.cold.station import DIRECTORY, Node, Stores

from tidelog.cold.catalog import SealedMarker
from tidelog.cold.gc import finish_deletion
from tidelog.cold.ownership import NAME as OWNER_FILE
from tidelog.cold.ownership import LocalClaim, read_local_claim, write_local_claim
from tidelog.cold.takeover import FENCED, divergent_tails, tail_directory
from tidelog.errors import (
    AccessDeniedError,
    ConflictError,
    DataError,
    FencedError,
    GapError,
    InputError,
    StoreUnavailableError,
)
from tidelog.log import Log
from tidelog.log.directory import wal_files
from tidelog.store.document import encode_json
from tidelog.store.keys import ObjectId
from tidelog.testing import FaultyMetadata


@pytest.fixture(params=KINDS)
def stores(request: pytest.FixtureRequest) -> Stores:
    return Stores(request.param)


def metadata_of(stores: Stores) -> FaultyMetadata:
    assert isinstance(stores.metadata, FaultyMetadata)
    return stores.metadata


def names(node: Node) -> list[str]:
    return [name for _, name in wal_files(node.files.list(DIRECTORY))]


def put_aside(node: Node) -> list[tuple[int, int]]:
    """The offsets of each tail that was put aside, empty ones too."""
    return [(tail.first_offset, tail.next_offset) for tail in divergent_tails(node.files, DIRECTORY)]


def lived(stores: Stores, name: str, *, ship: int, keep: int) -> Node:
    """A node that shipped so many messages, accepted some more, and closed."""
    node = Node(stores, name).open()
    node.append(ship)
    node.shipper.ship()
    node.append(keep)
    node.close()
    return node


def sealed(stores: Stores, name: str, count: int) -> Node:
    """A node that handed the topic over: everything shipped, the marker written, its files gone."""
    node = Node(stores, name).open()
    node.append(count)
    node.owned.seal(node.shipper.ship())
    node.close()
    for file in [*names(node), "wal.ckpt"]:
        if node.files.exists(DIRECTORY / file):
            node.files.remove(DIRECTORY / file)
    return node


# Where to go on


def test_a_topic_without_a_past_begins_at_zero(stores: Stores) -> None:
    """Nothing anywhere: the first owner begins at 0, under epoch 1."""
    taken = Node(stores).take()
    assert (taken.next_offset, taken.catalog.epoch) == (0, 1)
    assert stores.catalog.start_offset() == 0


def test_a_topic_without_a_past_begins_where_it_is_asked_to(stores: Stores) -> None:
    """What is imported keeps its offsets; with a past, the past decides."""
    assert Node(stores).take(500).next_offset == 500
    assert stores.catalog.start_offset() == 500
    assert Node(stores, "b").take(900).next_offset == 500


def test_a_sealed_topic_goes_on_behind_its_last_offset(stores: Stores) -> None:
    """On another node, without a gap; the marker is gone once it is owned again."""
    sealed(stores, "a", 7)
    with Node(stores, "b").open() as node:
        assert node.log.next_offset == 7
        assert stores.catalog.sealed() is None


def test_a_topic_sealed_without_a_message_begins_at_zero(stores: Stores) -> None:
    """There is no last offset, and that is not an error."""
    sealed(stores, "a", 0)
    with Node(stores, "b").open() as node:
        assert node.log.next_offset == 0


def test_a_topic_sealed_without_a_message_begins_where_it_was_asked_to(stores: Stores) -> None:
    """A topic that begins at 500 and was sealed empty goes on at 500, and can be opened again."""
    node = Node(stores).open(first_offset=500)
    node.owned.seal(node.shipper.ship())
    node.close()
    assert Node(stores, "b").take().next_offset == 500


def test_a_marker_that_contradicts_the_catalog_is_refused(stores: Stores) -> None:
    """A catalog that ends before the sealed offset has lost something: nothing is guessed."""
    sealed(stores, "a", 7)
    found = stores.catalog.sealed()
    assert found is not None
    marker = SealedMarker(sealed=True, last_committed_offset=9, node="a", epoch=found.epoch, sealed_us=0)
    stores.metadata.put(KEYS.state, encode_json(marker))
    with pytest.raises(DataError, match="sealed the topic at offset 10, but the catalog ends at 7"):
        Node(stores, "b").take()


def test_a_marker_of_an_earlier_epoch_is_not_believed(stores: Stores) -> None:
    """Somebody has owned the topic since, and its end is where that one left it."""
    sealed(stores, "a", 7)
    marker = stores.metadata.get(KEYS.state)
    assert marker is not None
    lived(stores, "b", ship=3, keep=0)
    stores.metadata.put(KEYS.state, marker.value)
    assert Node(stores, "c").take().next_offset == 10


def test_files_that_are_the_end_are_gone_on_with(stores: Stores) -> None:
    """The node that wrote last has messages that were never shipped: they are the end of the topic."""
    node = lived(stores, "a", ship=5, keep=4)
    with node.open() as again:
        assert (again.log.next_offset, again.shipper.shipped_offset) == (9, 5)
        assert again.shipper.ship() == 9
    assert put_aside(node) == []
    assert node.owned.epoch == 2


def test_the_catalog_decides_on_a_new_node(stores: Stores) -> None:
    """Without a marker and without files the topic goes on behind what is in the store."""
    lived(stores, "a", ship=5, keep=4)
    with Node(stores, "b").open() as node:
        assert node.log.next_offset == 5


def test_files_that_end_before_the_catalog_are_put_aside(stores: Stores) -> None:
    """An older copy of the disk: the store has more, and the topic goes on behind that."""
    node = Node(stores).open()
    node.append(4)
    node.close()
    copy = {name: node.files.read(DIRECTORY / name) for name in names(node)}
    node.open()
    node.append(9)
    node.shipper.ship()
    node.close()
    for name in names(node):
        node.files.remove(DIRECTORY / name)
    node.files.remove(DIRECTORY / "wal.ckpt")
    for name, data in copy.items():
        node.files.write_atomically(DIRECTORY / name, data)
    with node.open() as again:
        assert again.log.next_offset == 13
        again.append(1)
    assert [(first == stop) for first, stop in put_aside(node)] == [True]
    with node.open() as again:
        assert again.log.next_offset == 14


def test_files_that_begin_behind_the_catalog_are_a_gap(stores: Stores) -> None:
    """Messages that are in neither place are named, and nothing goes on as if they had never been."""
    node = lived(stores, "a", ship=3, keep=9)
    node.files.remove(DIRECTORY / names(node)[1])
    node.files.remove(DIRECTORY / names(node)[0])
    node.files.remove(DIRECTORY / "wal.ckpt")
    with pytest.raises(GapError) as raised:
        node.take()
    assert (raised.value.first, raised.value.last) == (3, 5)


def test_messages_from_before_there_was_a_store_are_the_topic(stores: Stores) -> None:
    """A local topic that is given a store keeps its messages and its offsets, wherever it begins."""
    node = Node(stores)
    node.open_log(first_offset=40)
    node.append(6)
    node.close()
    with node.open() as again:
        assert (again.log.start_offset, again.log.next_offset, again.shipper.shipped_offset) == (40, 46, 40)
        assert again.shipper.ship() == 46
    assert stores.catalog.start_offset() == 40


@pytest.mark.parametrize("fault", ["unavailable", "unanswered", "late"])
@pytest.mark.parametrize("floor", [0, 3])
def test_a_first_claim_that_failed_does_not_cost_the_local_messages(fault: str, floor: int) -> None:
    """What a local topic had before it was given a store is the topic, also when the first claim gets no answer."""
    stores = Stores()
    for owner in [Node(stores, "elsewhere").take().catalog for _ in range(floor)][-1:]:
        owner.mark_deleted()
        finish_deletion(owner, stores.objects)
    node = Node(stores)
    node.open_log()
    node.append(6)
    node.close()
    metadata_of(stores).fail("commit", fault, matching="owner")  # type: ignore[arg-type]  # all are faults
    with pytest.raises(StoreUnavailableError):
        node.take()
    with node.open() as again:
        metadata_of(stores).land_late_writes()
        assert again.log.next_offset == 6
        assert again.shipper.ship() == 6
    assert put_aside(node) == []


def test_local_messages_that_lost_a_race_are_refused_and_not_put_aside() -> None:
    """Somebody else made a topic of this name first: messages from before are not its fenced tail."""
    stores = Stores()
    node = Node(stores)
    node.open_log()
    node.append(6)
    node.close()
    seen: list[int] = []

    def interfere(operation: str, _keys: str) -> None:
        if operation == "commit" and not seen:
            seen.append(1)
            lived(stores, "b", ship=2, keep=0)

    metadata_of(stores).on_request = interfere
    with pytest.raises(ConflictError):
        node.take()
    for _ in range(2):
        with pytest.raises(InputError, match="never part of this topic"):
            node.take()
    assert put_aside(node) == []
    assert node.open_log().next_offset == 6
    node.close()


def test_an_empty_file_says_nothing_about_where_to_begin(stores: Stores) -> None:
    """A crash can leave a file without a frame: the topic begins where it was asked to, and nothing is put aside."""
    node = Node(stores)
    node.files.create(DIRECTORY / "wal.0000000000.log").close()
    with node.open(first_offset=500) as opened:
        assert opened.log.next_offset == 500
        opened.append(3)
        opened.shipper.ship()
    other = Node(stores, "b")
    other.files.create(DIRECTORY / "wal.0000000000.log").close()
    write_local_claim(other.files, DIRECTORY, LocalClaim(epoch=1, claim=_lineage(stores), intended=None))
    with other.open() as opened:
        assert opened.log.next_offset == 503
    assert put_aside(other) == []


def _lineage(stores: Stores) -> str:
    found = stores.catalog.owner()
    assert found is not None
    return found[0].incarnation


# Files of somebody who was replaced


def test_what_was_not_shipped_is_kept_aside(stores: Stores) -> None:
    """Another node took over: the tail that only this disk has is whole, readable, and named with its offsets."""
    node = lived(stores, "a", ship=5, keep=4)
    expected = [node.files.read(DIRECTORY / name) for name in names(node)]
    lived(stores, "b", ship=2, keep=0)
    with node.open() as again:
        assert again.log.next_offset == 7
        assert put_aside(node) == [(5, 9)]
        tail = divergent_tails(node.files, DIRECTORY)[0]
        folder = tail_directory(node.files, DIRECTORY, tail.name)
        kept = [node.files.read(folder / name) for _, name in wal_files(node.files.list(folder))]
        assert kept == expected
        assert (tail.epoch, tail.count) == (1, 4)


def test_a_tail_that_was_shipped_is_put_aside_as_nothing_lost(stores: Stores) -> None:
    """Everything here is in the store: the files move away, and the tail says that it holds nothing else."""
    node = lived(stores, "a", ship=5, keep=0)
    lived(stores, "b", ship=2, keep=0)
    node.take()
    assert [first == stop for first, stop in put_aside(node)] == [True]


def test_offsets_that_the_new_owner_used_are_part_of_the_tail(stores: Stores) -> None:
    """The store has other messages under the same offsets: ours are not taken for shipped."""
    node = lived(stores, "a", ship=5, keep=4)
    lived(stores, "b", ship=10, keep=0)
    assert node.take().next_offset == 15
    assert put_aside(node) == [(5, 9)]


def test_an_owner_that_accepted_nothing_gives_the_lineage_back(stores: Stores) -> None:
    """A node that only looked leaves the end of the topic with the one before."""
    node = lived(stores, "a", ship=5, keep=4)
    other = Node(stores, "b").open()
    other.owned.ownership.give_back_incarnation()
    other.close()
    with node.open() as again:
        assert again.log.next_offset == 9
        assert again.owned.epoch == 3
    assert put_aside(node) == []


def test_an_owner_that_accepted_nothing_gives_the_lineage_back_as_it_seals(stores: Stores) -> None:
    """Loss prevented: a planned move put the tail of the node before aside, though nobody had written since. After the
    claim of another that accepts something it is put aside."""
    node = lived(stores, "a", ship=5, keep=4)
    for name in ("b", "c"):
        other = Node(stores, name).open()
        other.owned.seal(5, is_unused=True)
        other.close()
    with node.open() as again:
        assert (again.log.next_offset, again.owned.epoch) == (9, 4)
    assert put_aside(node) == []
    lived(stores, "b", ship=1, keep=0)
    assert node.take().next_offset == 6
    assert put_aside(node) == [(5, 9)]


def test_tails_of_several_lives_stay_apart(stores: Stores) -> None:
    """Fenced twice, a node has two tails, the older one first."""
    node = lived(stores, "a", ship=1, keep=2)
    lived(stores, "b", ship=1, keep=0)
    node.open()
    node.append(3)
    node.close()
    lived(stores, "c", ship=1, keep=0)
    node.take()
    assert put_aside(node) == [(1, 3), (2, 5)]


def test_files_that_were_never_part_of_the_topic_are_refused(stores: Stores) -> None:
    """Somebody's local messages under the same name are neither mixed in nor moved."""
    lived(stores, "a", ship=5, keep=0)
    foreign = Node(stores, "x")
    foreign.open_log()
    foreign.append(3)
    foreign.close()
    before = foreign.files.tree()
    with pytest.raises(InputError, match="never part of this topic, which a owns"):
        foreign.take()
    assert foreign.files.tree() == before


def test_a_topic_that_was_deleted_elsewhere_starts_anew(stores: Stores) -> None:
    """Its old files are put aside, its epochs go on, and nothing of before is in it."""
    node = lived(stores, "a", ship=5, keep=4)
    taken = Node(stores, "b").take()
    taken.catalog.mark_deleted()
    finish_deletion(taken.catalog, stores.objects)
    with node.open() as again:
        assert (again.log.next_offset, again.owned.epoch) == (0, 3)
    assert put_aside(node) == [(0, 9)]


def test_a_deletion_that_was_interrupted_is_finished_first(stores: Stores) -> None:
    """Whoever opens the topic next deletes it, and begins anew."""
    node = lived(stores, "a", ship=5, keep=2)
    again = node.take()
    again.catalog.mark_deleted()
    assert stores.object_keys()
    with node.open() as opened:
        assert opened.log.next_offset == 0
    assert stores.object_keys() == []
    assert put_aside(node) == []


def test_local_messages_are_not_swallowed_by_somebodys_deletion(stores: Stores) -> None:
    """Messages that were never part of a topic are refused beside one that is being deleted, not put aside."""
    taken = Node(stores, "b").take()
    taken.catalog.mark_deleted()
    foreign = Node(stores, "x")
    foreign.open_log()
    foreign.append(3)
    foreign.close()
    with pytest.raises(InputError, match="never part of this topic"):
        foreign.take()
    assert len(names(foreign)) == 1
    assert put_aside(foreign) == []


# Errors are never taken for nothing


def test_a_lost_catalog_is_not_a_new_topic(stores: Stores) -> None:
    """Objects of a topic that no catalog knows: the error names one of them and how to make the catalog anew."""
    descriptor = put_object(stores.objects, ObjectId(0, 9, 1), 0)
    with pytest.raises(DataError, match=descriptor.object_id) as raised:
        Node(stores).take()
    assert "rebuild-catalog" in str(raised.value)
    assert stores.catalog.owner() is None


def test_a_damaged_owner_file_is_refused(stores: Stores) -> None:
    """Whose files these are is not guessed; the error says what can be done."""
    node = lived(stores, "a", ship=5, keep=4)
    data = bytearray(node.files.read(DIRECTORY / OWNER_FILE))
    data[-5] ^= 1
    node.files.write_atomically(DIRECTORY / OWNER_FILE, bytes(data))
    epoch = stores.catalog.owner()
    with pytest.raises(DataError, match="not known whose files") as raised:
        node.take()
    assert "owner.json" in str(raised.value)
    assert stores.catalog.owner() == epoch


@pytest.mark.parametrize("fault", ["unavailable", "denied"])
@pytest.mark.parametrize("key", ["owner", "state", "start", "cur", "*"])
def test_a_document_that_cannot_be_read_is_an_error(key: str, fault: str) -> None:
    """Whichever of them it is, the topic is not opened, its files stay, and opening it later goes on rightly."""
    for kind in KINDS[:2]:
        stores = Stores(kind)
        node = lived(stores, "a", ship=5, keep=4)
        before = names(node)
        metadata_of(stores).fail("get", fault, times=None, matching=key)  # type: ignore[arg-type]  # both are faults
        with pytest.raises((StoreUnavailableError, AccessDeniedError)):
            node.take()
        metadata_of(stores).heal()
        assert names(node) == before
        with node.open() as again:
            assert again.log.next_offset == 9


@pytest.mark.parametrize("key", [KEYS.owner, KEYS.state, KEYS.start])
def test_a_document_that_is_nonsense_is_an_error(stores: Stores, key: str) -> None:
    """Nothing is claimed over an owner, a marker or a start that cannot be understood."""
    node = lived(stores, "a", ship=5, keep=4)
    stores.metadata.put(key, b"{nonsense")
    with pytest.raises(DataError, match=key):
        node.take()
    assert len(names(node)) == 3


def test_a_bucket_that_cannot_be_listed_is_an_error(stores: Stores) -> None:
    """Whether there are objects is asked before a topic counts as new."""
    stores.objects.fail("list", times=None)
    if stores.metadata.url.startswith("memory"):
        with pytest.raises(StoreUnavailableError):
            Node(stores).take()


@pytest.mark.parametrize("operation", ["list", "open", "read_at"])
def test_a_disk_that_fails_is_an_error(stores: Stores, operation: str) -> None:
    """Files that cannot be looked at are not files that are not there."""
    node = lived(stores, "a", ship=5, keep=4)
    lived(stores, "b", ship=1, keep=0)
    node.files.fail(operation, error=errno.EIO, times=None)  # type: ignore[arg-type]  # all are operations
    with pytest.raises(OSError, match=r"Input/output"):
        node.take()
    node.files.heal()
    node.take()
    assert put_aside(node) == [(5, 9)]


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("fault", ["unanswered", "late", "unavailable"])
@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_any_write_that_gets_no_answer_can_be_tried_again(kind: str, fault: str, nth: int) -> None:
    """Whatever part of opening is undecided, opening again finds the same end, and nothing is put aside."""
    stores = Stores(kind)
    node = lived(stores, "a", ship=5, keep=4)
    metadata_of(stores).fail("commit", fault, nth=nth)  # type: ignore[arg-type]  # all are faults
    with contextlib.suppress(StoreUnavailableError, ConflictError):
        node.take()
    metadata_of(stores).heal()
    with node.open() as again:
        metadata_of(stores).land_late_writes()
        assert again.log.next_offset == 9
        again.append(1)
        assert again.shipper.ship() == 10
    assert put_aside(node) == []


def test_our_own_claim_that_lands_late_does_not_fence_our_files() -> None:
    """A claim that was given up, and lands while the next one is made, was ours: the files are still the end."""
    stores = Stores()
    node = lived(stores, "a", ship=5, keep=4)
    metadata_of(stores).fail("commit", "late", matching="owner")
    with pytest.raises(StoreUnavailableError):
        node.take()
    landed: list[int] = []

    def land(operation: str, keys: str) -> None:
        if operation == "commit" and "owner" in keys and not landed:
            landed.append(metadata_of(stores).land_late_writes())

    metadata_of(stores).on_request = land
    with pytest.raises(ConflictError):
        node.take()
    assert landed == [1]
    with node.open() as again:
        assert again.log.next_offset == 9
    assert put_aside(node) == []


# The claim


def test_the_claim_is_written_down_beside_the_files(stores: Stores) -> None:
    """So that the next opening knows whose they are."""
    node = Node(stores)
    taken = node.take()
    local = read_local_claim(node.files, DIRECTORY)
    assert local is not None
    assert (local.epoch, local.claim) == (1, taken.catalog.ownership.owner.claim)
    assert local.knows(_lineage(stores))


def test_taking_over_fences_the_one_before(stores: Stores) -> None:
    """It ships nothing from then on, and what it had is its own."""
    first = Node(stores, "a").open()
    first.append(3)
    with Node(stores, "b").open() as second:
        with pytest.raises(FencedError):
            first.shipper.ship()
        second.append(2)
        second.shipper.ship()
    assert [one.epoch for one in stores.descriptors()] == [2]
    first.close()


def test_nothing_is_moved_when_another_is_claiming(stores: Stores) -> None:
    """A claim that loses leaves the directory as it can be opened again."""
    node = lived(stores, "a", ship=5, keep=4)
    for _ in range(3):
        with node.open() as again:
            assert again.log.next_offset == 9
    assert not node.files.exists(DIRECTORY / FENCED)


def test_a_log_opens_over_what_was_taken(stores: Stores) -> None:
    """The offset that taking over gives is where the log without files begins."""
    lived(stores, "a", ship=5, keep=0)
    node = Node(stores, "b")
    taken = node.take()
    log = Log.open(DIRECTORY, files=node.files, first_offset=taken.next_offset)
    assert log.append(b"x", sync=True) == 5
    log.close()


def test_what_retention_deleted_from_the_store_was_shipped(stores: Stores) -> None:
    """The catalog has forgotten it; put aside as never shipped, a rescue would bring back what was deleted."""
    first = lived(stores, "a", ship=5, keep=2)
    taken = Node(stores, "b").take()
    taken.catalog.move_start(5)
    taken.catalog.remove_descriptors(stores.descriptors())
    assert first.take().next_offset == 5
    assert put_aside(first) == [(5, 7)]


def test_a_note_of_an_earlier_epoch_hides_no_tail(stores: Stores) -> None:
    """It may be about another log of the same name: what is not known to be shipped is put aside."""
    node = lived(stores, "a", ship=5, keep=0)
    node.open().append(2)
    node.close()
    taken = Node(stores, "b").take()
    taken.catalog.move_start(5)
    taken.catalog.remove_descriptors(stores.descriptors())
    node.take()
    assert put_aside(node) == [(0, 7)]
