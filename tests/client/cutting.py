"""A proxy of bytes that cuts connections on demand, or after so many bytes, and can be turned to another server."""

from __future__ import annotations

import contextlib
import socket
import struct
from threading import Lock, Thread
from types import TracebackType
from typing import Self

_RESET = struct.pack("ii", 1, 0)
_PIECE_BYTES = 64 << 10


class CuttingProxy:
    """In front of a server, on a port of its own."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._guard = Lock()
        self._open: set[socket.socket] = set()
        self._cuts: list[int] = []
        self.connections = 0
        Thread(target=self._accept, name="cutting-proxy", daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def turn_to(self, target: tuple[str, int]) -> None:
        """New connections go to another server."""
        self._target = target
        self.cut()

    def cut(self) -> None:
        """Every connection is reset, wherever it is."""
        with self._guard:
            links, self._open = self._open, set()
        for link in links:
            _reset(link)

    def cut_after(self, *sizes: int) -> None:
        """Each of the next connections is cut when so many bytes have gone through it, in both directions together."""
        with self._guard:
            self._cuts = list(sizes)

    @property
    def cuts_left(self) -> int:
        return len(self._cuts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=60)
            except OSError:
                _reset(client)
                continue
            with self._guard:
                self.connections += 1
                self._open |= {client, server}
                budget = [self._cuts.pop(0)] if self._cuts else None
            for source, target in ((client, server), (server, client)):
                arguments = (source, target, budget)
                Thread(target=self._pass_on, args=arguments, name="cutting-proxy link", daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, budget: list[int] | None) -> None:
        try:
            while piece := source.recv(_PIECE_BYTES):
                if budget is not None:
                    with self._guard:
                        allowed, budget[0] = budget[0], budget[0] - len(piece)
                    if allowed < len(piece):
                        target.sendall(piece[: max(0, allowed)])
                        break
                target.sendall(piece)
        except OSError:
            pass
        for link in (source, target):
            _reset(link)


def _reset(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        link.shutdown(socket.SHUT_RDWR)
    link.close()
