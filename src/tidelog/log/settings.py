"""The log's settings: each with its default, its effect and what it costs."""

from __future__ import annotations

from typing import Annotated, TypedDict

import msgspec

Positive = Annotated[int, msgspec.Meta(ge=1)]

KIB = 1 << 10
MIB = 1 << 20


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one log writes, syncs, rotates and remembers."""

    fsync_interval_ms: Positive = 5000
    """Longest time that an accepted message stays unsynced. Shorter loses less in a power cut and syncs more often."""

    fsync_max_batch_bytes: Positive = 10 * MIB
    """Unsynced bytes that force a sync. Smaller bounds the loss, larger makes fewer and longer syncs."""

    rotate_max_bytes: Annotated[int, msgspec.Meta(ge=32)] = 64 * MIB
    """Size at which a new file is begun. Smaller files are shipped and pruned sooner, and there are more of them."""

    rotate_max_seconds: Positive = 3600
    """Age at which a file that holds messages is closed, so that a quiet log can be shipped and pruned too."""

    handover_max_bytes: Positive = 64 * MIB
    """Accepted bytes that may wait for the file. More absorbs longer bursts, and is what a killed process can lose."""

    handover_max_messages: Positive = 65536
    """Accepted messages that may wait for the file."""

    append_timeout_ms: Annotated[int, msgspec.Meta(ge=0)] = 30_000
    """How long an append waits for room in the hand-over before it raises; 0 raises at once."""

    cache_max_messages: Annotated[int, msgspec.Meta(ge=0)] = 65536
    """Newest written messages kept in memory for readers at the tail; 0 sends them to the files."""

    cache_max_bytes: Annotated[int, msgspec.Meta(ge=0)] = 32 * MIB
    """Memory of that cache, its own overhead included."""

    max_message_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 16 * MIB
    """Largest message that is accepted, its envelope included. It bounds what a reader must hold at once."""

    open_check_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 * MIB
    """Newest bytes that opening checks frame by frame although the checkpoint vouches for them."""

    read_chunk_bytes: Annotated[int, msgspec.Meta(ge=4 * KIB)] = MIB
    """Bytes that a reader takes from a file at once. Larger is faster to scan and costs memory for every reader."""


class LogOptions(TypedDict, total=False):
    """`LogSettings` as keywords, with units where a name ends in one."""

    fsync_interval_ms: int | str
    fsync_max_batch_bytes: int | str
    rotate_max_bytes: int | str
    rotate_max_seconds: int | str
    handover_max_bytes: int | str
    handover_max_messages: int
    append_timeout_ms: int | str
    cache_max_messages: int
    cache_max_bytes: int | str
    max_message_bytes: int | str
    open_check_bytes: int | str
    read_chunk_bytes: int | str
