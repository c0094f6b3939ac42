"""What a task reads of an engine's log: frames from objects, and which of their records count.

Invariants
- Exactly the entries of the part, in order, each once, or an error that names what is missing. With `skips_gaps` what
  is lost is passed over.
- Objects are read where the plan says they are. When one is gone meanwhile (compacted, dropped), the catalog is asked
  where its records are now, and reading goes on at the same LSN.
"""

from __future__ import annotations

from collections.abc import Iterator

from tidelog.engine.entry_columns import Chosen, EntrySelection
from tidelog.errors import OffsetOutOfRangeError
from tidelog.pipeline.engines.log_part import LogPart
from tidelog.tier.history import History, HistoryReader
from tidelog.tier.planned_catalog import PlannedCatalog


def read_chosen(part: LogPart, *, skips_gaps: bool) -> Iterator[Chosen]:
    """The records of a part that count, with the frames that they are in."""
    opened = part.place.opened()
    catalog = PlannedCatalog(part.descriptors, opened.keys, part.place.catalog)
    history = History(catalog, opened.objects, opened.fetchers)
    reader = history.read(part.start, part.end_lsn, on_gap="skip" if skips_gaps else "raise")
    selection = EntrySelection(part.stop, part.first_seq, part.last_seq, (), part.dead)
    try:
        yield from _chosen(reader, selection)
    finally:
        reader.close()
    if not selection.is_done and not reader.reached_stop and not skips_gaps:
        raise OffsetOutOfRangeError(f"LSN {reader.offset} is not in {part.place.store_url} any more", operation="read")


def _chosen(reader: HistoryReader, selection: EntrySelection) -> Iterator[Chosen]:
    while not selection.is_done and (batch := reader.next_batch()) is not None:
        assert batch.frames is not None, "what comes from objects is framed"
        yield from selection.feed(batch.frames, batch.start, batch.stop)
