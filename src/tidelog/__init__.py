"""tidelog: a durable log for Python.

For example:

    import tidelog

    with tidelog.open("./data") as log:
        topic = log.topic("shop/orders")
        topic.append(b"first", key=b"customer-1")
        topic.append(b"second", sync=True)  # returns once it is on the disk
        for message in topic.read(start="earliest"):
            print(message.offset, message.key, message.value)

`open_engine` opens the other half, a store of objects that is built from an ordered log:

    with tidelog.open_engine("./engine") as engine:
        engine.apply(1, tidelog.CreateBucket("photos"))
        engine.apply(2, tidelog.PutObject("photos", "cat", b"..."))
        print(engine.read("photos", "cat", seq=2).data)

`spark_session` and `register` bring Spark along; nothing else imports it.

The README says what is promised; `docs/guides/operations.md` what each error means.
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
    InputError,
    InternalError,
    LockedError,
    LockTimeoutError,
    LogFailedError,
    MessageTooLargeError,
    NotFoundError,
    NotSupportedError,
    NotTakenInError,
    OffsetOutOfRangeError,
    OtherLogError,
    ReopenError,
    RetryError,
    StoreUnavailableError,
    TidelogError,
    TopicNameError,
)
from tidelog.topics.delivery_queue import Delivery
from tidelog.topics.latest_by_key import LatestByKey
from tidelog.topics.live_topic import LiveTopic
from tidelog.topics.message import Message
from tidelog.topics.producer import Producer
from tidelog.topics.storage import LogDirectory
from tidelog.topics.subscription_consumer import Consumer
from tidelog.topics.topic import Topic
from tidelog.wiring import open as open
from tidelog.wiring import open_async

if TYPE_CHECKING:
    from tidelog.engine.engine import Engine
    from tidelog.engine.entry import Batch, CopyObject, CreateBucket, DeleteBucket, DeleteObject, PutObject
    from tidelog.engine.orchestrator import Orchestrator, drive
    from tidelog.engine.results import ObjectInfo, ObjectStat, Result, StoredObject, VersionInfo
    from tidelog.engine.topic_orchestrator import TopicOrchestrator
    from tidelog.engine.transaction import Transaction
    from tidelog.engine_wiring import open_engine, open_engine_async, restore_engine, restore_engine_async
    from tidelog.pipeline.session import register, spark_session

__version__ = "0.1.0"

# Without `open`: `from tidelog import *` must not put it in the place of Python's own.
__all__ = [
    "AccessDeniedError",
    "BackpressureError",
    "Batch",
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
    "ExhaustedError",
    "FencedError",
    "GapError",
    "HeldError",
    "InputError",
    "InternalError",
    "LatestByKey",
    "LiveTopic",
    "LockTimeoutError",
    "LockedError",
    "LogDirectory",
    "LogFailedError",
    "Message",
    "MessageTooLargeError",
    "NotFoundError",
    "NotSupportedError",
    "NotTakenInError",
    "ObjectInfo",
    "ObjectStat",
    "OffsetOutOfRangeError",
    "Orchestrator",
    "OtherLogError",
    "Producer",
    "PutObject",
    "ReopenError",
    "Result",
    "RetryError",
    "StoreUnavailableError",
    "StoredObject",
    "TidelogError",
    "Topic",
    "TopicNameError",
    "TopicOrchestrator",
    "Transaction",
    "VersionInfo",
    "__version__",
    "drive",
    "open_async",
    "open_engine",
    "open_engine_async",
    "register",
    "restore_engine",
    "restore_engine_async",
    "spark_session",
]


_LATER = {
    "tidelog.engine.engine": ("Engine",),
    "tidelog.engine.entry": ("Batch", "CopyObject", "CreateBucket", "DeleteBucket", "DeleteObject", "PutObject"),
    "tidelog.engine.results": ("ObjectInfo", "ObjectStat", "Result", "StoredObject", "VersionInfo"),
    "tidelog.engine.orchestrator": ("Orchestrator", "drive"),
    "tidelog.engine.topic_orchestrator": ("TopicOrchestrator",),
    "tidelog.engine.transaction": ("Transaction",),
    "tidelog.engine_wiring": ("open_engine", "open_engine_async", "restore_engine", "restore_engine_async"),
    "tidelog.pipeline.session": ("register", "spark_session"),
}
_MODULE_OF = {name: module for module, names in _LATER.items() for name in names}


def __getattr__(name: str) -> object:
    """What belongs to engines, or needs Spark, is imported when it is asked for: `import tidelog` is quick without."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    found: object = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return sorted([*__all__, "open"])
