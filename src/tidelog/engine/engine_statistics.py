"""What an engine counts, as one immutable snapshot."""

from __future__ import annotations

import msgspec

from tidelog.engine.buffer_pool import BufferPoolStatistics
from tidelog.engine.compaction_calls import Compaction, CompactionStatistics
from tidelog.engine.core import Core
from tidelog.engine.garbage import GarbageStatistics
from tidelog.engine.locks import LockStatistics
from tidelog.engine.recovery import RecoveryReport
from tidelog.engine.shipping import Shipping
from tidelog.engine.shipping_statistics import ShippingStatistics
from tidelog.engine.transaction import Transactions
from tidelog.engine.upkeep import Upkeep
from tidelog.engine.wal import WalStatistics


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of an engine.

    `applied_seq` is where it stands, `redo_lsn` where opening after a crash would begin. `hot_tier_bytes` is what the
    log takes on this disk, `index_bytes` what the page file does. `checkpoint_seconds` is how long the last checkpoint
    took. `shipping` is None for an engine without a store.
    """

    applied_seq: int
    low_water_mark: int
    high_water_mark: int
    truncation_mark: int
    history_start_seq: int
    wal: WalStatistics
    buffer_pool: BufferPoolStatistics
    hot_tier_bytes: int
    index_bytes: int
    redo_lsn: int
    checkpoints: int
    checkpoint_seconds: float
    failed_checkpoints: int
    recovery: RecoveryReport
    locks: LockStatistics
    garbage: GarbageStatistics | None
    compaction: CompactionStatistics
    shipping: ShippingStatistics | None


def snapshot(core: Core, upkeep: Upkeep, transactions: Transactions, compaction: Compaction) -> EngineStatistics:
    """One moment of it. The store is not asked for anything."""
    wal = core.wal.statistics()
    cold = upkeep.cold
    return EngineStatistics(
        applied_seq=core.marks.applied_seq,
        low_water_mark=core.marks.low_water_mark,
        high_water_mark=core.marks.high_water_mark,
        truncation_mark=upkeep.truncation_mark(),
        history_start_seq=core.checkpointer.history_start_seq,
        wal=wal,
        buffer_pool=core.pool.statistics(),
        hot_tier_bytes=wal.file_bytes,
        index_bytes=core.tree.next_page * core.settings.page_bytes,
        redo_lsn=core.checkpointer.redo_lsn,
        checkpoints=core.checkpointer.count,
        checkpoint_seconds=core.checkpointer.seconds,
        failed_checkpoints=upkeep.failed_checkpoints,
        recovery=core.recovery,
        locks=transactions.statistics(),
        garbage=None if upkeep.garbage is None else upkeep.garbage.statistics(),
        compaction=compaction.statistics(),
        shipping=cold.statistics() if isinstance(cold, Shipping) else None,
    )
