"""The version index of a compaction as a state: what a restore may begin with when no state that is listed is good.

Invariants
- It is the state at the compaction's seq: its rows are those that the tree had, less what the retention left out.
- It has no object of its own: its root is what says so, and its row files are those of the version index.
"""

from __future__ import annotations

from tidelog.engine.compacted import read_compaction
from tidelog.engine.manifest import StoredCheckpoint, StoredCompaction
from tidelog.engine.store_checkpoint import Footer, StoredState, digest_of_parts
from tidelog.tier.keys import EngineKeys
from tidelog.tier.object_store import ObjectStore


class CompactionState(StoredState):
    """A state that was not written as one."""

    def __init__(self, objects: ObjectStore, keys: EngineKeys, compacted: StoredCompaction) -> None:
        root = read_compaction(objects, keys, compacted)
        footer = Footer(
            seq=root.seq,
            lsn=root.lsn,
            epoch=0,
            history_start_seq=root.history_start_seq,
            rows=sum(part.rows for part in root.versions),
            digest=digest_of_parts(root.versions),
            created_us=0,
            blocks=(),
            parts=root.versions,
        )
        listed = StoredCheckpoint(
            key=compacted.key,
            seq=footer.seq,
            lsn=footer.lsn,
            epoch=footer.epoch,
            rows=footer.rows,
            size=compacted.size,
            digest=footer.digest,
            created_us=compacted.created_us,
        )
        self._set(objects, listed, footer, has_places=True)
