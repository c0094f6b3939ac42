"""Object stores through obstore: S3, GCS, Azure, memory, and the reading half of a shared directory.

obstore runs its requests in threads that a fork does not copy: a child that used it would hang. So a child of
a process that has used it gets an error instead. (Spawned processes are fine.)
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.exceptions import NotSupportedError as NotSupportedByClientError

from tidelog.clock import to_microseconds
from tidelog.errors import (
    AccessDeniedError,
    ConfigError,
    ConflictError,
    DataError,
    InputError,
    NotFoundError,
    NotSupportedError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.store.keys import check_key, check_prefix
from tidelog.store.object_store import ObjectInfo, ObjectStore, ObjectWriter, StoredObject
from tidelog.store.settings import DEFAULT_PART_BYTES, DEFAULT_PARTS_IN_FLIGHT

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ObjectStore as Client


# Translates the answers of an object store into tidelog errors, sorted by what the caller does next.
#
# Invariants
# - "Not found" is trusted only where the answer says that the object is missing. A missing bucket, or a 404 of some
#   proxy in between, must never pass for an empty catalog.
# - A refused condition is a conflict only if it is certain that nothing was written: after a retry inside the client,
#   the write that was first may have been the first attempt. Then the outcome is undecided.
# - An error not known to be permanent counts as transient. Retrying costs time; giving up on data that is there costs
#   more.
# - No message contains the query of a URL: some stores carry a signature there.


_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,80})</Code>")
_RETRIED = re.compile(r"after [1-9]\d* retries")
_QUERY = re.compile(r"\?\S+")
_MAX_REASON_CHARACTERS = 300

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "InvalidBucketName", "without LOCATION")
# What S3 and GCS, Azure, a directory and memory say when there is no such object.
_NO_OBJECT = ("NoSuchKey", "BlobNotFound", "(os error 2)", "(os error 20)", "is directory", "No data in memory found")
_DENIED = ("ExpiredToken", "InvalidToken", "AuthorizationHeaderMalformed", "(os error 13)", "(os error 1)")
_PASSING = ("RequestTimeout", "SlowDown", "ServerBusy", "OperationTimedOut")
_PASSING_STATUSES = (408, 409, 425, 429)


@contextlib.contextmanager
def translated(operation: str, place: str) -> Iterator[None]:
    """Translates errors of the client into tidelog's; `place` is what they call the store or object."""
    try:
        yield
    except (BaseError, OSError, NotImplementedError, ValueError) as error:
        if isinstance(error, TidelogError):
            raise
        # A traceback would print the original, query and all.
        raise translate(error, operation, place) from (None if "sig=" in str(error) else error)


def translate(error: Exception, operation: str, place: str) -> TidelogError:
    """Our error for one of the client's."""
    text = str(error)
    reason = _reason(text)
    if isinstance(error, NotImplementedError | NotSupportedByClientError):
        return NotSupportedError(f"{place}: the store cannot do that ({reason})", operation=operation)
    if isinstance(error, AlreadyExistsError | PreconditionError):
        return _conflict(text, operation, place)
    if any(mark in text for mark in _NO_BUCKET):
        hint = "tidelog does not create buckets: check the name, the region and the endpoint"
        bucket = place.partition("://")[2].partition("/")[0] or place
        return ConfigError(f"bucket {bucket!r} does not exist ({reason})", hint=hint)
    if isinstance(error, FileNotFoundError):
        return _not_found(text, operation, place)
    if isinstance(error, ValueError):
        return InputError(f"{place}: {reason}", operation=operation)
    return _by_status(error, text, operation, place)


def _conflict(text: str, operation: str, place: str) -> TidelogError:
    if _RETRIED.search(text):
        message = f"{place}: it is unknown whether an earlier attempt was written"
        return StoreUnavailableError(message, operation=operation, hint="Read it back")
    return ConflictError(
        f"{place}: another writer changed it first",
        operation=operation,
        hint="Read it again, then decide whether to write",
    )


def _says_no_object(error: object) -> bool:
    """Whether a 404 is about the object, and not about the bucket."""
    return any(mark in str(error) for mark in _NO_OBJECT)


def _not_found(text: str, operation: str, place: str) -> TidelogError:
    if _says_no_object(text):
        return NotFoundError(f"{place}: there is no such object", operation=operation)
    return StoreUnavailableError(f"{place}: the store answered 404 without saying what is missing", operation=operation)


def _by_status(error: Exception, text: str, operation: str, place: str) -> TidelogError:
    found = _STATUS.search(text)
    status = int(found[1]) if found else None
    reason = _reason(text)
    is_denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403)
    if is_denied or any(mark in text for mark in _DENIED):
        hint = "Check the key (store_access_key_id, AWS_ACCESS_KEY_ID, ...), its rights, and this machine's clock"
        return AccessDeniedError(f"{place}: access is denied ({reason})", operation=operation, hint=hint)
    is_passing = status is None or status >= 500 or status in _PASSING_STATUSES
    if is_passing or any(mark in text for mark in _PASSING):
        hint = "Check the network and the endpoint (store_endpoint, AWS_ENDPOINT_URL), or try again later"
        return StoreUnavailableError(f"{place}: the store is not available ({reason})", operation=operation, hint=hint)
    return InputError(f"{place}: the store refused the request ({reason})", operation=operation)


def _reason(text: str) -> str:
    """Status and code where there are any, else the beginning of what the client said, without queries."""
    status, code = _STATUS.search(text), _CODE.search(text)
    if status:
        return f"{status[1]} {code[1]}" if code else status[1]
    said = _QUERY.sub("?...", text.partition("\n\nDebug source")[0])
    return said[:_MAX_REASON_CHARACTERS]


_KEYS_PER_PAGE = 1000

Reopen = tuple[Callable[..., ObjectStore], tuple[Any, ...]]


class ObstoreStore(ObjectStore):
    """A store accessed through obstore. `reopen` is a function and its arguments that open it in another process."""

    supports_conditional_update = True

    def __init__(
        self,
        client: Client,
        url: str,
        reopen: Reopen | None,
        *,
        condition: Literal["e_tag", "version"] = "e_tag",
        identity: Hashable | None = None,
    ) -> None:
        self.url = url
        self.identity = identity
        self._client = client
        self._reopen = reopen
        # What identifies a version of an object at the server. Callers see it as the etag.
        self._condition = condition

    # Reading

    def get(self, key: str) -> StoredObject:
        check_key(key)
        with self._asking("get", key):
            return self._got(key)

    def find(self, key: str) -> StoredObject | None:
        check_key(key)
        try:
            with self._asking("get", key):
                try:
                    return self._got(key)
                except FileNotFoundError as error:
                    if not _says_no_object(error):
                        raise
        except NotFoundError:
            pass  # what is in the way of such an object
        return None

    def _got(self, key: str) -> StoredObject:
        found = obstore.get(self._client, key)
        return StoredObject(bytes(found.bytes()), self._etag(found.meta))

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        check_key(key)
        if start < 0 or length < 0:
            raise InputError(f"{key} has no bytes {start} to {start + length}")
        with self._asking("read", key):
            try:
                return memoryview(obstore.get_range(self._client, key, start=start, length=max(length, 1)))[:length]
            except BaseError as error:
                # Stores disagree on how to report a range past the end; the size decides for all of them.
                if start >= self.head(key).size:
                    return memoryview(b"")
                raise translate(error, "read", self._place(key)) from error

    def head(self, key: str) -> ObjectInfo:
        check_key(key)
        with self._asking("head", key):
            try:
                return self._info(obstore.head(self._client, key))
            except FileNotFoundError:
                # The answer to HEAD has no body, so it cannot say what is missing, the object or the bucket. GET can.
                return self._info(obstore.get(self._client, key).meta)

    def exists(self, key: str) -> bool:
        check_key(key)
        with self._asking("head", key), contextlib.suppress(FileNotFoundError):
            obstore.head(self._client, key)
            return True
        return self.find(key) is not None  # only the answer to GET says what is missing: see `head`

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._asking("list", prefix):
            pages = iter(obstore.list(self._client, prefix or None, offset=start_after, chunk_size=_KEYS_PER_PAGE))
        while True:
            with self._asking("list", prefix):
                page = next(pages, None)
            if page is None:
                return
            yield from map(self._info, page)

    # Writing

    def put(self, key: str, data: bytes) -> str:
        check_key(key)
        with self._asking("put", key):
            return self._etag(obstore.put(self._client, key, data, use_multipart=False))

    def put_if_absent(self, key: str, data: bytes) -> str:
        check_key(key)
        with self._asking("create", key):
            return self._etag(obstore.put(self._client, key, data, mode="create"))

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        check_key(key)
        if not self.supports_conditional_update:
            raise NotSupportedError(
                f"{self._place(key)}: this store cannot replace on a condition", operation="replace"
            )
        mode: UpdateVersion = {"e_tag": etag} if self._condition == "e_tag" else {"version": etag}
        with self._asking("replace", key):
            return self._etag(obstore.put(self._client, key, data, mode=mode))

    def open_writer(self, key: str) -> ObjectWriter:
        check_key(key)
        return _MultipartWriter(self, key)

    def copy(self, source: str, target: str) -> None:
        check_key(source)
        check_key(target)
        with self._asking("copy", source):
            obstore.copy(self._client, source, target)

    def delete(self, keys: str | Iterable[str]) -> None:
        several = [check_key(key) for key in ([keys] if isinstance(keys, str) else keys)]
        if not several:
            return
        try:
            with self._asking("delete", several[0]):
                obstore.delete(self._client, several)
        except NotFoundError:
            if len(several) > 1:
                for key in several:
                    self.delete(key)

    def _info(self, meta: ObjectMeta) -> ObjectInfo:
        return ObjectInfo(meta["path"], meta["size"], self._etag(meta), to_microseconds(meta["last_modified"]))

    def _etag(self, meta: ObjectMeta | PutResult) -> str:
        etag = meta[self._condition] or meta["e_tag"]  # listings have the latter alone
        if not etag:
            raise DataError(f"{self.url} returns no etags, so tidelog cannot detect changes")
        return etag

    # Being an object

    @contextlib.contextmanager
    def _asking(self, operation: str, key: str) -> Iterator[None]:
        _refuse_in_forked_child()
        with translated(operation, self._place(key)):
            yield
        self.answers += 1

    def _place(self, key: str) -> str:
        return f"{self.url}{key}" if self.url.endswith("/") else f"{self.url}/{key}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def __reduce__(self) -> Reopen:
        if self._reopen is None:
            raise InputError(f"{self.url} exists only in this process and cannot be pickled")
        return self._reopen


class _MultipartWriter(ObjectWriter):
    def __init__(self, store: ObstoreStore, key: str) -> None:
        super().__init__(key)
        self._store = store
        part_bytes = store.settings.store_part_bytes or DEFAULT_PART_BYTES
        at_once = store.settings.store_parts_in_flight or DEFAULT_PARTS_IN_FLIGHT
        with store._asking("write", key):
            self._parts = obstore.open_writer(store._client, key, buffer_size=part_bytes, max_concurrency=at_once)

    def _write(self, data: bytes | memoryview) -> None:
        with self._store._asking("write", self.key):
            self._parts.write(_unchanging(data))

    def _publish(self) -> ObjectInfo:
        with self._store._asking("publish", self.key):
            self._parts.close()
        info = self._store.head(self.key)
        if info.size != self.bytes_written:
            message = f"{self.key} has {info.size} bytes in the store, {self.bytes_written} were written"
            raise DataError(message, operation="publish", hint="Another process writes to the same key")
        return info

    def _abort(self) -> None:
        try:
            self._parts.__exit__(RuntimeError, RuntimeError("aborted"), None)
        except (BaseError, OSError, ValueError):
            return  # the store is out of reach; what it was sent is not visible, and its own lifecycle rule removes it


def _unchanging(data: bytes | memoryview) -> bytes | memoryview:
    """obstore sends a part later, from the buffer that it was given: one that could be reused meanwhile is copied."""
    is_constant = isinstance(data, bytes) or isinstance(data.obj, bytes)
    return data if is_constant else bytes(data)


_used_by_pid: int | None = None


def _refuse_in_forked_child() -> None:
    global _used_by_pid
    pid = os.getpid()
    if _used_by_pid is None:
        _used_by_pid = pid
    if _used_by_pid != pid:
        raise InputError(
            "an object store was used before this process was forked, and does not work in the child",
            hint='Start processes with "spawn", or open stores in the children only',
        )
