"""A tree that is built in pieces is a tree: the same cells, sound as a whole, whatever the pieces were."""

from __future__ import annotations

import random
import struct
from itertools import pairwise
from pathlib import Path

import pytest

from tidelog.engine.btree.buffer_pool import BufferPool
from tidelog.engine.btree.bulk_load import FIRST_LEAF, Child, Leaf, empty_root, filled_leaves, inner_pages, placed
from tidelog.engine.btree.page import ROOT, divider_of
from tidelog.engine.btree.page_file import PageFile
from tidelog.engine.btree.tree import Tree
from tidelog.errors import DataError, InternalError
from tidelog.testing import FaultyFiles

LSN = 77
PATH = Path("/pages.db")
LENGTHS = struct.Struct("<HH")


def raw_of(rows: list[tuple[bytes, bytes]]) -> bytes:
    """Rows as they are in a block."""
    return b"".join(LENGTHS.pack(len(key), len(value)) + key + value for key, value in rows)


def rows_of(count: int, seed: int = 1) -> list[tuple[bytes, bytes]]:
    """Rows in order of key, of all sizes."""
    choose = random.Random(seed)
    keys = sorted({choose.randbytes(choose.choice((1, 8, 40, 300))) for _ in range(count)})
    return [(key, choose.randbytes(choose.choice((1, 30, 400)))) for key in keys]


def built(pieces: list[list[tuple[bytes, bytes]]]) -> tuple[Tree, int]:
    """The tree with the rows of these pieces, in a page file, and the first page that is free."""
    files = FaultyFiles()
    file = PageFile.create(files, PATH, made_lsn=LSN)
    leaves = [leaf for rows in pieces for leaf in filled_leaves([raw_of(rows)], LSN)]
    next_page = write(file, leaves)
    file.sync()
    return Tree(BufferPool(file, 64 * 8192), refuse_to_log), next_page


def write(file: PageFile, leaves: list[Leaf]) -> int:
    """Gives the leaves their numbers, and makes what is above them."""
    if len(leaves) <= 1:
        file.write_page(ROOT, placed(leaves[0].page, ROOT, 0, LSN) if leaves else empty_root(LSN))
        return FIRST_LEAF
    for page_id, leaf in enumerate(leaves, FIRST_LEAF):
        right = 0 if leaf is leaves[-1] else page_id + 1
        file.write_page(page_id, placed(leaf.page, page_id, right, LSN))
    keys = [b"", *(divider_of(left.last_key, right.first_key) for left, right in pairwise(leaves))]
    pages, next_page = inner_pages([Child(key, page_id) for page_id, key in enumerate(keys, FIRST_LEAF)], LSN)
    for page_id, page in pages:
        file.write_page(page_id, page)
    return next_page


def refuse_to_log(updates: bytes) -> int:
    """A tree that is only read logs nothing."""
    raise InternalError("nothing is to be logged")


@pytest.mark.parametrize("count", [0, 1, 20, 400, 6000])
@pytest.mark.parametrize("pieces", [1, 3])
def test_it_has_the_cells_of_all_pieces(count: int, pieces: int) -> None:
    """Order, levels and siblings are right, and a scan gives every row."""
    rows = rows_of(count)
    size = max(1, -(-len(rows) // pieces))
    tree, next_page = built([rows[at : at + size] for at in range(0, len(rows), size)])
    tree.next_page = next_page
    assert list(tree.scan(b"", None)) == rows
    found = tree.check()
    assert found.cells == len(rows)
    assert found.pages == next_page - 1


def test_rows_that_are_not_in_order_are_refused() -> None:
    """Within a block and from one block to the next: no tree is made of them."""
    ordered = rows_of(300)
    with pytest.raises(DataError):
        list(filled_leaves([raw_of(ordered[::-1])], LSN))
    with pytest.raises(DataError):
        list(filled_leaves([raw_of(ordered), raw_of(ordered)], LSN))
