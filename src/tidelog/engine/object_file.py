"""`open_object`: an object as a file object, which is read by pieces.

    ObjectFile (buffered, seekable) -> value file on this disk, or ranges of it in the store, the next ones ahead
                                    -> the value in memory, where it has no file of its own: it is small
    AsyncObjectFile (for tasks)     -> such a file object, which threads read

Invariants
- It shows one version of the object: its seq is pinned until it is closed. If that is rolled back, reading ends with
  ConflictError.
- Memory is bounded by `_AHEAD + 2` pieces of 4 MiB and a buffer, however large the object is.
- Nothing is fetched ahead of a reader that jumps.
"""

from __future__ import annotations

import asyncio
import io
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from threading import Lock
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from tidelog.engine.entry import MetadataValue, Tier
from tidelog.engine.mvcc.retention import Pin
from tidelog.engine.sst.value_file import PIECE_BYTES
from tidelog.errors import ClosedError, InputError

_BUFFER_BYTES = 256 << 10
_AHEAD = 2
_STEP_BYTES = 1 << 20

Answer = TypeVar("Answer")
ReadData = Callable[[int, int], bytes | memoryview]
"""Data from an offset on, of at most so many bytes."""


class SeekableObject(io.RawIOBase):
    """Bytes of a known size that are read by their positions, as a file object without a buffer."""

    def __init__(self, size: int, read: ReadData) -> None:
        self._size = size
        self._read = read
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        found = self._read(self._at, min(len(view), PIECE_BYTES)) if self._at < self._size else b""
        view[: len(found)] = found
        self._at += len(found)
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise InputError(f"whence must be 0, 1 or 2, not {whence!r}")
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise InputError(f"byte {at} is before the beginning of the object")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at


class RawObject(SeekableObject):
    """The unbuffered file object. `close_source` is called once."""

    def __init__(self, size: int, read: ReadData, pin: Pin, close_source: Callable[[], None]) -> None:
        super().__init__(size, read)
        self._pin = pin
        self._close_source = close_source

    def readinto(self, buffer: Any) -> int:
        self._pin.check()
        return super().readinto(buffer)

    def readall(self) -> bytes:
        pieces = []
        while piece := bytes(self._read(self._at, PIECE_BYTES)):
            self._pin.check()
            self._at += len(piece)
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        if not self.closed:
            try:
                self._close_source()
            finally:
                self._pin.release()
                super().close()


class ObjectFile(io.BufferedReader):
    """An object that is read like a file, with its `size`, `metadata`, `seq` and `tier`. Close it, or use `with`."""

    def __init__(self, raw: RawObject, *, size: int, metadata: dict[str, MetadataValue], seq: int, tier: Tier) -> None:
        super().__init__(raw, _BUFFER_BYTES)
        self.size = size
        self.metadata = metadata
        self.seq = seq
        self.tier = tier


class OpenFile(Protocol):
    """An object that is open for reading: `ObjectFile`, or that of a server."""

    size: int
    metadata: dict[str, MetadataValue]
    seq: int
    tier: Tier

    def read(self, size: int | None = -1, /) -> bytes: ...

    def seek(self, offset: int, whence: int = 0, /) -> int: ...

    def tell(self) -> int: ...

    def close(self) -> None: ...


class InThread(Protocol):
    """Has a thread do the work of a call."""

    def __call__(self, call: Callable[[], Answer], /) -> Coroutine[Any, Any, Answer]: ...


class AsyncObjectFile(AsyncIterator[bytes]):
    """An object that a task reads like a file, with its `size`, `metadata`, `seq` and `tier`. Close it, or use
    `async with`. `async for` yields what is left of it in pieces of up to 1 MiB. For one task at a time.
    """

    def __init__(self, file: OpenFile, run: InThread) -> None:
        self._file = file
        self._run = run
        self._calling = Lock()
        self._closing: asyncio.Future[None] | None = None
        self.size = file.size
        self.metadata = file.metadata
        self.seq = file.seq
        self.tier = file.tier

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closing is not None

    async def read(self, size: int | None = -1) -> bytes:
        """Returns so many bytes from where it stands, fewer only at the end; all that is left by default."""
        return await self._called(lambda: self._file.read(size))

    async def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Goes to a byte, counted from the beginning (0), from where it stands (1) or from the end (2); returns it."""
        return await self._called(lambda: self._file.seek(offset, whence))

    async def tell(self) -> int:
        """Returns where it stands."""
        return await self._called(self._file.tell)

    async def close(self) -> None:
        """Closes it. Idempotent. After a read that was cancelled it does not wait for what that waits for."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._closed())
            if not self._calling.locked():
                await self._closing

    async def _closed(self) -> None:
        try:
            await self._run(self._close_now)
        except ClosedError:  # with the engine, whose threads are gone
            self._close_now()

    def _close_now(self) -> None:
        with self._calling:
            self._file.close()

    async def _called(self, call: Callable[[], Answer]) -> Answer:
        if self._closing is not None:
            raise ClosedError("the object is closed", hint="Open it again")

        def locked() -> Answer:
            with self._calling:
                return call()

        return await self._run(locked)

    async def __anext__(self) -> bytes:
        piece = await self.read(_STEP_BYTES)
        if not piece:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class ColdPieces(Protocol):
    """A value in the store, which is fetched in pieces of `PIECE_BYTES`, each as the views that it was verified in."""

    def pieces(self, offset: int, length: int) -> list[memoryview]: ...

    def fetch(self, offset: int, length: int) -> Future[list[memoryview]]: ...


class ReadAheadValue:
    """Reads a value in the store, and from the second of consecutive reads on some pieces ahead. For one thread at a
    time.
    """

    def __init__(self, value: ColdPieces, size: int) -> None:
        self._value = value
        self._size = size
        self._end = -1
        self._ahead: deque[tuple[int, Future[list[memoryview]]]] = deque()
        self._begin = 0
        self._views: list[memoryview] = []

    def read(self, offset: int, length: int) -> memoryview:
        """Data from an offset on, at least one byte of it if there is any."""
        found = self._found(offset)
        if not found:
            self._views = []  # before there are more of them
            self._begin, self._views = offset, self._fetched(offset, length)
            found = self._found(offset)
        self._end = offset + len(found[:length])
        return found[:length]

    def _found(self, offset: int) -> memoryview:
        """What is here of the data from an offset on; empty if nothing is."""
        begin = self._begin
        for view in self._views if offset >= begin else ():
            if offset < begin + len(view):
                return view[offset - begin :]
            begin += len(view)
        return memoryview(b"")

    def _fetched(self, offset: int, length: int) -> list[memoryview]:
        if offset != self._end:
            self.forget()
            return self._value.pieces(offset, length)
        last = offset if not self._ahead else self._ahead[-1][0] + PIECE_BYTES
        while len(self._ahead) <= _AHEAD and last < self._size:
            self._ahead.append((last, self._value.fetch(last, PIECE_BYTES)))
            last += PIECE_BYTES
        return self._ahead.popleft()[1].result() if self._ahead else []

    def forget(self) -> None:
        """Nobody wants what is here or on its way."""
        self._views = []
        for _, one in self._ahead:
            one.cancel()
        self._ahead.clear()
