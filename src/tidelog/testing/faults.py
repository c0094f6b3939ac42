"""Fault injection: the numbering of calls, the crash, the planned failures.

Invariants
- Every changing call has a number, from 1 on; the trace lists them in that order. Reading calls are not numbered.
- The call with the number `crash_at` raises Crash instead of taking effect, and so does every call after it, reads
  included: the process is dead.
- A planned failure hits exactly the calls it names; a crash takes precedence.
- Components that share a numbering (`sharing`) die together but fail separately.

This module knows nothing of files. Anything that a crash or an error can hit (a disk, an object store) consults it at
each call, and the driver can crash between several components that share one numbering.

The ways in which a store reached over a network fails.

    unavailable   no answer, and nothing was done
    unanswered    it was done, and the answer was lost: the caller sees the same as with `unavailable`
    late          nothing was done yet, the caller sees the same again, and it is done later (`land_late_writes`)
    denied        the credentials are refused
    conflict      the store reports that another writer was first; nothing was done
    not_found     the store reports that there is no such object
    truncated     the answer has fewer bytes than the object
    flipped       one bit of the answer is wrong

A call that only reads has no effect to be late or unanswered: for it the first three are the same.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from tidelog.errors import AccessDeniedError, ConflictError, NotFoundError, StoreUnavailableError, TidelogError


class Call(NamedTuple):
    """One changing call."""

    number: int
    operation: str
    path: str

    def __str__(self) -> str:
        return f"{self.number} {self.operation} {self.path}"


class Crash(BaseException):
    """The process died here.

    Not an Exception: code under test that catches those must not live on. `call` is set where the cut was, and None in
    later calls of the dead process.
    """

    def __init__(self, call: Call | None = None) -> None:
        super().__init__(f"crash at call {call}" if call else "the process is dead")
        self.call = call


@dataclass(kw_only=True)
class Failure(ABC):
    """What some calls of one operation will meet. `operation` and `matching` are patterns as in a shell."""

    operation: str
    nth: int = 1
    times: int | None = 1
    matching: str = "*"

    def __post_init__(self) -> None:
        if self.nth < 1:
            raise ValueError("nth counts from 1")
        self._to_pass = self.nth - 1
        self._to_meet = self.times

    def meets(self, operation: str, path: str) -> bool:
        """Whether this call fails; counts it either way."""
        if not fnmatch.fnmatchcase(operation, self.operation) or not self.matches(path):
            return False
        if self._to_pass > 0:
            self._to_pass -= 1
            return False
        if self._to_meet is None:
            return True
        self._to_meet -= 1
        return self._to_meet >= 0

    def matches(self, path: str) -> bool:
        """A pattern with a slash is held against the whole path, another one against the name at its end."""
        return fnmatch.fnmatchcase(path if "/" in self.matching else path.rpartition("/")[2], self.matching)

    @abstractmethod
    def as_error(self, path: str) -> Exception:
        """What the caller gets to see."""


@dataclass(kw_only=True)
class DiskFailure(Failure):
    """An error of the operating system; a failing write takes effect for its first `partial_bytes`."""

    error: int = errno.EIO
    partial_bytes: int = 0

    def as_error(self, path: str) -> OSError:
        """The OSError of the right class (FileNotFoundError for ENOENT and so on)."""
        return OSError(self.error, os.strerror(self.error), path)


class _Trace:
    """The state that components with one numbering share."""

    def __init__(self, crash_at: int | None, on_call: Callable[[Call], None] | None) -> None:
        self.crash_at = crash_at
        self.on_call = on_call
        self.lock = threading.Lock()
        self.calls: list[Call] = []
        self.crashed = False


class Faults:
    """The planned failures, and the trace of calls. Thread-safe."""

    def __init__(self, *, crash_at: int | None = None, on_call: Callable[[Call], None] | None = None) -> None:
        self._trace = _Trace(crash_at, on_call)
        self._prefix = ""
        self._failures: list[Failure] = []

    def sharing(self, name: str) -> Faults:
        """A plan for one of several components: the same numbering and the same crash, its own failures and name."""
        one = Faults()
        one._trace = self._trace
        one._prefix = f"{name}."
        return one

    @property
    def crash_at(self) -> int | None:
        """The number of the call at which the process dies."""
        return self._trace.crash_at

    @crash_at.setter
    def crash_at(self, crash_at: int | None) -> None:
        self._trace.crash_at = crash_at

    @property
    def on_call(self) -> Callable[[Call], None] | None:
        """Called with every changing call before it takes effect, on the calling thread."""
        return self._trace.on_call

    @on_call.setter
    def on_call(self, on_call: Callable[[Call], None] | None) -> None:
        self._trace.on_call = on_call

    @property
    def calls(self) -> list[Call]:
        """The changing calls so far, the one that crashed included."""
        with self._trace.lock:
            return list(self._trace.calls)

    @property
    def crashed(self) -> bool:
        return self._trace.crashed

    def crash(self) -> None:
        """The process dies now, between two calls."""
        self._trace.crashed = True

    def check_alive(self) -> None:
        """Raises Crash in a dead process."""
        if self._trace.crashed:
            raise Crash

    def enter(self, operation: str, path: str, at_crash: Callable[[], None] | None = None) -> Failure | None:
        """Numbers a changing call; returns the failure it hits, if any, for the caller to perform and raise.

        `at_crash` runs when this very call is the crash point, before anyone can see the crash.
        """
        trace = self._trace
        with trace.lock:
            self.check_alive()
            call = Call(len(trace.calls) + 1, self._prefix + operation, path)
            trace.calls.append(call)
            if call.number == trace.crash_at:
                if at_crash is not None:
                    at_crash()
                trace.crashed = True
                raise Crash(call)
        # Not under the lock: a hook may wait for another thread that makes calls of its own.
        if trace.on_call is not None:
            trace.on_call(call)
        return self.failure_of(operation, path)

    def failure_of(self, operation: str, path: str) -> Failure | None:
        """The failure that a call meets, if any; a dead process cannot make the call."""
        with self._trace.lock:
            self.check_alive()
            # Every rule has to see the call, or its count would depend on the other rules.
            met = [failure for failure in self._failures if failure.meets(operation, path)]
        return met[0] if met else None

    def look(self, operation: str, path: str) -> None:
        """A call that changes nothing: not numbered, yet it can fail, and a dead process cannot make it."""
        failure = self.failure_of(operation, path)
        if failure is not None:
            raise failure.as_error(path)

    def plan(self, failure: Failure) -> None:
        """Adds a failure that later calls may meet."""
        with self._trace.lock:
            self._failures.append(failure)

    def fail(
        self,
        operation: str,
        *,
        nth: int = 1,
        times: int | None = 1,
        error: int = errno.EIO,
        partial_bytes: int = 0,
        matching: str = "*",
    ) -> None:
        """The `nth` call of `operation` from now on, and the `times - 1` after it, raise OSError (None: until `heal`).

        `matching` narrows it to file names (as in a shell); only those are counted. A failing write takes effect for
        its first `partial_bytes`.
        """
        self.plan(
            DiskFailure(
                operation=operation, nth=nth, times=times, matching=matching, error=error, partial_bytes=partial_bytes
            )
        )

    def heal(self) -> None:
        """Forgets the planned failures. A crash stays a crash."""
        with self._trace.lock:
            self._failures.clear()


class Crashing:
    """What every component with faults answers to the crash driver."""

    faults: Faults

    @property
    def calls(self) -> list[Call]:
        """The changing calls so far, of all components that share the numbering. A rename is listed by its target."""
        return self.faults.calls

    @property
    def crashed(self) -> bool:
        return self.faults.crashed

    def crash(self) -> None:
        """The process dies now, between two calls."""
        self.faults.crash()


StoreFault = Literal["unavailable", "unanswered", "late", "denied", "conflict", "not_found", "truncated", "flipped"]
STORE_FAULTS: tuple[StoreFault, ...] = get_args(StoreFault)
DAMAGES: frozenset[StoreFault] = frozenset({"truncated", "flipped"})


@dataclass(kw_only=True)
class StoreFailure(Failure):
    """What some calls of a store meet. `at_byte` says where an answer is cut or wrong; by default in its middle."""

    fault: StoreFault = "unavailable"
    at_byte: int | None = None

    @property
    def is_damage(self) -> bool:
        """Whether the caller gets an answer, and a wrong one."""
        return self.fault in DAMAGES

    def matches(self, path: str) -> bool:
        """A call may be about several keys; one of them is enough."""
        return any(map(super().matches, path.split(",")))

    def damaged(self, data: bytes) -> bytes:
        """What arrives in place of this. An answer shorter than `at_byte` arrives unchanged."""
        at = len(data) // 2 if self.at_byte is None else self.at_byte
        if self.fault == "truncated":
            return data[:at]
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if at < len(data) else data

    def as_error(self, path: str) -> TidelogError:
        """The error that a real store's client would raise."""
        assert not self.is_damage
        if self.fault == "denied":
            return AccessDeniedError(f"{path}: access is denied")
        if self.fault == "conflict":
            return ConflictError(
                f"{path}: another writer changed it first", hint="Read it again, then decide whether to write"
            )
        if self.fault == "not_found":
            return NotFoundError(f"{path}: there is no such object")
        return StoreUnavailableError(f"{path}: the store is not available")
