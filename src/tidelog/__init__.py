"""tidelog: a durable log for Python.

For example:

    import tidelog

    with tidelog.open("./data") as log:
        topic = log.topic("shop/orders")
        topic.append(b"first", key=b"customer-1")
        topic.append(b"second", sync=True)  # returns once it is on the disk
        for message in topic.read(start="earliest"):
            print(message.offset, message.key, message.value)

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
    FencedError,
    GapError,
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
from tidelog.wiring import open, open_async

if TYPE_CHECKING:
    from tidelog.pipeline.session import register, spark_session

__version__ = "0.1.0"

__all__ = [
    "AccessDeniedError",
    "BackpressureError",
    "ClosedError",
    "ConfigError",
    "ConflictError",
    "Consumer",
    "CorruptionError",
    "DataError",
    "DeadlockError",
    "Delivery",
    "DiskFullError",
    "FencedError",
    "GapError",
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
    "OffsetOutOfRangeError",
    "Producer",
    "ReopenError",
    "RetryError",
    "StoreUnavailableError",
    "TidelogError",
    "Topic",
    "TopicNameError",
    "__version__",
    "open",
    "open_async",
    "register",
    "spark_session",
]


def __getattr__(name: str) -> object:
    """What needs Spark is imported when it is asked for: `import tidelog` works, and is quick, without."""
    if name not in ("register", "spark_session"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tidelog.pipeline import session

    return getattr(session, name)
