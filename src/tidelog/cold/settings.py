"""The cold tier's settings: each with its default, its effect and its cost. A topic may override them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypedDict

import msgspec

from tidelog.clock import Histogram
from tidelog.store.metadata.base import MetadataStatistics

Positive = Annotated[int, msgspec.Meta(ge=1)]

MIB = 1 << 20


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a topic is shipped, how long it is kept and where."""

    max_object_bytes: Annotated[int, msgspec.Meta(ge=1, le=64 << 30)] = 256 * MIB
    """Most bytes of messages in one object. Larger makes fewer objects, smaller ones are pruned sooner."""

    ship_interval_seconds: Annotated[float, msgspec.Meta(gt=0)] = 5
    """How often the shipper looks whether something is due."""

    ship_min_bytes: Positive = 64 * MIB
    """So many unshipped bytes are shipped at once, however young they are."""

    ship_max_delay_seconds: Annotated[float, msgspec.Meta(ge=0)] = 60
    """Longest time that a message waits to be shipped: what the loss of a disk can cost. It counts from the oldest
    unshipped message, across restarts too. Shorter makes more objects."""

    ship_on_close: bool = False
    """Closing a topic ships what is left first. It then waits for the store, and raises when that fails; nothing is
    lost, the rest is on the disk. Without it closing never waits for the store."""

    ship_retry_max_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60
    """Longest pause between two attempts while the store is out of reach."""

    ship_compression: Literal["none", "zstd"] = "none"
    """Compresses objects in blocks of whole messages. Costs time of the shipper and of every reader of history."""

    ship_compression_level: Annotated[int, msgspec.Meta(ge=1, le=19)] = 3
    """Higher is smaller and slower to ship; reading costs the same."""

    ship_index_messages: Positive = 1000
    """An object's index has an entry every so many messages. Fewer fetches less for a single message, and makes
    larger descriptors."""

    ship_index_bytes: Annotated[int, msgspec.Meta(ge=4096)] = 4 * MIB
    """And one every so many bytes, whichever is sooner."""

    durability: Literal["synced", "shipped"] = "synced"
    """What a synced append waits for. "synced": this disk. "shipped": the store has the message too, so that the loss
    of the disk loses nothing that was acknowledged. That takes an eighth of a second or more, and all topics of a node
    share some small objects a second for it. Needs a store."""

    retention_seconds: Positive | None = None
    """Messages older than this are deleted for good, whole files and objects at a time; without a store the newest file
    loses them one by one. Default: never."""

    retention_bytes: Positive | None = None
    """The oldest messages are deleted for good while the topic is larger than this. Default: never."""

    local_retention_seconds: Positive | None = None
    """Files older than this leave the local disk once they are in the store. Default: they stay."""

    local_retention_bytes: Positive | None = None
    """The oldest files leave the local disk once they are in the store, while there is more than this."""

    retention_interval_seconds: Annotated[float, msgspec.Meta(gt=0)] = 60
    """How often it is looked for something to delete."""

    compaction: Literal["none", "by_key"] = "none"
    """`by_key` marks a topic of which only the newest message of every key matters. It deletes nothing by itself:
    `topic.latest_by_key()` shows such a topic as a table, and the mark is for the pipeline, which makes old history
    smaller in bulk."""

    min_compaction_lag_seconds: Annotated[int, msgspec.Meta(ge=0)] = 0
    """A compaction by key keeps every message for at least so long, superseded or not: what readers that follow the
    topic may lag behind."""

    ingest_check_seconds: Annotated[float, msgspec.Meta(gt=0)] = 2
    """How often the topic looks for commits that others staged, usually Spark. All topics share one
    small request to the metadata store; in a bucket each has its own, a fifth as often after a minute without any."""

    progress_flush_interval_seconds: Annotated[float, msgspec.Meta(ge=0.001)] = 5.0
    """How often the position of a subscription is stored while it moves: what a crash brings again. A subscription may
    have its own."""

    progress_min_offset_delta: Positive = 1000
    """So many offsets further it is stored sooner."""

    replicas: tuple[str, ...] = ()
    """Further stores, by URL, that get a copy of everything that is shipped. Each costs the traffic of the first."""

    replication_mode: Literal["async", "sync"] = "async"
    """"async": replicas follow soon after. "sync": a message counts as shipped, and its file may leave the disk, only
    when all replicas have it; while one is out of reach nothing does."""

    ownership_check_seconds: Annotated[float, msgspec.Meta(gt=0)] = 5
    """How often an owner asks whether the topic was taken over. Shorter stops a replaced owner sooner."""

    kafka_configs: dict[str, str] = {}
    """The topic's configs as clients of Kafka set them, such as `compression.type`: `tidelog serve` stores them here,
    so that they move with the topic (docs/reference/kafka.md lists them)."""


LIVE_SETTINGS = (
    *("retention_seconds", "retention_bytes", "local_retention_seconds", "local_retention_bytes"),
    *("retention_interval_seconds", "ship_interval_seconds", "ship_min_bytes", "ship_max_delay_seconds"),
    *("durability", "ship_on_close", "progress_flush_interval_seconds", "progress_min_offset_delta", "kafka_configs"),
)
"""What takes effect on a topic that is open; the others do when it is opened next, or are read by those that need them
(`compaction`, `min_compaction_lag_seconds`)."""


def with_live(settings: TierSettings, changed: TierSettings) -> TierSettings:
    """The settings of an open topic, with those of the changed ones that take effect at once."""
    return msgspec.structs.replace(settings, **{name: getattr(changed, name) for name in LIVE_SETTINGS})


class TierOptions(TypedDict, total=False):
    """`TierSettings` as keywords, with units where a name ends in one; for a topic None takes one back."""

    max_object_bytes: int | str | None
    ship_interval_seconds: float | str | None
    ship_min_bytes: int | str | None
    ship_max_delay_seconds: float | str | None
    ship_on_close: bool | None
    ship_retry_max_seconds: float | str | None
    ship_compression: Literal["none", "zstd"] | None
    ship_compression_level: int | None
    ship_index_messages: int | None
    ship_index_bytes: int | str | None
    durability: Literal["synced", "shipped"] | None
    retention_seconds: int | str | None
    retention_bytes: int | str | None
    local_retention_seconds: int | str | None
    local_retention_bytes: int | str | None
    retention_interval_seconds: float | str | None
    compaction: Literal["by_key", "none"] | None
    min_compaction_lag_seconds: int | str | None
    ingest_check_seconds: float | str | None
    progress_flush_interval_seconds: float | str | None
    progress_min_offset_delta: int | None
    replicas: Sequence[str] | str | None
    replication_mode: Literal["async", "sync"] | None
    ownership_check_seconds: float | str | None
    kafka_configs: Mapping[str, str] | None


# What a shipper counted, as an immutable snapshot.


class ShipperStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a shipper. Lag is what a lost disk would cost: in messages, bytes of files, and seconds."""

    shipped_offset: int
    lag_messages: int
    lag_bytes: int
    lag_seconds: float
    oldest_unshipped_us: int | None
    cycles: int
    cycle_seconds: Histogram
    objects_created: int
    bytes_uploaded: int
    raw_bytes_uploaded: int
    errors: int
    errors_in_a_row: int
    last_error: str | None
    last_object_id: str | None
    uploading: str | None
    uploading_raw_bytes: int


# What reading history cost, gathered over all readers and shown as an immutable snapshot.


class ColdReadStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of reading history. `requests` are ranges of objects that were asked for, failed ones included."""

    requests: int
    failed_requests: int
    fetched_bytes: int
    repeated_ranges: int
    objects_opened: int
    skipped_messages: int
    request_seconds: Histogram
    query_seconds: Histogram


# What the cold tier of one topic counted, as an immutable snapshot.


class RetentionStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted since the topic was opened."""

    local_bytes_removed: int
    cold_objects_removed: int
    cold_bytes_removed: int
    errors: int
    last_error: str | None


class ReplicaStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of a replica's statistics. Lag is what the first store has and this one lacks.

    `high_water_mark` is the last seq of an engine that is there, or the first offset of a topic that is not.
    """

    url: str
    high_water_mark: int
    lag_bytes: int
    objects_copied: int
    bytes_copied: int
    errors_total: int
    errors_in_a_row: int
    last_error: str | None
    last_success_us: int | None


class FlushStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a node's flush log (`flush_log.py`). `waiting_objects` are not in all catalogs yet."""

    flushes: int
    bytes: int
    seconds: Histogram
    waiting_objects: int
    errors: int


class TierStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a topic's cold tier. `shipper` and `retention` are the owner's; a view has none."""

    store: str
    epoch: int | None
    fenced: bool
    start_offset: int
    hot_start_offset: int | None
    shipper: ShipperStatistics | None
    retention: RetentionStatistics | None
    history: ColdReadStatistics
    metadata: MetadataStatistics | None
    replicas: tuple[ReplicaStatistics, ...] = ()
    flushes: FlushStatistics | None = None
    """Those of the whole node, if any of its topics is acknowledged by the store."""
