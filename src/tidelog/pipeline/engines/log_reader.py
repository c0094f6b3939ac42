"""What a task reads of an engine's log: frames from objects, and which of their records count.

Invariants
- Exactly the entries of the part, in order, each once, or an error that names what is missing. With `skips_gaps` what
  is lost is passed over.
- Objects are read where the plan says they are. When one is gone meanwhile (compacted, dropped), the catalog is asked
  where its records are now, and reading goes on at the same LSN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Literal

from tidelog.engine.entry_columns import Chosen, EntrySelection
from tidelog.errors import DataError, OffsetOutOfRangeError
from tidelog.pipeline.engines.log_part import LogPart
from tidelog.tier.history import History, HistoryReader
from tidelog.tier.planned_catalog import PlannedCatalog


def read_chosen(part: LogPart, *, skips_gaps: bool) -> Iterator[Chosen]:
    """The records of a part that count, with the frames that they are in."""
    opened = part.place.opened()
    catalog = PlannedCatalog(part.descriptors, opened.keys, part.place.catalog)
    history = History(catalog, opened.objects, opened.fetchers)
    on_gap: Literal["skip", "raise"] = "skip" if skips_gaps else "raise"
    selection = EntrySelection(part.stop, part.first_seq, part.last_seq, (), part.dead)
    # The end of an entry that goes on behind the part is fetched only where there is one.
    for start, stop in ((part.start, part.stop), (part.stop, part.end_lsn)):
        if not selection.is_done:
            with closing(history.read(start, stop, on_gap=on_gap)) as reader:
                yield from _chosen(reader, selection)
                if not skips_gaps and not reader.reached_stop:
                    _check_end(reader, selection, part)


def _chosen(reader: HistoryReader, selection: EntrySelection) -> Iterator[Chosen]:
    while not selection.is_done and (batch := reader.next_batch()) is not None:
        assert batch.frames is not None, "what comes from objects is framed"
        try:
            chosen = list(selection.feed(batch.frames, batch.start, batch.stop))
        except DataError as error:
            hint = "startingSeq behind the oldest state passes over it; `tidelog pipeline verify --engine` finds damage"
            raise DataError(error.message, operation="read entries", hint=hint) from error
        yield from chosen


def _check_end(reader: HistoryReader, selection: EntrySelection, part: LogPart) -> None:
    if not selection.is_done:
        raise OffsetOutOfRangeError(
            f"LSN {reader.offset} is not in {part.place.store_url} any more", operation="read entries"
        )
