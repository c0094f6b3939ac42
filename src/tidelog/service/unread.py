"""Clients that do not read their answers: they are cut, so that what waits for them does not stay in memory.

The three kinds of connections (Kafka's, HTTP, WebSocket) tell it when the transport's buffer is full and when there is
room again, and end the connection when it says so.

Invariants
- A client is cut when not one byte of what waits for it has gone in `seconds`. However slowly it reads, it is not cut.
- While the buffer is full nothing more is written to it: a connection has its buffer and one answer in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

_logger = logging.getLogger("tidelog.service")
_CUT = "cut the connection of %s: it read nothing for %s s, and %d bytes waited for it"


class UnreadWatch:
    """Watches the buffer of one connection while it is full."""

    __slots__ = ("_cut", "_left", "_loop", "_seconds", "_timer", "_transport")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, seconds: float, cut: Callable[[], None]
    ) -> None:
        """`cut` is called once, in the event loop; the connection is aborted before."""
        self._loop = loop
        self._transport = transport
        self._seconds = seconds
        self._cut = cut
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def pause(self) -> None:
        """The buffer is full."""
        if self._timer is None:
            self._look_later()

    def resume(self) -> None:
        """There is room again, or the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_later(self) -> None:
        self._left = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._transport.is_closing():
            return
        unread = self._transport.get_write_buffer_size()
        if unread < self._left:
            self._look_later()
            return
        peer = self._transport.get_extra_info("peername")
        client = peer[0] if isinstance(peer, tuple) else "socket"
        _logger.warning(_CUT, client, self._seconds, unread)
        self._transport.abort()
        self._cut()
