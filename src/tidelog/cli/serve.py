"""`tidelog serve`: opens a log directory to clients of Kafka and of HTTP, until it is stopped."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidelog.cli.output import parse_size
from tidelog.cli.session import Session, command

if TYPE_CHECKING:
    from tidelog.service.kafka.broker import Address, BrokerSettings
    from tidelog.service.node import Listening

KafkaOption = Annotated[
    str, typer.Option("--kafka", metavar="HOST:PORT", help="Where clients of Kafka connect; port 0 picks one.")
]
HttpOption = Annotated[
    str,
    typer.Option("--http", metavar="HOST:PORT", help="Where the HTTP API, metrics and health are; port 0 picks one."),
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(
        "--advertise-kafka", metavar="HOST:PORT", help="What clients are sent to, behind NAT or from a container."
    ),
]
AdvertiseHttpOption = Annotated[
    str | None,
    typer.Option("--advertise-http", metavar="URL", help="What clients of HTTP are told, behind a proxy or NAT."),
]
AutoCreateOption = Annotated[
    bool,
    typer.Option(
        "--auto-create-topics/--no-auto-create-topics", help="Whether a topic that a client names is created."
    ),
]
PartitionsOption = Annotated[
    int, typer.Option("--default-partitions", metavar="N", min=1, help="Partitions of a topic that is created so.")
]
CacheOption = Annotated[
    int,
    typer.Option(
        "--cache-bytes",
        metavar="BYTES",
        parser=parse_size,
        help="Newest messages of all topics together that stay in memory; consumers that are behind them read files.",
    ),
]
_GC_THRESHOLDS = (50_000, 20, 100)
_ENCODED_SHARE = 8
"""This part of the memory for messages holds them as consumers get them."""


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "serve")(serve)


def serve(
    session: Session,
    kafka: KafkaOption = "127.0.0.1:9092",
    http: HttpOption = "127.0.0.1:8080",
    advertise_kafka: AdvertiseOption = None,
    advertise_http: AdvertiseHttpOption = None,
    auto_create_topics: AutoCreateOption = True,
    default_partitions: PartitionsOption = 1,
    cache_bytes: CacheOption = 128 << 20,
) -> None:
    """Serves topics to clients of Kafka and of HTTP.

    It stops with Ctrl-C or SIGTERM, and loses nothing. The directory is created when absent; with --store its history
    is in an object store. The addresses are the first lines of the output, once they listen.
    """
    from tidelog.log.tail_cache import caches
    from tidelog.service.kafka.broker import BrokerSettings
    from tidelog.service.node import check_loopback, check_url, parse_address

    addresses = parse_address(kafka, "--kafka"), parse_address(http, "--http")
    advertised = None if advertise_kafka is None else parse_address(advertise_kafka, "--advertise-kafka")
    if advertise_http is not None:
        check_url(advertise_http, "--advertise-http")
    check_loopback(addresses[0], "--kafka")
    check_loopback(addresses[1], "--http")
    encoded_max_bytes = cache_bytes // _ENCODED_SHARE
    caches.max_bytes = cache_bytes - encoded_max_bytes
    settings = BrokerSettings(
        auto_create_topics=auto_create_topics,
        default_partitions=default_partitions,
        encoded_max_bytes=encoded_max_bytes,
    )
    _run(_serve(session, *addresses, advertised, advertise_http, settings))


def _run(work: Coroutine[Any, Any, None]) -> None:
    """In the faster event loop, where it is installed."""
    _collect_less_often()
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


def _collect_less_often() -> None:
    """Requests leave no cycles behind, and the collector took a sixth of their time, looking at caches and modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


async def _serve(
    session: Session,
    kafka: Address,
    http: Address,
    advertised: Address | None,
    advertised_http: str | None,
    settings: BrokerSettings,
) -> None:
    from tidelog.service.node import Node

    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    directory = await asyncio.to_thread(session.open)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    node = Node(directory, settings)
    try:
        _show(session, await node.start(kafka, http, advertised, advertised_http))
        await stopping.wait()
    finally:
        await node.stop()


def _show(session: Session, listening: Listening) -> None:
    kafka, http = listening
    if session.as_json:
        session.output.document({"kafka": f"{kafka.host}:{kafka.port}", "http": http.url})
    else:
        print(f"kafka {kafka.host}:{kafka.port}", flush=True)
        print(f"http {http.url}", flush=True)
