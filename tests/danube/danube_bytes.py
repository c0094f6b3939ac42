"""Writes what Danube writes: messages in bincode, frames, WAL files and objects. The product only reads them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tidelog.imports.danube.message import DanubeMessage

PUBLISHED_MS = 1_720_000_000_000
VECTOR = bytes.fromhex(
    "7011010000000000280000000859f6e5fb2c010101740162fc70110100026869fd0030fd779001000001700001016b01760105000102726b"
)
VECTOR_MESSAGE = DanubeMessage(
    request_id=300,
    producer_id=1,
    topic_name="t",
    broker_addr="b",
    topic_offset=70000,
    payload=b"hi",
    publish_time=PUBLISHED_MS,
    producer_name="p",
    subscription_name=None,
    attributes={"k": "v"},
    schema_id=5,
    schema_version=None,
    routing_key="rk",
)

# The same message without its schema and routing key, and with the subscription that is named: made with the crates
# bincode 1.3.3 (`serialize`) and 2.0.1 (`serde::encode_to_vec`, `config::standard()`) from structs of the same fields.
_BINCODE_1_BEGINNING = (
    "2c0100000000000001000000000000000100000000000000740100000000000000627011010000000000020000000000000068690030fd77900100"
    "00010000000000000070"
)
_BINCODE_1_END = "010000000000000001000000000000006b010000000000000076"
BINCODE_1_VECTOR = {
    None: bytes.fromhex(_BINCODE_1_BEGINNING + "00" + _BINCODE_1_END),
    "s": bytes.fromhex(_BINCODE_1_BEGINNING + "01010000000000000073" + _BINCODE_1_END),
}
OLDER_VECTOR = {
    None: bytes.fromhex("fb2c010101740162fc70110100026869fd0030fd779001000001700001016b0176"),
    "s": bytes.fromhex("fb2c010101740162fc70110100026869fd0030fd7790010000017001017301016b0176"),
}


def number(value: int) -> bytes:
    """A number of bincode 2, in as few bytes as it goes."""
    if value <= 250:
        return bytes([value])
    marker, width = (251, 2) if value < 1 << 16 else (252, 4) if value < 1 << 32 else (253, 8)
    return bytes([marker]) + value.to_bytes(width, "little")


def content(value: bytes) -> bytes:
    return number(len(value)) + value


def text(value: str) -> bytes:
    return content(value.encode("utf-8"))


def optional(value: bytes | None) -> bytes:
    return b"\x00" if value is None else b"\x01" + value


def attributes(pairs: Iterable[tuple[str, str]]) -> bytes:
    parts = [text(name) + text(value) for name, value in pairs]
    return number(len(parts)) + b"".join(parts)


def encode_fields(message: DanubeMessage) -> list[bytes]:
    """Each field by itself, in order."""
    return [
        number(message.request_id),
        number(message.producer_id),
        text(message.topic_name),
        text(message.broker_addr),
        number(message.topic_offset),
        content(message.payload),
        number(message.publish_time),
        text(message.producer_name),
        optional(None if message.subscription_name is None else text(message.subscription_name)),
        attributes(message.attributes.items()),
        optional(None if message.schema_id is None else number(message.schema_id)),
        optional(None if message.schema_version is None else number(message.schema_version)),
        optional(None if message.routing_key is None else text(message.routing_key)),
    ]


def encode_message(message: DanubeMessage) -> bytes:
    return b"".join(encode_fields(message))


def encode_bincode_1(message: DanubeMessage) -> bytes:
    """As Danube 0.5.0 wrote it, which knew neither schemas nor routing keys: numbers and lengths have eight bytes."""

    def fixed(*values: int | str | bytes) -> bytes:
        return b"".join(map(one, values))

    def one(value: int | str | bytes) -> bytes:
        if isinstance(value, int):
            return value.to_bytes(8, "little")
        data = value.encode("utf-8") if isinstance(value, str) else value
        return len(data).to_bytes(8, "little") + data

    subscription = message.subscription_name
    named = [text for pair in message.attributes.items() for text in pair]
    return (
        fixed(message.request_id, message.producer_id, message.topic_name, message.broker_addr, message.topic_offset)
        + fixed(message.payload, message.publish_time, message.producer_name)
        + optional(None if subscription is None else one(subscription))
        + fixed(len(message.attributes), *named)
    )


def sent(offset: int, value: bytes | None = None) -> DanubeMessage:
    """A message as a producer of a shop sends it."""
    return DanubeMessage(
        request_id=1000 + offset,
        producer_id=7,
        topic_name="/default/orders",
        broker_addr="http://broker:6650",
        topic_offset=offset,
        payload=b"message %d" % offset if value is None else value,
        publish_time=PUBLISHED_MS + offset,
        producer_name="till",
        subscription_name=None,
        attributes={"source": "web"},
        schema_id=None,
        schema_version=None,
        routing_key=f"customer-{offset % 10}",
    )


def encode(offset: int, payload: bytes) -> bytes:
    """A frame of Danube's: its checksum covers the payload alone."""
    return struct.pack("<QII", offset, len(payload), zlib.crc32(payload)) + payload


def frame(offset: int, value: bytes | None = None) -> bytes:
    return encode(offset, encode_message(sent(offset, value)))


def frames(offsets: Iterable[int], life: str = "") -> bytes:
    """Frames of these offsets; another life of the topic sent other messages at the same ones."""
    return b"".join(frame(offset, f"message {offset}{life}".encode()) for offset in offsets)


def write_wal(directory: Path, *contents: bytes) -> list[Path]:
    """A topic's WAL directory with these files."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ["wal.log", *(f"wal.{seq}.log" for seq in range(1, len(contents)))]
    paths = [directory / name for name in names[: len(contents)]]
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    (directory / "wal.ckpt").write_bytes(b"\x00\x01 of no interest")
    return paths


def older_frames(offsets: Iterable[int], life: str = "") -> bytes:
    """The same as Danube 0.5.0 wrote them: in bincode 1, without routing keys."""
    return b"".join(encode(offset, encode_bincode_1(older_sent(offset, life))) for offset in offsets)


def older_sent(offset: int, life: str = "") -> DanubeMessage:
    """Another life of the topic, with a longer name, came later."""
    message = sent(offset, f"message {offset}{life}".encode())
    time = message.publish_time + 1_000_000 * len(life)
    return msgspec.structs.replace(message, publish_time=time, routing_key=None)


def write_objects(
    root: Path,
    objects: Sequence[tuple[int, int | str, bytes]],
    topic: str = "default/orders",
    folder: str = "segments",
) -> list[Path]:
    """Objects as (start in the name, seconds in the name, content) in a directory that is a store.

    In the folder `objects` of older versions the second one may be the last offset, or "pending".
    """
    segments = root / "storage" / "topics" / topic / folder
    segments.mkdir(parents=True, exist_ok=True)
    paths = [segments / f"data-{start}-{seconds}.dnb1" for start, seconds, _ in objects]
    for path, (_, _, data) in zip(paths, objects, strict=True):
        path.write_bytes(data)
    return paths
