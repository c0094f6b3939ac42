"""Letting files of the log leave the disk once the store has them.

Invariants
- A file leaves only when all of it is below what the published manifest says is shipped, the catalog covers it, and its
  objects are there with their size: asked right before. An error while asking keeps it.
- Nothing from the beginning of the last complete checkpoint on leaves: opening begins there.
- Files leave oldest first, and only while there is more than `hot_tier_bytes` of them. One that was read a short while
  ago stays longer, as long as there is not twice as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from tidelog.engine.wal import Wal
from tidelog.engine.wal_files import WalSpan
from tidelog.tier.object_store import ObjectStore
from tidelog.tier.owned_catalog import OwnedCatalog
from tidelog.tier.retention import safe_below

Reads = Callable[[WalSpan], bool]


def removable_below(spans: Sequence[WalSpan], limit_lsn: int, hot_bytes: int, was_read_lately: Reads) -> int:
    """The LSN below which files may go, as far as their age and size are concerned; 0 when none may."""
    total = sum(span.next_position - span.first_position for span in spans)
    below = 0
    for span in spans[:-1]:
        if span.next_lsn > limit_lsn or total <= hot_bytes:
            break
        if was_read_lately(span) and total <= 2 * hot_bytes:
            break
        total -= span.next_position - span.first_position
        below = span.next_lsn
    return below


class Purger:
    """Takes files of one engine's log from the disk."""

    def __init__(self, wal: Wal, objects: ObjectStore, hot_bytes: int, was_read_lately: Reads) -> None:
        self._wal = wal
        self._objects = objects
        self._hot_bytes = hot_bytes
        self._was_read_lately = was_read_lately
        self._purging = Lock()
        self.freed_bytes = 0

    def purge(self, owned: OwnedCatalog, shipped_lsn: int, redo_lsn: int) -> int:
        """Removes what may go; the bytes that this freed. `shipped_lsn` is what the published manifest says."""
        with self._purging:
            spans = self._wal.spans()
            below = removable_below(spans, min(shipped_lsn, redo_lsn), self._hot_bytes, self._was_read_lately)
            if not below:
                return 0
            owned.ownership.verify()
            files = self._wal.log.file_spans()
            safe = safe_below(files, below, owned.catalog, self._objects, max_epoch=owned.epoch)
            freed = self._wal.remove_below(safe)
            self.freed_bytes += freed
            return freed
