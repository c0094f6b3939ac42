"""A server with authentication in this process, its clients, and requests that are made from their definitions."""

from __future__ import annotations

import asyncio
import contextlib
import types
import typing
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
from tests.service.kafka.test_server import LOOPBACK, Client, Running, batch

import tidelog
from tidelog.config.serve import ServeSettings
from tidelog.service.auth.access import Grant, Permission, parse_pattern
from tidelog.service.auth.accounts import AccountStore, Change, adding_user, granting, make_user
from tidelog.service.auth.security import Security
from tidelog.service.kafka.broker import BrokerSettings
from tidelog.service.kafka.codec import wire
from tidelog.service.kafka.groups.classic import GroupSettings
from tidelog.service.kafka.groups.table import CoordinatorSettings
from tidelog.service.node import Node
from tidelog.topics.directory import LogDirectory

HANDSHAKE, AUTHENTICATE = 17, 36
PASSWORD = "correct horse battery"


def grant(text: str) -> Grant:
    """`alice read topic:shop/*`."""
    who, what, pattern = text.split()
    return Grant(who, Permission(what), parse_pattern(pattern))


def change_accounts(log: LogDirectory, *changes: Change) -> None:
    store = AccountStore(*log._shared_metadata())
    for change in changes:
        store.change(change)


_USER = make_user(PASSWORD, 0)


def add_users(log: LogDirectory, *names: str) -> None:
    """All with the same password: hashing takes its time."""
    change_accounts(log, *(adding_user(name, msgspec.structs.replace(_USER, id=f"id-{name}")) for name in names))


class Secured(Running):
    """A server that wants to know who asks."""

    node: Node
    directory: LogDirectory

    async def logged_in(self, name: str, password: str = PASSWORD) -> Client:
        """A connection of a user."""
        client = await self.client()
        answer = await authenticate(client, name, password)
        assert answer.error_code == 0, answer
        return client


async def handshake(client: Client, mechanism: str, version: int = 1) -> Any:
    return await client.call(HANDSHAKE, version, wire(HANDSHAKE).SaslHandshakeRequest(mechanism=mechanism))


async def send_token(client: Client, data: bytes, version: int = 2) -> Any:
    return await client.call(AUTHENTICATE, version, wire(AUTHENTICATE).SaslAuthenticateRequest(auth_bytes=data))


async def authenticate(client: Client, name: str, password: str = PASSWORD) -> Any:
    assert (await handshake(client, "PLAIN")).error_code == 0
    return await send_token(client, f"\0{name}\0{password}".encode())


@contextlib.asynccontextmanager
async def secured(
    directory: Path,
    *grants: str,
    users: tuple[str, ...] = (),
    broker: BrokerSettings | None = None,
    **settings: Any,
) -> AsyncIterator[Secured]:
    """With authentication required; users are those of the grants and `users`."""
    log = tidelog.open(directory)
    given = [grant(text) for text in grants]
    add_users(log, *dict.fromkeys([*(one.principal for one in given if one.principal != "*"), *users]))
    change_accounts(log, granting(*given))
    security = Security(ServeSettings(auth="required", auth_reload_seconds=3600, **settings))
    node = Node(log, broker, CoordinatorSettings(GroupSettings(initial_rebalance_delay_ms=0)), security=security)
    listening = await node.start(LOOPBACK, LOOPBACK)
    server = Secured(node, listening.kafka)
    server.directory = log
    try:
        yield server
    finally:
        await server.close()
        await node.stop()


# Requests from their definitions


class Names(typing.NamedTuple):
    """What a request is about."""

    topic: str
    topic_id: bytes
    group: str
    transaction: str | None
    mechanism: str = "PLAIN"


_NUMBERS = {
    "acks": -1,
    "timeout_ms": 1000,
    "session_timeout_ms": 10_000,
    "rebalance_timeout_ms": 10_000,
    "transaction_timeout_ms": 10_000,
    "resource_type": 2,
    "max_bytes": 1 << 20,
    "partition_max_bytes": 1 << 20,
    "response_partition_limit": 100,
    "max_records": 10,
    "batch_size": 10,
    "num_partitions": 1,
    "replication_factor": 1,
    "count": 3,
    "timestamp": -2,
    "replica_id": -1,
    "isolation_level": 0,
    "key_type": 0,
}


def request_of(api_key: int, names: Names) -> Any:
    """A request that names them wherever it can name something, with one item in each list."""
    module = wire(api_key)
    (root,) = (one for name, one in vars(module).items() if name.endswith("Request") and _is_root(name, module))
    return _filled(root, names)


def _is_root(name: str, module: types.ModuleType) -> bool:
    return not any(other != name and name.startswith(other) for other in vars(module) if other.endswith("Request"))


def _filled(kind: type, names: Names) -> Any:
    hints = typing.get_type_hints(kind)
    return kind(**{name: _value(name, hint, names) for name, hint in hints.items()})


def _value(name: str, hint: Any, names: Names) -> Any:
    options = [one for one in typing.get_args(hint) or (hint,) if one is not type(None)]
    listed = next((one for one in (hint, *options) if typing.get_origin(one) is list), None)
    if name == "records":
        return batch(b"attempt")
    if listed is not None:
        return [_value(name, typing.get_args(listed)[0], names)]
    kind = options[0]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _filled(kind, names)
    if kind is str:
        return _text(name, names)
    if kind is bytes:
        return names.topic_id if name == "topic_id" else b""
    if kind is int:
        return _NUMBERS.get(name, -1 if name.endswith(("epoch", "session_id", "_id")) and name != "session_id" else 0)
    return kind()


def _text(name: str, names: Names) -> str | None:
    if "group" in name and "instance" not in name:
        return names.group
    if "transactional" in name:
        return names.transaction
    texts = {
        "key": names.group,
        "coordinator_keys": names.group,
        "mechanism": names.mechanism,
        "protocol_type": "consumer",
        "state_filters": "Ongoing",
    }
    topics = ("name", "topic", "topic_names", "resource_name", "subscribed_topic_names", "topic_name")
    return texts.get(name) or (names.topic if name in topics else "")


def error_codes(value: Any, name: str = "") -> Iterator[int]:
    """All codes of an answer, those that say that there is no error too."""
    if isinstance(value, msgspec.Struct):
        for field in value.__struct_fields__:
            yield from error_codes(getattr(value, field), field)
    elif isinstance(value, list):
        for item in value:
            yield from error_codes(item, name)
    elif name.endswith("error_code") and isinstance(value, int):
        yield value


def has_items(value: Any) -> bool:
    """Whether an answer tells of anything but the brokers."""
    fields = [field for field in value.__struct_fields__ if field not in ("brokers", "node_endpoints")]
    return any(isinstance(getattr(value, field), list) and getattr(value, field) for field in fields)


async def within(seconds: float, work: Any) -> Any:
    async with asyncio.timeout(seconds):
        return await work
