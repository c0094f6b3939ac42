"""`tidelog serve`: opens a log directory to clients of Kafka and of HTTP, until it is stopped.

SIGTERM and SIGINT stop it; SIGHUP reads certificates, keys of tokens, users and grants again.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import os
import signal
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tidelog.cli.output import parse_size
from tidelog.cli.session import Session, command
from tidelog.errors import ConfigError
from tidelog.tracing import start_tracing

if TYPE_CHECKING:
    from tidelog.cluster.engine_host import ClusterEngines
    from tidelog.cluster.runtime import Cluster
    from tidelog.config.serve import ServeSettings
    from tidelog.engine.engine import Engine
    from tidelog.service.kafka.broker import BrokerSettings
    from tidelog.service.node import Listening
    from tidelog.service.placement import Address
    from tidelog.topics.directory import LogDirectory

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
EngineOption = Annotated[
    list[str] | None,
    typer.Option("--engine", metavar="NAME=DIR", help="Serves an engine over HTTP by this name; may be repeated."),
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
NodeOption = Annotated[
    str | None,
    typer.Option("--node", metavar="NAME", help="This node's name in its cluster [default: that of its directory]."),
]
ZoneOption = Annotated[
    str | None, typer.Option("--zone", metavar="ZONE", help="Where this node is: partitions are spread over zones.")
]
ClusterOption = Annotated[
    bool | None,
    typer.Option(
        "--cluster/--no-cluster", help="Whether it joins other nodes over the same store. [default: with etcd]"
    ),
]
AuthOption = Annotated[
    Literal["off", "required"] | None,
    typer.Option(
        "--auth", help="Whether clients must authenticate and need grants: see `tidelog auth`. [default: off]"
    ),
]
TlsCertOption = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="The server's certificate (PEM): listens with TLS.")
]
TlsKeyOption = Annotated[
    Path | None, typer.Option("--tls-key", metavar="FILE", help="The key of the certificate (PEM).")
]
ClientCaOption = Annotated[
    Path | None,
    typer.Option("--tls-client-ca", metavar="FILE", help="Who signs certificates of clients (PEM): they authenticate."),
]
PlaintextOption = Annotated[
    bool, typer.Option("--allow-plaintext", help="Listen without TLS where other machines can connect.")
]
AnonymousOption = Annotated[
    bool, typer.Option("--allow-anonymous", help="Listen without authentication where other machines can connect.")
]
OAuthKeysOption = Annotated[
    Path | None, typer.Option("--oauth-keys", metavar="FILE", help="Keys that sign tokens (JWKS, or a key in PEM).")
]
OAuthIssuerOption = Annotated[
    str | None, typer.Option("--oauth-issuer", metavar="TEXT", help="The issuer that tokens must have.")
]
OAuthAudienceOption = Annotated[
    str | None, typer.Option("--oauth-audience", metavar="TEXT", help="The audience that tokens must have.")
]


_PACKAGES = ("cramjam", "cryptography", "httptools", "uvicorn", "websockets")
"""What the extra `serve` brings; uvloop is used where it is there."""
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
    engine: EngineOption = None,
    auto_create_topics: AutoCreateOption = True,
    default_partitions: PartitionsOption = 1,
    cache_bytes: CacheOption = 128 << 20,
    node: NodeOption = None,
    zone: ZoneOption = None,
    cluster: ClusterOption = None,
    auth: AuthOption = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: ClientCaOption = None,
    allow_plaintext: PlaintextOption = False,
    tracing: Annotated[
        bool, typer.Option("--tracing", help="Traces by OpenTelemetry, if it is installed and set up.")
    ] = False,
    allow_anonymous: AnonymousOption = False,
    oauth_keys: OAuthKeysOption = None,
    oauth_issuer: OAuthIssuerOption = None,
    oauth_audience: OAuthAudienceOption = None,
) -> None:
    """Serves topics to clients of Kafka and of HTTP.

    It stops with Ctrl-C or SIGTERM, and loses nothing. The directory is created when absent; with --store its history
    is in an object store. The addresses are the first lines of the output, once they listen.
    """
    _check_packages()
    from tidelog.config import load_serve_settings
    from tidelog.log.tail_cache import caches
    from tidelog.service.kafka.broker import BrokerSettings
    from tidelog.service.node import check_exposure, check_url, parse_address

    named = {
        "node": node,
        "zone": zone,
        "cluster": cluster,
        "auth": auth,
        "tls_cert": tls_cert,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "allow_plaintext": allow_plaintext or None,
        "tracing": tracing or None,
        "allow_anonymous": allow_anonymous or None,
        "oauth_keys": oauth_keys,
        "oauth_issuer": oauth_issuer,
        "oauth_audience": oauth_audience,
    }
    protection = load_serve_settings(session.config, os.environ, named)
    addresses = parse_address(kafka, "--kafka"), parse_address(http, "--http")
    advertised = None if advertise_kafka is None else parse_address(advertise_kafka, "--advertise-kafka")
    if advertise_http is not None:
        check_url(advertise_http, "--advertise-http")
    check_exposure(addresses[0], "--kafka", protection)
    check_exposure(addresses[1], "--http", protection)
    encoded_max_bytes = cache_bytes // _ENCODED_SHARE
    caches.max_bytes = cache_bytes - encoded_max_bytes
    settings = BrokerSettings(
        auto_create_topics=auto_create_topics,
        default_partitions=default_partitions,
        encoded_max_bytes=encoded_max_bytes,
        history_from_any_node=protection.history_from_any_node,
        max_connections=protection.max_connections,
        max_connections_per_address=protection.max_connections_per_address,
        idle_seconds=protection.connection_idle_seconds,
        unread_seconds=protection.unread_seconds,
        max_request_bytes=protection.max_request_bytes,
    )
    engines = parse_engines(engine or [])
    _run(_serve(session, *addresses, advertised, advertise_http, settings, protection, engines))


def _check_packages() -> None:
    """ConfigError that names the extra when a package of it is not installed."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"tidelog serve needs {', '.join(missing)}", hint="Install it: pip install 'tidelog[serve]'")


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
    protection: ServeSettings,
    engines: Mapping[str, Path],
) -> None:
    from tidelog.cluster.joining import join
    from tidelog.config import load_engine_config
    from tidelog.service.auth.security import Security
    from tidelog.service.http.service import HttpSettings
    from tidelog.service.node import Node

    if protection.tracing:
        start_tracing()
    security = Security(protection)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    config = load_engine_config(session.config, os.environ)
    directory = await asyncio.to_thread(session.open)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    opened = await asyncio.to_thread(_open_engines, directory, engines)
    cluster = await asyncio.to_thread(_cluster_of, directory, protection)
    limits = HttpSettings(max_connections=protection.max_connections, unread_seconds=protection.unread_seconds)
    placement = None if cluster is None else cluster.placement
    node = Node(directory, settings, http_settings=limits, security=security, engines=opened, placement=placement)
    reloading: set[asyncio.Task[None]] = set()
    hosted: ClusterEngines | None = None
    loop.add_signal_handler(signal.SIGHUP, lambda: _begin(security.reload(), reloading))
    try:
        if cluster is not None:
            await cluster.load()
        listening = await node.start(kafka, http, advertised, advertised_http)
        if cluster is not None:
            hosted = await join(cluster, node, directory, listening, config)
        _show(session, listening)
        await stopping.wait()
        if cluster is not None:
            await cluster.stop()
    finally:
        if hosted is not None:
            await hosted.stop()
        if cluster is not None:
            await cluster.leave()
        await node.stop()


def _cluster_of(directory: LogDirectory, settings: ServeSettings) -> Cluster | None:
    """The cluster that the node joins; None for a node by itself."""
    import tidelog
    from tidelog.cluster.joining import can_join, make_cluster

    if settings.cluster is False or (settings.cluster is None and not can_join(directory)):
        return None
    return make_cluster(directory, settings.node, settings.zone, tidelog.__version__, settings.cluster_lease_seconds)


def _begin(work: Coroutine[Any, Any, None], running: set[asyncio.Task[None]]) -> None:
    task = asyncio.get_running_loop().create_task(work)
    running.add(task)  # the loop itself would forget it
    task.add_done_callback(running.discard)


def parse_engines(texts: Sequence[str]) -> dict[str, Path]:
    """Names and directories of engines; InputError for what is not NAME=DIR, or a name that comes twice."""
    from tidelog.errors import InputError
    from tidelog.topics.names import is_name_part

    found: dict[str, Path] = {}
    for text in texts:
        name, sign, path = text.partition("=")
        if not sign or not path or not is_name_part(name):
            raise InputError(f"--engine must be NAME=DIR, for example photos=./engine, not {text!r}")
        if name in found:
            raise InputError(f"--engine names {name} twice")
        found[name] = Path(path)
    return found


def _open_engines(directory: LogDirectory, engines: Mapping[str, Path]) -> dict[str, Engine]:
    """Opens all of them, or closes what was opened."""
    opened: dict[str, Engine] = {}
    if not engines:
        return opened
    from tidelog.engine_wiring import open_engine

    try:
        for name, path in engines.items():
            opened[name] = open_engine(path)
    except BaseException:
        for engine in opened.values():
            engine.close()
        directory.close()
        raise
    return opened


def _show(session: Session, listening: Listening) -> None:
    kafka = listening.kafka
    if session.as_json:
        session.output.document({"kafka": f"{kafka.host}:{kafka.port}", "http": listening.http_url})
    else:
        print(f"kafka {kafka.host}:{kafka.port}", flush=True)
        print(f"http {listening.http_url}", flush=True)
