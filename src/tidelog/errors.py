"""Every error tidelog raises, sorted by what the caller does next.

    TidelogError
    ├── RetryError            try again: nothing was done, or what was done is still safe
    │   ├── BackpressureError     the writer is behind and the timeout passed; no offset was used
    │   ├── DeadlockError         transactions waited for each other, and this one was chosen as the victim
    │   ├── DiskFullError         the disk is full; free some space, accepted messages wait in memory
    │   ├── LockTimeoutError      another transaction held a lock for longer than the timeout
    │   ├── LockedError           another process owns the directory
    │   │   └── HeldError             another live node has the topic or the engine open; `take_over` takes it
    │   ├── ExhaustedError        the process has no descriptors or threads left; nothing was done
    │   ├── ServerUnavailableError a server of tidelog gave no answer; what was sent may have been carried out
    │   ├── IngestPendingError       rows are committed and safe, and the topic's owner has not ingested them yet
    │   └── StoreUnavailableError an object or metadata store gave no answer; read back before you write again
    ├── ConflictError         another writer was first and nothing was written; read again, then decide
    ├── ReopenError           this object is finished; open a new one
    │   ├── ClosedError           closed by you, by a signal or by a fork
    │   ├── LogFailedError        a write or a sync failed for good
    │   ├── LeaseLostError        the lease expired; another node may hold what it held
    │   └── FencedError           another node owns the topic now; unshipped messages are kept for a rescue
    ├── InputError            the call or the configuration is wrong; fix it
    │   ├── ConfigError           a setting is unknown, of the wrong type or out of range
    │   ├── TopicNameError        not a valid "namespace/name"
    │   ├── MessageTooLargeError  over max_message_bytes
    │   ├── AccessDeniedError     a store does not accept the credentials, or they lack permission
    │   ├── NotSupportedError     this kind of store cannot do that
    │   └── NotFoundError         no such topic, offset or object
    │       └── OffsetOutOfRangeError   before the first or after the next offset of the log
    ├── DataError             bytes on disk are not what was written; repair or restore them
    │   ├── CorruptionError       names the file, the byte and the reason
    │   │   └── OtherLogError         a file or an object that belongs to another log
    │   └── GapError              offsets are missing between two good ranges
    └── InternalError         a bug in tidelog; please report it

An error says what failed. Its parts are for programs, which need not take a text apart: `reason` says what is wrong,
`operation`, `path` and `byte` where, and `hint` what to do about it.
"""

from __future__ import annotations

from pathlib import Path


def offsets_text(first: int, last: int, unit: str = "offset") -> str:
    """A range of offsets in words; both ends belong to it."""
    return f"{unit} {first}" if first == last else f"{unit}s {first} to {last}"


class Hint(str):
    """What to do about an error: in the words of the library, and as `command` in those of the command line.

    A hint that names a keyword or a method in Python says here which option or command does the same.
    """

    command: str | None

    def __new__(cls, text: str, command: str | None = None) -> Hint:
        made = super().__new__(cls, text)
        made.command = command
        return made


NAME_A_STORE = Hint(
    'Name one: tidelog.open("./data", store="s3://bucket/prefix")', command="Name one with --store s3://bucket/prefix"
)


class TidelogError(Exception):
    """Base of every error in tidelog. `message` is put together from `reason` and the parts that belong in its text."""

    byte: int | None = None
    """Where in the file or object of `path`."""

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        path: str | Path | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.reason = message
        self.operation = operation
        self.path = None if path is None else Path(path)
        self.hint = None if hint is None else str(hint)
        self.command_hint = hint.command if isinstance(hint, Hint) else None
        """The hint in the words of the command line, where they are others."""

    @property
    def message(self) -> str:
        """What failed, without operation, path and hint."""
        return self.reason

    @property
    def text(self) -> str:
        """All of it but the hint."""
        text = self.message if self.operation is None else f"{self.operation}: {self.message}"
        return text if self.path is None or str(self.path) in text else f"{text} [{self.path}]"

    def __str__(self) -> str:
        return self.text if self.hint is None else f"{self.text}. {self.hint}"


class RetryError(TidelogError):
    """Nothing was lost; the same call may succeed later."""


class BackpressureError(RetryError):
    """The append queue stayed full until the timeout. No offset was used."""


class DeadlockError(RetryError):
    """Transactions waited for each other in a cycle. This one was aborted: its locks are free, nothing was written.

    Run the whole transaction again, from its first read on.
    """


class DiskFullError(RetryError):
    """The disk is full. New appends are refused until a retried write succeeds.

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
    """Another node has the topic or the engine open, and its heartbeat is recent. Nothing was changed.

    The call succeeds once that node has closed it, or has been silent for its `lease_seconds`. Pass `take_over=True` to
    take it over from that node.
    """


class ServerUnavailableError(RetryError):
    """A client (`tidelog.connect`) got no answer from its server within the timeout, though it tried again.

    What was sent last may have been carried out, or not. What a producer of your own (`topic.producer(name)`) sends
    again with the same sequence is stored once.
    """


class IngestPendingError(RetryError):
    """Rows are committed to a topic, but its owner has not ingested them within the timeout.

    They are safe and are ingested when the owner runs. Writing them again would duplicate them, unless under the same
    name and version.
    """


class StoreUnavailableError(RetryError):
    """A store did not answer, or answered that it is unavailable. A write is undecided: it was done, or not, or will
    be.

    Reads can simply be retried. Before retrying a write, read back what is there.
    """


class ConflictError(TidelogError):
    """A condition of a write did not hold: another writer was first. Nothing was written.

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
    """Another node has claimed the topic. This one can no longer append, ship or delete.

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
    """This kind of store does not support the operation; its `supports_...` properties say so beforehand."""


class NotFoundError(InputError, LookupError):
    """The named thing does not exist."""


class OffsetOutOfRangeError(NotFoundError):
    """The offset was never written, or is no longer kept."""


class DataError(TidelogError):
    """Stored bytes are damaged or missing."""


class CorruptionError(DataError):
    """A file holds bytes that were not written that way. `path` and `byte` say where, `reason` what is wrong."""

    byte: int

    def __init__(
        self,
        message: str,
        *,
        path: str | Path,
        byte: int,
        operation: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, operation=operation, path=path, hint=hint)
        self.byte = byte
        self._place = path  # as it was given: a Path would shorten the slashes of a URL

    @property
    def message(self) -> str:
        return f"{self.reason} at byte {self.byte} of {self._place}"


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
    """Offsets `first` to `last` (inclusive) are missing. With a `unit` ("offset", "LSN") the message names them so."""

    def __init__(
        self,
        message: str,
        *,
        first: int,
        last: int,
        unit: str | None = None,
        path: str | Path | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, path=path, hint=hint)
        self.first = first
        self.last = last
        self.unit = unit

    @property
    def message(self) -> str:
        return self.reason if self.unit is None else f"{offsets_text(self.first, self.last, self.unit)} {self.reason}"


class InternalError(TidelogError):
    """A state that cannot be: a bug in tidelog."""
