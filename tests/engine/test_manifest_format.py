"""The page of formats is held to what an engine writes into its store."""

from __future__ import annotations

from pathlib import Path

from tests.engine.stations import KEYS, EngineNode, new_store
from tests.test_docs import FORMATS, block

from tidelog.engine.cold.manifest import decode_manifest, encode_manifest
from tidelog.engine.sst.value_file import ValueName
from tidelog.store.keys import CheckpointId, ObjectId, StatePartId


def test_the_manifest_is_that_of_the_formats_page() -> None:
    """What the page shows is read, and is written the same way again."""
    shown = block(FORMATS, "text manifest").encode()
    assert encode_manifest(decode_manifest(shown, "manifest", KEYS)) == shown


def test_the_keys_are_those_of_the_formats_page() -> None:
    """To the letter."""
    keys = [line.split()[0] for line in block(FORMATS, "text engine keys").splitlines()]
    assert keys == [KEYS.descriptor(42), KEYS.current, KEYS.owner, KEYS.start, KEYS.engine_manifest]
    objects = [line.split()[0] for line in block(FORMATS, "text engine objects").splitlines()]
    assert objects == [
        KEYS.object(ObjectId(42, 99, 7)),
        KEYS.checkpoint(CheckpointId(900, 1841, 3, "0d" * 16)),
        KEYS.values_prefix + str(ValueName(41, 0, 9_000_000, 0x2EC595F5)),
        KEYS.state_part(StatePartId(900, 1841, "1c" * 16)),
    ]


def test_nothing_else_is_in_the_store() -> None:
    """Nobody finds something there that the page does not explain."""
    store = new_store()
    with EngineNode(store).open() as node:
        node.apply(60)
        node.ship_all()
        node.engine.create_checkpoint()
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")
    for key in store.contents():
        kind = key.rsplit("/", 2)[-2] if key.rsplit("/", 1)[-1][0].isdigit() else key.rsplit("/", 1)[-1].split("-")[0]
        assert key.startswith(("tidelog/storage/engine/main/", "storage/engine/main/"))
        assert kind in page
