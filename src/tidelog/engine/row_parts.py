"""Row files one behind the other, read from beginning to end: as few requests as there are files, several at a time.

Invariants
- Rows come in the order of the files, which is that of their keys. At most a few files are in memory.
- A file that is read whole is compared with the digest in its name before any of its rows is handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future

from tidelog.engine.cell_blocks import Row
from tidelog.engine.row_file import ByteSource, RowFile, RowKind, RowPart, check_row_file

# Files are as large as their writer likes them, up to this much they are fetched whole.
_MAX_WHOLE_BYTES = 128 << 20
_MAX_AHEAD_BYTES = 64 << 20


def rows_of_parts(
    objects: ByteSource, parts: Sequence[RowPart], kind: RowKind, fetchers: Executor | None = None
) -> Iterator[Row]:
    """All rows of these files. With `fetchers` the next ones are on their way while one is read."""
    for part, data in whole_parts(objects, parts, fetchers):
        if data is None:
            yield from RowFile(objects, part, kind=kind).rows()
        else:
            yield from check_row_file(data, part, kind)


def whole_parts(
    objects: ByteSource, parts: Sequence[RowPart], fetchers: Executor | None
) -> Iterator[tuple[RowPart, bytes | None]]:
    """Each file with its bytes; None for one that is too large to be in memory as a whole."""
    waiting: deque[tuple[RowPart, Future[bytes] | None]] = deque()
    ahead_bytes, remaining = 0, deque(parts)
    while remaining or waiting:
        while remaining and (not waiting or ahead_bytes + remaining[0].size <= _MAX_AHEAD_BYTES):
            part = remaining.popleft()
            waiting.append((part, _begun(objects, part, fetchers)))
            ahead_bytes += part.size
        part, fetched = waiting.popleft()
        ahead_bytes -= part.size
        if part.size > _MAX_WHOLE_BYTES:
            yield part, None
        else:
            yield part, _fetched(objects, part) if fetched is None else fetched.result()


def _begun(objects: ByteSource, part: RowPart, fetchers: Executor | None) -> Future[bytes] | None:
    if fetchers is None or part.size > _MAX_WHOLE_BYTES:
        return None
    return fetchers.submit(_fetched, objects, part)


def _fetched(objects: ByteSource, part: RowPart) -> bytes:
    return bytes(objects.read_range(part.key, 0, part.size + 1))
