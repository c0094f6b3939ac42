"""What a fenced owner left on its disk: put aside, never dropped, never mixed into the new owner's offsets.

    <topic>/fenced/e{epoch}-{claim}/    the files of the log as they were, and tail.json

Invariants
- Files are moved newest first. What is left at a crash is a shorter log that begins where it began, and the next
  attempt moves the rest to the same place.
- `tail.json` is written first: a directory with files in it always says whose they are.
- Nothing in here is deleted except by `discard`, which somebody asked for by name.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import NotFoundError
from tidelog.files import Files
from tidelog.log.names import CHECKPOINT, LOG_ID, PRODUCERS, start_name, start_offsets, wal_files
from tidelog.log.start_mark import remove_start
from tidelog.tier.placed_rows import PLACED_FILE

FENCED = "fenced"
_TAIL = "tail.json"
_KIND = "fenced-tail"
_VERSION = 1
_NAME = re.compile(r"e(\d{1,20})-([0-9a-z]{1,32})", re.ASCII)


class FencedTail(msgspec.Struct, frozen=True, kw_only=True):
    """Offsets from `first_offset` up to `next_offset` (exclusive) that were accepted here and never shipped."""

    epoch: int
    claim: str
    first_offset: int
    next_offset: int
    set_aside_us: int

    @property
    def name(self) -> str:
        """How it is called on the command line."""
        return f"e{self.epoch}-{self.claim}"

    @property
    def count(self) -> int:
        return max(0, self.next_offset - self.first_offset)


def set_aside(files: Files, directory: Path, tail: FencedTail) -> None:
    """Moves the files of the log out of the way; safe to be cut anywhere and done again."""
    folder = directory / FENCED / tail.name
    files.make_own_directory(directory / FENCED)
    files.make_own_directory(folder)
    if not files.exists(folder / _TAIL):
        files.write_atomically(folder / _TAIL, encode_document(_KIND, _VERSION, tail))
    names = [name for _, name in reversed(wal_files(files.list(directory)))]
    # What is said about the messages first: it must not be believed beside others.
    marks = map(start_name, start_offsets(files.list(directory)))
    moved = (PRODUCERS, PLACED_FILE, *names, CHECKPOINT, *marks, LOG_ID)
    for name in [name for name in moved if files.exists(directory / name)]:
        files.rename(directory / name, folder / name)
        files.sync_directory(folder)
        if files.exists(directory / name):
            # A crash left one file under both names, and renaming one of them to the other changes nothing.
            files.remove(directory / name)
        files.sync_directory(directory)


def secure_tails(files: Files, directory: Path) -> None:
    """Makes sure of what an interrupted attempt moved: else the next change here could outlive its move there."""
    for folder in (directory / FENCED, *(directory / FENCED / tail.name for tail in fenced_tails(files, directory))):
        if files.is_directory(folder):
            files.sync_directory(folder)


def remove_files(files: Files, directory: Path) -> None:
    """Deletes the files of a log whose messages are all elsewhere, or are meant to go.

    Oldest first, each for good before the next: what a crash leaves is still the end of the log, and nothing says any
    more where it began.
    """
    remove_start(files, directory)
    names = [name for _, name in wal_files(files.list(directory))]
    for name in [PRODUCERS, PLACED_FILE, *names, CHECKPOINT, LOG_ID]:
        if files.exists(directory / name):
            files.remove(directory / name)
            files.sync_directory(directory)


def fenced_tails(files: Files, directory: Path) -> list[FencedTail]:
    """All that were put aside here, oldest first."""
    folder = directory / FENCED
    if not files.has_own_directory(folder):
        return []
    found = [name for name in files.list(folder) if _NAME.fullmatch(name) and files.exists(folder / name / _TAIL)]
    tails = [decode_document(_KIND, _VERSION, files.read(folder / name / _TAIL), FencedTail) for name in found]
    return sorted(tails, key=lambda tail: (tail.epoch, tail.set_aside_us))


def tail_directory(files: Files, directory: Path, name: str) -> Path:
    """Where the files of a tail are: a log directory of its own."""
    folder = directory / FENCED / name
    files.has_own_directory(directory / FENCED)
    if not _NAME.fullmatch(name) or not files.has_own_directory(folder) or not files.exists(folder / _TAIL):
        raise NotFoundError(f"there is no fenced tail {name}", path=directory)
    return folder


def discard(files: Files, directory: Path, name: str) -> None:
    """Deletes a tail for good."""
    files.remove_tree(tail_directory(files, directory, name))
    files.sync_directory(directory / FENCED)
