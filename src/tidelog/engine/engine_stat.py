"""What is known about an object, without its data: from the version index, and where there is metadata from its body.

Invariants
- An object without metadata costs no read of its body, wherever that is.
- Metadata of a large body that is on this disk and not compressed is read alone. The checksum is that of the whole body
  and is not checked then; lengths are, by the index. Everything else is read as `read` does, and checked.
"""

from __future__ import annotations

from tidelog.engine.arguments import check_names
from tidelog.engine.body import CODEC_NONE, LENGTH_BYTES, decode_metadata
from tidelog.engine.cell import Cell
from tidelog.engine.engine_reading import EngineReading
from tidelog.engine.entry import MAX_METADATA_BYTES, MetadataValue
from tidelog.engine.results import ObjectStat, Tier
from tidelog.engine.versions import Found

# Up to here the whole body costs about what its beginning does, and can be checked.
_CHECKED_BYTES = 64 << 10


class EngineStat(EngineReading):
    """The part of an engine that tells about objects."""

    def stat(self, bucket: str, key: str, seq: int | None = None) -> ObjectStat:
        """An object as it is at a seq (by default the last one that was applied): all but its data."""
        check_names(bucket, key)
        at = self._checked_seq(self._marks.applied_seq if seq is None else seq)
        created = self._buckets.created(bucket, at)
        found = None if created is None else self._find_in(created, bucket, key, at)
        known = None if found is None else self._metadata_alone(found.cell)
        if found is None or known is None:
            whole = self.read(bucket, key, seq)  # it may have changed since, as a whole; or it is not there, and why
            return ObjectStat(len(whole.data), whole.metadata, whole.seq, whole.tier)
        return ObjectStat(found.cell.size, known, found.seq, self._where(found))

    def _metadata_alone(self, cell: Cell) -> dict[str, MetadataValue] | None:
        """The metadata, if all of the body need not be read for it."""
        head_bytes = cell.stored_bytes - cell.size
        if cell.codec != CODEC_NONE or not LENGTH_BYTES <= head_bytes <= LENGTH_BYTES + MAX_METADATA_BYTES:
            return None
        if head_bytes == LENGTH_BYTES:
            return {}
        if cell.stored_bytes <= _CHECKED_BYTES:
            return None
        head = self._read_stored(cell.position, head_bytes)
        return None if head is None else decode_metadata(head, cell.lsn)

    def _where(self, found: Found) -> Tier:
        tier = self._tier_of(found.cell)
        assert tier is not None  # a deletion is not found
        return tier
