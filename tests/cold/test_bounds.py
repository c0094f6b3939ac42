"""Numbers in catalog documents that cannot be: none is believed, and the error names the key and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cold.test_descriptor import good

import tidelog
from tidelog.cold import catalog as owner
from tidelog.cold.catalog import decode_descriptor, impossible_number
from tidelog.cold.cursor import Cursor
from tidelog.engine.cold.manifest import Manifest, decode_manifest, encode_manifest
from tidelog.errors import DataError
from tidelog.staging.document import StagedCommit, StagingDocument, decode_staging
from tidelog.store.document import decode_json
from tidelog.store.keys import EngineKeys
from tidelog.store.metadata.open import open_metadata_store

HUGE = 10**30
CURSOR: dict[str, Any] = {"offset": 5, "epoch": 1, "moved_us": 7}
DOCUMENTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "owner": (
        owner.Owner,
        {"epoch": 1, "claim": "c", "incarnation": "c", "node": "n", "claimed_us": 7, "log_id": "0" * 32},
    ),
    "state": (
        owner.SealedMarker,
        {"sealed": True, "last_committed_offset": 4, "node": "n", "epoch": 1, "sealed_us": 7},
    ),
    "start": (owner.StartMark, {"start_offset": 5, "epoch": 1, "moved_us": 7}),
    "cursor": (Cursor, {**CURSOR, "created_us": 3, "dead_letter_offset": 2}),
}
FIELDS = [(name, field) for name, (_, good) in DOCUMENTS.items() for field, value in good.items() if type(value) is int]


@pytest.mark.parametrize(("name", "field"), FIELDS)
@pytest.mark.parametrize("number", [-1, 1 << 63, (1 << 64) - 1, HUGE])
def test_a_number_that_cannot_be_is_refused_by_name(name: str, field: str, number: int) -> None:
    """Of every field of who owns a topic, where it begins and ends, and how far its subscriptions are."""
    kind, good = DOCUMENTS[name]
    assert decode_json(msgspec.json.encode(good), "the/key", kind) is not None
    with pytest.raises(DataError, match=rf"the/key .*\.{field}"):
        decode_json(msgspec.json.encode({**good, field: number}), "the/key", kind)


def test_a_seal_behind_the_last_offset_is_refused() -> None:
    """The next owner would begin where no message can be."""
    sealed = {**DOCUMENTS["state"][1], "last_committed_offset": (1 << 63) - 1}
    with pytest.raises(DataError, match=r"the/key .*\.last_committed_offset"):
        decode_json(msgspec.json.encode(sealed), "the/key", owner.SealedMarker)


@pytest.mark.parametrize("field", ["acked", "failures"])
@pytest.mark.parametrize("pair", [(-1, 5), (7, HUGE)])
def test_pairs_of_a_cursor_are_looked_at(field: str, pair: tuple[int, int]) -> None:
    """What is acknowledged beyond the offset, and what was rejected."""
    data = msgspec.json.encode({**CURSOR, field: [pair]})
    with pytest.raises(DataError, match=rf"the/key .*\.{field}"):
        decode_json(data, "the/key", Cursor)


@pytest.mark.parametrize("field", ["size", "raw_size", "epoch", "created_us", "last_time_us", "end_offset"])
def test_a_descriptor_with_such_a_number_is_refused(field: str) -> None:
    """Whatever else it says."""
    decode_descriptor(json.dumps(good()).encode(), "the/key", 100)
    with pytest.raises(DataError, match=f"the/key .*{field}"):
        decode_descriptor(json.dumps({**good(), field: HUGE}).encode(), "the/key", 100)


def test_a_reservation_with_such_an_epoch_is_refused() -> None:
    """It is told apart from an object, and looked at all the same."""
    reservation = {"start_offset": 0, "epoch": -1, "completed": False}
    with pytest.raises(DataError, match=r"the/key .*epoch"):
        decode_descriptor(json.dumps(reservation).encode(), "the/key", 0)


@pytest.mark.parametrize("field", ["committed_us", "epoch", "rows"])
def test_a_staging_document_with_such_a_number_is_refused(field: str) -> None:
    """In any of its consignments."""
    one = StagedCommit(
        id="i", app="a", version=0, manifest="m", checksum="c", rows=1, bytes=2, committed_us=3, first_offset=4
    )
    document = msgspec.to_builtins(StagingDocument(pending=(one,)))
    decode_staging(msgspec.json.encode(document), "the/key")
    document["pending"][0][field] = HUGE
    with pytest.raises(DataError, match=f"the/key .*{field}"):
        decode_staging(msgspec.json.encode(document), "the/key")


@pytest.mark.parametrize("field", ["revision", "history_start_seq", "updated_us"])
def test_a_manifest_with_such_a_number_is_refused(field: str) -> None:
    """Also in those fields that nothing else bounds."""
    keys = EngineKeys("main")
    changes: dict[str, Any] = {field: HUGE}
    data = encode_manifest(msgspec.structs.replace(Manifest(epoch=1), **changes))
    with pytest.raises(DataError, match=f"the/key .*{field} is"):
        decode_manifest(data, "the/key", keys)


def test_the_field_is_named_wherever_it_is() -> None:
    """Inside lists and mappings too."""
    assert impossible_number({"a": [1, {"b": (2, HUGE)}], "c": True}) == f"a[1].b[1] is {HUGE}"
    assert impossible_number({"a": [(1 << 64) - 1, -(1 << 63), None, "x"]}) is None


def test_a_start_behind_the_end_of_the_catalog_is_refused(tmp_path: Path) -> None:
    """Believed before: every object of the topic lay below its start, and was garbage."""
    store, root = (tmp_path / "store").as_uri(), tmp_path / "data"
    with tidelog.open(root, store=store, metadata="sqlite", ship_interval_seconds=1000.0) as log:
        topic = log.topic("shop/orders")
        topic.append_many([b"a", b"b"], sync=True)
        assert topic.ship() == 2
        assert log._tier is not None
        key = log._tier.catalog("shop", "orders").keys.start
    with open_metadata_store(f"sqlite://{root}/metadata.db") as metadata:
        entry = metadata.get(key)
        assert entry is not None
        mark = msgspec.json.decode(entry.value)
        metadata.put(key, msgspec.json.encode({**mark, "start_offset": 3}))
    with tidelog.open(root) as log, pytest.raises(DataError, match=f"{key} .*start_offset is 3.*ends at 2"):
        log.topic("shop/orders")
