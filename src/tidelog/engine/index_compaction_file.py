"""The page file, written anew from the cells of a tree and put in the place of the one that is in use.

`index_compaction.py` says why that is safe; here is what both use who do it, a running engine and a redo.

Invariants
- The new tree follows from the cells and the LSN alone: whoever builds it from the same gets the same pages.
- Until `use_new_index` the file that is in use is not touched. `pages.db.new` belongs to nobody before.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

from tidelog.engine.btree import Tree
from tidelog.engine.buffer_pool import BufferPool
from tidelog.engine.page_file import PageFile
from tidelog.errors import InternalError
from tidelog.files import Files, explained

_SUFFIX = ".new"
# Pages are written once and in order, so a few that are still being filled are all that has to be in memory.
_POOL_BYTES = 4 << 20


class NewIndex(NamedTuple):
    """A page file that is complete and synced, and not in use yet."""

    lsn: int
    cells: int
    next_page: int


def build_new_index(files: Files, path: Path, tree: Tree, lsn: int) -> NewIndex:
    """Writes all cells of a tree beside its page file, as the record of this LSN will leave them."""
    new_path = _new_path(path)
    page_file = PageFile.create(files, new_path, made_lsn=lsn)
    try:
        pool = BufferPool(page_file, _POOL_BYTES)
        new_tree = Tree(pool, _log_nothing)
        cells = new_tree.bulk_load(tree.scan(), lsn)
        pool.flush(pool.dirty_pages())
        return NewIndex(lsn, cells, new_tree.next_page)
    except BaseException:
        with contextlib.suppress(OSError):
            files.remove(new_path)
        raise
    finally:
        page_file.close()


def use_new_index(files: Files, path: Path, tree: Tree, new: NewIndex) -> PageFile:
    """Renames the new file over the old one, and reads pages from it from now on. The tree has nothing unsettled."""
    with explained("replace the page file", path):
        files.rename(_new_path(path), path)
        files.sync_directory(path.parent)
    page_file = PageFile(files, path)
    old_next_page = tree.next_page
    tree.renumbered(new.next_page, new.lsn)
    tree.pool.use_file(page_file, stale_pages=range(new.next_page, old_next_page))
    return page_file


def remove_unused_index(files: Files, path: Path) -> None:
    """What a crash has left of a file that never came into use."""
    if files.exists(_new_path(path)):
        with explained("open engine", path):
            files.remove(_new_path(path))


def _new_path(path: Path) -> Path:
    return path.with_name(path.name + _SUFFIX)


def _log_nothing(updates: bytes) -> int:
    raise InternalError("a tree that is loaded in bulk logs nothing")
