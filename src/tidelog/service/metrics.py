"""Metrics for Prometheus: what every part says of itself by `statistics()`, as text.

Invariants
- A family is declared once, in `FAMILIES`, with its kind and help; nothing else has a name here. Dashboards and alert
  rules are tested against that table.
- A scrape asks no store and reads no file: lags and offsets are those that this process knows. Subscriptions and
  partitions that nobody has opened since the start are not in it.
- Times of single partitions are summed up over all of them: a histogram per partition would be most of the answer.
- Counters of a partition begin again when it is opened again, as those of a process do.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from tidelog.clock import Histogram, Stopwatch
from tidelog.engine.engine import EngineStatistics
from tidelog.topics.base import TopicStatistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["gauge", "counter", "histogram"]
Labels = tuple[tuple[str, str], ...]

# Powers of two of a microsecond, as `Histogram` has them: 64 us to 67 s. What is faster is in the first bucket.
_FIRST_BUCKET, _LAST_BUCKET = 6, 26
_FIRST_BUCKET_OF_HOT_READS = 0


class Family(NamedTuple):
    """The metrics of one name."""

    kind: Kind
    help: str
    first_bucket: int = _FIRST_BUCKET


FAMILIES: dict[str, Family] = {
    "tidelog_info": Family("gauge", "1, with the version and the mode as labels"),
    "tidelog_ready": Family("gauge", "1 while clients are served"),
    "tidelog_start_time_seconds": Family("gauge", "When the server was started, in seconds since 1970"),
    "tidelog_process_cpu_seconds_total": Family("counter", "Processor time of the process"),
    "tidelog_process_resident_bytes": Family("gauge", "Memory of the process"),
    "tidelog_process_open_descriptors": Family("gauge", "Open files and sockets of the process"),
    "tidelog_topics": Family("gauge", "Topics that are served"),
    "tidelog_partitions_open": Family("gauge", "Partitions that are open"),
    # Partitions
    "tidelog_partition_start_offset": Family("gauge", "The oldest offset that can be read"),
    "tidelog_partition_hot_start_offset": Family("gauge", "The oldest offset on this disk"),
    "tidelog_partition_shipped_offset": Family("gauge", "Everything below is in the object store"),
    "tidelog_partition_durable_offset": Family("gauge", "Everything below is synced to the disk"),
    "tidelog_partition_next_offset": Family("gauge", "The offset of the next message: its rate is messages in"),
    "tidelog_partition_hot_bytes": Family("gauge", "Bytes of files on this disk"),
    "tidelog_partition_cached_bytes": Family("gauge", "Bytes of the newest messages in memory"),
    "tidelog_partition_queued_bytes": Family("gauge", "Bytes that were accepted and wait for the writer"),
    "tidelog_partition_written_bytes_total": Family("counter", "Bytes written to files: its rate is bytes in"),
    "tidelog_partition_full_disk_waits_total": Family("counter", "Writes that found the disk full"),
    "tidelog_partition_failed": Family("gauge", "1 when the log is not open: it has failed, or was sealed"),
    "tidelog_partition_fenced": Family("gauge", "1 when another node has taken the partition over"),
    "tidelog_partition_epoch": Family("gauge", "The owner's epoch"),
    "tidelog_partition_unshipped_bytes": Family("gauge", "Bytes that the loss of this disk would cost"),
    "tidelog_partition_unshipped_seconds": Family("gauge", "Age of the oldest message that is on this disk only"),
    "tidelog_partition_unshipped_messages": Family("gauge", "Messages that are on this disk only"),
    "tidelog_partition_ship_errors_in_a_row": Family("gauge", "Attempts to ship that failed since the last success"),
    "tidelog_partition_shipped_bytes_total": Family("counter", "Bytes uploaded to the object store"),
    "tidelog_partition_shipped_objects_total": Family("counter", "Objects created in the object store"),
    "tidelog_partition_retention_errors_total": Family("counter", "Failures of retention"),
    # All logs together
    "tidelog_fsync_seconds": Family("histogram", "Time of syncs to the disk, all partitions"),
    "tidelog_flush_seconds": Family(
        "histogram", "Time of flushes to the store, for topics that are acknowledged by it"
    ),
    "tidelog_flush_bytes_total": Family("counter", "Bytes of these flushes"),
    "tidelog_flush_errors_total": Family("counter", "Flushes that failed, and were tried again"),
    "tidelog_write_seconds": Family("histogram", "Time of writes to files, all partitions"),
    "tidelog_append_wait_seconds": Family("histogram", "Time of appends that waited for room or for the disk"),
    "tidelog_reads_total": Family("counter", "Reads of consumers by where they were answered: memory, files or store"),
    "tidelog_reads_for_others_total": Family(
        "counter", "Reads of the store for consumers of partitions that other nodes own; not among the reads above"
    ),
    "tidelog_consumers_sent_away_total": Family("counter", "Consumers that were sent to another node for history"),
    # The store
    "tidelog_cold_requests_total": Family("counter", "Requests for ranges of objects"),
    "tidelog_cold_failed_requests_total": Family("counter", "Those that failed"),
    "tidelog_cold_read_bytes_total": Family("counter", "Bytes read from the object store"),
    "tidelog_cold_request_seconds": Family("histogram", "Time of requests for ranges of objects"),
    "tidelog_metadata_read_seconds": Family("histogram", "Time of reads of the metadata store"),
    "tidelog_metadata_commit_seconds": Family("histogram", "Time of writes of the metadata store"),
    "tidelog_metadata_conflicts_total": Family("counter", "Writes of the metadata store that lost a race"),
    "tidelog_metadata_errors_total": Family("counter", "Requests to the metadata store that failed"),
    # Consumers
    "tidelog_subscription_lag_messages": Family("gauge", "Messages that a subscription has not acknowledged"),
    "tidelog_subscription_unacked_messages": Family("gauge", "Messages that are with consumers now"),
    "tidelog_subscription_waiting_messages": Family("gauge", "Messages that wait for redelivery, or are delayed"),
    "tidelog_subscription_consumers": Family("gauge", "Consumers that are connected"),
    "tidelog_subscription_delivered_total": Family("counter", "Deliveries, redeliveries included"),
    "tidelog_subscription_redelivered_total": Family("counter", "Redeliveries"),
    "tidelog_subscription_acked_total": Family("counter", "Acknowledgements"),
    "tidelog_subscription_nacked_total": Family("counter", "Rejections"),
    "tidelog_subscription_dead_letters_total": Family("counter", "Messages that were given up and kept as letters"),
    "tidelog_group_lag_messages": Family("gauge", "Messages after what a consumer group has committed"),
    "tidelog_group_committed_offset": Family("gauge", "The offset that a consumer group has committed"),
    # Clients
    "tidelog_kafka_connections": Family("gauge", "Connections of Kafka's clients"),
    "tidelog_kafka_received_bytes_total": Family("counter", "Bytes of requests of Kafka's clients"),
    "tidelog_kafka_sent_bytes_total": Family("counter", "Bytes of answers to Kafka's clients"),
    "tidelog_kafka_request_seconds": Family(
        "histogram", "Time of requests by API; Fetch with its wait for messages, Produce with that for the disk"
    ),
    "tidelog_http_connections": Family("gauge", "Connections of HTTP clients, WebSockets included"),
    "tidelog_http_received_bytes_total": Family("counter", "Bytes of bodies of requests"),
    "tidelog_http_sent_bytes_total": Family("counter", "Bytes of answers"),
    "tidelog_http_requests_total": Family("counter", "Requests by route and status"),
    "tidelog_http_request_seconds": Family("histogram", "Time of requests by route; long polls with their wait"),
    "tidelog_http_consumers": Family("gauge", "Consumers of subscriptions over HTTP"),
    "tidelog_clients_cut_total": Family("counter", "Connections that were cut because nothing was read of the answers"),
    "tidelog_operations_running": Family("gauge", "Operations that run"),
    # The cluster, as this node sees it
    "tidelog_cluster_nodes": Family("gauge", "Nodes that are alive"),
    "tidelog_cluster_alive": Family("gauge", "1 while this node holds its lease: without it, it answers for nothing"),
    "tidelog_cluster_leader": Family("gauge", "1 while this node runs the load manager"),
    "tidelog_cluster_leases_lost_total": Family("counter", "How often this node was away for longer than its lease"),
    "tidelog_cluster_unassigned_partitions": Family("gauge", "Partitions whose node is not alive, or that have none"),
    "tidelog_cluster_assigned_partitions": Family("gauge", "Partitions that are assigned to this node"),
    "tidelog_cluster_opening_partitions": Family("gauge", "Those that it has not opened yet"),
    "tidelog_cluster_releasing_partitions": Family(
        "gauge", "Partitions that it still has, and another node is to open"
    ),
    "tidelog_cluster_failures": Family(
        "gauge", "What fails on this node and is tried again: opening, releasing, the lease, leading, reporting"
    ),
    "tidelog_cluster_slots": Family("gauge", "Coordinator slots that are assigned to this node"),
    "tidelog_cluster_decisions_total": Family("counter", "What this node has decided as the leader"),
    "tidelog_cluster_unshipped_messages": Family("gauge", "Restore point: messages that are on this disk only"),
    "tidelog_cluster_unshipped_bytes": Family("gauge", "Restore point: bytes that are on this disk only"),
    "tidelog_cluster_unshipped_seconds": Family("gauge", "Restore point: age of the oldest message on this disk only"),
    "tidelog_cluster_assigned_engines": Family("gauge", "Engines that are assigned to this node"),
    "tidelog_cluster_unassigned_engines": Family("gauge", "Engines whose node is not alive, or that have none"),
    "tidelog_cluster_failing_engines": Family("gauge", "Engines that this node cannot open, restore or let go"),
    "tidelog_cluster_unshipped_entries": Family(
        "gauge", "Restore point: entries of engines that are on this disk only, and in the orchestrator's log"
    ),
    "tidelog_cluster_kept_messages": Family(
        "gauge", "Restore point: messages that another node went on without, and that this disk keeps for a rescue"
    ),
    # Engines
    "tidelog_engine_applied_seq": Family("gauge", "The last seq that was applied"),
    "tidelog_engine_low_water_mark": Family("gauge", "Everything up to it is committed"),
    "tidelog_engine_high_water_mark": Family("gauge", "Everything up to it is in the store"),
    "tidelog_engine_truncation_mark": Family("gauge", "The orchestrator may truncate its log up to it"),
    "tidelog_engine_hot_bytes": Family("gauge", "Bytes of the WAL on this disk"),
    "tidelog_engine_index_bytes": Family("gauge", "Bytes of the page file"),
    "tidelog_engine_buffer_hits_total": Family("counter", "Pages found in the buffer pool"),
    "tidelog_engine_buffer_misses_total": Family("counter", "Pages that had to be read"),
    "tidelog_engine_checkpoints_total": Family("counter", "Checkpoints"),
    "tidelog_engine_failed_checkpoints_total": Family("counter", "Checkpoints that failed"),
    "tidelog_engine_fenced": Family("gauge", "1 when another node has taken the engine over"),
    "tidelog_engine_unshipped_bytes": Family("gauge", "Bytes that only the orchestrator has if the disk is lost"),
    "tidelog_engine_unshipped_seconds": Family("gauge", "How long the oldest shippable entry has waited"),
    "tidelog_engine_ship_errors_in_a_row": Family("gauge", "Attempts to ship that failed since the last success"),
    "tidelog_engine_uncommitted_seconds": Family(
        "gauge",
        "How long the oldest applied entry above the low-water mark waits for the orchestrator and its replicas",
    ),
    "tidelog_engine_apply_seconds": Family("histogram", "Time of applies, until their entries are durable"),
    "tidelog_engine_fsync_seconds": Family("histogram", "Time of syncs of the WAL"),
    "tidelog_engine_hot_read_seconds": Family(
        "histogram", "Time of reads from this disk, a sample of one in 64", _FIRST_BUCKET_OF_HOT_READS
    ),
    "tidelog_engine_cold_read_seconds": Family("histogram", "Time of single reads of values that have left the disk"),
    "tidelog_engine_cold_requests_total": Family("counter", "Requests for values that have left the disk"),
    "tidelog_engine_cold_fetched_bytes_total": Family("counter", "Bytes that these fetched"),
    "tidelog_engine_cold_used_bytes_total": Family(
        "counter", "Bytes of the values that were asked for, from the store or from memory"
    ),
    "tidelog_engine_disk_cache_bytes": Family("gauge", "Cold values that came back to this disk"),
    "tidelog_engine_disk_cache_hits_total": Family("counter", "Reads that these answered"),
    "tidelog_engine_disk_cache_admitted_total": Family("counter", "Values that came back to this disk"),
}


class Exposition:
    """Gathers samples, and writes them by family."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def add(self, name: str, value: float, labels: str = "") -> None:
        """One sample; `labels` are what `label_text` makes."""
        lines = self._lines.get(name)
        if lines is None:
            assert name in FAMILIES, name
            lines = self._lines[name] = []
        lines.append(f"{name}{labels} {value}")

    def add_histogram(self, name: str, histogram: Histogram, labels: Labels = ()) -> None:
        """Buckets, sum and count."""
        assert FAMILIES[name].kind == "histogram", name
        lines = self._lines.setdefault(name, [])
        inner = _inner(labels)
        comma = "," if inner else ""
        first = FAMILIES[name].first_bucket
        reached = sum(histogram.counts[:first])
        for power in range(first, _LAST_BUCKET + 1):
            reached += histogram.counts[power]
            lines.append(f'{name}_bucket{{{inner}{comma}le="{2**power / 1e6:g}"}} {reached}')
        total = histogram.count
        lines.append(f'{name}_bucket{{{inner}{comma}le="+Inf"}} {total}')
        around = f"{{{inner}}}" if inner else ""
        lines.append(f"{name}_sum{around} {histogram.total_seconds}")
        lines.append(f"{name}_count{around} {total}")

    def text(self) -> bytes:
        """All of it, in the order of the table."""
        parts: list[str] = []
        for name, family in FAMILIES.items():
            lines = self._lines.get(name)
            if lines:
                parts.append(f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}")
                parts += lines
        return ("\n".join(parts) + "\n").encode("utf-8")


def label_text(*labels: tuple[str, str]) -> str:
    """Labels as they are written."""
    return f"{{{_inner(labels)}}}"


def _inner(labels: Iterable[tuple[str, str]]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(value: str) -> str:
    if '"' in value or "\\" in value or "\n" in value:
        return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return value


class Sum:
    """Adds up histograms."""

    def __init__(self) -> None:
        self._counts = [0] * 32
        self._total_seconds = 0.0
        self._max_seconds = 0.0
        self.has_any = False

    def add(self, one: Histogram) -> None:
        self.has_any = True
        if one.total_seconds == 0.0:
            return
        self._counts = [mine + other for mine, other in zip(self._counts, one.counts, strict=True)]
        self._total_seconds += one.total_seconds
        self._max_seconds = max(self._max_seconds, one.max_seconds)

    def histogram(self) -> Histogram:
        return Histogram(tuple(self._counts), self._total_seconds, self._max_seconds)


class RequestMetrics:
    """Counts HTTP requests, in the event loop."""

    def __init__(self) -> None:
        self._seconds: dict[str, Stopwatch] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._received = self._sent = 0

    def observe_request(self, route: str, status: int, seconds: float, received: int, sent: int) -> None:
        watch = self._seconds.get(route)
        if watch is None:
            watch = self._seconds[route] = Stopwatch()
        watch.add(seconds)
        key = (route, status)
        self._counts[key] = self._counts.get(key, 0) + 1
        self._received += received
        self._sent += sent

    def write(self, exposition: Exposition) -> None:
        exposition.add("tidelog_http_received_bytes_total", self._received)
        exposition.add("tidelog_http_sent_bytes_total", self._sent)
        for (route, status), count in sorted(self._counts.items()):
            labels = label_text(("route", route), ("status", str(status)))
            exposition.add("tidelog_http_requests_total", count, labels)
        for route, watch in sorted(self._seconds.items()):
            exposition.add_histogram("tidelog_http_request_seconds", watch.snapshot(), (("route", route),))


_PARTITION_LOG = (
    ("tidelog_partition_hot_bytes", "file_bytes"),
    ("tidelog_partition_cached_bytes", "cached_bytes"),
    ("tidelog_partition_queued_bytes", "queued_bytes"),
    ("tidelog_partition_written_bytes_total", "written_bytes"),
    ("tidelog_partition_full_disk_waits_total", "full_disk_waits"),
    ("tidelog_partition_durable_offset", "durable_offset"),
)
_PARTITION_SHIPPER = (
    ("tidelog_partition_unshipped_bytes", "lag_bytes"),
    ("tidelog_partition_unshipped_seconds", "lag_seconds"),
    ("tidelog_partition_unshipped_messages", "lag_messages"),
    ("tidelog_partition_ship_errors_in_a_row", "errors_in_a_row"),
    ("tidelog_partition_shipped_bytes_total", "bytes_uploaded"),
    ("tidelog_partition_shipped_objects_total", "objects_created"),
)
_SUBSCRIPTION = (
    ("tidelog_subscription_lag_messages", "lag_messages"),
    ("tidelog_subscription_unacked_messages", "unacked"),
    ("tidelog_subscription_waiting_messages", "waiting"),
    ("tidelog_subscription_delivered_total", "delivered"),
    ("tidelog_subscription_redelivered_total", "redelivered"),
    ("tidelog_subscription_acked_total", "acked"),
    ("tidelog_subscription_nacked_total", "nacked"),
    ("tidelog_subscription_dead_letters_total", "dead_lettered"),
)


class PartitionMetrics:
    """The partitions of a scrape, and what is summed up over all of them."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition
        self._fsync, self._write, self._append = Sum(), Sum(), Sum()
        self._cold, self._cold_counts = Sum(), [0, 0, 0]
        self._metadata_urls: set[str] = set()

    def add(self, topic: str, partition: int, statistics: TopicStatistics) -> None:
        """One open partition."""
        add = self._exposition.add
        where = f'{{topic="{_escaped(topic)}",partition="{partition}"}}'
        add("tidelog_partition_start_offset", statistics.start_offset, where)
        add("tidelog_partition_hot_start_offset", statistics.hot_start_offset, where)
        add("tidelog_partition_next_offset", statistics.next_offset, where)
        log = statistics.log
        if log is not None:
            for name, field in _PARTITION_LOG:
                add(name, getattr(log, field), where)
            add("tidelog_partition_failed", int(log.state != "open"), where)
            self._fsync.add(log.sync_seconds)
            self._write.add(log.write_seconds)
            self._append.add(log.append_wait_seconds)
        if statistics.tier is not None:
            self._add_tier(statistics, where)
        for subscription in statistics.subscriptions:
            self._add_subscription(topic, partition, subscription)

    def _add_tier(self, statistics: TopicStatistics, where: str) -> None:
        tier = statistics.tier
        assert tier is not None
        add = self._exposition.add
        add("tidelog_partition_shipped_offset", statistics.shipped_offset, where)
        add("tidelog_partition_fenced", int(tier.fenced), where)
        add("tidelog_partition_epoch", tier.epoch or 0, where)
        if tier.shipper is not None:
            for name, field in _PARTITION_SHIPPER:
                add(name, getattr(tier.shipper, field), where)
        if tier.retention is not None:
            add("tidelog_partition_retention_errors_total", tier.retention.errors, where)
        history = tier.history
        self._cold.add(history.request_seconds)
        for index, count in enumerate((history.requests, history.failed_requests, history.fetched_bytes)):
            self._cold_counts[index] += count
        metadata = tier.metadata
        if metadata is not None and metadata.url not in self._metadata_urls:
            # All topics share it: each says the same of it.
            self._metadata_urls.add(metadata.url)
            self._exposition.add_histogram("tidelog_metadata_read_seconds", metadata.read_seconds)
            self._exposition.add_histogram("tidelog_metadata_commit_seconds", metadata.commit_seconds)
            add("tidelog_metadata_conflicts_total", metadata.conflicts)
            add("tidelog_metadata_errors_total", metadata.errors)
            if tier.flushes is not None:  # of the whole node, too
                self._exposition.add_histogram("tidelog_flush_seconds", tier.flushes.seconds)
                add("tidelog_flush_bytes_total", tier.flushes.bytes)
                add("tidelog_flush_errors_total", tier.flushes.errors)

    def _add_subscription(self, topic: str, partition: int, subscription: object) -> None:
        name: str = subscription.name  # type: ignore[attr-defined]
        labels = label_text(("topic", topic), ("partition", str(partition)), ("subscription", name))
        for family, field in _SUBSCRIPTION:
            self._exposition.add(family, getattr(subscription, field), labels)
        consumers = len(subscription.consumers)  # type: ignore[attr-defined]
        self._exposition.add("tidelog_subscription_consumers", consumers, labels)

    def finish(self) -> None:
        """Writes the sums."""
        named = {
            "tidelog_fsync_seconds": self._fsync,
            "tidelog_write_seconds": self._write,
            "tidelog_append_wait_seconds": self._append,
            "tidelog_cold_request_seconds": self._cold,
        }
        for name, gathered in named.items():
            if gathered.has_any:
                self._exposition.add_histogram(name, gathered.histogram())
        if self._cold.has_any:
            names = (
                "tidelog_cold_requests_total",
                "tidelog_cold_failed_requests_total",
                "tidelog_cold_read_bytes_total",
            )
            for name, count in zip(names, self._cold_counts, strict=True):
                self._exposition.add(name, count)


def write_engine(exposition: Exposition, name: str, statistics: EngineStatistics) -> None:
    """One engine."""
    labels = label_text(("engine", name))
    values: dict[str, float] = {
        "tidelog_engine_applied_seq": statistics.applied_seq,
        "tidelog_engine_low_water_mark": statistics.low_water_mark,
        "tidelog_engine_high_water_mark": statistics.high_water_mark,
        "tidelog_engine_truncation_mark": statistics.truncation_mark,
        "tidelog_engine_hot_bytes": statistics.hot_tier_bytes,
        "tidelog_engine_index_bytes": statistics.index_bytes,
        "tidelog_engine_buffer_hits_total": statistics.buffer_pool.hits,
        "tidelog_engine_buffer_misses_total": statistics.buffer_pool.misses,
        "tidelog_engine_checkpoints_total": statistics.checkpoints,
        "tidelog_engine_failed_checkpoints_total": statistics.failed_checkpoints,
        "tidelog_engine_uncommitted_seconds": statistics.low_water_lag_seconds,
    }
    times = {
        "tidelog_engine_apply_seconds": statistics.apply_seconds,
        "tidelog_engine_fsync_seconds": statistics.wal.sync_seconds,
        "tidelog_engine_hot_read_seconds": statistics.hot_read_seconds,
    }
    cold, shipping = statistics.cold, statistics.shipping
    if cold is not None:
        times["tidelog_engine_cold_read_seconds"] = cold.read_seconds
        values["tidelog_engine_cold_requests_total"] = cold.requests
        values["tidelog_engine_cold_fetched_bytes_total"] = cold.bytes_fetched
        values["tidelog_engine_cold_used_bytes_total"] = cold.bytes_used
        if cold.disk_cache is not None:
            values["tidelog_engine_disk_cache_bytes"] = cold.disk_cache.bytes
            values["tidelog_engine_disk_cache_hits_total"] = cold.disk_cache.hits
            values["tidelog_engine_disk_cache_admitted_total"] = cold.disk_cache.admitted
    if shipping is not None:
        values["tidelog_engine_fenced"] = int(shipping.is_fenced)
        values["tidelog_engine_unshipped_bytes"] = shipping.lag_bytes
        values["tidelog_engine_unshipped_seconds"] = shipping.lag_seconds
        values["tidelog_engine_ship_errors_in_a_row"] = shipping.errors_in_a_row
    for family, value in values.items():
        exposition.add(family, value, labels)
    for family, histogram in times.items():
        exposition.add_histogram(family, histogram, (("engine", name),))


def write_groups(
    exposition: Exposition,
    committed: Mapping[str, Mapping[tuple[str, int], int]],
    next_offsets: Mapping[tuple[str, int], int],
) -> None:
    """What consumer groups have committed, and how far that is behind where that is known."""
    for group, offsets in sorted(committed.items()):
        for (topic, partition), offset in sorted(offsets.items()):
            labels = label_text(("group", group), ("topic", topic), ("partition", str(partition)))
            exposition.add("tidelog_group_committed_offset", offset, labels)
            end = next_offsets.get((topic, partition))
            if end is not None:
                exposition.add("tidelog_group_lag_messages", max(0, end - offset), labels)


def write_process(exposition: Exposition, started_at: float) -> None:
    """The process itself."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    exposition.add("tidelog_start_time_seconds", started_at)
    exposition.add("tidelog_process_cpu_seconds_total", usage.ru_utime + usage.ru_stime)
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        descriptors = len(os.listdir("/proc/self/fd"))
    except OSError:
        return  # another system
    exposition.add("tidelog_process_resident_bytes", resident)
    exposition.add("tidelog_process_open_descriptors", descriptors)


def now() -> float:
    """Seconds since 1970."""
    return time.time()
