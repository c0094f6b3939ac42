"""What the cold tier of one topic counted, as an immutable snapshot."""

from __future__ import annotations

import msgspec

from tidelog.tier.history_counters import HistoryStatistics
from tidelog.tier.metadata.measured import MetadataStatistics
from tidelog.tier.shipper_statistics import ShipperStatistics


class RetentionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted since the topic was opened."""

    local_bytes_removed: int
    cold_objects_removed: int
    cold_bytes_removed: int
    errors: int
    last_error: str | None


class TierStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a topic's cold tier. `shipper` and `retention` are the owner's; an onlooker has none."""

    store: str
    epoch: int | None
    fenced: bool
    start_offset: int
    hot_start_offset: int | None
    shipper: ShipperStatistics | None
    retention: RetentionStatistics | None
    history: HistoryStatistics
    metadata: MetadataStatistics | None
