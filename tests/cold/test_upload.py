"""One object on its way: the same frames arrive, summed up and indexed on the way, and damage lets nothing appear."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.cold.published import LOG_ID
from tests.cold.station import DIRECTORY, FRAME_BYTES, TIME_FIELD, Node, Stores

from tidelog.cold import upload as upload_module
from tidelog.cold.blocks import decode_block, parse_header
from tidelog.cold.catalog import Codec
from tidelog.cold.upload import Upload, Uploaded, UploadPlan, checksum_text, plan_upload
from tidelog.errors import CorruptionError, StoreUnavailableError
from tidelog.log import LogSettings
from tidelog.log.binding import BINDING_BYTES, encode_binding
from tidelog.log.directory import wal_files
from tidelog.log.frame import HEADER_BYTES

KEY = "storage/topics/shop/orders/objects/data-0-19-e1.tlog"
CODECS: list[Codec] = ["none", "zstd"]


@pytest.fixture
def node() -> Iterator[Node]:
    """20 messages in seven files."""
    with Node(Stores()) as node:
        node.open_log()
        node.append(20)
        yield node


def plan(node: Node, offset: int = 0, max_bytes: int = 1 << 30) -> UploadPlan:
    shipment = plan_upload(node.log, offset, node.log.durable_offset, max_bytes, None)
    assert shipment is not None
    return shipment


def send(node: Node, shipment: UploadPlan, codec: Codec = "none", *, time_field: int | None = TIME_FIELD) -> Uploaded:
    return Upload(node.log.files, shipment, LOG_ID, codec, 3, time_field).send(node.stores.objects, KEY)


def stored(node: Node) -> bytes:
    return node.stores.objects.contents()[KEY]


def whole_log(node: Node) -> bytes:
    return b"".join(
        node.files.read(DIRECTORY / name)[BINDING_BYTES:] for _, name in wal_files(node.files.list(DIRECTORY))
    )


def decompressed(data: bytes, offset: int) -> tuple[bytes, dict[int, int]]:
    """The frames in an object of blocks, and where each block begins."""
    raw, position, places = b"", BINDING_BYTES, {}
    while position < len(data):
        header = parse_header(data, position, offset)
        assert header is not None
        places[offset] = position
        raw += decode_block(header, data[position : position + header.size]).buffer
        offset, position = header.next_offset, position + header.size
    return raw, places


def damage(node: Node, name: str, byte: int) -> None:
    """A bit rots on the disk, behind everybody's back."""
    data = node.files.read(DIRECTORY / name)
    file = node.files.open(DIRECTORY / name, write=True)
    file.write_at(BINDING_BYTES + byte, bytes([data[BINDING_BYTES + byte] ^ 1]))
    file.close()


def test_raw_objects_are_the_frames_of_the_files(node: Node) -> None:
    """Nothing is changed on the way, across all files."""
    uploaded = send(node, plan(node))
    assert stored(node) == encode_binding(LOG_ID, 0) + whole_log(node)
    assert uploaded.info.size == BINDING_BYTES + 20 * FRAME_BYTES
    assert uploaded.info.etag == node.stores.objects.head(KEY).etag


@pytest.mark.parametrize("codec", CODECS)
def test_the_checksum_is_that_of_the_object(node: Node, codec: Codec) -> None:
    """It is over the bytes that are in the store, whatever they are."""
    assert send(node, plan(node), codec).checksum == f"crc32:{zlib.crc32(stored(node)):08x}"
    assert checksum_text(0xAB) == "crc32:000000ab"


def test_blocks_decode_to_the_same_frames(node: Node) -> None:
    """Block after block, from the first offset to the last, byte for byte what is in the files."""
    send(node, plan(node, offset=4), "zstd")
    raw, _ = decompressed(stored(node), 4)
    assert raw == whole_log(node)[4 * FRAME_BYTES :]


@pytest.mark.parametrize("codec", CODECS)
def test_the_index_points_at_what_can_be_read_alone(node: Node, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every entry is the start of a frame, or of a block, of that offset."""
    monkeypatch.setattr("tidelog.cold.upload.EVERY_MESSAGES", 4)
    uploaded = send(node, plan(node), codec)
    places = {offset: BINDING_BYTES + offset * FRAME_BYTES for offset in range(20)}
    if codec == "zstd":
        places = decompressed(stored(node), 0)[1]
    assert uploaded.offset_index[0] == (0, BINDING_BYTES)
    assert len(uploaded.offset_index) >= 3
    assert all(places[offset] == position for offset, position in uploaded.offset_index)


def test_times_are_the_least_and_the_greatest() -> None:
    """Messages need not be in order of time, and some may have none."""
    with Node(Stores()) as node:
        node.open_log()
        for time_us in (50, -7, 90, 3):
            node.log.append(struct.pack("<q", time_us) + b"text", sync=True)
        node.log.append(b"short", sync=True)
        uploaded = send(node, plan(node))
        assert (uploaded.first_time_us, uploaded.last_time_us) == (-7, 90)


def test_messages_without_times_have_none(node: Node) -> None:
    """Where payloads are opaque nothing is guessed."""
    uploaded = send(node, plan(node), time_field=None)
    assert (uploaded.first_time_us, uploaded.last_time_us) == (None, None)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("byte", [0, 8, 12, HEADER_BYTES + 3])
def test_damage_lets_no_object_appear(node: Node, codec: Codec, byte: int) -> None:
    """A wrong bit anywhere in a frame is found before its bytes are sent, and is named with its file and byte."""
    shipment = plan(node)
    node.stores.objects.part_bytes = 50
    damage(node, "wal.0000000003.log", FRAME_BYTES + byte)
    with pytest.raises(CorruptionError, match=r"wal\.0000000003\.log") as raised:
        send(node, shipment, codec)
    assert raised.value.byte == FRAME_BYTES
    assert node.stores.objects.contents() == {}
    assert node.stores.objects.uploads() == {}


def test_a_file_that_lost_its_end_is_damage(node: Node) -> None:
    """What was planned and is not there any more is not left out silently."""
    shipment = plan(node)
    file = node.files.open(DIRECTORY / "wal.0000000006.log", write=True)
    file.truncate(FRAME_BYTES + 3)
    file.close()
    with pytest.raises(CorruptionError):
        send(node, shipment)
    assert node.stores.objects.contents() == {}


def test_an_object_that_was_there_is_replaced_only_by_a_whole_one(node: Node) -> None:
    """An attempt that fails in the middle leaves what an earlier one stored."""
    shipment = plan(node)
    send(node, shipment)
    before = stored(node)
    node.stores.objects.part_bytes = 50
    node.stores.objects.fail("upload_part", nth=3)
    with pytest.raises(StoreUnavailableError):
        send(node, shipment)
    assert stored(node) == before
    send(node, shipment)
    assert stored(node) == before


def test_what_comes_after_the_plan_is_not_sent(node: Node) -> None:
    """An object ends where its name says, although the file has grown."""
    shipment = plan(node)
    node.append(5)
    send(node, shipment)
    assert len(stored(node)) == BINDING_BYTES + 20 * FRAME_BYTES


@settings(max_examples=examples(25), deadline=None)
@given(
    sizes=st.lists(st.integers(1, 3000), min_size=1, max_size=30),
    chunk_bytes=st.integers(17, 4000),
    codec=st.sampled_from(CODECS),
)
def test_any_chunks_give_the_same_frames(sizes: list[int], chunk_bytes: int, codec: Codec) -> None:
    """Frames smaller and larger than what is read at once arrive whole, compressed or not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(upload_module, "_RAW_CHUNK_BYTES", chunk_bytes)
        patch.setattr(upload_module, "TARGET_BLOCK_BYTES", chunk_bytes)
        with Node(Stores(), settings=LogSettings(rotate_max_bytes=5000, cache_max_messages=0)) as node:
            node.open_log()
            for number, size in enumerate(sizes):
                node.log.append(bytes([number]) * size)
            node.log.flush()
            uploaded = send(node, plan(node), codec)
            raw = stored(node)[BINDING_BYTES:] if codec == "none" else decompressed(stored(node), 0)[0]
            assert raw == whole_log(node)
            assert uploaded.offset_index[0] == (0, BINDING_BYTES)
