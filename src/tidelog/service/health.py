"""Health checks over HTTP: `/health/live` while the process runs, `/health/ready` while it serves clients."""

from __future__ import annotations

import asyncio
import contextlib
from http import HTTPStatus

_MAX_REQUEST_BYTES = 8192
_REQUEST_SECONDS = 10.0


class HealthServer:
    """Answers one request per connection."""

    def __init__(self) -> None:
        self.is_ready = False
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._answer, host, port, limit=_MAX_REQUEST_BYTES)
        found = self._server.sockets[0].getsockname()
        return found[0], found[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                status, text = self._status(head.split(b"\r\n", 1)[0])
                body = text.encode() + b"\n"
                writer.write(
                    f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: text/plain; charset=utf-8\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
                    + (b"" if head.startswith(b"HEAD ") else body)
                )
                await writer.drain()
        writer.close()

    def _status(self, line: bytes) -> tuple[HTTPStatus, str]:
        parts = line.split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return HTTPStatus.BAD_REQUEST, "expected an HTTP/1.1 request"
        if parts[0] not in (b"GET", b"HEAD"):
            return HTTPStatus.METHOD_NOT_ALLOWED, "expected GET or HEAD"
        path = parts[1].split(b"?", 1)[0]
        if path == b"/health/live":
            return HTTPStatus.OK, "live"
        if path == b"/health/ready":
            return (HTTPStatus.OK, "ready") if self.is_ready else (HTTPStatus.SERVICE_UNAVAILABLE, "not ready")
        return HTTPStatus.NOT_FOUND, "no such path"
