"""Objects that are planned and not published yet: sent several at a time, published one after the other.

Invariants
- They follow each other without a gap, in the order in which they will be published.
- One that could not be sent stays as it was planned, and is sent again under the same name.
- Whoever asks for the first one sends it himself where there are no threads for it.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future

from tidelog.errors import ClosedError
from tidelog.tier.daemon_pool import DaemonPool
from tidelog.tier.keys import ObjectId
from tidelog.tier.shipment import Shipment
from tidelog.tier.upload import Uploaded

_Send = Callable[[ObjectId, Shipment], Uploaded]


class Outgoing:
    """One object between its plan and its publication."""

    def __init__(self, name: ObjectId, shipment: Shipment) -> None:
        self.name = name
        self.shipment = shipment
        self.may_be_sent = False
        """Whether it was looked for something of that name in the store, and there was nothing."""
        self._sending: Future[Uploaded] | None = None

    def begin(self, send: _Send, executor: Executor) -> None:
        """Sends it by another thread, if that is not under way or done."""
        if self._sending is None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile: whoever waits for it hears so
                self._sending = executor.submit(send, self.name, self.shipment)

    def sent(self, send: _Send) -> Uploaded:
        """The object in the store, once it is there."""
        if self._sending is None:
            return send(self.name, self.shipment)
        try:
            return self._sending.result()
        except CancelledError:
            raise ClosedError("the shipper is closed") from None
        except BaseException:
            self._sending = None
            raise


class OutgoingQueue:
    """The next objects of a log, at most `concurrency` of them."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._objects: deque[Outgoing] = deque()
        self._threads = DaemonPool(concurrency, "tidelog-ship") if concurrency > 1 else None

    def __bool__(self) -> bool:
        return bool(self._objects)

    @property
    def has_room(self) -> bool:
        return len(self._objects) < self._concurrency

    @property
    def first(self) -> Outgoing:
        return self._objects[0]

    @property
    def last(self) -> Outgoing:
        return self._objects[-1]

    def names(self) -> list[ObjectId]:
        """In order."""
        return [one.name for one in tuple(self._objects)]

    def add(self, outgoing: Outgoing) -> None:
        """One more, behind all others."""
        self._objects.append(outgoing)

    def begin_all(self, allow: Callable[[Outgoing], None], send: _Send) -> None:
        """Sends what is not on its way yet, where there are threads for it. `allow` looks before the first attempt."""
        for outgoing in self._objects if self._threads is not None else (self._objects[0],):
            if not outgoing.may_be_sent:
                allow(outgoing)
                outgoing.may_be_sent = True
            if self._threads is not None:
                outgoing.begin(send, self._threads)

    def remove_first(self) -> None:
        """It is about to be published."""
        self._objects.popleft()

    def close(self) -> None:
        """Nothing more is begun; what is under way ends by itself, and nobody publishes it."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
