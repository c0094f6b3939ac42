"""Value files: what is written is read back by any range, and nothing else is ever taken for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.engine.entry import MAX_STREAM_BYTES
from tidelog.engine.sst.value_file import (
    BLOCK_BYTES,
    Reference,
    ValueName,
    ValueReader,
    ValueWriter,
    check_value_file,
    decode_reference,
    encode_reference,
    parse_value_name,
)
from tidelog.engine.wal.value import decode_value, encode_value, object_crc
from tidelog.errors import DataError
from tidelog.files import LocalFiles
from tidelog.log.frame import crc32

PATTERN = bytes(range(251)) * 4000
SIZES = st.sampled_from([0, 1, 1000, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES, len(PATTERN)])
PIECES = st.lists(st.integers(1, 2 * BLOCK_BYTES), min_size=1, max_size=6)


def written(path: Path, data: bytes, metadata: dict[str, object], sizes: list[int]) -> tuple[Reference, bytes]:
    """A file with this value, written in pieces of these sizes, over and over."""
    file = LocalFiles().create(path)
    writer, at = ValueWriter(file, metadata), 0
    while at < len(data):
        for size in sizes:
            writer.write(data[at : at + size])
            at += size
    writer.finish()
    file.close()
    content = path.read_bytes()
    path.unlink()
    return Reference(ValueName(7, 1, writer.size, writer.crc), writer.metadata_bytes), content


def reader_of(reference: Reference, content: bytes) -> ValueReader:
    return ValueReader(reference, lambda at, size: content[at : at + size], "f")


@given(SIZES, PIECES, st.sampled_from([{}, {"type": "x", "n": 3}]), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_any_range_is_that_of_the_data(
    tmp_path_factory: pytest.TempPathFactory,
    size: int,
    sizes: list[int],
    metadata: dict[str, object],
    offset: int,
    length: int,
) -> None:
    """However it was written; size and checksum are those of the same value in the log."""
    data = PATTERN[:size]
    reference, content = written(tmp_path_factory.mktemp("v") / "f", data, metadata, sizes)
    assert (reference.name.size, reference.name.crc) == (size, object_crc(data, metadata))
    assert reference.file_bytes == len(content)
    reader = reader_of(reference, content)
    assert reader.data(offset, length) == data[offset : offset + length]
    assert reader.metadata() == metadata
    assert reader.value() == encode_value(data, metadata)
    assert decode_value(reader.value(), 2, size, reference.name.crc, 1) == (data, metadata)
    checked = check_value_file(reference.name, len(content), lambda at, size: content[at : at + size], "f")
    assert b"".join(checked) == content


@given(st.data())
def test_damaged_file_is_never_read_as_something_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A flipped bit, blocks in another order, or an end that is missing: DataError, by every way."""
    value = PATTERN[: 2 * BLOCK_BYTES + 77]
    reference, content = written(tmp_path_factory.mktemp("v") / "f", value, {"a": 1}, [1 << 17])
    bad = bytearray(content)
    match data.draw(st.sampled_from(["flip", "swap", "cut"])):
        case "flip":
            bad[data.draw(st.integers(0, len(bad) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        case "swap":
            begin, block = reference.byte_of(0), BLOCK_BYTES + 4
            bad[begin : begin + 2 * block] = bad[begin + block : begin + 2 * block] + bad[begin : begin + block]
        case _:
            del bad[data.draw(st.integers(0, len(bad) - 1)) :]
    with pytest.raises(DataError):
        reader_of(reference, bytes(bad)).value()
    with pytest.raises(DataError):
        list(check_value_file(reference.name, len(bad), lambda at, size: bytes(bad[at : at + size]), "f"))


def test_format_is_as_it_is_drawn(tmp_path: Path) -> None:
    """Head and blocks with their checksums, each begun with the number of its block."""
    data = PATTERN[: BLOCK_BYTES + 5]
    _, content = written(tmp_path / "f", data, {}, [1 << 20])
    head = bytes(4)
    expected = head + crc32(head, 0).to_bytes(4, "little")
    for number, block in enumerate((data[:BLOCK_BYTES], data[BLOCK_BYTES:]), 1):
        expected += block + crc32(block, number).to_bytes(4, "little")
    assert content == expected


@given(
    st.integers(1, (1 << 64) - 1),
    st.integers(0, (1 << 32) - 1),
    st.integers(0, MAX_STREAM_BYTES),
    st.integers(0, 1 << 20),
)
def test_names_and_references_are_read_back(seq: int, order: int, size: int, metadata_bytes: int) -> None:
    """A name says what the reference and its cell say together."""
    name = ValueName(seq, order, size, seq & 0xFFFFFFFF)
    reference = Reference(name, metadata_bytes)
    assert parse_value_name(str(name)) == name
    assert decode_reference(encode_reference(reference), size, name.crc, 1) == reference


@pytest.mark.parametrize("name", ["", "7.tmp", "7-0-5-00000000.tval", "00000000000000000007-0-05-00000000.tval"])
def test_other_names_are_none_of_ours(name: str) -> None:
    """Who did not build a name does not read it."""
    assert parse_value_name(name) is None


@pytest.mark.parametrize(
    "data", [b"", bytes(15), bytes(16), bytes(8) + b"\1" + bytes(7), b"\1" + bytes(11) + b"\xff" * 4]
)
def test_other_references_are_refused(data: bytes) -> None:
    """A cell from a disk may have anything in it."""
    with pytest.raises(DataError, match="a reference to a value file"):
        decode_reference(data, 5, 0, 3)
