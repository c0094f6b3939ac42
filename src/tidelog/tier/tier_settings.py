"""The cold tier's settings: each with its default, its effect and what it costs. A topic may have its own."""

from __future__ import annotations

from typing import Annotated, Literal, TypedDict

import msgspec

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

    retention_seconds: Positive | None = None
    """Messages older than this are deleted for good, whole files and objects at a time. Default: never."""

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

    intake_check_seconds: Annotated[float, msgspec.Meta(gt=0)] = 2
    """How often it is looked whether rows were handed over to the topic, by Spark as a rule. All topics share one
    small request to the metadata store; in a bucket each has its own, a fifth as often after a minute without any."""

    progress_flush_interval_seconds: Annotated[float, msgspec.Meta(ge=0.001)] = 5.0
    """How often the position of a subscription is stored while it moves: what a crash brings again. A subscription may
    have its own."""

    progress_min_offset_delta: Positive = 1000
    """So many offsets further it is stored sooner."""

    ownership_check_seconds: Annotated[float, msgspec.Meta(gt=0)] = 5
    """How often an owner asks whether the topic was taken over. Shorter stops a replaced owner sooner."""


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
    retention_seconds: int | str | None
    retention_bytes: int | str | None
    local_retention_seconds: int | str | None
    local_retention_bytes: int | str | None
    retention_interval_seconds: float | str | None
    compaction: Literal["by_key", "none"] | None
    intake_check_seconds: float | str | None
    progress_flush_interval_seconds: float | str | None
    progress_min_offset_delta: int | None
    ownership_check_seconds: float | str | None
