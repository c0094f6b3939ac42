"""`wal.start-<offset>`: where a log begins, known from elsewhere than its oldest file, which may be lost.

    wal.start-00000000000000001000    an empty file; all that it says is in its name

Invariants
- It is moved before the first file below it is removed. So files that begin at or below it are whole at their start,
  whatever a crash has left; files that begin behind it have lost something.
- Moving it is one rename: it is never half there, and needs no room on a disk that is to be given some.
- Whoever looks beside the owner looks at the files first and then at the mark, which is therefore as new as the files.
- Where there is none, nothing is known, and the log begins with its oldest file: opening it for writing makes one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from tidelog.errors import GapError, offsets_text
from tidelog.files import Files, is_full_disk
from tidelog.log.names import start_name, start_offsets
from tidelog.log.segment import Segment

KeptElsewhere = Callable[[int, int], bool]
"""Whether offsets from one up to another (exclusive), which no file here has, can be read from somewhere else."""


def read_start(files: Files, directory: Path) -> int | None:
    """Where the log begins; None when that is not marked. Called after the files were looked at."""
    return max(start_offsets(files.list(directory)), default=None)


def move_start(files: Files, directory: Path, offset: int) -> None:
    """Marks that the log begins there from now on, durably. What is marked already costs nothing."""
    marked = start_offsets(files.list(directory))
    if marked == [offset]:
        return
    if marked:
        files.rename(directory / start_name(marked[-1]), directory / start_name(offset))
    else:
        files.create(directory / start_name(offset)).close()
    files.sync_directory(directory)
    for older in marked[:-1]:  # a crash can leave one under both names
        if older != offset:
            files.remove(directory / start_name(older))


def refuse_missing_start(
    files: Files, directory: Path, segments: Sequence[Segment], kept_elsewhere: KeptElsewhere | None = None
) -> bool:
    """GapError when the files that the log began with are gone. True when they are, and what they had is elsewhere."""
    first = read_start(files, directory) if segments else None
    if first is None or first >= segments[0].first_offset:
        return False
    last = segments[0].first_offset - 1
    if kept_elsewhere is not None and kept_elsewhere(first, last + 1):
        return True
    oldest = segments[0].path
    raise GapError(
        f"{offsets_text(first, last)} missing: the log began with them, and its oldest file is {oldest.name}",
        first=first,
        last=last,
        path=oldest,
        hint="Put the files back, if there is a copy. Else `tidelog repair` marks these offsets as lost",
    )


def settle_start(
    files: Files, directory: Path, segments: Sequence[Segment], start_offset: int, kept_elsewhere: KeptElsewhere | None
) -> None:
    """When a log is opened for writing: GapError if its start is missing, else a mark where there is none that holds.

    A full disk must not keep anybody from opening; the next time will do.
    """
    is_elsewhere = refuse_missing_start(files, directory, segments, kept_elsewhere)
    if segments and not is_elsewhere and read_start(files, directory) is not None:
        return  # at the oldest file, or behind it: somebody was about to remove that one
    try:
        move_start(files, directory, start_offset)
    except OSError as error:
        if not is_full_disk(error):
            raise


def remove_start(files: Files, directory: Path) -> None:
    """Before all files of a log are removed or taken elsewhere."""
    for offset in start_offsets(files.list(directory)):
        with contextlib.suppress(FileNotFoundError):
            files.remove(directory / start_name(offset))
        files.sync_directory(directory)
