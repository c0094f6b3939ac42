"""The engine's settings: each with its default, its effect and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final, Literal, TypedDict

import msgspec

from tidelog.errors import ConfigError

Positive = Annotated[int, msgspec.Meta(ge=1)]

MIB: Final = 1 << 20
PAGE_BYTES: Final = 8192


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of an engine: writing, caching, shipping and retention. What topics have too has the same name."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "wal_segment_size": "rotate_max_bytes",
        "wal_segment_max_secs": "rotate_max_seconds",
        "buffer_pool_size": "buffer_pool_bytes",
        "checkpoint_interval_secs": "checkpoint_interval_seconds",
        "checkpoint_max_age_secs": "checkpoint_max_age_seconds",
        "shipping_interval_secs": "ship_interval_seconds",
        "shipping_batch_size": "ship_batch_objects",
        "shipping_concurrency": "ship_concurrency",
        "s3_compression": "ship_compression",
        "cold_compression_level": "ship_compression_level",
        "hot_tier_bytes": "local_retention_bytes",
        "compaction_interval_secs": "compaction_interval_seconds",
        "compaction_size_threshold": "compaction_max_bytes",
    }
    """Names of the original design of the engine, which are accepted too."""

    CONSTANTS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "page_size": ("8192", "8KB", "8KiB"),
        "eviction_policy": ("lru",),
    }
    """Names of the original design for which there is nothing to choose, with the values that are accepted: pages have
    8192 bytes, and leave the buffer pool by second chance, which comes close to LRU. They are no settings."""

    # The log

    rotate_max_bytes: Annotated[int, msgspec.Meta(ge=4096)] = 100_000_000
    """Size at which a new file of the log is begun. Files leave the disk as a whole, so smaller ones free room sooner;
    there are more of them, and each costs a few syncs."""

    rotate_max_seconds: Positive = 3600
    """Age at which a file is ended however small it is, so that a quiet engine can let go of it too."""

    wal_sync_mode: Literal["fsync", "fdatasync", "none"] = "fdatasync"
    """What an apply waits for. "fdatasync": contents and size are on the disk. "fsync": the file's times too; nothing
    more survives, and it is never faster. "none": the system has it. That survives a crash of the process;
    after a power failure what was acknowledged may be lost, or the engine must be restored from its store."""

    wal_compression: Literal["none", "zstd"] = "none"
    """Compresses each object by itself before it is written, if that makes it smaller. Saves disk and upload, and costs
    time on every put and every read."""

    wal_compression_level: Annotated[int, msgspec.Meta(ge=-7, le=19)] = -1
    """Higher is smaller and slower; below zero it is fast and compresses little."""

    inline_value_bytes: Annotated[int, msgspec.Meta(ge=0, le=512)] = 128
    """Objects up to this size, metadata included, are kept in the index itself: read without a second look at the log,
    at the price of a larger index. 0 keeps none there."""

    large_value_bytes: Annotated[int, msgspec.Meta(ge=1024, le=512 * MIB)] = 8 * MIB
    """Objects of more data than this have a file of their own, here and in the store, and not a record of the log: they
    are put and read piece by piece, and never moved. Smaller makes more files, each of which costs some syncs."""

    # The index

    buffer_pool_bytes: Annotated[int, msgspec.Meta(ge=64 * PAGE_BYTES)] = 256 * MIB
    """Memory for pages of the index, taken as they come to be used. About a tenth of the index is a good start; a
    version takes some 100 bytes of it, so that the default holds the whole index of two million objects and a tenth of
    that of twenty million. An index that fits is also redone faster after a crash."""

    checkpoint_interval_seconds: Annotated[float, msgspec.Meta(gt=0)] = 300
    """How often dirty pages are written, so that opening after a crash has little to do again. More often means more
    page images in the log."""

    checkpoint_max_age_seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600
    """How old the newest checkpoint in the store may become while there are new entries: what a restore has to replay.
    Each is a full copy of the index."""

    # The store

    s3_bucket: str | None = None
    """The bucket where cold data goes, for those who do not name a store by its URL. `s3_prefix` says where in
    it."""

    s3_prefix: str = ""
    """Where in `s3_bucket` the engine is; it may share the bucket with others."""

    metadata: str | None = None
    """Where the engine's catalog and manifest are: bucket (the store itself), sqlite:///path, etcd://host:port (several
    with commas, etcds:// with TLS) or memory://. Default: what the directory remembers, else bucket."""

    metadata_root: str | None = None
    """Keeps several engines in one metadata store apart. Default: what the directory remembers, else tidelog."""

    ship_interval_seconds: Annotated[float, msgspec.Meta(gt=0)] = 10
    """How often it is looked whether something can be shipped. It bounds the lag behind the low-water mark; each time
    costs a few requests."""

    ship_batch_objects: Positive = 100
    """Most objects that are shipped at one time before it is looked again whether the engine still owns its store."""

    ship_concurrency: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    """Uploads at the same time. More is faster where the way to the store is long, and takes memory for each."""

    ship_compression: Literal["none", "zstd"] = "none"
    """Compresses what is shipped. "none" lets an object be read by one exact range request; "zstd" is smaller, and a
    read fetches a block of about 1 MiB."""

    ship_compression_level: Annotated[int, msgspec.Meta(ge=1, le=19)] = 9
    """Higher is smaller and slower to ship; reading costs the same."""

    local_retention_bytes: Annotated[int, msgspec.Meta(ge=0)] = 1 << 30
    """Bytes of the log that stay on the disk although they are shipped, the newest ones. More serves more reads without
    the store."""

    cold_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 * MIB
    """Memory for what was read from the store, so that it is not fetched again."""

    disk_cache_bytes: Annotated[int, msgspec.Meta(ge=0)] = 256 * MIB
    """Room on this disk for values that left it and are read again: the second read brings one back, and the oldest of
    them leave, except those that were read since (second chance). More serves more reads without the store; each value
    takes some 200 bytes of memory. 0 keeps none."""

    cold_read_threads: Annotated[int, msgspec.Meta(ge=1, le=512)] = 256
    """Requests for values that have left the disk at the same time, of all scans and of all tasks. They have threads of
    their own, so that nothing else waits for a store that is slow or hangs; threads are started as they are needed. A
    scan or a `read_many` uses a quarter of them at most, and no more than 16. A synchronous `read` or `stat` by a
    thread of the program is not counted: it makes one request at a time, so the program's threads are the bound."""

    open_store_wait_seconds: Annotated[float, msgspec.Meta(ge=0)] = 2
    """How long opening waits for the store. If that gives no answer by then, the engine opens without it, and claims it
    in the background as soon as it does: entries are applied and hot values are read meanwhile."""

    take_over_after_seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """A replica that shares its store (`shares_store=True`) takes over by itself when the owner's lease has run out,
    and then nothing was heard of it for so long, and by chance for up to half of that more. It copies the index from
    the store for that, and its entries after the high-water mark come from the orchestrator again. Default: it does
    not; the program calls `take_over()`."""

    refresh_seconds: Annotated[float, msgspec.Meta(gt=0)] = 5
    """How often a read-only engine (`read_only=True`) looks for what was shipped since. Each time costs a request, and
    what was shipped is fetched."""

    replicas: tuple[str, ...] = ()
    """Further stores, by URL, that get a copy of everything that is shipped."""

    replication_mode: Literal["async", "sync"] = "async"
    """"sync": the high-water mark moves only when all replicas have the data. "async": they follow."""

    # What is kept

    compaction_enabled: bool = True
    """Whether small shipped objects are put together, and what nobody can read any more is removed, in the
    background."""

    compaction_interval_seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600
    """How often it is looked for something to compact."""

    compaction_max_bytes: Positive = 100_000_000
    """Objects of the store are put together up to this size; those of more than half of it stay as they are. Larger
    makes fewer objects, which are written and let go of as a whole."""

    compaction_live_ratio: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.5
    """Least part of the log that is in use, live bytes / stored bytes, for an engine that forgets versions
    (`keep_versions`, `keep_seconds`). Below it, values that are still needed are moved out of the oldest pieces of the
    log to its end, so that those can go. Higher takes less room and writes more; 0 moves nothing."""

    compaction_bytes_per_second: Positive = 64 * MIB
    """The pace at which values are moved. Slower disturbs less, and gives room back later."""

    keep_versions: Positive | None = None
    """Newest versions of each object that stay readable. Default: all."""

    keep_seconds: Positive | None = None
    """How long a version stays readable after a newer one replaced it. Default: for ever."""

    # For tests

    checks_invariants: bool = False
    """Checks at run time what must always hold, such as that no page is written before its log. Costs time on every
    page."""

    @property
    def page_bytes(self) -> int:
        """The only page size."""
        return PAGE_BYTES

    @property
    def store_url(self) -> str | None:
        """The store URL that `s3_bucket` and `s3_prefix` denote."""
        if self.s3_bucket is None:
            if self.s3_prefix:
                raise ConfigError("s3_prefix is given without s3_bucket", hint="Name the bucket too, or give a store")
            return None
        return f"s3://{self.s3_bucket}/{self.s3_prefix.strip('/')}".rstrip("/")


class EngineOptions(TypedDict, total=False):
    """`EngineSettings` as keyword arguments, with units where a name ends in one."""

    rotate_max_bytes: int | str
    rotate_max_seconds: int | str
    wal_sync_mode: Literal["fdatasync", "fsync", "none"]
    wal_compression: Literal["none", "zstd"]
    wal_compression_level: int
    inline_value_bytes: int | str
    large_value_bytes: int | str
    buffer_pool_bytes: int | str
    checkpoint_interval_seconds: float | str
    checkpoint_max_age_seconds: float | str
    s3_bucket: str | None
    s3_prefix: str
    metadata_root: str | None
    ship_interval_seconds: float | str
    ship_batch_objects: int
    ship_concurrency: int
    ship_compression: Literal["none", "zstd"]
    ship_compression_level: int
    local_retention_bytes: int | str
    cold_cache_bytes: int | str
    disk_cache_bytes: int | str
    cold_read_threads: int
    open_store_wait_seconds: float | str
    take_over_after_seconds: float | str | None
    refresh_seconds: float | str
    replicas: Sequence[str] | str
    replication_mode: Literal["async", "sync"]
    compaction_enabled: bool
    compaction_interval_seconds: float | str
    compaction_max_bytes: int | str
    compaction_live_ratio: float
    compaction_bytes_per_second: int | str
    keep_versions: int | None
    keep_seconds: int | str | None
    checks_invariants: bool
    # By another name, or with nothing to choose
    wal_segment_size: int | str
    wal_segment_max_secs: int | str
    buffer_pool_size: int | str
    checkpoint_interval_secs: float | str
    checkpoint_max_age_secs: float | str
    shipping_interval_secs: float | str
    shipping_batch_size: int
    shipping_concurrency: int
    s3_compression: Literal["none", "zstd"]
    cold_compression_level: int
    hot_tier_bytes: int | str
    compaction_interval_secs: float | str
    compaction_size_threshold: int | str
