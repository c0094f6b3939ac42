"""What goes wrong, and when: the numbering of calls, the crash, the planned failures.

Invariants
- Every changing call has a number, from 1 on; the trace lists them in that order. Looking around is not numbered.
- The call with the number `crash_at` raises Crash instead of taking effect, and so does every call after it, looking
  included: the process is dead.
- A planned failure is met by exactly the calls it names; a crash wins over it.

It knows nothing of files. Anything that a crash or an error can hit (a disk, an object store) asks it at each call, and
several that share one `Faults` share one numbering, so a driver can cut between them.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


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
    whatever the dead process still tries afterwards.
    """

    def __init__(self, call: Call | None = None) -> None:
        super().__init__(f"crash at call {call}" if call else "the process is dead")
        self.call = call


@dataclass
class Failure:
    """An error that some calls of one operation will meet."""

    operation: str
    skip: int
    times: int | None
    error: int
    partial_bytes: int
    matching: str

    def meets(self, operation: str, path: str) -> bool:
        """Whether this call fails; counts it either way."""
        if operation != self.operation or not fnmatch.fnmatchcase(path.rpartition("/")[2], self.matching):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        if self.times is None:
            return True
        self.times -= 1
        return self.times >= 0

    def as_error(self, path: str) -> OSError:
        """The OSError of the right class (FileNotFoundError for ENOENT and so on)."""
        return OSError(self.error, os.strerror(self.error), path)


class Faults:
    """The plan of what goes wrong, and the trace of what was called. Safe to use from any thread."""

    def __init__(self, *, crash_at: int | None = None, on_call: Callable[[Call], None] | None = None) -> None:
        self.crash_at = crash_at
        self.on_call = on_call
        self._lock = threading.Lock()
        self._calls: list[Call] = []
        self._failures: list[Failure] = []
        self._crashed = False

    @property
    def calls(self) -> list[Call]:
        """The changing calls so far, the one that crashed included."""
        with self._lock:
            return list(self._calls)

    @property
    def crashed(self) -> bool:
        return self._crashed

    def crash(self) -> None:
        """The process dies now, between two calls."""
        self._crashed = True

    def check_alive(self) -> None:
        """Raises Crash in a dead process."""
        if self._crashed:
            raise Crash

    def enter(self, operation: str, path: str, at_crash: Callable[[], None] | None = None) -> Failure | None:
        """Numbers a changing call; the failure it meets, if any, is the caller's to act out and raise.

        `at_crash` runs when this very call is the cut, before anybody can see the crash.
        """
        with self._lock:
            self.check_alive()
            call = Call(len(self._calls) + 1, operation, path)
            self._calls.append(call)
            if call.number == self.crash_at:
                if at_crash is not None:
                    at_crash()
                self._crashed = True
                raise Crash(call)
        # Not under the lock: a hook may wait for another thread that makes calls of its own.
        if self.on_call is not None:
            self.on_call(call)
        with self._lock:
            self.check_alive()
            return self._failure_of(operation, path)

    def look(self, operation: str, path: str) -> None:
        """A call that changes nothing: not numbered, yet it can fail, and a dead process cannot make it."""
        with self._lock:
            self.check_alive()
            failure = self._failure_of(operation, path)
        if failure is not None:
            raise failure.as_error(path)

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
        if nth < 1:
            raise ValueError("nth counts from 1")
        failure = Failure(operation, nth - 1, times, error, partial_bytes, matching)
        with self._lock:
            self._failures.append(failure)

    def heal(self) -> None:
        """Forgets the planned failures. A crash stays a crash."""
        with self._lock:
            self._failures.clear()

    def _failure_of(self, operation: str, path: str) -> Failure | None:
        # Every rule has to see the call, or its count would depend on the other rules.
        met = [failure for failure in self._failures if failure.meets(operation, path)]
        return met[0] if met else None
