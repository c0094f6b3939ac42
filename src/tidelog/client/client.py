"""`tidelog.connect`: a log that a server has open, with the names of an embedded one.

    client = tidelog.connect("http://127.0.0.1:8080")   # instead of tidelog.open("./data")
    topic = client.topic("shop/orders")
    topic.append(b"first", key=b"customer-1", sync=True)

The rest of a program stays as it is: `topic.append`, `read`, `subscribe` and so on take the same arguments, return the
same and raise the same errors. What only the process with the files can do (`latest_by_key`, transactions, raw frames)
is not here.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import Any, Unpack, overload

from tidelog.client.bridge import Bridge, both
from tidelog.client.engine import RemoteEngine
from tidelog.client.local_socket import socket_of
from tidelog.client.tail import TopicState
from tidelog.client.topic import Link, RemotePartitionedTopic, RemoteTopic
from tidelog.client.transport import Http, parse_server, path_of
from tidelog.cold.settings import TierOptions
from tidelog.config.load import TLS_CA_VARIABLE, TOKEN_VARIABLE
from tidelog.errors import ConfigError, ConflictError, InputError, NotFoundError
from tidelog.secret import Secret
from tidelog.store.aio import ClosedAtExit
from tidelog.topics.directory import check_partitions, fewer_partitions
from tidelog.topics.names import TopicName, parse_topic_name
from tidelog.units import to_seconds

_MAX_PREFETCH = 10_000


class Client(ClosedAtExit):
    """A log of a server. Any number of threads and tasks may use it; it has one thread and a few connections.

    Connect in the process that uses it: a client does not survive a fork.
    """

    def __init__(
        self,
        url: str,
        token: Secret | None,
        tls: ssl.SSLContext | None,
        timeout_seconds: float,
        max_connections: int,
        prefetch: int,
    ) -> None:
        server = parse_server(url)
        self._bridge = Bridge("tidelog-client")
        try:
            self._http = self._bridge.wait(_made(server, token, tls, timeout_seconds, max_connections))
        except BaseException:
            self._bridge.close()
            raise
        self._bridge.on_close = self._http.close
        self._link = Link(self._bridge, self._http, prefetch)
        self._topics: dict[str, RemoteTopic | RemotePartitionedTopic] = {}

    @property
    def url(self) -> str:
        """Where the server is."""
        return self._http.server.url

    def __repr__(self) -> str:
        return f"<Client of {self.url}>"

    async def _check(self) -> None:
        """Raises what keeps the server from answering: it is not there, or refuses the token."""
        await self._http.ask("GET", "/v1/topics", {"limit": 1}, is_only_try=True)

    # Topics

    @overload
    def topic(self, name: str, *, partitions: None = None, **settings: Unpack[TierOptions]) -> RemoteTopic: ...

    @overload
    def topic(self, name: str, *, partitions: int, **settings: Unpack[TierOptions]) -> RemotePartitionedTopic: ...

    def topic(
        self, name: str, *, partitions: int | None = None, **settings: Unpack[TierOptions]
    ) -> RemoteTopic | RemotePartitionedTopic:
        """Returns the topic of this name, always the same object; it is created if absent.

        `settings` are the topic's own, such as `retention_seconds=86400`. With `partitions` it has so many; a larger
        number adds some.
        """
        known = self._known(name, partitions, settings)
        return self._bridge.wait(self._topic(name, partitions, dict(settings))) if known is None else known

    async def topic_async(
        self, name: str, *, partitions: int | None = None, **settings: Unpack[TierOptions]
    ) -> RemoteTopic | RemotePartitionedTopic:
        """Like `topic`, without blocking the event loop."""
        known = self._known(name, partitions, settings)
        if known is not None:
            return known
        return await asyncio.wrap_future(self._bridge.start(self._topic(name, partitions, dict(settings))))

    def _known(self, name: str, partitions: int | None, settings: Any) -> RemoteTopic | RemotePartitionedTopic | None:
        parse_topic_name(name)
        self._bridge.check()
        known = self._topics.get(name)
        return known if known is not None and not settings and partitions in (None, known.partitions) else None

    async def _topic(
        self, name: str, partitions: int | None, settings: dict[str, Any]
    ) -> RemoteTopic | RemotePartitionedTopic:
        parsed = parse_topic_name(name)
        check_partitions(partitions)
        state = await self._opened(parsed, partitions, settings)
        count = len(state.partitions)
        known = self._topics.get(name)
        if known is None or known.partitions != count:
            single = count == 1 and partitions in (None, 1)
            known = (
                RemoteTopic(self._link, parsed)
                if single
                else (RemotePartitionedTopic(self._link, parsed, count, is_placed=state.is_placed))
            )
            self._topics[name] = known
        return known

    async def _opened(self, name: TopicName, partitions: int | None, settings: dict[str, Any]) -> TopicState:
        path, document = _path(name), {"settings": settings}
        if partitions is not None:
            document["partitions"] = partitions  # type: ignore[assignment]
        state: TopicState
        try:
            state = await self._http.json("GET", path, kind=TopicState)
        except NotFoundError:
            try:
                state = await self._http.json("PUT", path, document, kind=TopicState)
                return state
            except ConflictError:  # somebody was faster, or it is the answer that was lost
                state = await self._http.json("GET", path, kind=TopicState)
        if partitions is not None and partitions < len(state.partitions):
            raise fewer_partitions(str(name), len(state.partitions))
        if settings or (partitions is not None and partitions != len(state.partitions)):
            state = await self._http.json("PATCH", path, document, kind=TopicState)
        return state

    async def _configure_topic(self, name: str, **settings: Unpack[TierOptions]) -> dict[str, object]:
        """Changes settings of a topic, None resets one; returns all of its own."""
        path = _path(parse_topic_name(name))
        state: TopicState = await self._http.json("PATCH", path, {"settings": settings}, kind=TopicState)
        return dict(state.settings)

    async def _topics_list(self) -> list[str]:
        found: list[str] = []
        after = ""
        while True:
            page = await self._http.json("GET", "/v1/topics", query={"after": after or None, "limit": 10_000})
            found += [one["name"] for one in page["topics"]]
            if page.get("next") is None:
                return found
            after = page["next"]

    def topics(self) -> list[str]:
        """The names of the topics that the client may see."""
        return self._bridge.wait(self._topics_list())

    async def topics_async(self) -> list[str]:
        """Like `topics`, without blocking the event loop."""
        return await asyncio.wrap_future(self._bridge.start(self._topics_list()))

    async def _has_topic(self, name: str) -> bool:
        """Whether there is a topic of this name."""
        try:
            await self._http.ask("GET", _path(parse_topic_name(name)))
        except NotFoundError:
            return False
        return True

    async def _delete_topic(self, name: str) -> None:
        """Deletes a topic with everything in it, for good, from the server's disk and from the store."""
        await self._http.ask("DELETE", _path(parse_topic_name(name)))
        self._topics.pop(name, None)

    # Engines

    def engine(self, name: str) -> RemoteEngine:
        """An engine that the server has open by this name (`tidelog serve --engine NAME=DIR`)."""
        return RemoteEngine(self._bridge, self._http, name)

    async def _engines(self) -> list[str]:
        """The names of the engines that the client may see."""
        found = await self._http.json("GET", "/v1/engines")
        return sorted(one["name"] for one in (*found["engines"], *found.get("elsewhere", ())))

    engines, engines_async = both(_engines)
    configure_topic, configure_topic_async = both(_configure_topic)
    has_topic, has_topic_async = both(_has_topic)
    delete_topic, delete_topic_async = both(_delete_topic)

    # Ending

    def close(self) -> None:
        """Closes the connections. Consumers that are still open are cut off: close them first."""
        self._bridge.close()

    async def close_async(self) -> None:
        """Like `close`, without blocking the event loop."""
        await asyncio.to_thread(self.close)


async def _made(server: Any, token: Any, tls: Any, timeout_seconds: float, max_connections: int) -> Http:
    return Http(server, token, tls, timeout_seconds=timeout_seconds, max_connections=max_connections)


def _path(name: TopicName) -> str:
    return path_of("topics", name.namespace, name.name)


def connect(
    url: str,
    *,
    token: str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    tls: ssl.SSLContext | None = None,
    timeout: float | str = 30.0,
    max_connections: int = 8,
    prefetch: int = 1000,
) -> Client:
    """Connects to a server (`tidelog serve`); what it returns has the names of what `tidelog.open` returns.

    `url` is `http://host:port` or `https://host:port`. `token` is the bearer token, else that of TIDELOG_TOKEN; it is
    sent to this server and to the nodes that it names. `tls_ca` is a file in PEM with the private authority that signed
    the server's certificate, else that of TIDELOG_TLS_CA, else those of the system count; `tls` instead is for a
    certificate of the client's own. A server that does not answer is tried again for `timeout` seconds a call, then
    ServerUnavailableError is raised; appends that were tried again are stored once. At most `max_connections` requests
    are on their way at once, and as many appends of threads that wait. A consumer gets up to `prefetch` messages ahead:
    fewer share work more evenly, more cost less per message.
    """
    seconds = to_seconds(timeout)
    if not seconds:
        raise InputError(f"timeout must be more than 0 seconds, not {timeout!r}")
    _check_count("max_connections", max_connections, 1000)
    _check_count("prefetch", prefetch, _MAX_PREFETCH)
    given = token if token is not None else os.environ.get(TOKEN_VARIABLE)
    if given and not (given.isascii() and given.isprintable()):
        raise InputError("token must be printable ASCII")
    context = _context(url, tls_ca, tls)
    client = Client(url, Secret(given) if given else None, context, seconds, max_connections, prefetch)
    try:
        client._bridge.wait(client._check())
    except BaseException:
        client.close()
        raise
    return client


async def connect_async(
    url: str,
    *,
    token: str | None = None,
    tls_ca: str | os.PathLike[str] | None = None,
    tls: ssl.SSLContext | None = None,
    timeout: float | str = 30.0,
    max_connections: int = 8,
    prefetch: int = 1000,
) -> Client:
    """Like `connect`, without blocking the event loop. What it returns has an `_async` twin of every name."""
    options: dict[str, Any] = {"token": token, "tls_ca": tls_ca, "tls": tls, "timeout": timeout}
    options |= {"max_connections": max_connections, "prefetch": prefetch}
    return await asyncio.to_thread(lambda: connect(url, **options))


def _context(url: str, authority: str | os.PathLike[str] | None, given: ssl.SSLContext | None) -> ssl.SSLContext | None:
    """What a server has to prove; None: what the system says, or nothing without TLS."""
    if authority is not None and given is not None:
        raise InputError("tls_ca and tls cannot be combined", hint="Load the authority into the context that is tls")
    if given is not None or not parse_server(url).is_tls:
        return given
    path = authority or os.environ.get(TLS_CA_VARIABLE)
    if not path:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:  # also ssl.SSLError: no certificate is in it
        raise ConfigError(
            f"the certificate of the authority cannot be read: {error.strerror or error}",
            path=Path(path),
            hint="tls_ca must name a file in PEM",
        ) from None


def connect_local(directory: Path, *, prefetch: int = 1000) -> Client:
    """The server of a directory on this machine, by the socket in it."""
    return connect(f"unix://{os.path.abspath(socket_of(directory))}", token="", prefetch=prefetch)


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InputError(f"{name} must be from 1 to {most}, not {value!r}")
