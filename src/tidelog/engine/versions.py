"""The version index: which version of an object is to be seen at a seq.

Invariants
- A version is seen at a seq when it is the newest of its key that is not after it, is no deletion, and belongs to the
  bucket that is there at that seq: it was put after that bucket's creation.
- Looking changes nothing, takes no lock and never waits for whoever applies. Each step looks at the tree as it is at
  one moment, and versions that are not after the seq asked for do not change, so many steps see one state.
- A listing seeks from key to key: what it costs does not depend on how many versions a key has. What was deleted and
  is still kept is passed over a key at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from tidelog.engine import version_python
from tidelog.engine.btree import Tree
from tidelog.engine.buckets import Buckets, BucketVersion
from tidelog.engine.cell import TOMBSTONE, Cell, decode_cell
from tidelog.engine.page import ROOT
from tidelog.engine.version_keys import SEQ_BYTES, at, behind, object_prefix, objects_of, seq_of
from tidelog.engine.version_python import Other, Pointer, Row

if TYPE_CHECKING:
    _kernel = version_python
else:
    try:
        if os.environ.get("TIDELOG_PURE_PYTHON"):
            raise ImportError
        from tidelog.engine import _engine as _kernel
    except ImportError:
        _kernel = version_python

_find_version = _kernel.find_version
_list_seen = _kernel.list_seen

# Objects of one step of a listing: enough to forget what a step costs, few enough that nobody waits for it.
LISTED_ROWS = 256


class Found(NamedTuple):
    """A version and its seq."""

    seq: int
    cell: Cell


class Versions:
    """What is in an engine, at any seq."""

    def __init__(self, tree: Tree, buckets: Buckets) -> None:
        self.tree = tree
        self.buckets = buckets
        self._pages = tree.pool.pages

    def find(self, bucket: str, key: str, seq: int) -> Found | None:
        """The version to be seen at a seq."""
        created = self.buckets.created(bucket, seq)
        return None if created is None else self.find_in(created, bucket, key, seq)

    def find_in(self, created: BucketVersion, bucket: str, key: str, seq: int) -> Found | None:
        """The same, in a bucket that is known to be there."""
        found = self._newest(bucket, key, seq)
        if found is None:
            return None
        if len(found) == 2:
            return _seen(created, found[0], decode_cell(found[1]))
        return _seen(created, found[0], Cell(0, *found[1:]))

    def pointer(self, created: BucketVersion, bucket: str, key: str, seq: int) -> Pointer | None:
        """The short way to what there is most of: a version whose body is in the log; None for all else."""
        found = _find_version(self._pages, ROOT, bucket, key, seq)
        if type(found) is not tuple or len(found) == 2:
            return None
        if found[0] < created.seq or (found[0] == created.seq and found[1] < created.order):
            return None
        return found

    def _newest(self, bucket: str, key: str, seq: int) -> Pointer | Other | None:
        found = _find_version(self._pages, ROOT, bucket, key, seq)
        return self._newest_step_by_step(bucket, key, seq) if isinstance(found, int) else found

    def _newest_step_by_step(self, bucket: str, key: str, seq: int) -> Other | None:
        """The same where pages must be loaded."""
        prefix = object_prefix(bucket, key)
        found = self.tree.find(at(prefix, seq), behind(prefix))
        if found is None or found[0][:-SEQ_BYTES] != prefix:
            return None
        return seq_of(found[0]), found[1]

    def history(self, bucket: str, key: str, seq: int) -> Iterator[Found]:
        """All versions that are kept and are not after a seq, newest first, deletions and earlier buckets included."""
        prefix = object_prefix(bucket, key)
        for name, value in self.tree.scan(at(prefix, seq), behind(prefix)):
            yield Found(seq_of(name), decode_cell(value))

    def objects(
        self, bucket: str, key_prefix: str, seq: int, *, after: str | None = None, has_crc: bool = False
    ) -> Iterator[list[Row]]:
        """The objects of a bucket whose keys begin like this and are after another key, in order of key.

        In lists of (key, size, seq), with `has_crc` (key, size, seq, crc).
        """
        created = self.buckets.created(bucket, seq)
        if created is None:
            return
        start, stop = objects_of(bucket, key_prefix)
        resume: bytes | None = start if after is None else max(start, behind(object_prefix(bucket, after)))
        while resume is not None:
            rows, resume, missing_page = _list_seen(
                *(self._pages, ROOT, resume, stop, seq, created.seq, created.order, LISTED_ROWS, has_crc)
            )
            if rows:
                yield rows
            if missing_page:
                self.tree.pool.load(missing_page)

    def names(self, bucket: str, seq: int) -> Iterator[str]:
        """The keys of all objects of a bucket."""
        return (key for key, *_ in chain.from_iterable(self.objects(bucket, "", seq)))


def _seen(created: BucketVersion, seq: int, cell: Cell) -> Found | None:
    if cell.flags & TOMBSTONE or seq < created.seq or (seq == created.seq and cell.order < created.order):
        return None
    return Found(seq, cell)
