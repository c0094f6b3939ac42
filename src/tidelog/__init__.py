"""tidelog: a durable log for Python.

For example:

    import tidelog

    with tidelog.open("./data") as log:
        topic = log.topic("shop/orders")
        topic.append(b"first", key=b"customer-1")
        topic.append(b"second", sync=True)  # returns once it is on the disk
        for message in topic.read(start="earliest"):
            print(message.offset, message.key, message.value)

`open_engine` opens the other half, an object store that is built from an ordered log:

    with tidelog.open_engine("./engine") as engine:
        engine.apply(1, tidelog.CreateBucket("photos"))
        engine.apply(2, tidelog.PutObject("photos", "cat", b"..."))
        print(engine.read("photos", "cat", seq=2).data)

`spark_session` and `register` connect tidelog to Spark; nothing else imports Spark.

The README states the guarantees; `docs/reference/operations.md` explains each error.
"""

from typing import TYPE_CHECKING

from tidelog.errors import (
    AccessDeniedError,
    BackpressureError,
    ClosedError,
    ConfigError,
    ConflictError,
    CorruptionError,
    DataError,
    DeadlockError,
    DiskFullError,
    ExhaustedError,
    FencedError,
    GapError,
    HeldError,
    IngestPendingError,
    InputError,
    InternalError,
    LockedError,
    LockTimeoutError,
    LogFailedError,
    MessageTooLargeError,
    NotFoundError,
    NotSupportedError,
    OffsetOutOfRangeError,
    OtherLogError,
    ReopenError,
    RetryError,
    ServerUnavailableError,
    StoreUnavailableError,
    TidelogError,
    TopicNameError,
)
from tidelog.findings import Finding, VerifyReport
from tidelog.log.transactions import OpenTransaction
from tidelog.topics.directory import LogDirectory
from tidelog.topics.latest_by_key import LatestByKey
from tidelog.topics.live_topic import LiveTopic
from tidelog.topics.message import Headers, Message
from tidelog.topics.partitioned import PartitionedTopic, PartitionOffset
from tidelog.topics.producer.producer import Producer
from tidelog.topics.subscription.consumer import Consumer
from tidelog.topics.subscription.queue import Delivery
from tidelog.topics.topic import Topic
from tidelog.wiring import open as open
from tidelog.wiring import open_async

if TYPE_CHECKING:
    from tidelog.client.client import Client, connect, connect_async
    from tidelog.client.consumer import RemoteConsumer
    from tidelog.client.engine import RemoteEngine
    from tidelog.client.producer import RemoteProducer
    from tidelog.client.topic import RemotePartitionedTopic, RemoteTopic
    from tidelog.engine.changes import Change
    from tidelog.engine.engine import Engine
    from tidelog.engine.entry import (
        Batch,
        CopyObject,
        CreateBucket,
        DeleteBucket,
        DeleteObject,
        ObjectInfo,
        ObjectStat,
        PutObject,
        Result,
        ScannedObject,
        StoredObject,
        VersionInfo,
    )
    from tidelog.engine.object_file import AsyncObjectFile, ObjectFile
    from tidelog.engine.orchestrator.base import Orchestrator, drive
    from tidelog.engine.orchestrator.topic import TopicOrchestrator
    from tidelog.engine.reader import EngineReader
    from tidelog.engine.restoring import RestoringEngine
    from tidelog.engine.scan_iterator import AsyncScan, Scan
    from tidelog.engine.txn.read_set import Guarded, ListingRead, ObjectRead
    from tidelog.engine.txn.transaction import Transaction
    from tidelog.engine.wal.value import object_crc
    from tidelog.engine_wiring import (
        open_engine,
        open_engine_async,
        rebuild_engine_manifest,
        restore_engine,
        restore_engine_async,
    )
    from tidelog.pipeline.session.session import register, spark_session

__version__ = "0.1.0"

# Without `open`: `from tidelog import *` must not replace Python's own.
__all__ = [
    "AccessDeniedError",
    "AsyncObjectFile",
    "AsyncScan",
    "BackpressureError",
    "Batch",
    "Change",
    "Client",
    "ClosedError",
    "ConfigError",
    "ConflictError",
    "Consumer",
    "CopyObject",
    "CorruptionError",
    "CreateBucket",
    "DataError",
    "DeadlockError",
    "DeleteBucket",
    "DeleteObject",
    "Delivery",
    "DiskFullError",
    "Engine",
    "EngineReader",
    "ExhaustedError",
    "FencedError",
    "Finding",
    "GapError",
    "Guarded",
    "Headers",
    "HeldError",
    "IngestPendingError",
    "InputError",
    "InternalError",
    "LatestByKey",
    "ListingRead",
    "LiveTopic",
    "LockTimeoutError",
    "LockedError",
    "LogDirectory",
    "LogFailedError",
    "Message",
    "MessageTooLargeError",
    "NotFoundError",
    "NotSupportedError",
    "ObjectFile",
    "ObjectInfo",
    "ObjectRead",
    "ObjectStat",
    "OffsetOutOfRangeError",
    "OpenTransaction",
    "Orchestrator",
    "OtherLogError",
    "PartitionOffset",
    "PartitionedTopic",
    "Producer",
    "PutObject",
    "RemoteConsumer",
    "RemoteEngine",
    "RemotePartitionedTopic",
    "RemoteProducer",
    "RemoteTopic",
    "ReopenError",
    "RestoringEngine",
    "Result",
    "RetryError",
    "Scan",
    "ScannedObject",
    "ServerUnavailableError",
    "StoreUnavailableError",
    "StoredObject",
    "TidelogError",
    "Topic",
    "TopicNameError",
    "TopicOrchestrator",
    "Transaction",
    "VerifyReport",
    "VersionInfo",
    "__version__",
    "connect",
    "connect_async",
    "drive",
    "object_crc",
    "open_async",
    "open_engine",
    "open_engine_async",
    "rebuild_engine_manifest",
    "register",
    "restore_engine",
    "restore_engine_async",
    "spark_session",
]


_LATER = {
    "tidelog.client.client": ("Client", "connect", "connect_async"),
    "tidelog.client.consumer": ("RemoteConsumer",),
    "tidelog.client.engine": ("RemoteEngine",),
    "tidelog.client.producer": ("RemoteProducer",),
    "tidelog.client.topic": ("RemotePartitionedTopic", "RemoteTopic"),
    "tidelog.engine.changes": ("Change",),
    "tidelog.engine.engine": ("Engine",),
    "tidelog.engine.entry": (
        *("Batch", "CopyObject", "CreateBucket", "DeleteBucket", "DeleteObject", "PutObject"),
        *("ObjectInfo", "ObjectStat", "Result", "ScannedObject", "StoredObject", "VersionInfo"),
    ),
    "tidelog.engine.object_file": ("AsyncObjectFile", "ObjectFile"),
    "tidelog.engine.orchestrator.base": ("Orchestrator", "drive"),
    "tidelog.engine.orchestrator.topic": ("TopicOrchestrator",),
    "tidelog.engine.reader": ("EngineReader",),
    "tidelog.engine.restoring": ("RestoringEngine",),
    "tidelog.engine.scan_iterator": ("AsyncScan", "Scan"),
    "tidelog.engine.txn.read_set": ("Guarded", "ListingRead", "ObjectRead"),
    "tidelog.engine.txn.transaction": ("Transaction",),
    "tidelog.engine.wal.value": ("object_crc",),
    "tidelog.engine_wiring": (
        *("open_engine", "open_engine_async", "restore_engine", "restore_engine_async"),
        "rebuild_engine_manifest",
    ),
    "tidelog.pipeline.session.session": ("register", "spark_session"),
}
_MODULE_OF = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> object:
    """Imports the names of engines, and those that need Spark, on first use: `import tidelog` stays fast."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found: object = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return sorted([*__all__, "open"])
