"""`/metrics`: gathers the statistics of everything that is open, and writes them for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tidelog.service.auth.access import Permission
from tidelog.service.http.call import Call, Reply
from tidelog.service.http.routes import RouteTable
from tidelog.service.http.service import Service
from tidelog.service.metrics import (
    CONTENT_TYPE,
    Exposition,
    PartitionMetrics,
    label_text,
    now,
    write_engine,
    write_groups,
    write_process,
)
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.topic import Topic

routes = RouteTable("Server")


class Sources(NamedTuple):
    """What else the node knows; it is called in the event loop."""

    kafka: Callable[[Exposition], None]
    groups: Callable[[], dict[str, dict[tuple[str, int], int]]]
    http_connections: Callable[[], int]
    started_at: float = now()
    cluster: Callable[[Exposition], None] | None = None
    """Of a node that has joined others."""


@routes.add("GET", "/metrics", Permission.READ, response_types=("text/plain",))
async def metrics(call: Call) -> Reply:
    """Metrics for Prometheus; names begin with `tidelog_`."""
    return Reply(await expose(call.service), CONTENT_TYPE)


async def expose(service: Service) -> bytes:
    """The text of a scrape."""
    exposition = Exposition()
    broker, sources = service.broker, service.sources
    served = broker.topics()
    opened = [
        (str(topic.name), number, partition.topic)
        for topic in served
        for number, partition in sorted(topic.open.items())
        if partition.is_open
    ]
    version = label_text(("version", service.version), ("mode", broker.directory.mode))
    exposition.add("tidelog_info", 1, version)
    exposition.add("tidelog_ready", int(service.is_ready))
    exposition.add("tidelog_topics", len(served))
    exposition.add("tidelog_partitions_open", len(opened))
    for where in ("memory", "files", "store"):
        exposition.add("tidelog_reads_total", getattr(broker.read_counts, where), label_text(("from", where)))
    exposition.add("tidelog_reads_for_others_total", broker.read_counts.for_others)
    exposition.add("tidelog_consumers_sent_away_total", broker.read_counts.sent_away)
    exposition.add("tidelog_http_consumers", len(service.sessions))
    exposition.add("tidelog_operations_running", service.operations.running)
    service.requests.write(exposition)
    groups = {}
    if sources is not None:
        exposition.add("tidelog_http_connections", sources.http_connections())
        sources.kafka(exposition)
        if sources.cluster is not None:
            sources.cluster(exposition)
        groups = sources.groups()
        write_process(exposition, sources.started_at)
    await in_store_thread(_write_rest, exposition, opened, groups, service)
    return exposition.text()


def _write_rest(
    exposition: Exposition,
    opened: list[tuple[str, int, Topic]],
    groups: dict[str, dict[tuple[str, int], int]],
    service: Service,
) -> None:
    """In a thread: a thousand partitions take a while, and requests go on beside it."""
    partitions = PartitionMetrics(exposition)
    ends: dict[tuple[str, int], int] = {}
    for name, number, topic in opened:
        statistics = topic.statistics()
        ends[name, number] = statistics.next_offset
        partitions.add(name, number, statistics)
    partitions.finish()
    write_groups(exposition, groups, ends)
    for name, engine in sorted(service.engines.items()):
        write_engine(exposition, name, engine.statistics())
