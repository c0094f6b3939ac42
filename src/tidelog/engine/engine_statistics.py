"""What an engine counts, as one immutable snapshot."""

from __future__ import annotations

import msgspec

from tidelog.engine.buffer_pool import BufferPoolStatistics
from tidelog.engine.core import Core
from tidelog.engine.locks import LockStatistics
from tidelog.engine.recovery import RecoveryReport
from tidelog.engine.transaction import Transactions
from tidelog.engine.upkeep import Upkeep
from tidelog.engine.wal import WalStatistics


class EngineStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of an engine."""

    applied_seq: int
    low_water_mark: int
    high_water_mark: int
    history_start_seq: int
    wal: WalStatistics
    buffer_pool: BufferPoolStatistics
    hot_tier_bytes: int
    checkpoints: int
    checkpoint_seconds: float
    failed_checkpoints: int
    recovery: RecoveryReport
    locks: LockStatistics


def snapshot(core: Core, upkeep: Upkeep, transactions: Transactions) -> EngineStatistics:
    """One moment of it."""
    wal = core.wal.statistics()
    return EngineStatistics(
        applied_seq=core.marks.applied_seq,
        low_water_mark=core.marks.low_water_mark,
        high_water_mark=core.marks.high_water_mark,
        history_start_seq=core.checkpointer.history_start_seq,
        wal=wal,
        buffer_pool=core.pool.statistics(),
        hot_tier_bytes=wal.file_bytes,
        checkpoints=core.checkpointer.count,
        checkpoint_seconds=core.checkpointer.seconds,
        failed_checkpoints=upkeep.failed_checkpoints,
        recovery=core.recovery,
        locks=transactions.statistics(),
    )
