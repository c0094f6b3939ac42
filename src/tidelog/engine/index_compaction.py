"""Writing the version index anew, in full pages: random inserts and vacuums leave pages half empty for ever.

    all cells, in order -> pages.db.new, synced -> REPACK in the log -> renamed to pages.db -> in use -> checkpoint

The pages have other numbers then, so page updates of the log before the REPACK record and behind it speak of different
trees. Why a crash anywhere is harmless:

- Before the record is in the log, nothing has happened: `pages.db.new` is removed by whoever opens next.
- With the record and the old file, redo does the updates before the record, then the same as here (the new tree follows
  from the cells and the LSN alone), then the updates behind it. This is also how an index is made from the whole log.
- With the record and the new file, which says in its header which record it belongs to (`made_lsn`), redo leaves out
  everything up to that record: all pages of the file have its LSN, and have those changes.
- A page of the new file that is changed has its image in the log first, as after a checkpoint: `image_floor` is behind
  the record. So a torn page does not matter, though no checkpoint was made since.
- A damaged page is made anew from images behind the record only: those before are of pages with other numbers.

Invariants
- Appliers wait while it runs, as long as it takes to read and write the whole index. Readers go on; one that was about
  to load a page of the old file begins its search again, and finds the same cells.
- No cell changes: every state is read as before.
- If it fails before the record, the engine goes on as it was. Behind it only opening again helps.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tidelog.engine.core import Core
from tidelog.engine.record import encode_repack


class IndexCompactionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the index. Appliers waited for `seconds`."""

    cells: int
    pages_before: int
    pages_after: int
    seconds: float


def compact_index(
    core: Core, *, check: Callable[[], None], on_failure: Callable[[BaseException], None]
) -> IndexCompactionReport:
    """Writes the index anew. `check` raises where the engine cannot be changed; `on_failure` hears what cannot be
    gone on from."""
    checkpointer = core.checkpointer
    with checkpointer.one_at_a_time, core.applying:
        check()
        begin, before = core.clock.monotonic(), core.tree.next_page
        core.wal.commit()
        core.tree.settle()
        new = core.build_new_index(core.wal.next_lsn)
        try:
            core.wal.add(encode_repack(new.cells))
            core.wal.commit()
            core.use_new_index(new)
        except BaseException as error:
            on_failure(error)
            raise
        seconds = core.clock.monotonic() - begin
    checkpointer.checkpoint()
    return IndexCompactionReport(cells=new.cells, pages_before=before, pages_after=new.next_page, seconds=seconds)
