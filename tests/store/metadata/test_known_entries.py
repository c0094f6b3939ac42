"""Entries of a bucket that were read before are not read again, as long as the listing shows that they are the same."""

from __future__ import annotations

from contextlib import closing

import pytest

from tidelog.store.metadata.base import Entry
from tidelog.store.metadata.bucket import BucketMetadataStore, _KnownEntries
from tidelog.store.obstore import ObstoreStore
from tidelog.store.settings import StoreSettings
from tidelog.store.urls import open_store

PREFIX = "a/"
KEYS = [f"{PREFIX}{number:02}" for number in range(20)]


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> ObstoreStore:
    """A store whose entries are counted when they are read: `reads` has their keys."""
    found = open_store("memory://", StoreSettings())
    assert isinstance(found, ObstoreStore)
    find = found.find
    reads = list[str]()

    def counting(key: str) -> object:
        reads.append(key)
        return find(key)

    monkeypatch.setattr(found, "find", counting)
    monkeypatch.setattr(found, "reads", reads, raising=False)
    return found


def read_all(store: BucketMetadataStore, objects: ObstoreStore) -> tuple[list[Entry], list[str]]:
    """The entries, and those that were read for it."""
    reads: list[str] = objects.reads  # type: ignore[attr-defined]
    reads.clear()
    entries = store.listed(PREFIX, lambda key: key != KEYS[3])
    assert entries == [entry for entry in store.range(PREFIX) if entry.key != KEYS[3]]
    return entries, sorted({key for key in reads if key != KEYS[3]})


def test_entries_are_read_again_only_when_they_have_changed(objects: ObstoreStore) -> None:
    """What was put, deleted or made again since then is seen; by other stores of the process, too."""
    objects.identity = ("known", id(objects))
    with closing(BucketMetadataStore(objects)) as store, closing(BucketMetadataStore(objects)) as other:
        versions = {key: store.put(key, b"one") for key in KEYS}
        assert read_all(store, objects) == (
            [Entry(key, b"one", versions[key]) for key in KEYS if key != KEYS[3]],
            sorted(set(KEYS) - {KEYS[3]}),
        )
        assert read_all(other, objects)[1] == []
        versions[KEYS[5]] = store.put(KEYS[5], b"two")
        store.remove(KEYS[7], versions.pop(KEYS[7]))
        entries, reads = read_all(other, objects)
        assert entries == [
            Entry(key, b"two" if key == KEYS[5] else b"one", versions[key]) for key in versions if key != KEYS[3]
        ]
        assert set(reads) <= {KEYS[5], KEYS[7]}
        versions[KEYS[7]] = store.put(KEYS[7], b"one")
        assert read_all(store, objects)[0][6] == Entry(KEYS[7], b"one", versions[KEYS[7]])


def test_nothing_is_known_where_etags_may_come_again(objects: ObstoreStore) -> None:
    """A store without an identity is asked every time."""
    with closing(BucketMetadataStore(objects)) as store:
        for key in KEYS:
            store.put(key, b"one")
        for _ in range(2):
            assert read_all(store, objects)[1] == sorted(set(KEYS) - {KEYS[3]})


def test_what_is_known_is_bounded() -> None:
    """The entries that nobody has asked for longest go first."""
    known = _KnownEntries(3000)
    for number in range(4):
        known.put(("store", number), Entry("key", bytes(400), "1"))
        known.get(("store", 0))
    assert [known.get(("store", number)) is not None for number in range(4)] == [True, False, True, True]
