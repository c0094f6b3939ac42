"""Object stores through obstore: S3, GCS, Azure, memory, and the reading half of a directory.

obstore runs its requests in threads that a fork does not copy: a child that used it would wait for ever. So a child of
a process that has used it gets an error instead. (Spawned processes are fine.)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal

import obstore
from obstore.exceptions import BaseError

from tidelog.clock import to_microseconds
from tidelog.errors import DataError, InputError, NotFoundError, NotSupportedError
from tidelog.tier.keys import check_key, check_prefix
from tidelog.tier.object_errors import translate, translated
from tidelog.tier.object_store import ObjectInfo, ObjectStore, ObjectWriter, StoredObject
from tidelog.tier.store_settings import DEFAULT_PART_BYTES, DEFAULT_PARTS_IN_FLIGHT

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ObjectStore as Client

_KEYS_PER_PAGE = 1000

Reopen = tuple[Callable[..., ObjectStore], tuple[Any, ...]]


class ObstoreStore(ObjectStore):
    """A store behind obstore. `reopen` is a function and its arguments that open it again in another process."""

    supports_conditional_update = True

    def __init__(
        self, client: Client, url: str, reopen: Reopen | None, *, condition: Literal["e_tag", "version"] = "e_tag"
    ) -> None:
        self.url = url
        self._client = client
        self._reopen = reopen
        # By what the server knows a state of an object again. To our callers it is the etag, whatever it is there.
        self._condition = condition

    # Reading

    def get(self, key: str) -> StoredObject:
        check_key(key)
        with self._asking("get", key):
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
                # Stores disagree on how to say "behind the end"; the size says it for all of them.
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
            raise DataError(f"{self.url} gives its objects no etag, so changes cannot be told apart")
        return etag

    # Being an object

    def _asking(self, operation: str, key: str) -> AbstractContextManager[None]:
        _refuse_in_forked_child()
        return translated(operation, self._place(key))

    def _place(self, key: str) -> str:
        return f"{self.url}{key}" if self.url.endswith("/") else f"{self.url}/{key}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.url}>"

    def __reduce__(self) -> Reopen:
        if self._reopen is None:
            raise InputError(f"{self.url} lives in this process alone and cannot be pickled")
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
            raise DataError(message, operation="publish", hint="Somebody else writes to the same key")
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
