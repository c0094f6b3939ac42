"""A catalog and its store: which belong together is found out once, whoever races or dies meanwhile."""

from __future__ import annotations

import contextlib
import json
from threading import Barrier, Thread

import pytest

from tidelog.clock import SystemClock
from tidelog.errors import ConfigError, DataError, StoreUnavailableError
from tidelog.store.binding import StoreBinding
from tidelog.store.keys import STORE_ID, store_key
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.object_store import ObjectStore
from tidelog.store.urls import open_store
from tidelog.testing.crash import World, cut_world_everywhere
from tidelog.testing.faults import Call, StoreFault
from tidelog.testing.faulty_store import FaultyMetadata, FaultyStore
from tidelog.testing.history import History

ROOT = "tidelog"


def binding(objects: ObjectStore, metadata: MetadataStore, *, read_only: bool = False) -> StoreBinding:
    return StoreBinding(objects, metadata, ROOT, SystemClock(), read_only=read_only)


def ids(world: World) -> tuple[str, str]:
    """Of the store and of the catalog."""
    stored = json.loads(world.store.get(STORE_ID).data)["store_id"]
    entry = world.metadata.get(store_key(ROOT))
    assert entry is not None
    return stored, json.loads(entry.value)["store_id"]


def test_new_installation_is_bound_and_opens_again() -> None:
    """Both have the same id, and it stays."""
    world = World()
    binding(world.store, world.metadata).check()
    first = ids(world)
    binding(world.store, world.metadata).check()
    assert ids(world) == first
    assert first[0] == first[1]


def test_other_store_is_refused_and_changes_nothing() -> None:
    """Loss prevented: a second installation with the same metadata_root fenced the first and mixed their catalogs."""
    metadata, mine, other = MemoryMetadataStore(), open_store("memory://"), open_store("memory://")
    mine.url, other.url = "s3://mine", "s3://other"
    binding(mine, metadata).check()
    for read_only in (False, True):
        with pytest.raises(ConfigError, match=r"s3://mine .*not to s3://other.*metadata_root='tidelog-2'"):
            binding(other, metadata, read_only=read_only).check()
    assert list(other.list()) == []
    StoreBinding(other, metadata, "tidelog-2", SystemClock()).check()
    with pytest.raises(ConfigError, match=r"whose id is [0-9a-f]{32}"):
        binding(other, metadata).check()


def test_crash_at_every_call_leaves_an_installation_that_opens() -> None:
    """Whatever of the two writes was done, the next opening binds the same pair."""

    def workload(world: World, _: History) -> None:
        binding(world.store, world.metadata).check()

    def check(world: World, _: History) -> None:
        binding(world.store, world.metadata).check()
        stored, bound = ids(world)
        assert stored == bound

    cut_world_everywhere(workload, check)


@pytest.mark.parametrize("moment", ["store.put_if_absent", "metadata.commit"])
@pytest.mark.parametrize("is_same_store", [True, False])
def test_who_comes_in_between_agrees_or_is_refused(moment: str, is_same_store: bool) -> None:
    """Another opening that runs as a whole before a write of the first: one id, and one store for the catalog."""
    other = open_store("memory://")
    other.url = "s3://other"
    met: list[str] = []

    def on_call(call: Call) -> None:
        if call.operation == moment and not met:
            met.append(moment)
            binding(world.store if is_same_store else other, world.metadata).check()

    world = World(on_call=on_call)
    refused = contextlib.nullcontext() if is_same_store else pytest.raises(ConfigError, match="s3://other")
    with refused:
        binding(world.store, world.metadata).check()
    assert met
    assert not is_same_store or len(set(ids(world))) == 1


def test_nodes_that_open_a_new_installation_at_once_agree() -> None:
    """In threads, as they happen to run."""
    world, start = World(), Barrier(8)
    passed: list[bool] = []

    def open_node() -> None:
        start.wait()
        binding(world.store, world.metadata).check()
        passed.append(True)

    threads = [Thread(target=open_node) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(passed) == 8
    assert len(set(ids(world))) == 1


@pytest.mark.parametrize("fault", ["unavailable", "unanswered", "late"])
def test_lost_answer_while_the_id_is_made_is_settled_by_the_next_opening(fault: StoreFault) -> None:
    """The first one raises, since it does not know; the next one takes what is there, and what comes late is late."""
    world = World()
    world.store.fail("put_if_absent", fault)
    with pytest.raises(StoreUnavailableError):
        binding(world.store, world.metadata).check()
    binding(world.store, world.metadata).check()
    world.store.land_late_writes()
    assert len(set(ids(world))) == 1


class TestOutage:
    """Stores that give no answer."""

    def test_catalog_of_the_same_url_is_used_without_the_store(self) -> None:
        """Appending goes on without the object store, also after a restart."""
        objects, metadata = FaultyStore(), MemoryMetadataStore()
        binding(objects, metadata).check()
        objects.fail("get", times=None)
        binding(objects, metadata).check()
        with pytest.raises(StoreUnavailableError):
            binding(objects, metadata).check(asks_store=True)

    def test_new_installation_needs_both_stores(self) -> None:
        """Nobody goes on without knowing whose catalog it is."""
        objects, metadata = FaultyStore(), FaultyMetadata()
        objects.fail("get")
        with pytest.raises(StoreUnavailableError):
            binding(objects, metadata).check()
        metadata.fail("get")
        with pytest.raises(StoreUnavailableError):
            binding(objects, metadata).check()
        binding(objects, metadata).check()

    def test_reader_goes_on_without_the_metadata(self) -> None:
        """It is asked once and not again."""
        objects, metadata = FaultyStore(), FaultyMetadata()
        metadata.fail("get")
        found = binding(objects, metadata, read_only=True)
        found.check()
        found.check()


def test_damaged_documents_are_named() -> None:
    """They are neither ignored nor made anew."""
    world = World()
    binding(world.store, world.metadata).check()
    world.store.put(STORE_ID, b"{}")
    with pytest.raises(DataError, match=STORE_ID):
        binding(world.store, world.metadata).check(asks_store=True)
    world.metadata.put(store_key(ROOT), b"nonsense")
    with pytest.raises(DataError, match=store_key(ROOT)):
        binding(world.store, world.metadata).check()


def test_same_url_at_another_endpoint_is_another_store() -> None:
    """It is found when a directory is bound: one name of a bucket, and two servers that have one of that name."""
    world, elsewhere = World(), World()
    binding(world.store, world.metadata).check(asks_store=True)
    assert elsewhere.store.url == world.store.url
    with pytest.raises(ConfigError, match="has no id"):
        binding(elsewhere.store, world.metadata).check(asks_store=True)
    assert elsewhere.store.contents() == {}


def test_opening_again_asks_one_question_where_the_url_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none the second time; a reader leaves an unbound catalog unbound."""
    objects, metadata = open_store("memory://"), MemoryMetadataStore()
    reader = binding(objects, metadata, read_only=True)
    reader.check()
    assert metadata.keys("") == []
    binding(objects, metadata).check()
    monkeypatch.setattr(objects, "get", None)
    for read_only in (False, True):
        binding(objects, metadata, read_only=read_only).check()
    monkeypatch.setattr(metadata, "get", None)
    reader.check()
