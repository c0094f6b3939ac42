"""Listens for HTTP: uvicorn's protocols in the event loop that is there, over sockets that we bind.

Invariants
- At most `max_connections` clients are connected; one more is closed at once. A connection without a request for
  `idle_seconds`, or that never begins one, is closed.
- A client that reads nothing of its answer for `unread_seconds` is cut, with a WebSocket too.
- A WebSocket is not idle while its client answers pings, however little is said.
- The head of a request has at most `_MAX_HEAD_BYTES` beyond what came with its first bytes, and must be there within
  `idle_seconds`: before it is complete nobody knows who the client is, so it must cost neither memory nor time.
- Stopping accepts nothing more, ends streams and long polls, answers what was begun within `stop_seconds`, then cuts
  the rest.
- uvicorn installs no signal handlers and changes no logging here: only its protocols are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from pathlib import Path
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from tidelog.client.local_socket import short_path
from tidelog.service.http.app import App
from tidelog.service.unread import UnreadWatch

_BACKLOG = 1024
_TLS_SECONDS = 15.0
_WEBSOCKET_PING_SECONDS = 20.0
_MAX_WEBSOCKET_BYTES = 4 << 20  # acknowledgements: a hundred thousand of them fit
_MAX_HEAD_BYTES = 64 << 10
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class HttpServer:
    """Serves an application on any number of sockets."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._settings = app.service.settings
        self._servers: list[asyncio.AbstractServer] = []
        self._sockets: list[Path] = []
        self.state = ServerState()
        self.is_stopping = False
        self.cut_clients = 0
        """Connections that were cut because their client read nothing."""
        # The application logs what fails; these would log refused handshakes as errors.
        for name in ("uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._config = Config(
            app,
            http=_LimitedProtocol,
            ws=_WatchedWebSocket,
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            ws_max_size=min(_MAX_WEBSOCKET_BYTES, self._settings.max_body_bytes),
            ws_ping_interval=_WEBSOCKET_PING_SECONDS,
            ws_ping_timeout=_WEBSOCKET_PING_SECONDS,
        )
        self._config.load()

    @property
    def connections(self) -> int:
        """How many clients are connected."""
        return len(self.state.connections)

    @property
    def max_connections(self) -> int:
        return self._settings.max_connections

    @property
    def idle_seconds(self) -> float:
        return self._settings.idle_seconds

    def watch(self, transport: asyncio.Transport) -> UnreadWatch:
        """Of one connection."""
        return UnreadWatch(asyncio.get_running_loop(), transport, self._settings.unread_seconds, self._cut)

    def _cut(self) -> None:
        self.cut_clients += 1

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
        """Listens; returns the address, with the port that was chosen where `port` is 0."""
        loop = asyncio.get_running_loop()
        tls_seconds = None if tls is None else _TLS_SECONDS
        server = await loop.create_server(
            lambda: self._protocol({}), host, port, ssl=tls, backlog=_BACKLOG, ssl_handshake_timeout=tls_seconds
        )
        self._servers.append(server)
        found = server.sockets[0].getsockname()
        return found[0], found[1]

    async def start_unix(self, path: Path) -> None:
        """Listens on a unix socket, too, which only the owner of the process may open.

        What a killed server left there is replaced: the caller has the directory for itself.
        """
        loop = asyncio.get_running_loop()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            with short_path(str(path)) as name:
                listener.bind(name)
            path.chmod(0o600)  # nobody connects before it listens
            server = await loop.create_unix_server(
                lambda: self._protocol({"is_local_socket": True}), sock=listener, backlog=_BACKLOG
            )
        except BaseException:
            listener.close()
            raise
        self._servers.append(server)
        self._sockets.append(path)

    def _protocol(self, state: dict[str, Any]) -> _LimitedProtocol:
        return _LimitedProtocol(self._config, self.state, state, self)

    async def stop(self) -> None:
        """Returns when every connection is closed."""
        self.is_stopping = True
        self._app.service.begin_to_stop()
        for server in self._servers:
            server.close()
        for path in self._sockets:
            path.unlink(missing_ok=True)
        for connection in list(self.state.connections):
            if isinstance(connection, HttpToolsProtocol):  # a WebSocket ends by itself, when all is said
                connection.shutdown()
        await self._finish_tasks()
        for connection in list(self.state.connections):
            connection.transport.abort()
        await self._app.service.operations.stop(self._settings.stop_seconds)
        await self._app.service.sessions.stop()
        for server in self._servers:
            await server.wait_closed()

    async def _finish_tasks(self) -> None:
        """Lets the requests that were begun finish, within a limit."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.stop_seconds):
                while self.state.tasks:
                    await asyncio.wait(list(self.state.tasks))
        for task in list(self.state.tasks):
            task.cancel()
        if self.state.tasks:
            await asyncio.wait(list(self.state.tasks))


class _LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with a limit for connections, and one for the time before a request."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], server: HttpServer
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._server = server
        self._is_websocket = False
        self._is_in_head = False
        self._head_bytes = 0
        self._head_ends_at = 0.0
        self._unread: UnreadWatch | None = None
        self.timeout_keep_alive = server.idle_seconds  # type: ignore[assignment]  # a timer takes fractions

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unread = self._server.watch(transport)
        tls = transport.get_extra_info("ssl_object")
        if tls is not None:
            self.app_state = {**self.app_state, "certificate_der": tls.getpeercert(binary_form=True)}
        if self._server.is_stopping or self._server.connections > self._server.max_connections:
            transport.abort()
            return
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._unread is not None:
            self._unread.resume()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is not None:
            self._unread.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.resume()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0
        self._head_ends_at = self.loop.time() + self.timeout_keep_alive

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()
                return
        super().data_received(data)
        if self.timeout_keep_alive_task is None and self._waits_for_head and not self.transport.is_closing():
            # The rest of a head has to come in time, too, however slowly it trickles.
            seconds = self._head_ends_at - self.loop.time() if self._is_in_head else self.timeout_keep_alive
            self.timeout_keep_alive_task = self.loop.call_later(max(0.0, seconds), self.timeout_keep_alive_handler)

    def handle_websocket_upgrade(self) -> None:
        self._is_websocket = True  # another protocol has the connection from here on
        super().handle_websocket_upgrade()
        conversation: Any = self.transport.get_protocol()
        conversation.unread = self._unread
        if not conversation.handshake_initiated:  # it reads shorter lines than this one, and says nothing of it
            self.transport.write(_HEAD_TOO_LARGE)
            self.transport.close()

    @property
    def _waits_for_head(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return not self._is_websocket and (cycle is None or cycle.response_complete)


class _WatchedWebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol with a limit for a client that does not read."""

    unread: UnreadWatch | None = None
    """That of the connection, which HTTP has begun."""

    def connection_lost(self, exc: Exception | None) -> None:
        if self.unread is not None:
            self.unread.resume()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.unread is not None:
            self.unread.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.unread is not None:
            self.unread.resume()
