"""Row files one behind the other, read from beginning to end: as few requests as there are files, several at a time.

Invariants
- At most a few files are in memory. One that is there as a whole was compared with the digest in its name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future

from tidelog.engine.row_file import ByteSource, RowFile, RowKind, RowPart, opened_in_memory

# Files are as large as their writer likes them, up to this much they are fetched whole.
_MAX_WHOLE_BYTES = 128 << 20
_MAX_AHEAD_BYTES = 64 << 20


def open_parts(
    objects: ByteSource, parts: Sequence[RowPart], kind: RowKind, fetchers: Executor | None = None
) -> Iterator[RowFile]:
    """These files one after the other. With `fetchers` the next ones are on their way while one is read."""
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
            yield RowFile(objects, part, kind=kind)
        else:
            data = _fetched(objects, part) if fetched is None else fetched.result()
            yield opened_in_memory(data, part, kind)


def _begun(objects: ByteSource, part: RowPart, fetchers: Executor | None) -> Future[bytes] | None:
    if fetchers is None or part.size > _MAX_WHOLE_BYTES:
        return None
    return fetchers.submit(_fetched, objects, part)


def _fetched(objects: ByteSource, part: RowPart) -> bytes:
    return bytes(objects.read_range(part.key, 0, part.size + 1))
