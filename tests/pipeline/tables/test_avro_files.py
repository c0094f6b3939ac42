"""Avro container files: what other programs have written comes out in every codec, and nothing hostile gets through."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.catalog.sql import SqlCatalog
from tests.pipeline.tables.avro_writing import CODECS, SYNC, avro_block, avro_file

from tidelog.errors import DataError, InputError
from tidelog.pipeline.tables import avro_files
from tidelog.pipeline.tables.avro_files import columns_of, read_head, read_rows

SCHEMA = {
    "type": "record",
    "name": "row",
    "fields": [{"name": "id", "type": "long"}, {"name": "text", "type": "string"}],
}
ROWS = [bytes([2 * number, 4]) + b"%02d" % number for number in range(5)]
WHOLE = avro_file(SCHEMA, ROWS)


def rows_of(data: bytes) -> list[dict[str, Any]]:
    """The rows in the columns of the file itself."""
    columns = columns_of(read_head(data, "a.avro"))
    return [row for batch in read_rows(data, "a.avro", columns) for row in batch.to_pylist()]


@pytest.mark.parametrize("codec", CODECS)
def test_rows_of_every_codec_come_out(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several blocks, and as several batches."""
    monkeypatch.setattr(avro_files, "BATCH_ROWS", 3)
    found = rows_of(avro_file(SCHEMA, ROWS, codec=codec))
    assert found == [{"id": number, "text": f"{number:02}"} for number in range(5)]
    assert rows_of(avro_file(SCHEMA, [], codec=codec)) == []


def test_files_that_another_program_has_written_come_out(tmp_path: Path) -> None:
    """The manifests of an Iceberg table, with unions, lists, maps as lists, and bytes, name its data file."""
    catalog = SqlCatalog("lake", uri=f"sqlite:///{tmp_path}/lake.db", warehouse=f"file://{tmp_path}/lake")
    catalog.create_namespace("lake")
    rows = pa.table({"id": [1, 2, 3]})
    table = catalog.create_table("lake.rows", rows.schema)
    table.append(rows)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifest = snapshot.manifests(table.io)[0]
    (row,) = rows_of(Path(manifest.manifest_path.removeprefix("file://")).read_bytes())
    (entry,) = manifest.fetch_manifest_entry(table.io)
    assert row["data_file"]["file_path"] == entry.data_file.file_path
    assert row["data_file"]["record_count"] == 3
    assert row["snapshot_id"] == snapshot.snapshot_id


@given(st.binary(max_size=200))
def test_bytes_that_are_no_file_are_named(data: bytes) -> None:
    """Whatever follows the mark of a file, the answer is rows or an error that names it."""
    with contextlib.suppress(InputError, DataError):
        rows_of(b"Obj\x01" + data)


@given(st.integers(0, len(WHOLE) - 1))
def test_file_that_is_cut_short_is_damage(length: int) -> None:
    """Unless it is cut between two blocks, where nothing tells."""
    edges = [len(avro_file(SCHEMA, ROWS[:count])) for count in (0, 2, 4)]
    if length in edges:
        assert len(rows_of(WHOLE[:length])) == 2 * edges.index(length)
        return
    with pytest.raises((DataError, InputError)):
        rows_of(WHOLE[:length])


@pytest.mark.parametrize("codec", CODECS)
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_damage_never_comes_out_as_another_error(codec: str, at: int, bit: int) -> None:
    """A flipped bit anywhere: rows (of other values, where no checksum is), or damage that is named."""
    data = bytearray(avro_file(SCHEMA, ROWS, codec=codec))
    data[at % len(data)] ^= 1 << bit
    with contextlib.suppress(InputError, DataError):
        rows_of(bytes(data))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (avro_block(1 << 60, b"\x02\x00"), "claims 1152921504606846976 rows and has 2 bytes"),
        (avro_block(0, b"\x02\x00"), "claims 0 rows"),
        (avro_block(2, b"\x02\x00"), "truncated"),
        (avro_block(1, b"\x02\x00\x00"), "bytes after its end"),
        (avro_block(-1, b"\x02\x00"), "mark of the file"),
        (avro_block(1, b"\x02\x00")[:-16] + SYNC[::-1], "mark of the file"),
    ],
)
def test_block_that_lies_is_refused(block: bytes, message: str) -> None:
    """A count, a length or an end that cannot be, with the byte at which the block begins."""
    with pytest.raises(DataError, match=rf"a\.avro: byte {len(avro_file(SCHEMA, []))}: .*{message}"):
        rows_of(avro_file(SCHEMA, []) + block)


@pytest.mark.parametrize("codec", ["deflate", "zstandard", "bzip2", "xz", "snappy"])
def test_block_that_grows_beyond_its_limit_is_refused(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loses, without this: the memory of a worker, to a few bytes that become gigabytes."""
    monkeypatch.setattr(avro_files, "_MOST_BLOCK_BYTES", 1000)
    with pytest.raises(DataError, match="more"):
        rows_of(avro_file(SCHEMA, [b"\x00" * 100_000], codec=codec))


def test_columns_are_those_of_the_first_file() -> None:
    """A column that a file lacks is null; one that the first file does not have, or of another type, is refused."""
    narrow = {**SCHEMA, "fields": SCHEMA["fields"][:1]}
    wide = columns_of(read_head(WHOLE, "a.avro"))
    (batch,) = read_rows(avro_file(narrow, [b"\x02"]), "b.avro", wide)
    assert batch.to_pylist() == [{"id": 1, "text": None}]
    for columns in (wide.remove(1), pa.schema([pa.field("id", pa.string()), wide.field(1)])):
        with pytest.raises(DataError, match=r"a\.avro: its column"):
            list(read_rows(WHOLE, "a.avro", columns))


def test_codec_that_is_not_known_is_named() -> None:
    """With those that are."""
    data = avro_file(SCHEMA, ROWS).replace(b"\x08null", b"\x08lzo4")
    with pytest.raises(InputError, match="codec lzo4"):
        rows_of(data)
