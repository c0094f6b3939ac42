"""What tidelog asks of an object store: one seam, so that every failure can be played in a test.

Invariants
- An object appears whole or not at all, under any failure and to any reader.
- When a write returns, it is durable. When it raises StoreUnavailableError it is undecided, when it raises anything
  else nothing was written.
- NotFoundError means that the object is not there. A store that cannot say so raises something else.
- Listings are in the order of keys. Deleting what is not there is fine.
- Keys are those of `keys.check_key`, relative to the store's URL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import NamedTuple, Self

from tidelog.errors import ClosedError
from tidelog.tier.store_settings import StoreSettings


class ObjectInfo(NamedTuple):
    """What a store knows about an object without reading it."""

    key: str
    size: int
    etag: str
    modified_us: int


class StoredObject(NamedTuple):
    """A small object, whole."""

    data: bytes
    etag: str


class ObjectWriter(ABC):
    """An object on its way into a store. Leaving its `with` publishes it; leaving by an exception removes every trace.

    `published` is there after it was published.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.bytes_written = 0
        self.published: ObjectInfo | None = None
        self._is_open = True

    def write(self, data: bytes | memoryview) -> None:
        """Takes the next bytes; the buffer is the caller's again. Blocks while enough parts are on their way."""
        if not self._is_open:
            raise ClosedError(f"the writer of {self.key} is closed")
        self._write(data)
        self.bytes_written += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if kind is None:
            self.published = self._publish()
        else:
            self._abort()

    @abstractmethod
    def _write(self, data: bytes | memoryview) -> None: ...

    @abstractmethod
    def _publish(self) -> ObjectInfo: ...

    @abstractmethod
    def _abort(self) -> None:
        """Never raises: the exception on its way is the one to be seen."""


class ObjectStore(ABC):
    """An open object store. Threads may share it; a forked child must not use it."""

    url: str
    settings = StoreSettings()
    """How it is reached, and in which pieces it is written and read."""

    @property
    @abstractmethod
    def supports_conditional_update(self) -> bool:
        """Whether `put_if_match` works. (`put_if_absent` always does.)"""

    @abstractmethod
    def get(self, key: str) -> StoredObject:
        """A small object, whole."""

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Up to `length` bytes from `start` on; fewer only at the end of the object, none behind it."""

    def let_go_below(self, key: str, position: int) -> None:
        """A hint: the bytes before `position` are not read again, so memory that holds them can serve for others."""
        return

    @abstractmethod
    def head(self, key: str) -> ObjectInfo: ...

    @abstractmethod
    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """What is below a prefix (empty, or ending in a slash), by key; fetched as it is consumed where possible.

        The etags in it are for telling objects apart. For `put_if_match`, take that of `get` or `head`.
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> str:
        """Writes a small object, replacing what was there. Returns its etag."""

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> str:
        """Writes a small object that must not be there yet, else ConflictError. Returns its etag."""

    @abstractmethod
    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replaces an object that must have this etag, else ConflictError. Returns the new one.

        The etag of many stores is a checksum of the content: whoever relies on it makes every content different.
        """

    @abstractmethod
    def open_writer(self, key: str) -> ObjectWriter:
        """For large objects: sent in parts while it is written. Replaces what was there."""

    @abstractmethod
    def copy(self, source: str, target: str) -> None:
        """Copies inside the store, replacing what was there."""

    @abstractmethod
    def delete(self, keys: str | Iterable[str]) -> None:
        """Removes one object, or many at once."""

    def remove_folder(self, prefix: str) -> None:
        """Where a prefix is a folder it goes, if it is empty. Only for one that nobody writes to any more."""
        return

    def unfinished_uploads(self, prefix: str = "", *, modified_before_us: int | None = None) -> Iterator[ObjectInfo]:
        """What writers that died were writing, below a prefix, in no order. Their keys are good for nothing else.

        One that is still at work has a young `modified_us`: give it time with `modified_before_us`. Nothing is found
        where the client cannot say: servers know their multipart uploads (SeaweedFS lists those of dead clients, as
        S3 does), but obstore has no call to ask for them, and its listings do not show them. A lifecycle rule of the
        bucket removes them.
        """
        return iter(())

    def delete_unfinished(self, uploads: Iterable[ObjectInfo]) -> None:
        """Removes what `unfinished_uploads` found, except where it was written to since then."""
        assert not list(uploads), "this store finds none"
