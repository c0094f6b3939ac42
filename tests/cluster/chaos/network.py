"""The network of a campaign: every connection between a node and etcd, the bucket, its clients and other nodes goes
through here, and can be cut.

    node n1 ── n1>etcd-0 ──> etcd        client or node ── >n1 ──> node n1
            ── n1>bucket ──> SeaweedFS

Invariants
- A cut by silence keeps connections and forwards nothing, as a network does that drops packets; after it, what was
  on its way arrives. A cut by refusal resets connections, and new ones at once.
- The port in front of a node stays the same however often the node is started again.
- Who has connected is found by the process that has the other end of the connection: only so can nodes be cut off from
  each other while clients still reach them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

HOST = "127.0.0.1"
_PIECE_BYTES = 64 << 10
How = Literal["silence", "refusal"]
Address = tuple[str, int]


class Path(NamedTuple):
    """From whom to whom; an empty `source` is everybody who is no node."""

    source: str
    target: str


class _Connection:
    """Two directions of bytes."""

    def __init__(self, path: Path, ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter | None]) -> None:
        self.path = path
        self.ends = ends

    def reset(self) -> None:
        for end in self.ends:
            if end is not None:
                end.transport.abort()


class Network:
    """All proxies, in one thread."""

    def __init__(self, processes: Callable[[], Mapping[str, int]]) -> None:
        self._processes = processes
        self._cuts: dict[Path, How] = {}
        self._changed = asyncio.Event()
        self._open: set[_Connection] = set()
        self._servers: list[asyncio.Server] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="chaos-network", daemon=True)
        self._thread.start()

    def listen(self, source: str | None, target: str, address: Callable[[], Address]) -> int:
        """A port that leads to `address`; for `source` alone, or (None) for whoever connects."""
        return asyncio.run_coroutine_threadsafe(self._listen(source, target, address), self._loop).result()

    async def _listen(self, source: str | None, target: str, address: Callable[[], Address]) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._serve(reader, writer, source, target, address)

        server = await asyncio.start_server(serve, HOST, 0, limit=_PIECE_BYTES)
        self._servers.append(server)
        port: int = server.sockets[0].getsockname()[1]
        return port

    def cut(self, how: How, *paths: Path) -> None:
        """Until `heal`."""
        self._in_loop(lambda: self._cut(how, paths))

    def heal(self, *paths: Path) -> None:
        self._in_loop(lambda: self._heal(paths))

    def close(self) -> None:
        async def end() -> None:
            for server in self._servers:
                server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.1)  # connections that were reset are closed by then

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _in_loop(self, work: Callable[[], None]) -> None:
        async def call() -> None:
            work()

        asyncio.run_coroutine_threadsafe(call(), self._loop).result()

    def _cut(self, how: How, paths: tuple[Path, ...]) -> None:
        self._cuts |= dict.fromkeys(paths, how)
        for connection in list(self._open):
            if how == "refusal" and connection.path in paths:
                connection.reset()

    def _heal(self, paths: tuple[Path, ...]) -> None:
        for path in paths:
            self._cuts.pop(path, None)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _passable(self, path: Path) -> None:
        while self._cuts.get(path) == "silence":
            await self._changed.wait()

    async def _serve(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        source: str | None,
        target: str,
        address: Callable[[], Address],
    ) -> None:
        if source is None:
            source = owner_of(writer.get_extra_info("peername")[1], self._processes())
        path = Path(source, target)
        connection = _Connection(path, (writer, None))
        self._open.add(connection)
        try:
            await self._passable(path)
            if path in self._cuts:
                return
            there_reader, there_writer = await asyncio.open_connection(*address(), limit=_PIECE_BYTES)
            connection.ends = (writer, there_writer)
            ways = ((reader, there_writer), (there_reader, writer))
            pumps = [asyncio.ensure_future(self._pump(path, *way)) for way in ways]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            self._open.discard(connection)
            connection.reset()

    async def _pump(self, path: Path, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while piece := await source.read(_PIECE_BYTES):
            await self._passable(path)
            target.write(piece)
            await target.drain()


def owner_of(port: int, processes: Mapping[str, int]) -> str:
    """The name of the process that has a connection from this local port; "" for any other."""
    inode = _inode_of(port)
    if inode is None:
        return ""
    for name, pid in processes.items():
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{pid}/fd/{number}") == f"socket:[{inode}]":
                        return name
    return ""


def _inode_of(port: int) -> str | None:
    wanted = f"0100007F:{port:04X}"
    with open("/proc/net/tcp") as table:
        for line in table:
            words = line.split()
            if words[1] == wanted:
                return words[9]
    return None
