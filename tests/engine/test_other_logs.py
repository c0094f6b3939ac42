"""Files and objects of another engine, put in the place of an engine's own: refused by name, never read as data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.engine.entry import CreateBucket, PutObject
from tidelog.errors import OtherLogError
from tidelog.log.binding import BINDING_BYTES, BoundFiles, decode_binding, encode_binding, known_log_id

COUNT = 20
VALUE_BYTES = 20_000


def fill(directory: Path, word: bytes, **settings: Any) -> None:
    """An engine with values of the same size at the same places as every other."""
    with tidelog.open_engine(directory, **settings) as engine:
        engine.apply(1, CreateBucket("photos"))
        for number in range(COUNT):
            engine.apply(2 + number, PutObject("photos", f"key-{number:03}", word * VALUE_BYTES))
        if "store" in settings:
            engine.update_low_water_mark(COUNT + 1)
            engine.ship()


def wal_of(directory: Path) -> Path:
    (path,) = (directory / "wal").glob("wal.*.log")
    return path


def test_a_log_file_of_another_engine_is_refused(tmp_path: Path) -> None:
    """With the same LSNs and the same sizes; both ids are told."""
    fill(tmp_path / "one", b"1")
    fill(tmp_path / "two", b"2")
    assert wal_of(tmp_path / "one").stat().st_size == wal_of(tmp_path / "two").stat().st_size
    shutil.copy(wal_of(tmp_path / "two"), wal_of(tmp_path / "one"))
    with pytest.raises(OtherLogError) as raised:
        tidelog.open_engine(tmp_path / "one")
    expected, found = (known_log_id(BoundFiles(), tmp_path / name / "wal") for name in ("one", "two"))
    assert (raised.value.expected, raised.value.found) == (expected, found)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_an_object_of_another_engine_is_refused(tmp_path: Path, codec: str) -> None:
    """Of the same name and size, plain and compressed: neither a restore nor a read takes it for the engine's own."""
    store = (tmp_path / "store").as_uri()
    fill(tmp_path / "one", b"1", store=store, ship_compression=codec)
    (path,) = (tmp_path / "store").rglob("objects/data-*.tlog")
    data = path.read_bytes()
    binding = decode_binding(data)
    assert binding.log_id == known_log_id(BoundFiles(), tmp_path / "one" / "wal")
    path.write_bytes(encode_binding("00" * 16, binding.first_offset) + data[BINDING_BYTES:])
    with pytest.raises(OtherLogError):
        tidelog.restore_engine(tmp_path / "new", store=store)
    path.write_bytes(data)
    with tidelog.restore_engine(tmp_path / "again", store=store) as engine:
        path.write_bytes(encode_binding("00" * 16, binding.first_offset) + data[BINDING_BYTES:])
        with pytest.raises(OtherLogError) as raised:
            engine.read("photos", "key-007")
        assert (raised.value.expected, raised.value.found) == (binding.log_id, "00" * 16)
        path.write_bytes(data)
        assert engine.read("photos", "key-007").data == b"1" * VALUE_BYTES
    assert known_log_id(BoundFiles(), tmp_path / "again" / "wal") == binding.log_id
