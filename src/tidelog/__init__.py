"""tidelog: a durable log for Python.

For example:

    import tidelog

    with tidelog.open("./data") as log:
        topic = log.topic("shop/orders")
        topic.append(b"first", key=b"customer-1")
        topic.append(b"second", sync=True)  # returns once it is on the disk
        for message in topic.read(start="earliest"):
            print(message.offset, message.key, message.value)

The README says what is promised; `docs/guides/operations.md` what each error means.
"""

from tidelog.errors import (
    AccessDeniedError,
    BackpressureError,
    ClosedError,
    ConfigError,
    ConflictError,
    CorruptionError,
    DataError,
    DiskFullError,
    FencedError,
    GapError,
    InputError,
    InternalError,
    LockedError,
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
    "Delivery",
    "DiskFullError",
    "FencedError",
    "GapError",
    "InputError",
    "InternalError",
    "LatestByKey",
    "LiveTopic",
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
]
