"""How a replica that shares its store begins to ship: a copy of the owner's index takes the place of its own.

    takeover/       a restore from the store, which claims the next epoch at its end; the replica reads and applies on
    takeover.json   the copy is whole: from here on it is what the directory holds
    engine.ckpt, pages.db and the log of the copy, one after the other, in the place of those of the replica
    takeover.json and takeover/ go

The log that is shipped has one space of LSNs and positions. A replica's own log is another one, so it cannot be shipped
as a continuation; the copy is. Values stay in the store, or, as value files have the same names everywhere, here. What
was applied after the high-water mark comes from the orchestrator again, which keeps it until it is shipped.

Invariants
- Until `takeover.json` is written the directory is the replica that it was, whatever is in `takeover/`. After that it
  is the copy: opening finishes the exchange first.
- A name is removed here and then renamed from there, and is durable here before it is gone there. One that is not in
  `takeover/` any more has been exchanged; the files of the log are gathered in `wal.new/` first.
- A crash between the claim and `takeover.json` leaves a store whose owner is gone. The next to take over claims the
  epoch after that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tidelog.codec import encode_document
from tidelog.engine.cold.disk_cache import CACHE
from tidelog.engine.core import PAGES, WAL
from tidelog.engine.recovery.checkpoint import MASTER
from tidelog.files import Files, explained

TAKEOVER: Final = "takeover"
_MARKER = "takeover.json"
_NEW_LOG = f"{WAL}.new"
_KIND = "engine-takeover"
_VERSION = 1


def prepare_takeover(files: Files, directory: Path) -> Path:
    """An empty directory for the copy. The caller restores into it."""
    discard_takeover(files, directory)
    return directory / TAKEOVER


def discard_takeover(files: Files, directory: Path) -> None:
    """Removes a copy that is not whole, which takes as much room as the index. The caller has the directory."""
    with explained("take over", directory):
        if files.is_directory(directory / TAKEOVER):
            files.remove_tree(directory / TAKEOVER)


def commit_takeover(files: Files, directory: Path) -> None:
    """The copy is whole: it is what the directory holds from here on. The caller has closed the replica."""
    with explained("take over", directory):
        files.write_atomically(directory / _MARKER, encode_document(_KIND, _VERSION, {}))
    finish_takeover(files, directory)


def finish_takeover(files: Files, directory: Path) -> None:
    """Exchanges what a takeover has begun to exchange; does nothing where there is none."""
    with explained("open engine", directory):
        if not files.exists(directory / _MARKER):
            return
        copy = directory / TAKEOVER
        for name in (MASTER, PAGES):
            if files.exists(copy / name):
                _remove(files, directory / name)
                files.rename(copy / name, directory / name)
                files.sync_directory(directory)
                files.sync_directory(copy)
        _exchange_log(files, directory, copy)
        _remove(files, directory / CACHE)  # by positions of the other log
        _remove(files, copy)
        files.remove(directory / _MARKER)
        files.sync_directory(directory)


def _exchange_log(files: Files, directory: Path, copy: Path) -> None:
    """File by file: a directory that was renamed may be found in both places, with files that are removed from both."""
    staged = directory / _NEW_LOG
    if files.is_directory(copy / WAL):
        files.make_directories(staged)
        for name in files.list(copy / WAL):
            files.rename(copy / WAL / name, staged / name)
        files.sync_directory(staged)
        _remove(files, copy / WAL)
    if files.is_directory(staged):
        _remove(files, directory / WAL)
        files.rename(staged, directory / WAL)
        files.sync_directory(directory)


def _remove(files: Files, path: Path) -> None:
    if files.is_directory(path):
        files.remove_tree(path)
    elif files.exists(path):
        files.remove(path)
    else:
        return
    files.sync_directory(path.parent)
