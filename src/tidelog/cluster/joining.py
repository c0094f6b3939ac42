"""A serving node joins a cluster: its parts are made from its log directory, and what it does is measured.

Invariants
- A node joins what its log directory is bound to: the store, the metadata store and the root of its catalog. Nodes of
  one cluster therefore have the same history, whatever they were started with.
- Rates are smoothed over about a minute, so that a short burst moves nothing; over less for a partition that has not
  been here for so long: what has just been moved here does not look idle.
- What is only on this disk is counted by topic (`restore point`): that much is missing if the disk is lost now.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from tidelog.clock import Clock
from tidelog.cluster.agent import engine_piece
from tidelog.cluster.documents import EngineArguments
from tidelog.cluster.engine_host import ClusterEngines, Place
from tidelog.cluster.failures import Failure
from tidelog.cluster.inventory import load_key
from tidelog.cluster.kept_tails import KeptTails
from tidelog.cluster.leader import TopicSeen
from tidelog.cluster.member import Identity, Member
from tidelog.cluster.operations import ClusterOperations
from tidelog.cluster.runtime import Cluster
from tidelog.cold.ownership import Ownership
from tidelog.config import EngineConfig
from tidelog.errors import ConfigError, FencedError, NotFoundError, TidelogError
from tidelog.log.settings import LogStatistics
from tidelog.service.cluster_control import Load, NodeLoad, NodeTail, NotServed, Unshipped
from tidelog.service.kafka.partitions import Partition
from tidelog.service.metrics import Exposition
from tidelog.service.node import Listening, Node
from tidelog.store.keys import ClusterKeys, is_part
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.base import TopicStatistics
from tidelog.topics.directory import LogDirectory
from tidelog.topics.names import TopicName, parse_topic_name, read_topic_info
from tidelog.topics.topic import Topic

_SMOOTHED_SECONDS = 60.0
_ENGINE = "engine "
"""Before the name of one, among what is measured."""
_MAX_PARTITIONS = 500
"""So many of the busiest partitions are reported one by one."""
_MAX_REASON_CHARACTERS = 500
"""Of each engine that fails: all nodes report it every few seconds."""
_QUIET_BYTES = 1000.0
"""A partition with less a second counts as idle."""


def check_node_name(name: str) -> str:
    """ConfigError for a name that cannot be part of a key."""
    if not is_part(name):
        raise ConfigError(f"{name!r} cannot be the name of a node", hint="Use letters, digits, `.`, `_` and `-`")
    return name


def can_join(directory: LogDirectory) -> bool:
    """Whether its metadata store has what nodes agree by."""
    if directory._tier is None:
        return False
    metadata, _ = directory._shared_metadata()
    return metadata.supports_leases and metadata.url.startswith("etcd")


def make_cluster(directory: LogDirectory, name: str | None, zone: str, version: str, lease_seconds: float) -> Cluster:
    """The cluster of a log directory, before anything of it is read. ConfigError where there cannot be one."""
    if directory._tier is None:
        raise ConfigError("a cluster needs a store that all nodes reach", hint="Name one with --store s3://...")
    metadata, root = directory._shared_metadata()
    if not (metadata.supports_leases and metadata.supports_multi_key):
        raise ConfigError(
            f"{metadata.url} has no leases, which nodes need", hint="Name etcd: --metadata etcd://host:port"
        )
    directory._tier.lease.follow(lease_seconds)  # others may open its partitions when they may have them
    own = directory._info.node
    identity = Identity(check_node_name(name or own), own, "", "", zone, version)
    directory._tier.lease.node_name = identity.name
    member = Member(metadata, ClusterKeys(root), directory._clock, identity, lease_seconds)
    return Cluster(metadata, directory._clock, member)


async def join(
    cluster: Cluster, node: Node, directory: LogDirectory, listening: Listening, config: EngineConfig | None = None
) -> ClusterEngines:
    """Makes a node that listens a member; returns its engines, which are opened with the settings of `config`."""
    kafka = node.http.broker.address
    host = f"[{kafka.host}]" if ":" in kafka.host else kafka.host
    session = "" if directory._tier is None else directory._tier.lease.session
    cluster.member.identity = cluster.member.identity._replace(
        kafka=f"{host}:{kafka.port}", http=node.http.advertised or listening.http_url, session=session
    )
    engines = ClusterEngines(
        node.http, config or EngineConfig(), _place_of(cluster, directory), lambda name: _arguments(cluster, name)
    )
    meter = LoadMeter(node, directory._clock, cluster, engines)
    cluster.measure = meter.measure
    cluster.known_topics = lambda: known_topics(directory)
    cluster.remove_topic = node.remove_topic
    assert node.http.sources is not None
    node.http.sources = node.http.sources._replace(cluster=lambda exposition: write_metrics(exposition, cluster, meter))
    node.http.cluster = ClusterOperations(*directory._shared_metadata(), directory._clock)
    engines.lost = lambda name: _lost(cluster, name)
    node.http.why_not_served = lambda name: _why_not_served(cluster, engines, name)
    await cluster.join(_Host(node), engines)
    return engines


def failing_engines(cluster: Cluster, engines: ClusterEngines) -> dict[str, Failure]:
    """Those that cannot be opened here, restored or let go, and why."""
    found = dict(engines.failures)
    if cluster.agent is not None:
        opening = list(cluster.agent.failures.items())
        found |= {piece.topic.name: failure for piece, failure in opening if piece.kind == "engine"}
    return found


def _why_not_served(cluster: Cluster, engines: ClusterEngines, name: str) -> NotServed | None:
    """What nobody foresaw may name files of this machine, which are not for clients."""
    failure, node = failing_engines(cluster, engines).get(name), cluster.member.name
    if failure is None:
        return None
    hint = f"`tidelog cluster engines` and the log of {node} say more; it is tried again"
    if not failure.is_foreseen:
        return NotServed(f"{node} cannot open it", hint)
    return NotServed(
        f"{node} cannot open it: {failure}", f"{failure.hint}. It is tried again" if failure.hint else hint
    )


def _lost(cluster: Cluster, name: str) -> None:
    if cluster.agent is not None:
        cluster.agent.lost(engine_piece(name))


def _arguments(cluster: Cluster, name: str) -> EngineArguments:
    """NotFoundError where the document is gone: the engine is not wanted any more."""
    placement = cluster.state.engines.get(name)
    if placement is None:
        raise NotFoundError(f"the cluster has no engine {name} any more")
    return placement.arguments


def _place_of(cluster: Cluster, directory: LogDirectory) -> Place:
    """Engines are with the topics, unless they say otherwise."""
    tier = directory._tier
    assert tier is not None, "a node of a cluster has a store"
    metadata, root = directory._shared_metadata()
    return Place(
        root=directory.root,
        store=tier.objects.url,
        metadata=metadata.url,
        metadata_root=root,
        lease_seconds=cluster.member.lease_seconds,
        node_name=cluster.member.name,
    )


class _Host:
    """A node as the agent sees it."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.open_partition = node.open_partition
        self.release_partition = node.release_partition
        self.acquire_slot = node.acquire_slot
        self.release_slot = node.release_slot

    def renew(self) -> None:
        tier = self._node.http.broker.directory._tier
        if tier is not None:
            tier.lease.renew()

    async def fenced_partitions(self) -> list[tuple[TopicName, int]]:
        opened = [
            (served.name, number, tiered.owned.ownership)
            for served in self._node.http.broker.topics()
            for number, partition in served.open.items()
            if (tiered := partition.topic._tiered) is not None
        ]
        return await in_store_thread(_fenced, opened)


def _fenced(opened: list[tuple[TopicName, int, Ownership]]) -> list[tuple[TopicName, int]]:
    """In a thread: which of these claims are not the last ones."""
    if not opened:
        return []
    keys = [ownership.catalog.keys.owner for _, _, ownership in opened]
    found = opened[0][2].catalog.metadata.get_many(keys)
    return [
        (topic, number)
        for (topic, number, ownership), key in zip(opened, keys, strict=True)
        if (key not in found or found[key].version != ownership.version) and _is_lost(ownership)
    ]


def _is_lost(ownership: Ownership) -> bool:
    """It may have been rewritten under the same claim in this moment."""
    try:
        ownership.verify()
    except FencedError:
        return True
    return False


def known_topics(directory: LogDirectory) -> dict[TopicName, TopicSeen]:
    """In a thread: the topics of the catalog."""
    found = {}
    for text in directory.topics():
        name = parse_topic_name(text)
        info = read_topic_info(directory._files, name.directory(directory.root))
        layout = directory._opener.layout(name)
        if info is not None and not info.reliable:
            continue
        found[name] = TopicSeen(
            directory._clock.now_us() if info is None else info.created_us, 1 if layout is None else layout.count
        )
    return found


class _Counts(NamedTuple):
    """What a partition or an engine has done since it was opened."""

    bytes_in: int
    bytes_out: int
    messages_in: int
    messages_out: int


class _Sample(NamedTuple):
    at: float
    counts: Mapping[str, _Counts]
    received_bytes: int
    sent_bytes: int
    cpu_seconds: float


class LoadMeter:
    """What a node does, measured from one call to the next. One thread at a time uses it."""

    def __init__(self, node: Node, clock: Clock, cluster: Cluster, engines: ClusterEngines) -> None:
        self._node = node
        self._clock = clock
        self._cluster = cluster
        self._engines = engines
        self._last: _Sample | None = None
        self._rates: dict[str, Load] = {}
        self._seconds: dict[str, float] = {}
        self._total = Load()
        self._cpu = 0.0
        self._kept = KeptTails(node.http.broker.directory, clock)
        self.tail = NodeTail(at_us=0)
        """What was only on this disk at the last measurement."""

    def measure(self) -> tuple[NodeLoad, NodeTail]:
        """In a thread."""
        opened = self._opened()
        statistics = {key: found for key, one in opened.items() if (found := _statistics(one.topic)) is not None}
        counts = {key: _counts(opened[key], one, one.log) for key, one in statistics.items() if one.log is not None}
        engines = {f"{_ENGINE}{name}": _Counts(*work) for name, work in self._engines.work().items()}
        self._take(counts | engines)
        now_us = self._clock.now_us()
        self.tail = NodeTail(
            at_us=now_us,
            topics=unshipped_of(statistics),
            flushed=flushed_of(statistics),
            engines=self._engines.unshipped(),
            kept=self._kept.by_topic(lambda: {TopicName(*one.topic.name.split("/")) for one in opened.values()}),
        )
        agent = self._cluster.agent
        partitions = [each for each in self._rates.items() if not each[0].startswith(_ENGINE)]
        busy = sorted(partitions, key=lambda each: -_bytes(each[1]))[:_MAX_PARTITIONS]
        load = NodeLoad(
            node=self._cluster.member.name,
            at_us=now_us,
            total=self._total,
            cpu=round(self._cpu, 3),
            memory_bytes=_resident_bytes(),
            disk_free_bytes=shutil.disk_usage(self._node.http.broker.directory.root).free,
            cold_reads=self._node.http.broker.cold_reads_under_way,
            open=len(opened),
            opening=0 if agent is None else agent.opening,
            releasing=0 if agent is None else agent.releasing,
            partitions={key: load for key, load in busy if _bytes(load) >= _QUIET_BYTES},
            engines=len(self._engines.names()),
            engine_loads={key.removeprefix(_ENGINE): self._rates[key] for key in engines if key in self._rates},
            failing_engines={
                name: failure.told[:_MAX_REASON_CHARACTERS] for name, failure in self.failing_engines().items()
            },
        )
        return load, self.tail

    def failing_engines(self) -> dict[str, Failure]:
        return failing_engines(self._cluster, self._engines)

    def _opened(self) -> dict[str, Partition]:
        return {
            load_key(served.name, number): partition
            for served in self._node.http.broker.topics()
            for number, partition in list(served.open.items())
            if partition.is_open
        }

    def _take(self, counts: Mapping[str, _Counts]) -> None:
        node = self._node.load()
        usage = resource.getrusage(resource.RUSAGE_SELF)
        sample = _Sample(
            self._clock.monotonic(),
            counts,
            node.received_bytes,
            node.sent_bytes,
            usage.ru_utime + usage.ru_stime,
        )
        last, self._last = self._last, sample
        if last is None or sample.at <= last.at:
            return
        seconds = sample.at - last.at
        part = min(1.0, seconds / _SMOOTHED_SECONDS)
        rates, measured = {}, {}
        for key, now in sample.counts.items():
            before = last.counts.get(key)
            if before is None:
                continue  # it has come since
            known = self._rates.get(key, Load())
            measured[key] = max(seconds, min(self._seconds.get(key, 0.0) + seconds, _SMOOTHED_SECONDS))
            rates[key] = Load(
                **{
                    name: _smoothed(getattr(known, name), (after - earlier) / seconds, seconds / measured[key])
                    for name, after, earlier in zip(_Counts._fields, now, before, strict=True)
                }
            )
        self._rates, self._seconds = rates, measured
        self._total = Load(
            bytes_in=_smoothed(self._total.bytes_in, (node.received_bytes - last.received_bytes) / seconds, part),
            bytes_out=_smoothed(self._total.bytes_out, (node.sent_bytes - last.sent_bytes) / seconds, part),
            messages_in=sum(load.messages_in for key, load in rates.items() if not key.startswith(_ENGINE)),
            messages_out=sum(load.messages_out for key, load in rates.items() if not key.startswith(_ENGINE)),
        )
        self._cpu = _smoothed(self._cpu, (sample.cpu_seconds - last.cpu_seconds) / seconds, part)


def write_metrics(exposition: Exposition, cluster: Cluster, meter: LoadMeter) -> None:
    """The cluster as this node sees it."""
    state, member, agent = cluster.state, cluster.member, cluster.agent
    owners = [node for placement in state.topics.values() for node in placement.partitions]
    lost = meter.tail.topics.values()
    failing = meter.failing_engines()
    others = [] if agent is None else [piece for piece in list(agent.failures) if piece.kind != "engine"]
    values = {
        "nodes": len(state.nodes),
        "alive": int(member.is_alive),
        "leader": int(cluster.leads),
        "leases_lost_total": member.leases_lost,
        "unassigned_partitions": sum(node not in state.nodes for node in owners),
        "assigned_partitions": owners.count(member.name),
        "opening_partitions": 0 if agent is None else agent.opening,
        "releasing_partitions": 0 if agent is None else agent.releasing,
        "failures": len(cluster.failures) + len(others) + len(failing),
        "slots": state.coordinators.slots.count(member.name),
        "decisions_total": cluster.rounds.decided,
        "unshipped_messages": sum(one.messages for one in lost),
        "unshipped_bytes": sum(one.bytes for one in lost),
        "unshipped_seconds": max((one.seconds for one in lost), default=0.0),
        "assigned_engines": sum(one.node == member.name for one in state.engines.values()),
        "unassigned_engines": sum(one.node not in state.nodes for one in state.engines.values()),
        "failing_engines": len(failing),
        "unshipped_entries": sum(one.messages for one in meter.tail.engines.values()),
        "kept_messages": sum(one.messages for one in meter.tail.kept.values()),
    }
    for name, value in values.items():
        exposition.add(f"tidelog_cluster_{name}", value)


def _smoothed(known: float, now: float, part: float) -> float:
    return round(known + (max(0.0, now) - known) * part, 3)


def _bytes(load: Load) -> float:
    return load.bytes_in + load.bytes_out


def _counts(partition: Partition, statistics: TopicStatistics, log: LogStatistics) -> _Counts:
    delivered = sum(one.delivered for one in statistics.subscriptions)  # their bytes are not counted
    reader = partition.reader
    return _Counts(log.written_bytes, reader.sent_bytes, statistics.next_offset, reader.sent_messages + delivered)


def _statistics(topic: Topic) -> TopicStatistics | None:
    try:
        return topic.statistics()
    except TidelogError:
        return None  # it was released meanwhile


def unshipped_of(statistics: Mapping[str, TopicStatistics]) -> dict[str, Unshipped]:
    """What is only on this disk, by topic."""
    messages: dict[str, int] = defaultdict(int)
    size: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    for key, one in statistics.items():
        shipper = None if one.tier is None else one.tier.shipper
        if shipper is not None and shipper.lag_messages:
            topic = key.rpartition("/")[0]
            messages[topic] += shipper.lag_messages
            size[topic] += shipper.lag_bytes
            seconds[topic] = max(seconds[topic], shipper.lag_seconds)
    return {
        topic: Unshipped(messages=count, bytes=size[topic], seconds=round(seconds[topic], 3))
        for topic, count in messages.items()
    }


def flushed_of(statistics: Mapping[str, TopicStatistics]) -> dict[str, int]:
    """What is in flushes and in no object of its topic, by topic."""
    messages: Counter[str] = Counter()
    for key, one in statistics.items():
        if one.tier is not None and one.tier.shipper is not None and one.tier.flushes is not None:
            shipper = one.tier.shipper
            messages[key.rpartition("/")[0]] += max(0, one.next_offset - shipper.shipped_offset - shipper.lag_messages)
    return {topic: count for topic, count in messages.items() if count}


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # another system
