"""`uploader.ckpt` is a hint: written durably, and worth nothing when it is missing, damaged or of another version."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.codec import encode_document
from tidelog.cold.shipper import NAME, UploaderCheckpoint, read_uploader_checkpoint, write_uploader_checkpoint
from tidelog.cold.upload import Place
from tidelog.testing import POLICIES, FaultyFiles, Policy

DIRECTORY = Path("/log")
CHECKPOINT = UploaderCheckpoint(
    next_offset=100, file_seq=3, byte=4096, last_object_id="data-0-99-e1.tlog", epoch=1, updated_us=5
)


@pytest.fixture
def files() -> FaultyFiles:
    files = FaultyFiles()
    files.make_directories(DIRECTORY)
    return files


def put(files: FaultyFiles, data: bytes) -> None:
    files.write_atomically(DIRECTORY / NAME, data)


def test_what_is_written_is_read(files: FaultyFiles) -> None:
    """It says the offset, the file and the byte at which shipping goes on."""
    write_uploader_checkpoint(files, DIRECTORY, CHECKPOINT)
    assert read_uploader_checkpoint(files, DIRECTORY) == CHECKPOINT
    assert CHECKPOINT.place == Place(100, 3, 4096)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_durable_when_it_is_written(files: FaultyFiles, policy: Policy) -> None:
    """Whatever a power cut takes, it takes neither the new one nor leaves half of one."""
    write_uploader_checkpoint(files, DIRECTORY, CHECKPOINT)
    files.crash()
    assert read_uploader_checkpoint(files.after_crash(policy), DIRECTORY) == CHECKPOINT


def test_none_is_none(files: FaultyFiles) -> None:
    """A directory that never shipped has none, and a directory that is gone neither."""
    assert read_uploader_checkpoint(files, DIRECTORY) is None
    assert read_uploader_checkpoint(files, Path("/nowhere")) is None


@given(byte=st.integers(0, 200), bit=st.integers(0, 7))
def test_a_flipped_bit_is_no_hint(byte: int, bit: int) -> None:
    """A damaged one counts as none: the catalog and the files tell the same, more slowly."""
    files = FaultyFiles()
    files.make_directories(DIRECTORY)
    write_uploader_checkpoint(files, DIRECTORY, CHECKPOINT)
    data = bytearray(files.read(DIRECTORY / NAME))
    data[byte % len(data)] ^= 1 << bit
    put(files, bytes(data))
    assert read_uploader_checkpoint(files, DIRECTORY) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff" * 50,
        encode_document("uploader-checkpoint", 2, CHECKPOINT),
        encode_document("wal-checkpoint", 1, CHECKPOINT),
        encode_document("uploader-checkpoint", 1, {"next_offset": "100"}),
        encode_document("uploader-checkpoint", 1, []),
    ],
)
def test_anything_else_is_no_hint(files: FaultyFiles, data: bytes) -> None:
    """Nonsense, another version, another document: none of them is believed."""
    put(files, data)
    assert read_uploader_checkpoint(files, DIRECTORY) is None


def test_one_that_cannot_be_read_is_no_hint(files: FaultyFiles) -> None:
    """A disk that fails at it does not keep a topic from being shipped."""
    write_uploader_checkpoint(files, DIRECTORY, CHECKPOINT)
    files.fail("read_at", error=errno.EIO, matching=NAME)
    assert read_uploader_checkpoint(files, DIRECTORY) is None
    assert read_uploader_checkpoint(files, DIRECTORY) == CHECKPOINT
