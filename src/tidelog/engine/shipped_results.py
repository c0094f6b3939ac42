"""What became of the last entries of a shipped log, for states that are written without the engine.

Invariants
- As much of the log is read as is needed, and never more than `TAIL_BYTES`: of what is before that nothing is known.
- Entries of ranges that do not count are left out, as everywhere (`rolled_back` of the manifest).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import closing
from typing import Final

from tidelog.engine.gate import LsnRange
from tidelog.engine.known_results import NOTHING_KNOWN, KnownResults, ResultTable
from tidelog.engine.manifest import Manifest
from tidelog.engine.store_checkpoint import StoredState
from tidelog.errors import DataError, NotFoundError
from tidelog.tier.catalog import Catalog
from tidelog.tier.history import History
from tidelog.tier.object_store import ObjectStore

TAIL_BYTES: Final = 32 << 20


def shipped_results(
    catalog: Catalog, objects: ObjectStore, executor: Executor, manifest: Manifest, seq: int, lsn: int
) -> KnownResults:
    """What is to be kept at a seq; the log goes on with `lsn` behind it."""
    known, first_lsn = _newest_known(catalog, objects, manifest, lsn)
    table = results_behind(catalog, objects, executor, manifest.rolled_back, known, first_lsn, lsn)
    return table.known_up_to(seq)


def results_behind(
    catalog: Catalog,
    objects: ObjectStore,
    executor: Executor,
    rolled_back: Sequence[LsnRange],
    known: KnownResults,
    first_lsn: int,
    stop_lsn: int,
) -> ResultTable:
    """What is known at an LSN, and the log from there up to another (exclusive): all of it, or its end."""
    begin, left = stop_lsn, TAIL_BYTES
    for descriptor in reversed(list(catalog.between(first_lsn, stop_lsn) if first_lsn < stop_lsn else ())):
        left -= descriptor.raw_size
        if left < 0:
            break
        begin = max(first_lsn, descriptor.start_offset)
    table = ResultTable(known if begin <= first_lsn else NOTHING_KNOWN)
    with closing(History(catalog, objects, executor).read(begin, stop_lsn)) as reader:
        while (batch := reader.next_batch()) is not None:
            assert batch.frames is not None
            table.take_live(batch.frames.slice(batch.start, batch.stop), rolled_back)
    return table


def _newest_known(catalog: Catalog, objects: ObjectStore, manifest: Manifest, lsn: int) -> tuple[KnownResults, int]:
    """What the newest state before an LSN knows, and where the log goes on behind it."""
    for listed in reversed(manifest.checkpoints):
        if listed.lsn <= lsn:
            try:
                known = StoredState(objects, listed).footer.results
            except (DataError, NotFoundError):
                continue  # others will tell of it
            if known is not None:
                return known, listed.lsn
    start_lsn = catalog.start_offset()
    return (KnownResults(floor=0), 1) if start_lsn <= 1 else (NOTHING_KNOWN, start_lsn)
