"""What the cold half of an engine counts, as one immutable snapshot."""

from __future__ import annotations

import msgspec

from tidelog.engine.cold import ColdStatistics
from tidelog.engine.replicas import ReplicaStatistics
from tidelog.tier.shipper_statistics import ShipperStatistics


class ShippingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of it. `lag_bytes` is what the loss of the disk would leave to the orchestrator. `lag_seconds` is how
    long the oldest entry waits that may be shipped: 0 when everything up to the low-water mark is in the store.

    `is_connected`: whether the store was reached since the engine was opened. `epoch` is 0 until then.
    """

    store: str
    is_connected: bool
    is_fenced: bool
    epoch: int
    high_water_mark: int
    truncation_mark: int
    shipped_lsn: int
    shipped_position: int
    lag_bytes: int
    lag_seconds: float
    errors_total: int
    errors_in_a_row: int
    last_error: str | None
    purged_bytes: int
    checkpoints: int
    newest_checkpoint_seq: int
    newest_checkpoint_us: int | None
    shipper: ShipperStatistics | None
    cold: ColdStatistics
    replicas: tuple[ReplicaStatistics, ...]
