"""The object store interface: the only access to object stores, so that tests can inject every failure.

Invariants
- Objects are atomic: under any failure, every reader sees an object whole or not at all.
- When a write returns, it is durable. When it raises StoreUnavailableError it is undecided, when it raises anything
  else nothing was written.
- NotFoundError means that the object does not exist. A store that cannot tell raises something else.
- Listings are in key order. Deleting a missing object is not an error.
- Keys are those of `keys.check_key`, relative to the store's URL.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator
from types import TracebackType
from typing import NamedTuple, Self

from tidelog.errors import ClosedError, NotFoundError
from tidelog.store.settings import StoreSettings


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
    """An object being written to a store. Leaving its `with` publishes it; leaving by an exception removes every trace.

    `published` is set after it was published.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.bytes_written = 0
        self.published: ObjectInfo | None = None
        self._is_open = True

    def write(self, data: bytes | memoryview) -> None:
        """Writes the next bytes; the caller may reuse the buffer. Blocks while enough parts are in flight."""
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
        """Never raises: the exception being propagated is the one to be seen."""


class ObjectStore(ABC):
    """An open object store. Threads may share it; a forked child must not use it."""

    url: str
    settings = StoreSettings()
    """How it is reached, and in which pieces it is written and read."""
    identity: Hashable | None = None
    """The same for all that this process opens of one store, where the etags in listings are those of reads, and no
    content ever has the etag of another; else None."""
    answers = 0
    """How many requests were answered, where that is counted: while there are more, it is in reach, however slow."""

    @property
    @abstractmethod
    def supports_conditional_update(self) -> bool:
        """Whether `put_if_match` works. (`put_if_absent` always does.)"""

    @abstractmethod
    def get(self, key: str) -> StoredObject:
        """A small object, whole."""

    def find(self, key: str) -> StoredObject | None:
        """As `get`, for those who expect that there may be none."""
        try:
            return self.get(key)
        except NotFoundError:
            return None

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> memoryview:
        """Up to `length` bytes from `start` on; fewer only at the end of the object, none after it."""

    def let_go_below(self, key: str, position: int) -> None:
        """A hint: the bytes before `position` are not read again, so memory that holds them can serve for others."""
        return

    @abstractmethod
    def head(self, key: str) -> ObjectInfo: ...

    def exists(self, key: str) -> bool:
        """Whether there is such an object: `head` for those who expect that there is none."""
        try:
            self.head(key)
        except NotFoundError:
            return False
        return True

    @abstractmethod
    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        """The objects below a prefix (empty, or ending in a slash), by key; fetched as it is consumed where possible.

        The etags in it are for telling objects apart. For `put_if_match`, use that of `get` or `head`.
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

        The etag of many stores is a checksum of the content: a caller that relies on it makes every content different.
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
        """Removes the folder of a prefix, if it is one and empty. Only for one that is no longer written to."""
        return

    def unfinished_uploads(self, prefix: str = "", *, modified_before_us: int | None = None) -> Iterator[ObjectInfo]:
        """Uploads that dead writers left below a prefix, in no order. Their keys have no other use.

        One still in progress has a recent `modified_us`: exclude it with `modified_before_us`. Nothing is found where
        the client cannot tell: servers know their multipart uploads (SeaweedFS lists those of dead clients, as S3
        does), but obstore has no call to list them, and its listings do not show them. A lifecycle rule of the bucket
        removes them.
        """
        return iter(())

    def delete_unfinished(self, uploads: Iterable[ObjectInfo]) -> None:
        """Removes what `unfinished_uploads` found, except where it was written to since then."""
        assert not list(uploads), "this store finds none"
