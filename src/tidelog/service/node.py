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
from tidelog.clock import SteadyClock
from tidelog.config.serve import ServeSettings
from tidelog.engine.engine import Engine
from tidelog.errors import ConfigError, ConflictError, DataError, InputError, TidelogError
from tidelog.service.auth.access import LOCAL, Principal, Resource
from tidelog.service.auth.security import Security
from tidelog.service.console.pages import console_routes
from tidelog.service.http.app import App
from tidelog.service.http.call import Peer
from tidelog.service.http.metrics_page import Sources
from tidelog.service.http.server import HttpServer
from tidelog.service.http.service import HttpSettings, Service
from tidelog.service.http.sessions import CONSUMER_SEPARATOR
from tidelog.service.http.spread.others import Others, asking_node
from tidelog.service.kafka.account_requests import AccountRequests
from tidelog.service.kafka.admin import Admin
from tidelog.service.kafka.broker import Broker, BrokerSettings
from tidelog.service.kafka.groups.coordinator import BrokerNode, GroupCoordinator
from tidelog.service.kafka.groups.group_configs import GroupConfigs
from tidelog.service.kafka.groups.share_fetch import ShareGroups
from tidelog.service.kafka.groups.store import GroupRecord, GroupStore, SlotGroupStore
from tidelog.service.kafka.groups.table import CoordinatorSettings
from tidelog.service.kafka.peers import Peers, shared_secret
from tidelog.service.kafka.quotas import ClientQuotas
from tidelog.service.kafka.server import KafkaServer
from tidelog.service.kafka.slots import Slots
from tidelog.service.kafka.transactions.coordinator import TransactionService
from tidelog.service.kafka.transactions.lost_ends import LostEnds
from tidelog.service.kafka.transactions.remote import MarkerRequests, RemoteCoordinators, Verification
from tidelog.service.kafka.transactions.state_machine import TransactionRecord
from tidelog.service.kafka.transactions.store import TransactionStore
from tidelog.service.kafka.transactions.views import TransactionViews
from tidelog.service.metrics import Exposition, label_text, now
from tidelog.service.placement import Address, Alone, Placement, slot_of
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.topics.subscription.dead_letters import DeadLetterTopic
from tidelog.topics.subscription.group_offsets import CoordinatedOffsets, GroupOffset, OffsetKey

_logger = logging.getLogger("tidelog.http")
_FOLLOW_SECONDS = 2.0


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
        self._peers = Peers(self.security)
        self._slots: Slots | None = None
        self._shared_offsets: CoordinatedOffsets | None = None
        self._shared_records: SlotGroupStore | None = None
        self._groups = self._group_coordinator(group_settings)
        self._kafka.add(self._groups.handlers())
        self._broker.on_open = self._partition_opened
        self._group_configs = GroupConfigs()
        self._kafka.add(Admin(self._broker, self._group_configs).handlers())
        self._shares = ShareGroups(self._broker, self._group_configs, slots=self._slots)
        self._kafka.add(self._shares.handlers())
        if self.security.is_required:
            self._kafka.add(AccountRequests(self.security, directory._clock.now_us).handlers())
        self._transactions: TransactionService | None = None
        self._transaction_store: TransactionStore | None = None
        self._verification: Verification | None = None
        self._lost_ends = LostEnds(directory._clock.now_us)
        self._quotas: ClientQuotas | None = None
        self._following: asyncio.Task[None] | None = None
        self.http = Service(self._broker, http_settings)
        self.http.authenticate = self._authenticated
        self.http.authorizer = self.security.authorizer
        self.http.audit = self._audited
        self.http.is_current = self.security.is_current
        self.security.on_check(self.http.end_revoked)
        self.http.move_group = self._groups.move
        self.http.engines = dict(engines or {})
        if not self.placement.is_alone:
            self.http.others = Others(self.placement, self.security)
            directory._open_letters = self._open_letters
            self.http.sessions.suffix = lambda: f"{CONSUMER_SEPARATOR}{self.placement.node_id}"
        self._http = HttpServer(App(self.http, console_routes()))

        self.http.sources = Sources(
            self._write_kafka_metrics, self._groups.statistics, lambda: self._http.connections, now()
        )

    def _write_kafka_metrics(self, exposition: Exposition) -> None:
        statistics = self._kafka.statistics()
        exposition.add("tidelog_kafka_connections", statistics.connections)
        exposition.add("tidelog_kafka_received_bytes_total", statistics.received_bytes)
        exposition.add("tidelog_kafka_sent_bytes_total", statistics.sent_bytes)
        exposition.add("tidelog_clients_cut_total", statistics.cut_clients, label_text(("side", "kafka")))
        exposition.add("tidelog_clients_cut_total", self._http.cut_clients, label_text(("side", "http")))
        for api, histogram in statistics.request_seconds.items():
            exposition.add_histogram("tidelog_kafka_request_seconds", histogram, (("api", api),))

    def _group_coordinator(self, settings: CoordinatorSettings | None) -> GroupCoordinator:
        """Of all groups, or of those whose slots this node gets."""
        directory, broker = self._directory, self._broker
        shared = directory._shared_metadata
        node = directory._info.node or "local"
        if self.placement.is_alone:
            records = GroupStore(shared, node)
            return GroupCoordinator(directory._group_offsets, records, broker, self._coordinator_of, settings)
        slots = self._slots = Slots(shared, node, self._load_slots)

        def count_of(topic: str) -> int:
            served = broker.find(parse_topic_name(topic))
            return 0 if served is None else served.count

        offsets = self._shared_offsets = CoordinatedOffsets(
            directory,
            lambda group: slots.check(slot_of(group)),
            lambda group, error: slots.conflict(slot_of(group), error),
            count_of,
        )
        broker.on_change(offsets.topics_changed)
        shared_records = self._shared_records = SlotGroupStore(shared, slots)
        return GroupCoordinator(offsets, shared_records, broker, self._coordinator_of, settings, slots=slots)

    def _coordinator_of(self, key: str) -> BrokerNode | None:
        node = self.placement.coordinator(key)
        return None if node is None else BrokerNode(node.node_id, *node.kafka)

    def _partition_opened(self, topic: str, partition: int, next_offset: int) -> None:
        self._groups.partition_opened(topic, partition, next_offset)
        served = self._broker.find(parse_topic_name(topic))
        if served is not None:
            self._lost_ends.opened(served.open[partition])
        if served is not None and not self.placement.is_alone:
            self.http.fences.forget(served.id)
        if self._verification is not None:
            self._verification.opened(topic, partition)

    # For the placement of an installation

    async def acquire_slot(self, slot: int) -> None:
        """Coordinates the groups and transactional ids of a slot from now on, with what the store has of them."""
        assert self._slots is not None, "a node by itself has no slots"
        await self._slots.acquire(slot)

    async def _load_slots(self, slots: frozenset[int]) -> None:
        offsets, records, store = self._shared_offsets, self._shared_records, self._transaction_store
        assert offsets is not None and records is not None and store is not None, "it was started"

        def load() -> tuple[dict[OffsetKey, GroupOffset | DataError], dict[str, GroupRecord], list[TransactionRecord]]:
            found = {key: one for key, one in offsets.load().items() if slot_of(key.group) in slots}
            return found, records.load_slots(slots), store.load()

        found, groups, transactions = await in_store_thread(load)
        assert self._transactions is not None
        self._groups.take_over(found, groups)
        self._transactions.take_over(transactions)

    async def release_slot(self, slot: int) -> None:
        """Another node coordinates a slot from now on."""
        assert self._slots is not None, "a node by itself has no slots"
        self._slots.release(slot)
        if self._transactions is not None:
            self._transactions.hand_over(slot)
        await self._groups.hand_over(slot)
        self._slots.forget(slot)

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

    def _open_letters(self, name: str) -> DeadLetterTopic:
        """In a thread: the topic for dead letters of this name, wherever it is. It is created as any other, so that
        all nodes know it at once."""
        parsed = parse_topic_name(name)
        served = self._broker.find(parsed)
        if served is not None and self.placement.is_ours(parsed, 0) and (opened := served.open.get(0)) is not None:
            return opened.topic
        assert self.http.others is not None, "there are other nodes"
        return self.http.others.bridge.wait(self._letters(parsed))

    async def _letters(self, name: TopicName) -> DeadLetterTopic:
        served = self._broker.find(name)
        if served is None:
            try:
                served = await self._broker.create(name, 1)
            except ConflictError:  # another node was faster
                served = await self.http.topic(name)
        if self.placement.is_ours(name, 0):
            return (await self._broker.partition(served, 0)).topic
        assert self.http.others is not None, "there are other nodes"
        return self.http.others.topic(name)

    async def _authenticated(self, peer: Peer) -> Principal:
        if peer.is_local_socket:
            return LOCAL
        node = asking_node(peer.headers, self.security) if self.security.is_required else None
        if node is not None:
            return node
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
        if self.http.others is not None:
            self.http.others.start()
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
        store = self._transaction_store = TransactionStore(metadata, root, clock, self._slots)
        self._lost_ends.records = store
        steady = SteadyClock(clock)
        now_ms = lambda: steady.now_us() // 1000  # noqa: E731
        if self._slots is None:
            self._transactions = TransactionService(store, self._broker, self._groups, now_ms)
            self._kafka.verify_with(self._transactions.verify)
        else:
            remote = RemoteCoordinators(self._broker, self._peers)
            self._transactions = TransactionService(
                store, self._broker, self._groups, now_ms, slots=self._slots, remote=remote
            )
            self._verification = Verification(store, self._transactions)
            self._broker.on_marker = self._verification.ended
            self._broker.write_marker_elsewhere = remote.write_marker
            self._kafka.add(MarkerRequests(self._broker, clock.now_us).handlers())
            self._kafka.verify_with(self._verification.verify, self._verification)
            if self.security.is_required:
                self.security.node_secret = await in_store_thread(shared_secret, metadata, root)
        self._kafka.add(self._transactions.handlers())
        self._kafka.add(TransactionViews(self._transactions, self._broker, now_ms).handlers())
        await self._transactions.start()

    async def _start_quotas(self) -> None:
        quotas = self._quotas = ClientQuotas(*await in_store_thread(self._directory._shared_metadata))
        await quotas.start()
        self._kafka.quotas = quotas
        self._kafka.add(quotas.handlers())
        if not self.placement.is_alone:
            self._following = asyncio.create_task(self._follow_documents())

    async def _follow_documents(self) -> None:
        """What other nodes change counts here soon: quotas, and configs of groups. Accounts are followed anyway."""
        while True:
            await asyncio.sleep(_FOLLOW_SECONDS)
            with contextlib.suppress(TidelogError):  # the next look finds it
                if self._quotas is not None:
                    await self._quotas.start()
                await self._group_configs.start(*await in_store_thread(self._directory._shared_metadata))

    async def stop(self) -> None:
        """Returns once everything is closed and on the disk."""
        self.http.begin_to_stop()
        self._groups.release()
        if self._following is not None:
            self._following.cancel()
        await asyncio.gather(self._kafka.stop(), self._http.stop())
        self._lost_ends.stop()
        if self._transactions is not None:
            await self._transactions.stop()
        await self._peers.close()
        if self.http.others is not None:
            self.http.others.close()
        await self._groups.stop()
        await self._shares.stop()
        await self._broker.stop()
        await self.security.stop()
        try:
            await asyncio.to_thread(self._directory.close)
        finally:
            restoring = (engine.close_async() for engine in self.http.restoring.values())
            await asyncio.gather(*restoring, *(engine.close_async() for engine in self.http.engines.values()))
