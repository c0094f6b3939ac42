"""The driver's view of an engine's log: from where to where it goes, which LSNs a range of seqs is in, and its parts.

Invariants
- Nothing behind the manifest's last entry is read: it may still be taken back.
- Where a seq is in the log is known from the states and the compaction of the manifest, each of which says how far the
  log had come: a range of LSNs may be too wide, never too narrow. Tasks look at the seqs themselves.
- What was to be read and is not there is an error that names it, or, where loss is allowed, left out with a warning.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from itertools import islice

from tidelog.engine.entry_columns import packed_ranges
from tidelog.engine.manifest import Manifest
from tidelog.errors import InputError, NotSupportedError, OffsetOutOfRangeError
from tidelog.pipeline.engines.entry_batches import read_entry_batches
from tidelog.pipeline.engines.log_part import LogPart
from tidelog.pipeline.engines.options import EARLIEST, LATEST, EntryOptions, Start
from tidelog.pipeline.engines.place import OpenedEngine
from tidelog.pipeline.part import ReadPart
from tidelog.pipeline.planning import Limits, TopicPlan, plan_parts

_logger = logging.getLogger("tidelog.pipeline")
MAX_BIGINT = (1 << 63) - 1
_FIRST_LSN = 1


def refuse_large_seqs(manifest: Manifest) -> None:
    """NotSupportedError for an engine whose seqs Spark's numbers cannot hold."""
    if manifest.high_water_mark > MAX_BIGINT:
        raise NotSupportedError(
            f"the engine is at seq {manifest.high_water_mark}, and Spark's largest number is {MAX_BIGINT}",
            hint="Give entries seqs below 2**63, such as microseconds since 1970",
        )


class EntryLog:
    """An engine's log, open for planning. Close it, or use it in a `with` statement."""

    def __init__(self, options: EntryOptions) -> None:
        self._options = options
        self._place = options.root.place
        self._stack = ExitStack()
        self._engine: OpenedEngine = self._stack.enter_context(options.root.open())
        refuse_large_seqs(self._engine.manifest)

    def __enter__(self) -> EntryLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing more is planned."""
        self._stack.close()

    def manifest(self) -> Manifest:
        """As it is published now."""
        manifest = self._engine.newest_manifest()
        refuse_large_seqs(manifest)  # a stream that began below may come there
        return manifest

    def start_lsn(self) -> int:
        """The first record that is in the store."""
        return max(_FIRST_LSN, self._engine.catalog.start_offset())

    # From seqs to LSNs

    def lsn_from(self, starting: Start, manifest: Manifest) -> int:
        """From where on to read: the first LSN, or one at or before the first entry with this seq."""
        if starting == LATEST:
            return manifest.high_water_lsn + 1
        start_lsn = self.start_lsn()
        if starting == EARLIEST:
            return start_lsn
        assert isinstance(starting, int)
        known = max((lsn for seq, lsn in _marks(manifest) if seq < starting), default=_FIRST_LSN)
        if known < start_lsn:
            self._check_lost_beginning(starting, start_lsn, manifest)
        return max(known, start_lsn)

    def check_start(self, starting: Start, manifest: Manifest) -> None:
        """A read that is to begin where the log has not come to yet would give nothing and say nothing."""
        mark = manifest.high_water_mark
        if isinstance(starting, int) and starting > mark + 1:
            self.lost(f"the engine has shipped entries up to seq {mark}, and was to be read from seq {starting} on")

    def _check_lost_beginning(self, starting_seq: int, start_lsn: int, manifest: Manifest) -> None:
        """The log no longer has its beginning: whether the seq that is asked for was in what is gone."""
        first_seq = self._first_seq(start_lsn, manifest)
        if first_seq is None or starting_seq < first_seq:
            begins = "nothing is left of it" if first_seq is None else f"it begins with seq {first_seq}"
            self.lost(f"entries from seq {starting_seq} on are no longer in the log: {begins}")

    def _first_seq(self, start_lsn: int, manifest: Manifest) -> int | None:
        part = self._part(start_lsn, manifest.high_water_lsn + 1, manifest)
        batches = read_entry_batches(part, ["seq"], includes_refused=True, skips_gaps=False, max_rows=1)
        return next((int(batch.column(0)[0].as_py()) for batch in islice(batches, 1)), None)

    def lsn_behind(self, ending_seq: int | None, manifest: Manifest) -> int:
        """Up to where to read (exclusive): behind the last entry with at most this seq."""
        end_lsn = manifest.high_water_lsn + 1
        if ending_seq is None:
            return end_lsn
        if ending_seq > manifest.high_water_mark:
            self.lost(f"the engine has shipped entries up to seq {manifest.high_water_mark}, not up to {ending_seq}")
        return min((lsn for seq, lsn in _marks(manifest) if seq >= ending_seq), default=end_lsn)

    def first_seq_of(self, starting: Start) -> int:
        """The smallest seq that counts."""
        return starting if isinstance(starting, int) else 0

    # Ranges and parts

    def readable_from(self, lsn: int, stop_lsn: int) -> int:
        """The same LSN if the log still has it; what happens otherwise is at the head of the module."""
        start_lsn = self.start_lsn()
        if lsn < min(start_lsn, stop_lsn):
            gone = min(start_lsn, stop_lsn)
            self.lost(f"LSNs {lsn} to {gone - 1} are no longer in the log: it begins at LSN {start_lsn}")
        return min(max(lsn, start_lsn), max(lsn, stop_lsn))

    def lost(self, problem: str) -> None:
        """Something that was to be read is not there: an error, or a warning where that is allowed."""
        if self._options.fail_on_data_loss:
            raise OffsetOutOfRangeError(
                problem,
                operation="read entries",
                hint="failOnDataLoss=false reads what is there; tidelog_objects has the states, of older seqs too",
            )
        _logger.warning("%s; what is there is read (failOnDataLoss=false)", problem)

    def parts(self, start_lsn: int, stop_lsn: int, first_seq: int, last_seq: int | None) -> list[LogPart]:
        """The entries that begin in a range of LSNs, divided among tasks."""
        manifest = self.manifest()
        if stop_lsn > manifest.high_water_lsn + 1:
            raise InputError(
                f"the log ends at LSN {manifest.high_water_lsn}, and was to be read up to LSN {stop_lsn - 1}",
                hint="Is it the same engine? A new one needs a new checkpoint location",
            )
        plan = TopicPlan("", start_lsn, stop_lsn, catalog=self._engine.catalog, view=None, cold_end=stop_lsn)
        options = self._options
        limits = Limits(options.max_partition_bytes, None, options.min_partitions)
        parts = plan_parts([plan], limits)
        return [self._part(one.start, one.stop, manifest, first_seq, last_seq, one) for one in parts]

    def _part(
        self,
        start: int,
        stop: int,
        manifest: Manifest,
        first_seq: int = 0,
        last_seq: int | None = None,
        read: ReadPart | None = None,
    ) -> LogPart:
        mark = manifest.high_water_mark
        return LogPart(
            place=self._place,
            start=start,
            stop=stop,
            end_lsn=manifest.high_water_lsn + 1,
            first_seq=first_seq,
            last_seq=mark if last_seq is None else min(mark, last_seq),
            # An entry may go on behind the part, but not into what was rolled back.
            dead=packed_ranges([one for one in manifest.rolled_back if one.last >= start and one.first < stop]),
            descriptors=() if read is None else read.descriptors,
        )


def _marks(manifest: Manifest) -> list[tuple[int, int]]:
    """Seqs and the LSNs behind all of their entries, as far as the manifest tells."""
    marks = [(state.seq, state.lsn) for state in manifest.checkpoints]
    compacted = manifest.compacted
    return marks if compacted is None else [*marks, (compacted.seq, compacted.lsn)]
