"""Requests and answers of Kafka's protocol: their headers, and the way to the codec of each API and version.

    request    [i32 size][i16 api key][i16 version][i32 correlation id][nullable string client id] [tags] body
    response   [i32 size][i32 correlation id]                                                      [tags] body

Tags are there in flexible versions; the answer to ApiVersions has none in its header, in no version, for a client reads
it before it knows what the broker speaks.

Invariants
- A frame is hostile. Whatever is in it, decoding returns an object or raises ProtocolError, and allocates no more than
  a small multiple of the frame.
- A version that is not spoken raises UnsupportedVersionError, which has the header, for the answer needs it.
- Bytes after the end of a body are ignored, as Kafka does it.
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, Protocol

from tidelog.service.kafka.error_codes import ErrorCode
from tidelog.service.kafka.primitives import Buffer, ProtocolError, put_uvarint, skip_tags

API_VERSIONS = 18
_HEAD = struct.Struct(">hhih")
_HEAD_BYTES = _HEAD.size
_SIZE_AND_ID = struct.Struct(">ii")
_DAMAGE = (IndexError, struct.error, UnicodeDecodeError)


class Api(NamedTuple):
    """An API, and the versions of it that the broker advertises and accepts."""

    name: str
    first: int
    last: int
    accepts_from: int | None = None
    """Where it differs from `first`: Produce is advertised from 0 on, or old librdkafkas stop compressing."""


APIS: dict[int, Api] = {
    0: Api("produce", 0, 12, accepts_from=3),
    1: Api("fetch", 4, 12),
    2: Api("list_offsets", 1, 8),
    3: Api("metadata", 0, 12),
    8: Api("offset_commit", 2, 9),
    9: Api("offset_fetch", 1, 9),
    10: Api("find_coordinator", 0, 4),
    11: Api("join_group", 0, 9),
    12: Api("heartbeat", 0, 4),
    13: Api("leave_group", 0, 5),
    14: Api("sync_group", 0, 5),
    15: Api("describe_groups", 0, 6),
    16: Api("list_groups", 0, 5),
    17: Api("sasl_handshake", 0, 1),
    18: Api("api_versions", 0, 4),
    19: Api("create_topics", 2, 7),
    20: Api("delete_topics", 1, 6),
    21: Api("delete_records", 0, 2),
    22: Api("init_producer_id", 0, 5),
    23: Api("offset_for_leader_epoch", 2, 4),
    24: Api("add_partitions_to_txn", 0, 3),
    25: Api("add_offsets_to_txn", 0, 4),
    26: Api("end_txn", 0, 4),
    27: Api("write_txn_markers", 1, 1),
    28: Api("txn_offset_commit", 0, 4),
    29: Api("describe_acls", 1, 3),
    30: Api("create_acls", 1, 3),
    31: Api("delete_acls", 1, 3),
    32: Api("describe_configs", 1, 4),
    33: Api("alter_configs", 0, 2),
    36: Api("sasl_authenticate", 0, 2),
    37: Api("create_partitions", 0, 3),
    42: Api("delete_groups", 0, 2),
    44: Api("incremental_alter_configs", 0, 1),
    47: Api("offset_delete", 0, 0),
    48: Api("describe_client_quotas", 0, 1),
    49: Api("alter_client_quotas", 0, 1),
    50: Api("describe_user_scram_credentials", 0, 0),
    51: Api("alter_user_scram_credentials", 0, 0),
    60: Api("describe_cluster", 0, 1),
    61: Api("describe_producers", 0, 0),
    65: Api("describe_transactions", 0, 0),
    66: Api("list_transactions", 0, 1),
    68: Api("consumer_group_heartbeat", 0, 1),
    69: Api("consumer_group_describe", 0, 1),
    75: Api("describe_topic_partitions", 0, 0),
    76: Api("share_group_heartbeat", 1, 1),
    77: Api("share_group_describe", 1, 1),
    78: Api("share_fetch", 1, 1),
    79: Api("share_acknowledge", 1, 1),
}
"""What the broker speaks. Produce and Fetch end before the versions that know topics by id only; the codec has those
too, and `describe_groups`, `list_groups` and others have further versions: raise the number to offer them."""

WITH_AUTHENTICATION = (17, 29, 30, 31, 36, 50, 51)
"""What is served where authentication is on."""

AMONG_NODES = (27,)
"""What nodes of one installation ask each other: a node by itself does not serve it."""

LIMITS: dict[int, str] = {
    0: "batches of format 2 (Kafka 0.11 and later), one a partition; topics by name, so not the versions by id",
    1: "topics by name, so not the versions by id; no followers; at most 1,000 sessions, evicted as Kafka does it",
    3: "replicas of a partition are its leader and, in a cluster, nodes that read its history: copies are the store's",
    19: "the replication factor is accepted, and is 1",
    21: "whole files and objects go at once, the rest with the last message of its file",
    27: "among nodes of one installation",
    30: "READ, WRITE, ALL of topics, groups and transactional ids; DESCRIBE, ALL of the cluster; no DENY, no hosts",
    32: "of topics and the broker; not of groups, loggers and client metrics",
    33: "topics only",
    37: "the number only grows",
    44: "topics only: configs of the broker are options of `tidelog serve`",
    48: "by client id",
    49: "`producer_byte_rate` and `consumer_byte_rate` by client id; not by user or address",
    51: "afterwards PLAIN needs `tidelog auth user passwd`",
    61: "`coordinator_epoch` is -1, which is not kept; `kafka-transactions abort` is not served: transactions time out",
    66: "no patterns (version 2)",
}
"""What of an API differs from Kafka's, for docs/reference/kafka.md, which is generated from this."""


class RequestHeader(NamedTuple):
    """What every request begins with, and where its body begins."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body_at: int


class UnsupportedVersionError(ProtocolError):
    """The API or its version is not spoken here. ApiVersions is answered all the same: `encode_fallback`."""

    def __init__(self, header: RequestHeader) -> None:
        super().__init__(f"version {header.api_version} of API {header.api_key} is not supported")
        self.header = header


class _Wire(Protocol):
    """A module of `wire/`."""

    FLEXIBLE_REQUEST: int
    FLEXIBLE_RESPONSE: int
    DECODE_REQUEST: dict[int, Any]
    ENCODE_REQUEST: dict[int, Any]
    DECODE_RESPONSE: dict[int, Any]
    ENCODE_RESPONSE: dict[int, Any]


_loaded: dict[int, Any] = {}


def wire(api_key: int) -> Any:
    """The module of an API, loaded when it is first needed."""
    found = _loaded.get(api_key)
    if found is None:
        found = _loaded[api_key] = importlib.import_module(f"tidelog.service.kafka.wire.api_{APIS[api_key].name}")
    return found


def is_supported(api_key: int, version: int) -> bool:
    """Whether the broker accepts requests of this version."""
    api = APIS.get(api_key)
    if api is None:
        return False
    return (api.first if api.accepts_from is None else api.accepts_from) <= version <= api.last


class _Spoken(NamedTuple):
    """How requests of an API and version are read."""

    is_flexible: bool
    decode: Callable[[Buffer, int, int], tuple[Any, int]]


_known_versions: dict[tuple[int, int], _Spoken] = {}


def _spoken(api_key: int, version: int) -> _Spoken | None:
    found = _known_versions.get((api_key, version))
    if found is None and is_supported(api_key, version):
        module = wire(api_key)
        found = _Spoken(version >= module.FLEXIBLE_REQUEST, module.DECODE_REQUEST[version])
        _known_versions[api_key, version] = found
    return found


def decode_header(frame: Buffer) -> RequestHeader:
    """The header of a request that comes without its size. With an unknown version, `body_at` means nothing."""
    try:
        api_key, version, correlation_id, length = _HEAD.unpack_from(frame, 0)
        at, client_id = _HEAD_BYTES, None
        if length >= 0:
            at += length
            if at > len(frame):
                raise ProtocolError("the client id is longer than its request")
            client_id = str(frame[_HEAD_BYTES:at], "utf-8")
        spoken = _spoken(api_key, version)
        if spoken is not None and spoken.is_flexible:
            at = at + 1 if frame[at] == 0 else skip_tags(frame, at, len(frame))
    except _DAMAGE as error:
        _refuse("the header of a request", error)
    return RequestHeader(api_key, version, correlation_id, client_id, at)


def decode_request(header: RequestHeader, frame: Buffer) -> Any:
    """The body of a request, as the class of its API in `wire/`."""
    spoken = _spoken(header.api_key, header.api_version)
    if spoken is None:
        raise UnsupportedVersionError(header)
    try:
        return spoken.decode(frame, header.body_at, len(frame))[0]
    except _DAMAGE as error:
        _refuse(f"a request {APIS[header.api_key].name} of version {header.api_version}", error)


def encode_response(header: RequestHeader, response: Any) -> bytearray:
    """The whole answer to a request, with its size."""
    out = response_head(header)
    wire(header.api_key).ENCODE_RESPONSE[header.api_version](response, out)
    _SIZE_AND_ID.pack_into(out, 0, len(out) - 4, header.correlation_id)
    return out


def gather_response(header: RequestHeader, response: Any) -> list[Buffer]:
    """As `encode_response` for an answer with records (Fetch): buffers for writev, none of them copied.

    `records` of a partition is a list of bytes-like objects whose items are bytes, or None.
    """
    parts: list[Buffer] = wire(header.api_key).GATHER_RESPONSE[header.api_version](response, response_head(header))
    _SIZE_AND_ID.pack_into(parts[0], 0, sum(map(len, parts)) - 4, header.correlation_id)
    return parts


def response_head(header: RequestHeader) -> bytearray:
    """The header of an answer; its first four bytes are for the size."""
    out = bytearray(8)
    _SIZE_AND_ID.pack_into(out, 0, 0, header.correlation_id)
    if header.api_key != API_VERSIONS and header.api_version >= wire(header.api_key).FLEXIBLE_RESPONSE:
        out.append(0)
    return out


def encode_fallback(header: RequestHeader) -> bytearray:
    """The answer to a version of ApiVersions that is not spoken: error 35 in the form of version 0, which all read."""
    module = wire(API_VERSIONS)
    api = APIS[API_VERSIONS]
    known = module.ApiVersionsResponseApiVersion(api_key=API_VERSIONS, min_version=api.first, max_version=api.last)
    response = module.ApiVersionsResponse(error_code=ErrorCode.UNSUPPORTED_VERSION, api_keys=[known])
    return encode_response(header._replace(api_version=0), response)


def api_versions(keys: Iterable[int] = tuple(APIS)) -> Any:
    """The answer to ApiVersions: those of the APIs that the broker serves."""
    module = wire(API_VERSIONS)
    offered = [(key, APIS[key]) for key in sorted(keys)]
    return module.ApiVersionsResponse(
        api_keys=[module.ApiVersionsResponseApiVersion(key, api.first, api.last) for key, api in offered]
    )


def encode_request(api_key: int, version: int, correlation_id: int, client_id: str | None, request: Any) -> bytearray:
    """A whole request, with its size, as a client sends it."""
    name = b"" if client_id is None else client_id.encode()
    out = bytearray(4)
    out += _HEAD.pack(api_key, version, correlation_id, -1 if client_id is None else len(name))
    out += name
    module = wire(api_key)
    if version >= module.FLEXIBLE_REQUEST:
        put_uvarint(out, 0)
    module.ENCODE_REQUEST[version](request, out)
    out[:4] = (len(out) - 4).to_bytes(4, "big")
    return out


def decode_response(api_key: int, version: int, frame: Buffer) -> tuple[int, Any]:
    """The correlation id and the body of an answer, which comes without its size."""
    module = wire(api_key)
    try:
        correlation_id = int.from_bytes(frame[:4], "big", signed=True)
        at = 4
        if api_key != API_VERSIONS and version >= module.FLEXIBLE_RESPONSE:
            at = skip_tags(frame, at, len(frame))
        return correlation_id, module.DECODE_RESPONSE[version](frame, at, len(frame))[0]
    except _DAMAGE as error:
        _refuse(f"an answer {APIS[api_key].name} of version {version}", error)


def decode_data(name: str, data: Buffer) -> Any:
    """A message that travels inside of others, by its name in `messages.txt`; its first two bytes are the version.

    A version above the known ones is read as the newest known one, as Kafka's consumers do among each other.
    """
    module = importlib.import_module(f"tidelog.service.kafka.wire.api_{name}")
    try:
        version = min(int.from_bytes(data[:2], "big", signed=True), max(module.DECODE_MESSAGE))
        if len(data) < 2 or version not in module.DECODE_MESSAGE:
            raise ProtocolError(f"{name} has no version {version}")
        return module.DECODE_MESSAGE[version](data, 2, len(data))[0]
    except _DAMAGE as error:
        _refuse(name, error)


def _refuse(what: str, error: Exception) -> NoReturn:
    if isinstance(error, UnicodeDecodeError):
        raise ProtocolError(f"{what} has text that is not UTF-8") from error
    raise ProtocolError(f"{what} is cut short") from error
