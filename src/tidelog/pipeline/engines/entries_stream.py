"""An engine's log as a stream: which records the next micro-batch reads, and how many entries at most.

    {"lsn": 1201, "first_seq": 0}       all that begins before this LSN was read, but entries below first_seq

Invariants
- A batch is what its two offsets say, however often and by whomever it is run again: an entry belongs to the batch in
  which its first record lies, and what is at or below the manifest's last entry never changes.
- An offset never goes back. A log that ends before what was read already, or has lost what was not read yet, is data
  loss: an error, or with failOnDataLoss=false left out.
- With Trigger.AvailableNow the end is the one of the moment at which the query began.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tidelog.errors import InputError
from tidelog.pipeline.engines.entries_source import EntryPartition, read_partition
from tidelog.pipeline.engines.entry_log import EntryLog
from tidelog.pipeline.engines.options import LATEST, EntryOptions, Start

Offset = dict[str, int]


class EntriesStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The driver's half of a stream; one process keeps it for as long as the query runs."""

    def __init__(self, options: EntryOptions, names: list[str]) -> None:
        self._options = options
        self._names = names
        self._opened: EntryLog | None = None
        self._initial: Offset | None = None
        self._target: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get a copy of it: what is open stays here."""
        return {**self.__dict__, "_opened": None}

    @property
    def _log(self) -> EntryLog:
        if self._opened is None:
            self._opened = EntryLog(self._options)
        return self._opened

    @property
    def _starting(self) -> Start:
        return LATEST if self._options.starting is None else self._options.starting

    def initialOffset(self) -> Offset:
        if self._initial is None:
            lsn = self._log.lsn_from(self._starting, self._log.manifest())
            self._initial = {"lsn": lsn, "first_seq": self._log.first_seq_of(self._starting)}
        return self._initial

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._end_lsn()

    def reportLatestOffset(self) -> Offset | None:
        return {"lsn": self._end_lsn(), "first_seq": self._log.first_seq_of(self._starting)}

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.max_entries_per_trigger
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        lsn, first_seq = _checked(start)
        end_lsn = self._end_lsn() if self._target is None else self._target
        if end_lsn < lsn:
            self._log.lost(f"the log ends at LSN {end_lsn - 1}, and was read up to LSN {lsn - 1}: it is another one")
        if isinstance(limit, ReadMaxRows):
            # An entry has a record at least, so these are not too many; records that are no entries make them fewer.
            end_lsn = min(end_lsn, lsn + limit.max_rows)
        return {"lsn": max(lsn, end_lsn), "first_seq": first_seq}

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        (start_lsn, first_seq), (stop_lsn, _) = _checked(start), _checked(end)
        if start_lsn >= stop_lsn:
            return []
        start_lsn = self._log.readable_from(start_lsn, stop_lsn)
        return [EntryPartition(part) for part in self._log.parts(start_lsn, stop_lsn, first_seq, None)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_partition(partition, self._options, self._names)

    def commit(self, end: Offset) -> None:
        """Spark keeps the position itself."""

    def stop(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _end_lsn(self) -> int:
        return self._log.manifest().high_water_lsn + 1


def _checked(offset: Offset) -> tuple[int, int]:
    """The LSN and the first seq of an offset; a checkpoint of another source is told as such."""
    lsn, first_seq = offset.get("lsn"), offset.get("first_seq", 0)
    if type(lsn) is not int or type(first_seq) is not int or lsn < 1 or first_seq < 0:
        raise InputError(f"{offset} is not a position in an engine's log", hint="Use a new checkpoint location")
    return lsn, first_seq
