"""A serving process: one log directory, open to clients of Kafka and of HTTP.

Invariants
- Both addresses listen before `start` returns. It is ready from then on until `stop` begins.
- Stopping refuses new connections, answers the requests that were begun, then closes the directory: nothing that was
  accepted is lost.
- On addresses that other machines reach it listens with TLS and authentication only, unless settings say otherwise by
  name.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from tidelog.client.local_socket import socket_of
from tidelog.config.serve import ServeSettings
from tidelog.engine.engine import Engine
from tidelog.errors import ConfigError, InputError
from tidelog.service.auth.access import LOCAL, Principal, Resource
from tidelog.service.auth.security import Security
from tidelog.service.console.pages import console_routes
from tidelog.service.http.app import App
from tidelog.service.http.call import Peer
from tidelog.service.http.metrics_page import Sources
from tidelog.service.http.server import HttpServer
from tidelog.service.http.service import HttpSettings, Service
from tidelog.service.kafka.account_requests import AccountRequests
from tidelog.service.kafka.admin import Admin
from tidelog.service.kafka.broker import Broker, BrokerSettings
from tidelog.service.kafka.groups.coordinator import BrokerNode, GroupCoordinator
from tidelog.service.kafka.groups.group_configs import GroupConfigs
from tidelog.service.kafka.groups.share_fetch import ShareGroups
from tidelog.service.kafka.groups.store import GroupStore
from tidelog.service.kafka.groups.table import CoordinatorSettings
from tidelog.service.kafka.quotas import ClientQuotas
from tidelog.service.kafka.server import KafkaServer
from tidelog.service.kafka.transactions.coordinator import TransactionService
from tidelog.service.kafka.transactions.store import TransactionStore
from tidelog.service.metrics import Exposition, now
from tidelog.service.placement import Address, Alone, Placement
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import TopicName

_logger = logging.getLogger("tidelog.http")


class NodeLoad(NamedTuple):
    """What a node has done since it was started, and has open."""

    received_bytes: int
    sent_bytes: int
    connections: int
    open_partitions: int


class Listening(NamedTuple):
    """Where the process can be reached."""

    kafka: Address
    http: Address
    has_tls: bool = False

    @property
    def http_url(self) -> str:
        return self.http.url.replace("http:", "https:", 1) if self.has_tls else self.http.url


def parse_address(text: str, option: str) -> Address:
    """`HOST:PORT`; an IPv6 address is in brackets."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InputError(f"{option} must be HOST:PORT, for example 127.0.0.1:9092, not {text!r}")
    return Address(host, int(port))


def check_url(text: str, option: str) -> None:
    """InputError for what is no URL of this service."""
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.netloc or url.username is not None or url.query or url.fragment:
        shown = "one with a user in it" if url.username is not None else repr(text)
        raise InputError(f"{option} must be a URL such as https://log.example.org, not {shown}")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_exposure(address: Address, option: str, settings: ServeSettings) -> None:
    """ConfigError for an address that other machines reach, unless it is protected, or allowed by name not to be."""
    if is_loopback(address.host):
        return
    where = f"{option} {address.host}:{address.port} is reachable from other machines"
    if settings.auth == "off" and not settings.allow_anonymous:
        raise ConfigError(
            f"{where}, and there is no authentication",
            hint="Turn it on with --auth required (`tidelog auth user add` makes users), listen on 127.0.0.1, "
            "or say --allow-anonymous",
        )
    if settings.tls_cert is None and not settings.allow_plaintext:
        raise ConfigError(
            f"{where}, and there is no TLS",
            hint="Give --tls-cert and --tls-key, listen on 127.0.0.1, or say --allow-plaintext",
        )


@contextlib.contextmanager
def _naming(address: Address, option: str) -> Iterator[None]:
    """ConfigError for an address that cannot be listened on."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address.host}:{address.port}: {error.strerror or error}",
            hint=f"Another program may use it: choose another one with {option} HOST:PORT, or port 0",
        ) from error


class Node:
    """Serves a log directory until it is stopped. It closes the directory."""

    def __init__(
        self,
        directory: LogDirectory,
        settings: BrokerSettings | None = None,
        group_settings: CoordinatorSettings | None = None,
        http_settings: HttpSettings | None = None,
        security: Security | None = None,
        engines: Mapping[str, Engine] | None = None,
        placement: Placement | None = None,
    ) -> None:
        """Without `security` everybody may do everything. `engines` are served over HTTP by their names; the node
        closes them, too. Without `placement` it is a node by itself."""
        self._directory = directory
        self.security = security or Security()
        self._broker = Broker(directory, settings, placement)
        self.placement = self._broker.placement
        self._kafka = KafkaServer(self._broker, self.security)
        self._groups = GroupCoordinator(
            directory._group_offsets,
            GroupStore(directory._shared_metadata, directory._info.node or "local"),
            self._broker,
            self._coordinator,
            group_settings,
        )
        self._kafka.add(self._groups.handlers())
        self._broker.on_open = self._groups.partition_opened
        self._group_configs = GroupConfigs()
        self._kafka.add(Admin(self._broker, self._group_configs).handlers())
        self._shares = ShareGroups(self._broker, self._group_configs)
        self._kafka.add(self._shares.handlers())
        if self.security.is_required:
            self._kafka.add(AccountRequests(self.security, directory._clock.now_us).handlers())
        self._transactions: TransactionService | None = None
        self.http = Service(self._broker, http_settings)
        self.http.authenticate = self._authenticated
        self.http.authorizer = self.security.authorizer
        self.http.audit = self._audited
        self.http.is_current = self.security.is_current
        self.security.on_check(self.http.end_revoked)
        self.http.move_group = self._groups.move
        self.http.engines = dict(engines or {})
        self._http = HttpServer(App(self.http, console_routes()))

        self.http.sources = Sources(
            self._write_kafka_metrics, self._groups.statistics, lambda: self._http.connections, now()
        )

    def _write_kafka_metrics(self, exposition: Exposition) -> None:
        statistics = self._kafka.statistics()
        exposition.add("tidelog_kafka_connections", statistics.connections)
        exposition.add("tidelog_kafka_received_bytes_total", statistics.received_bytes)
        exposition.add("tidelog_kafka_sent_bytes_total", statistics.sent_bytes)
        for api, histogram in statistics.request_seconds.items():
            exposition.add_histogram("tidelog_kafka_request_seconds", histogram, (("api", api),))

    def _coordinator(self) -> BrokerNode:
        return BrokerNode(self._broker.node_id, *self._broker.address)

    # For the placement of an installation

    async def open_partition(self, topic: TopicName, number: int) -> None:
        """Opens a partition that was assigned to this node; HeldError while another node has it open."""
        await self._broker.open_partition(topic, number)

    async def release_partition(self, topic: TopicName, number: int) -> None:
        """Ships what is left of a partition and closes it, so that another node can open it at once."""
        await self._broker.release_partition(topic, number)

    async def remove_topic(self, topic: TopicName) -> None:
        """Deletes what is stored of a topic whose partitions all nodes have released. It can be repeated."""
        await self._broker.remove_topic(topic)

    def load(self) -> NodeLoad:
        """What this node does, in numbers that only grow but for the last two."""
        statistics = self._kafka.statistics()
        return NodeLoad(
            received_bytes=statistics.received_bytes,
            sent_bytes=statistics.sent_bytes,
            connections=statistics.connections,
            open_partitions=sum(len(topic.open) for topic in self._broker.topics()),
        )

    async def _authenticated(self, peer: Peer) -> Principal:
        if peer.is_local_socket:
            return LOCAL
        header = peer.headers.get("authorization")
        return await self.security.authenticate_http(header, peer.certificate_der, peer.address)

    def _audited(self, principal: Principal, peer: Peer, route: str, resource: Resource, status: int) -> None:
        if self.security.is_required:
            self.security.audit.request(principal, route, resource, status, peer.address or "socket")

    async def start(
        self,
        kafka: Address,
        http: Address,
        advertised: Address | None = None,
        advertised_http: str | None = None,
    ) -> Listening:
        """Listens on both addresses. `advertised` is what Kafka's clients are sent to, if that is another one, and
        `advertised_http` the URL by which those of HTTP reach it."""
        await self._broker.start()
        await self._groups.start()
        await self._group_configs.start(*await in_store_thread(self._directory._shared_metadata))
        await self._shares.start()
        await self._start_transactions()
        await self._start_quotas()
        await self.security.start(*await in_store_thread(self._directory._shared_metadata))
        with _naming(kafka, "--kafka"):
            listening = Address(*await self._kafka.start(*kafka))
        self._broker.address = advertised or listening
        with _naming(http, "--http"):
            serving = Address(*await self._http.start(*http, self.security.ssl_context))
        await self._listen_locally()
        found = Listening(listening, serving, self.security.ssl_context is not None)
        self.http.advertised = advertised_http or found.http_url
        if not self.security.is_required and is_loopback(serving.host):
            named = urlsplit(self.http.advertised).hostname or ""
            self.http.allowed_hosts = frozenset({"localhost", http.host.lower(), named})
        if isinstance(self.placement, Alone):
            self.placement.serve_at(self._broker.address, self.http.advertised)
        self.http.is_ready = True
        return found

    async def _listen_locally(self) -> None:
        """By a socket in each directory, for the commands that are about it. Not every file system has sockets."""
        engines = (engine._core.directory for engine in self.http.engines.values())
        for directory in dict.fromkeys((self._directory.root, *engines)):
            path = socket_of(directory)
            if not path.parent.is_dir():
                continue  # it is in memory
            try:
                await self._http.start_unix(path)
            except OSError as error:
                _logger.warning("commands beside this server need --server: there is no socket %s: %s", path, error)

    async def _start_transactions(self) -> None:
        """What was decided before is carried out from here on, beside the requests."""
        metadata, root = await in_store_thread(self._directory._shared_metadata)
        clock = self._directory._clock
        store = TransactionStore(metadata, root, clock)
        self._transactions = TransactionService(store, self._broker, self._groups, lambda: clock.now_us() // 1000)
        self._kafka.add(self._transactions.handlers())
        self._kafka.verify_with(self._transactions.verify)
        await self._transactions.start()

    async def _start_quotas(self) -> None:
        quotas = ClientQuotas(*await in_store_thread(self._directory._shared_metadata))
        await quotas.start()
        self._kafka.quotas = quotas
        self._kafka.add(quotas.handlers())

    async def stop(self) -> None:
        """Returns once everything is closed and on the disk."""
        self.http.begin_to_stop()
        self._groups.release()
        await asyncio.gather(self._kafka.stop(), self._http.stop())
        if self._transactions is not None:
            await self._transactions.stop()
        await self._groups.stop()
        await self._shares.stop()
        await self._broker.stop()
        await self.security.stop()
        try:
            await asyncio.to_thread(self._directory.close)
        finally:
            await asyncio.gather(*(engine.close_async() for engine in self.http.engines.values()))
