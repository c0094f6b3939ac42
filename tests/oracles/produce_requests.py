"""The oracle of `native/produce_requests.h`: plain is what the codec and `decode_produced` read as such."""

from __future__ import annotations

import struct
from typing import Any

from tests.oracles.frames import encode_many

from tidelog.service.kafka.codec import decode_header, decode_request, encode_request
from tidelog.service.kafka.primitives import ProtocolError
from tidelog.service.kafka.records import DecodedBatch, RecordError, decode_produced

_PRODUCE = 0
_SIZE = struct.Struct(">I")


def plain_request(data: bytes, at: int, max_payload: int) -> tuple[Any, int] | None:
    """The plain request at a position of what a connection sent, and where it ends."""
    if len(data) - at < 4:
        return None
    size = _SIZE.unpack_from(data, at)[0]
    frame = data[at + 4 : at + 4 + size]
    if len(frame) < size or frame[:2] != b"\x00\x00":
        return None
    try:
        header = decode_header(frame)
        request = decode_request(header, frame)
        (topic,) = request.topic_data
        (part,) = topic.partition_data
        batch = decode_produced(part.records, max_message_bytes=max_payload)
    except (ProtocolError, RecordError, ValueError, TypeError):
        return None
    encoded = encode_request(_PRODUCE, header.api_version, header.correlation_id, header.client_id, request)
    if request.transactional_id is not None or batch.header.attributes or bytes(encoded) != data[at : at + 4 + size]:
        return None
    # Behind the batch there are only tags: none for the partition, the topic and the request.
    stop = at + 4 + size - (3 if header.api_version >= 9 else 0)
    found = batch.header
    largest = max(map(len, batch.frames.payloads()))
    key = (topic.name, part.index, request.acks, request.timeout_ms)
    who = (found.producer_id, found.producer_epoch, found.base_sequence)
    rest = (*who, found.record_count, largest, found.max_timestamp)
    return (key, header.api_version, header.correlation_id, at, stop - len(part.records), stop, *rest), at + 4 + size


def produce_requests(received: list[bytes], max_payload: int) -> list[tuple[list[Any], int]]:
    """For each connection."""
    answer = []
    for data in received:
        found, at = [], 0
        while (one := plain_request(data, at, max_payload)) is not None:
            found.append(one[0])
            at = one[1]
        answer.append((found, at))
    return answer


def batches_to_frames(batches: list[tuple[bytes, int, int]], max_payload: int) -> tuple[bytes, bytes, bytes]:
    """Their messages, one after the other."""
    decoded: list[DecodedBatch] = [
        decode_produced(data[start:stop], max_message_bytes=max_payload) for data, start, stop in batches
    ]
    return encode_many(0, [payload for batch in decoded for payload in batch.frames.payloads()])
