"""Large values over HTTP: a body becomes a value of an engine, and a value becomes an answer, piece by piece.

Invariants
- A piece of a body, what the protocol holds back, and its beginning up to `large_value_bytes` are in memory, whatever
  the size of the body.
- A body that breaks off puts nothing: the entry is applied after the last byte, and what was written is removed.
- An upload waits for its client in a thread of its own: entries of others are applied meanwhile.
- An answer shows one version of an object from its first byte to its last. What fails midway cuts the connection.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import re
from collections.abc import AsyncGenerator, Iterator
from http import HTTPStatus

import msgspec

from tidelog.engine.engine import Engine
from tidelog.engine.entry import MAX_STREAM_BYTES, PutObject, Result
from tidelog.engine.object_file import AsyncObjectFile
from tidelog.errors import DataError
from tidelog.service.http.call import Call
from tidelog.service.http.problems import HttpError
from tidelog.store.scheduler import in_thread

WHOLE_BYTES = 4 << 20
"""What has no more than this is held in memory, and takes fewer steps."""
_PIECE_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


class BodyReader(Iterator[bytes]):
    """A body that another thread reads, while it arrives in the event loop."""

    def __init__(self, call: Call) -> None:
        self._pieces = call.pieces(MAX_STREAM_BYTES)
        self._loop = asyncio.get_running_loop()
        self._under_way: concurrent.futures.Future[bytes] | None = None
        self._is_cut = False

    def __next__(self) -> bytes:
        self._under_way = asyncio.run_coroutine_threadsafe(self._gathered(), self._loop)
        if self._is_cut:
            self._under_way.cancel()
        data = self._under_way.result()
        if not data:
            raise StopIteration
        return data

    async def _gathered(self) -> bytes:
        data = bytearray()
        async for piece in self._pieces:
            data += piece
            if len(data) >= _PIECE_BYTES:
                break
        return bytes(data)

    def cut(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_cut = True
        if self._under_way is not None:
            self._under_way.cancel()


async def put_stream(call: Call, engine: Engine, seq: int, entry: PutObject) -> Result:
    """Applies the entry with the body of a request as its data."""
    body, results = BodyReader(call), list[Result]()
    put = msgspec.structs.replace(entry, data=body)
    with call.service.bodies.spending() as take:
        take(2 * _PIECE_BYTES + engine._core.values.large_value_bytes)  # up to that size it is no file
        working = in_thread(lambda: results.append(engine.apply(seq, put)), "tidelog-http-put")
        try:
            await asyncio.wrap_future(working)
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError from None  # the client is gone
        finally:
            body.cut()
    return results[0]


def asked_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and length that a header `range` asks for; None: all of it. HttpError (416) where there are none."""
    found = None if header is None else _RANGE.fullmatch(header.strip())
    if found is None or found[1] == found[2] == "":
        return None  # several ranges, and what is no range, may be answered with everything
    if found[1]:
        first, last = int(found[1]), min(int(found[2] or size), size - 1)
        is_good = first < size and (not found[2] or int(found[2]) >= first)
    else:
        first, last = max(0, size - int(found[2])), size - 1
        is_good = size > 0 and int(found[2]) > 0
    if not is_good:
        raise HttpError(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            f"the object has {size} bytes, and none of them is in the range",
            headers=(("content-range", f"bytes */{size}"),),
        )
    return first, last - first + 1


async def pieces_of(file: AsyncObjectFile, first: int, length: int) -> AsyncGenerator[bytes, None]:
    """So many bytes of an open object, which is closed at the end."""
    async with file:
        await file.seek(first)
        while length:
            piece = await file.read(min(length, _PIECE_BYTES))
            if not piece:
                raise DataError("an object ends before its size")
            length -= len(piece)
            yield piece
