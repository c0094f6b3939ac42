"""A store reached over a network, as seen by a client that can die or fail.

Invariants
- A server survives the death of its clients unchanged. The call at the crash point was done or was not: a test can ask
  for either, and nothing in between exists.
- A dead client changes nothing, so `after_crash` may be called any number of times.
- The same functions apply an effect whether it happens at once, unanswered, late or in a crash, and conditions are
  evaluated when the effect happens.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from tidelog.errors import InputError, TidelogError
from tidelog.testing.faults import Crashing, Faults, StoreFailure, StoreFault
from tidelog.testing.survival import Policy

# What went to a store and back: for tests that prove how little is asked and read.


class Traffic(NamedTuple):
    """A snapshot. `requests` are counted by operation, failed ones included; bytes are those of contents."""

    requests: dict[str, int]
    bytes_read: int
    bytes_written: int

    @property
    def request_count(self) -> int:
        """The number of all requests."""
        return sum(self.requests.values())


class Meter:
    """Counts from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        with self._lock:
            self._requests: Counter[str] = Counter()
            self._bytes_read = 0
            self._bytes_written = 0

    def request(self, operation: str, *, bytes_written: int = 0) -> None:
        with self._lock:
            self._requests[operation] += 1
            self._bytes_written += bytes_written

    def answered(self, bytes_read: int) -> None:
        """What came back."""
        with self._lock:
            self._bytes_read += bytes_read

    def snapshot(self) -> Traffic:
        """What was counted so far."""
        with self._lock:
            return Traffic(dict(self._requests), self._bytes_read, self._bytes_written)


OnRequest = Callable[[str, str], None]


class Content(Protocol):
    """What a server holds."""

    def copy(self) -> Self:
        """One that changes by itself from now on."""
        ...

    def image(self) -> object:
        """Equal for two that show the same."""
        ...


AnyContent = TypeVar("AnyContent", bound=Content)
Answer = TypeVar("Answer")


class Server(Generic[AnyContent]):
    """What the clients of one store share."""

    def __init__(self, content: AnyContent) -> None:
        self.content = content
        self.lock = threading.RLock()
        self.late: list[Callable[[AnyContent], object]] = []

    def copy(self) -> Server[AnyContent]:
        """Another server with the same content, and with the same writes still to come."""
        with self.lock:
            fresh = Server(self.content.copy())
            fresh.late = list(self.late)
        return fresh

    def do(self, effect: Callable[[AnyContent], object]) -> None:
        """An effect without an answer."""
        with self.lock, contextlib.suppress(TidelogError):
            effect(self.content)


class Client(Crashing, ABC, Generic[AnyContent]):
    """The faulty half of a store; what it can be asked is in the class that is both this and a store."""

    operations: frozenset[str]
    reading_operations: frozenset[str]
    possible_faults: frozenset[StoreFault]

    def __init__(self, server: Server[AnyContent], faults: Faults, on_request: OnRequest | None) -> None:
        self.faults = faults
        self.on_request = on_request
        self._server = server
        self._meter = Meter()
        self._interrupted: Callable[[AnyContent], object] | None = None
        self._pid = os.getpid()

    # What a test plans and looks at

    def fail(
        self,
        operation: str,
        fault: StoreFault = "unavailable",
        *,
        nth: int = 1,
        times: int | None = 1,
        matching: str = "*",
        at_byte: int | None = None,
    ) -> None:
        """The `nth` call of `operation` from now on, and the `times - 1` after it, meet `fault` (None: until `heal`).

        `operation` may be a pattern: `fail("*", times=None)` is an outage. `matching` narrows it to keys, by the name
        at their end or, with a slash in it, by the whole key; only those are counted. `at_byte` is where an answer is
        truncated or flipped.
        """
        self._refuse_what_cannot_fail(operation, fault)
        self.faults.plan(
            StoreFailure(operation=operation, fault=fault, nth=nth, times=times, matching=matching, at_byte=at_byte)
        )

    def heal(self) -> None:
        """Ends all failures. Late writes stay pending."""
        self.faults.heal()

    def land_late_writes(self) -> int:
        """Performs the `late` writes in order, with their conditions. Returns how many there were."""
        with self._server.lock:
            late, self._server.late = self._server.late, []
            for effect in late:
                self._server.do(effect)
        return len(late)

    @property
    def traffic(self) -> Traffic:
        """What this client asked, read and wrote since the last `reset_traffic`."""
        return self._meter.snapshot()

    def reset_traffic(self) -> None:
        """Resets the counts."""
        self._meter.reset()

    def another_client(self, faults: Faults | None = None) -> Self:
        """Another client of the same server, with its own crash (or that of `faults`), failures and counts."""
        return self._connected_to(self._server, faults or Faults())

    # What the crash driver asks

    @property
    def in_flight_bytes(self) -> int:
        """1 when the crash interrupted a call of this client, which then was done or was not; else 0."""
        return 0 if self._interrupted is None else 1

    def after_crash(
        self,
        policy: Policy = "keep",
        *,
        seed: int = 0,
        torn_bytes: int = 0,
        crash_at: int | None = None,
        faults: Faults | None = None,
    ) -> Self:
        """A copy of the store with a living client. It is another machine, so every policy leaves it as it is.

        With `torn_bytes` the interrupted call was done (as if it were a write of one byte), without it was not.
        """
        server = self._server.copy()
        if torn_bytes and self._interrupted is not None:
            server.do(self._interrupted)
        return self._connected_to(server, faults or Faults(crash_at=crash_at))

    def finish_interrupted(self) -> None:
        """Has the store itself do the call that the crash interrupted, for those who use it meanwhile: `after_crash`
        would give them another store.
        """
        if self._interrupted is not None:
            self._server.do(self._interrupted)
            self._interrupted = None

    def image(self) -> object:
        """Equal for two stores that show the same. Also in a dead process."""
        with self._server.lock:
            return self._server.content.image(), len(self._server.late)

    # What the store is made of

    @abstractmethod
    def _connected_to(self, server: Server[AnyContent], faults: Faults) -> Self: ...

    def _request(self, operation: str, place: str, *, bytes_written: int = 0) -> None:
        """Before anything else: it is counted, and may take its time."""
        if os.getpid() != self._pid:
            raise InputError("a store in memory does not work in a forked child", hint="It would change a copy of it")
        self.faults.check_alive()
        self._meter.request(operation, bytes_written=bytes_written)
        if self.on_request is not None:
            self.on_request(operation, place)

    def _look(self, operation: str, place: str) -> StoreFailure | None:
        """Before reading: raises what was planned. Damage is the caller's to act out."""
        self._request(operation, place)
        failure = self.faults.failure_of(operation, place)
        assert failure is None or isinstance(failure, StoreFailure)
        if failure is not None and not failure.is_damage:
            raise failure.as_error(place)
        return failure

    def _read(self, read: Callable[[AnyContent], Answer]) -> Answer:
        with self._server.lock:
            return read(self._server.content)

    def _change(self, operation: str, place: str, effect: Callable[[AnyContent], Answer]) -> Answer:
        """A numbered call: it is done and answered, or acts out what was planned."""

        def interrupt() -> None:
            self._interrupted = effect

        failure = self.faults.enter(operation, place, interrupt)
        assert failure is None or isinstance(failure, StoreFailure)
        with self._server.lock:
            # Another thread may have met the crash in the meantime, and the dead change nothing.
            self.faults.check_alive()
            if failure is None:
                return effect(self._server.content)
            if failure.fault == "unanswered":
                self._server.do(effect)
            elif failure.fault == "late":
                self._server.late.append(effect)
        raise failure.as_error(place)

    def _refuse_what_cannot_fail(self, operation: str, fault: StoreFault) -> None:
        meant = set(fnmatch.filter(self.operations, operation))
        if not meant:
            raise ValueError(f"no operation {operation!r}, only {', '.join(sorted(self.operations))}")
        if fault not in self.possible_faults:
            raise ValueError(f"no fault {fault!r}, only {', '.join(sorted(self.possible_faults))}")
        if fault in ("truncated", "flipped") and not meant <= self.reading_operations:
            raise ValueError(f"only an answer can be {fault}: {', '.join(sorted(self.reading_operations))}")
