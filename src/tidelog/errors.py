"""Every error tidelog raises, sorted by what the caller does next.

    TidelogError
    ├── RetryError            try again: nothing was done, or what was done is still safe
    │   ├── BackpressureError     the writer is behind and the timeout passed; no offset was used
    │   ├── DeadlockError         transactions waited for each other, and this one was chosen to give way
    │   ├── DiskFullError         no room on the disk; make room, accepted messages wait in memory
    │   ├── LockTimeoutError      another transaction kept a lock for longer than the time given
    │   ├── LockedError           another process owns the directory
    │   │   └── HeldError             another node has the topic or the engine open, and lives; `take_over` takes it
    │   ├── ExhaustedError        the process has no descriptors or threads left; nothing was done
    │   ├── NotTakenInError       rows are handed over and safe, and the topic's owner has not taken them in yet
    │   └── StoreUnavailableError an object or metadata store gave no answer; read back before you write again
    ├── ConflictError         somebody else was first and nothing was written; read again, then decide
    ├── ReopenError           this object is finished; open a new one
    │   ├── ClosedError           closed by you, by a signal or by a fork
    │   ├── LogFailedError        a write or a sync failed for good
    │   ├── LeaseLostError        the lease ran out; what it held may be somebody else's by now
    │   └── FencedError           another node owns the topic now; what was not shipped is kept for a rescue
    ├── InputError            the call or the configuration is wrong; fix it
    │   ├── ConfigError           a setting is unknown, of the wrong type or out of range
    │   ├── TopicNameError        not a "namespace/name" that we accept
    │   ├── MessageTooLargeError  over max_message_bytes
    │   ├── AccessDeniedError     a store does not accept the credentials, or they do not reach that far
    │   ├── NotSupportedError     this kind of store cannot do that
    │   └── NotFoundError         no such topic, offset or object
    │       └── OffsetOutOfRangeError   before the first or after the next offset of the log
    ├── DataError             bytes on disk are not what was written; repair or restore them
    │   ├── CorruptionError       names the file, the byte and the reason
    │   │   └── OtherLogError         a file or an object that belongs to another log
    │   └── GapError              offsets are missing between two good places
    └── InternalError         a bug in tidelog; please report it

An error says what failed; `operation`, `path` and `hint` carry where it failed and what to do about it.
"""

from __future__ import annotations

from pathlib import Path


def offsets_text(first: int, last: int) -> str:
    """A range of offsets in words; both ends belong to it."""
    return f"offset {first}" if first == last else f"offsets {first} to {last}"


class TidelogError(Exception):
    """Base of every error in tidelog."""

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        path: str | Path | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.operation = operation
        self.path = None if path is None else Path(path)
        self.hint = hint

    def __str__(self) -> str:
        text = self.message
        if self.operation is not None:
            text = f"{self.operation}: {text}"
        if self.path is not None and str(self.path) not in text:
            text = f"{text} [{self.path}]"
        if self.hint is not None:
            text = f"{text}. {self.hint}"
        return text


class RetryError(TidelogError):
    """Nothing was lost; the same call may succeed later."""


class BackpressureError(RetryError):
    """The hand-over to the writer stayed full until the timeout. No offset was used."""


class DeadlockError(RetryError):
    """Transactions waited for each other in a circle. This one gave way: its locks are free, nothing was written.

    Run the whole transaction again, from its first read on.
    """


class DiskFullError(RetryError):
    """The disk has no room. New appends are refused until a retried write goes through.

    `offset` is set when the message had already been accepted: it is kept in memory and written as soon
    as there is room, so appending it again would store it twice. `flush()` raises the same until then.
    """

    def __init__(self, message: str, *, offset: int | None = None, path: str | Path | None = None) -> None:
        super().__init__(message, path=path, hint="Free some space; writing goes on by itself")
        self.offset = offset


class ExhaustedError(RetryError):
    """The process, or the machine, has no more descriptors or threads. What failed left nothing half open.

    Nothing that was accepted is lost: messages wait in memory as on a full disk. `offset` is set when a message had
    already been accepted: appending it again would store it twice.
    """

    offset: int | None = None


class LockTimeoutError(RetryError):
    """A lock on a bucket or a key was not free in time. The transaction still has what it had; it may ask again."""


class LockedError(RetryError):
    """Another process (or another open log in this one) owns the directory."""


class HeldError(LockedError):
    """Another node has the topic or the engine open, and its heartbeat is young. Nothing was changed.

    It works once that node has closed it, or has been silent for its `lease_seconds`. Who means to take it away from
    there says `take_over=True`.
    """


class NotTakenInError(RetryError):
    """Rows were handed over to a topic, and its owner has not taken them in within the time.

    They are safe where they are and come in by themselves when the owner runs: to write them again would double them,
    unless it is done under the same name and version.
    """


class StoreUnavailableError(RetryError):
    """A store did not answer, or answered that it cannot now. A write is undecided: it was done, or not, or will be.

    Reading needs no care. Whoever was writing reads back what is there before writing again.
    """


class ConflictError(TidelogError):
    """A condition of a write did not hold: somebody else was first. Nothing was written.

    The same call would fail again; read what is there now and decide.
    """


class ReopenError(TidelogError):
    """The object can no longer be used; open a new one."""


class ClosedError(ReopenError):
    """The log was closed."""


class LogFailedError(ReopenError):
    """A write or sync failed in a way that must not be retried on the same file handle."""


class LeaseLostError(ReopenError):
    """The lease was not kept alive in time. Stop acting on what it held; take a new one."""


class FencedError(ReopenError):
    """Another node has claimed the topic. This one can neither append nor ship nor delete any more.

    Messages that it had accepted and not shipped stay on its disk: `tidelog topic rescue` shows and returns them.
    """


class InputError(TidelogError, ValueError):
    """The caller's input is wrong."""


class ConfigError(InputError):
    """A setting is unknown, of the wrong type or out of range."""


class TopicNameError(InputError):
    """A topic name is not of the form "namespace/name" with allowed characters."""


class MessageTooLargeError(InputError):
    """The message is larger than `max_message_bytes`."""


class AccessDeniedError(InputError):
    """A store refused the credentials, or they do not allow this."""


class NotSupportedError(InputError):
    """This kind of store cannot do what was asked; its `supports_...` properties say so beforehand."""


class NotFoundError(InputError, LookupError):
    """The named thing does not exist."""


class OffsetOutOfRangeError(NotFoundError):
    """The offset was never written, or is no longer kept."""


class DataError(TidelogError):
    """Stored bytes are damaged or missing."""


class CorruptionError(DataError):
    """A file holds bytes that were not written that way. `path` and `byte` say where, `reason` what is wrong."""

    def __init__(
        self,
        message: str,
        *,
        path: str | Path,
        byte: int,
        operation: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(f"{message} at byte {byte} of {path}", operation=operation, path=path, hint=hint)
        self.reason = message
        self.byte = byte


class OtherLogError(CorruptionError):
    """A WAL file or an object that belongs to another log: it is never read as data. `expected`, `found`: the ids."""

    def __init__(
        self, *, path: str | Path, expected: str, found: str, operation: str | None = None, hint: str | None = None
    ) -> None:
        message = f"this belongs to another log: its header has log id {found}, expected is {expected},"
        super().__init__(message, path=path, byte=0, operation=operation, hint=hint)
        self.expected = expected
        self.found = found


class GapError(DataError):
    """Offsets `first` to `last` (inclusive) are missing."""

    def __init__(
        self, message: str, *, first: int, last: int, path: str | Path | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, path=path, hint=hint)
        self.first = first
        self.last = last


class InternalError(TidelogError):
    """A state that cannot be: a bug in tidelog."""
