"""The log's settings, each with its default, its effect and its cost, and the log's statistics."""

from __future__ import annotations

from typing import Annotated, TypedDict

import msgspec

from tidelog.clock import Histogram

Positive = Annotated[int, msgspec.Meta(ge=1)]

KIB = 1 << 10
MIB = 1 << 20
DEFAULT_MAX_MESSAGE_BYTES = 16 * MIB


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

    append_queue_max_bytes: Positive = 64 * MIB
    """Accepted bytes that may wait for the file. More absorbs longer bursts, and is what a killed process can lose."""

    append_queue_max_messages: Positive = 65536
    """Accepted messages that may wait for the file."""

    append_timeout_ms: Annotated[int, msgspec.Meta(ge=0)] = 30_000
    """How long an append waits for room in the hand-over before it raises; 0 raises at once."""

    cache_max_messages: Annotated[int, msgspec.Meta(ge=0)] = 65536
    """Newest written messages kept in memory for readers at the tail; 0 sends them to the files."""

    cache_max_bytes: Annotated[int, msgspec.Meta(ge=0)] = 32 * MIB
    """Memory of that cache, its own overhead included."""

    max_message_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = DEFAULT_MAX_MESSAGE_BYTES
    """Largest message that is accepted, its envelope included. It bounds what a reader must hold at once. What was
    accepted under a larger one stays readable: files and the catalog say how large it is."""

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
    append_queue_max_bytes: int | str
    append_queue_max_messages: int
    append_timeout_ms: int | str
    cache_max_messages: int
    cache_max_bytes: int | str
    max_message_bytes: int | str
    open_check_bytes: int | str
    read_chunk_bytes: int | str


# The statistics of a log, as an immutable snapshot; only the service knows how to export them.


class TornTail(msgspec.Struct, frozen=True, kw_only=True):
    """What was cut off the end of the last file: `size` bytes from `byte` on, for `reason`."""

    file: str
    byte: int
    size: int
    reason: str


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What recovery found. `missing_synced` are the first and last offset that the checkpoint says were synced and that
    the files no longer have; None when nothing is missing. `unfinished` are the first and last offset of a batch whose
    end was missing, so that none of it counts; None when there was none."""

    checkpoint_used: bool
    checkpoint_problem: str | None
    files: int
    checked_bytes: int
    seconds: float
    torn_tail: TornTail | None
    missing_synced: tuple[int, int] | None
    unfinished: tuple[int, int] | None = None


class LogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """One moment of a log. Offsets are exclusive ends, as everywhere.

    `append_wait_seconds` has the appends that waited for room or for the disk, and those of several messages.
    """

    state: str
    start_offset: int
    next_offset: int
    written_offset: int
    durable_offset: int
    files: int
    file_bytes: int
    cached_messages: int
    cached_bytes: int
    queued_messages: int
    queued_bytes: int
    writes: int
    written_bytes: int
    rotations: int
    checkpoint_failures: int
    full_disk_waits: int
    append_wait_seconds: Histogram
    write_seconds: Histogram
    sync_seconds: Histogram
    recovery: RecoveryReport
