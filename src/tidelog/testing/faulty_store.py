"""An in-memory object store that dies and fails where a test says so.

Invariants
- It keeps the contract of `tidelog.store.object_store.ObjectStore` (one suite runs over this and the real ones).
- A changing call is numbered together with those of the disk that shares its `Faults`. Deleting many keys at once
  counts as that many calls, since no store deletes them in one step.
- An upload whose writer died is listed by `unfinished_uploads`, and never becomes an object.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, NoReturn, Self, get_args

from tidelog.clock import Clock, SystemClock
from tidelog.errors import ConflictError, InputError, NotFoundError, NotSupportedError
from tidelog.store.keys import check_key, check_prefix, is_node_key
from tidelog.store.metadata.base import Check, Delete, Entry, MetadataStore, Put, Write
from tidelog.store.metadata.memory import MemoryMetadataStore
from tidelog.store.object_store import ObjectInfo, ObjectStore, ObjectWriter, StoredObject
from tidelog.testing.faults import STORE_FAULTS, Call, Faults, StoreFailure
from tidelog.testing.remote import Client, OnRequest, Server

# The content of a faulty object store: objects, and uploads that were begun.
#
# Invariants
# - An etag is used once, even where contents are equal or an object is created again.
# - The parts of an upload are not visible as an object before it is completed. Its id is `<key>#<number>`, no key.
# - A condition is evaluated in the same step in which the object changes. (The caller holds the lock.)


class HeldObject(NamedTuple):
    """An object and what the store knows about it."""

    data: bytes
    etag: str
    modified_us: int

    def info(self, key: str) -> ObjectInfo:
        return ObjectInfo(key, len(self.data), self.etag, self.modified_us)


class Upload(NamedTuple):
    """The parts of an object that is not published yet."""

    key: str
    parts: tuple[bytes, ...]
    etag: str
    modified_us: int

    def info(self, upload_id: str) -> ObjectInfo:
        return ObjectInfo(upload_id, sum(map(len, self.parts)), self.etag, self.modified_us)


class Objects:
    """Everything in one store."""

    def __init__(self) -> None:
        self.objects: dict[str, HeldObject] = {}
        self.uploads: dict[str, Upload] = {}
        self._last_number = 0

    def copy(self) -> Objects:
        """The contents themselves are shared: they never change."""
        fresh = Objects()
        fresh.objects = dict(self.objects)
        fresh.uploads = dict(self.uploads)
        fresh._last_number = self._last_number
        return fresh

    def image(self) -> object:
        """Equal for two that show the same, etags and times included."""
        return dict(self.objects), dict(self.uploads)

    def find(self, key: str) -> HeldObject:
        """NotFoundError when it is not there."""
        found = self.objects.get(key)
        if found is None:
            raise NotFoundError(f"{key}: there is no such object")
        return found

    def page(self, prefix: str, start_after: str | None, limit: int) -> list[ObjectInfo]:
        keys = sorted(self.objects)
        start = bisect_left(keys, prefix)
        if start_after is not None:
            start = max(start, bisect_right(keys, start_after))
        found = [key for key in keys[start : start + limit] if key.startswith(prefix)]
        return [self.objects[key].info(key) for key in found]

    def put(self, key: str, data: bytes, now_us: int) -> ObjectInfo:
        """Replaces what was there."""
        self.objects[key] = HeldObject(data, self._next_etag(), now_us)
        return self.objects[key].info(key)

    def put_if_absent(self, key: str, data: bytes, now_us: int) -> ObjectInfo:
        """ConflictError when something is there."""
        if key in self.objects:
            raise _conflict(key)
        return self.put(key, data, now_us)

    def put_if_match(self, key: str, data: bytes, etag: str, now_us: int) -> ObjectInfo:
        """ConflictError when something else is there, or nothing."""
        if key not in self.objects or self.objects[key].etag != etag:
            raise _conflict(key)
        return self.put(key, data, now_us)

    def copy_object(self, source: str, target: str, now_us: int) -> None:
        """Replaces what was at the target."""
        self.put(target, self.find(source).data, now_us)

    def delete(self, key: str) -> None:
        """Deletes an object; it need not exist."""
        self.objects.pop(key, None)

    def begin_upload(self, key: str, now_us: int) -> str:
        upload_id = f"{key}#{self._next_number()}"
        self.uploads[upload_id] = Upload(key, (), self._next_etag(), now_us)
        return upload_id

    def add_part(self, upload_id: str, data: bytes, now_us: int) -> None:
        """Takes the next bytes."""
        upload = self._upload(upload_id)
        self.uploads[upload_id] = Upload(upload.key, (*upload.parts, data), self._next_etag(), now_us)

    def complete_upload(self, upload_id: str, now_us: int) -> ObjectInfo:
        """Makes it an object, all at once."""
        upload = self._upload(upload_id)
        del self.uploads[upload_id]
        return self.put(upload.key, b"".join(upload.parts), now_us)

    def abort_upload(self, upload_id: str) -> None:
        """Forgets what was sent."""
        self.uploads.pop(upload_id, None)

    def _upload(self, upload_id: str) -> Upload:
        if upload_id not in self.uploads:
            raise NotFoundError(f"there is no such upload: {upload_id}")
        return self.uploads[upload_id]

    def delete_upload(self, listed: ObjectInfo) -> None:
        """Forgets an upload, unless something was sent since it was listed."""
        upload = self.uploads.get(listed.key)
        if upload is not None and upload.info(listed.key) == listed:
            self.abort_upload(listed.key)

    def _next_etag(self) -> str:
        return f'"{self._next_number():016x}"'

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number


def _conflict(key: str) -> ConflictError:
    return ConflictError(f"{key}: another writer changed it first", hint="Read it again, then decide whether to write")


ChangingRequest = Literal[
    "put",
    "put_if_absent",
    "put_if_match",
    "begin_upload",
    "upload_part",
    "publish",
    "abort_upload",
    "copy",
    "delete",
    "delete_upload",
]
LookingRequest = Literal["get", "read_range", "head", "list", "list_uploads"]
DEFAULT_PART_BYTES = 8 << 20
KEYS_PER_PAGE = 1000


class FaultyStore(Client[Objects], ObjectStore):
    """An object store in memory. Give it to the product in place of a real one.

    crash_at            the changing call with this number (from 1) raises Crash; `after_crash` has it done or not done
    on_call             called with every changing call before it takes effect, on the calling thread
    faults              in place of those two: what is shared with a disk, so that their calls have one numbering
    on_request          called with (operation, key) of every request, reading ones too; it may wait, or raise
    part_bytes          a writer sends a part as soon as it has so much; what stays below it is sent when published
    conditional_update  whether `put_if_match` works
    clock               where the objects get their time from
    """

    url = "memory://"
    operations = frozenset(get_args(ChangingRequest) + get_args(LookingRequest))
    reading_operations = frozenset({"get", "read_range"})
    possible_faults = frozenset(STORE_FAULTS)

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        on_call: Callable[[Call], None] | None = None,
        faults: Faults | None = None,
        on_request: OnRequest | None = None,
        part_bytes: int = DEFAULT_PART_BYTES,
        conditional_update: bool = True,
        clock: Clock | None = None,
    ) -> None:
        shared = faults or Faults(crash_at=crash_at, on_call=on_call)
        super().__init__(Server(Objects()), shared.sharing("store"), on_request)
        self.part_bytes = part_bytes
        self._conditional_update = conditional_update
        self._clock = clock or SystemClock()

    # For tests: inspects and changes the content without the product

    def contents(self) -> dict[str, bytes]:
        """Every object with its content. Also in a dead process."""
        return self._read(lambda held: {key: held.objects[key].data for key in sorted(held.objects)})

    def end_leases(self) -> None:
        """Ends the leases that are kept in this bucket. No call is counted, and none fails."""
        for key in filter(is_node_key, self.contents()):
            self._server.do(lambda held, key=key: held.delete(key))  # type: ignore[misc]  # binds the loop's value

    def uploads(self) -> dict[str, bytes]:
        """Unfinished uploads, by id. Also in a dead process."""
        return self._read(lambda held: {name: b"".join(held.uploads[name].parts) for name in sorted(held.uploads)})

    def tamper(self, key: str, data: bytes) -> None:
        """Changes the content of an object at rest: no call, the same etag, the same time."""
        with self._server.lock:
            objects = self._server.content.objects
            objects[key] = self._server.content.find(key)._replace(data=data)

    # Reading

    @property
    def supports_conditional_update(self) -> bool:
        return self._conditional_update

    def get(self, key: str) -> StoredObject:
        failure = self._look("get", check_key(key))
        found = self._read(lambda held: held.find(key))
        data = failure.damaged(found.data) if failure else found.data
        self._meter.answered(len(data))
        return StoredObject(data, found.etag)

    def read_range(self, key: str, start: int, length: int) -> memoryview:
        check_key(key)
        if start < 0 or length < 0:
            raise InputError(f"{key} has no bytes {start} to {start + length}")
        failure = self._look("read_range", key)
        view = memoryview(self._read(lambda held: held.find(key)).data)[start : start + length]
        if failure:
            view = memoryview(failure.damaged(bytes(view)))
        self._meter.answered(len(view))
        return view

    def head(self, key: str) -> ObjectInfo:
        self._look("head", check_key(key))
        return self._read(lambda held: held.find(key)).info(key)

    def list(self, prefix: str = "", *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        return self._pages(check_prefix(prefix), start_after)

    def unfinished_uploads(self, prefix: str = "", *, modified_before_us: int | None = None) -> Iterator[ObjectInfo]:
        self._look("list_uploads", check_prefix(prefix))
        infos = self._read(lambda held: [upload.info(name) for name, upload in sorted(held.uploads.items())])
        for info in infos:
            if info.key.startswith(prefix) and (modified_before_us is None or info.modified_us < modified_before_us):
                yield info

    def _pages(self, prefix: str, start_after: str | None) -> Iterator[ObjectInfo]:
        """One request a page, when it is needed; what changes meanwhile is in it or not."""
        while True:
            self._look("list", prefix)
            page = self._read(lambda held, after=start_after: held.page(prefix, after, KEYS_PER_PAGE))  # type: ignore[misc]
            yield from page
            if len(page) < KEYS_PER_PAGE:
                return
            start_after = page[-1].key

    # Writing

    def put(self, key: str, data: bytes) -> str:
        return self._put("put", key, data, lambda held, whole, now_us: held.put(key, whole, now_us))

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._put("put_if_absent", key, data, lambda held, whole, now_us: held.put_if_absent(key, whole, now_us))

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        if not self._conditional_update:
            raise NotSupportedError(f"{self.url} cannot replace on a condition")
        return self._put(
            "put_if_match", key, data, lambda held, whole, now_us: held.put_if_match(key, whole, etag, now_us)
        )

    def open_writer(self, key: str) -> ObjectWriter:
        return _FaultyWriter(self, check_key(key))

    def copy(self, source: str, target: str) -> None:
        check_key(source)
        now_us = self._clock.now_us()
        self._request("copy", check_key(target))
        self._change("copy", target, lambda held: held.copy_object(source, target, now_us))

    def delete(self, keys: str | Iterable[str]) -> None:
        names = [check_key(key) for key in ([keys] if isinstance(keys, str) else keys)]
        for start in range(0, len(names), KEYS_PER_PAGE):
            self._request("delete", names[start])
            for name in names[start : start + KEYS_PER_PAGE]:
                self._change("delete", name, lambda held, key=name: held.delete(key))  # type: ignore[misc]

    def delete_unfinished(self, uploads: Iterable[ObjectInfo]) -> None:
        for upload in uploads:
            if "#" not in upload.key:
                raise InputError(f"{upload.key} is not an unfinished object")
            self._request("delete_upload", upload.key)
            self._change("delete_upload", upload.key, lambda held, listed=upload: held.delete_upload(listed))  # type: ignore[misc]

    def _put(
        self, operation: ChangingRequest, key: str, data: bytes, effect: Callable[[Objects, bytes, int], ObjectInfo]
    ) -> str:
        check_key(key)
        whole, now_us = bytes(data), self._clock.now_us()
        self._request(operation, key, bytes_written=len(whole))
        return self._change(operation, key, lambda held: effect(held, whole, now_us)).etag

    # Being an object

    def _connected_to(self, server: Server[Objects], faults: Faults) -> Self:
        fresh = type(self)(
            faults=faults,
            part_bytes=self.part_bytes,
            conditional_update=self._conditional_update,
            clock=self._clock,
        )
        fresh._server = server
        return fresh

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.contents())} objects>"

    def __reduce__(self) -> NoReturn:
        raise InputError(f"{self.url} exists only in this process and cannot be pickled")


class _FaultyWriter(ObjectWriter):
    """Sends parts one after the other. A publication that failed leaves the upload where it is, as servers do."""

    def __init__(self, store: FaultyStore, key: str) -> None:
        super().__init__(key)
        store.faults.check_alive()
        self._store = store
        self._waiting = bytearray()
        self._upload_id: str | None = None

    def _write(self, data: bytes | memoryview) -> None:
        self._store.faults.check_alive()
        self._waiting += data
        while len(self._waiting) >= self._store.part_bytes:
            self._send(bytes(self._waiting[: self._store.part_bytes]))
            del self._waiting[: self._store.part_bytes]

    def _publish(self) -> ObjectInfo:
        store, rest = self._store, bytes(self._waiting)
        now_us = store._clock.now_us()
        if self._upload_id is None:
            store._request("publish", self.key, bytes_written=len(rest))
            return store._change("publish", self.key, lambda held: held.put(self.key, rest, now_us))
        if rest:
            self._send(rest)
        upload_id = self._upload_id
        store._request("publish", self.key)
        return store._change("publish", self.key, lambda held: held.complete_upload(upload_id, now_us))

    def _abort(self) -> None:
        upload_id, store = self._upload_id, self._store
        # A dead writer sends nothing, and the exception being propagated is its cause of death.
        if upload_id is not None and not store.crashed:
            try:
                store._request("abort_upload", self.key)
                store._change("abort_upload", self.key, lambda held: held.abort_upload(upload_id))
            except Exception:  # noqa: BLE001  # the exception being propagated is the one to be seen
                return

    def _send(self, part: bytes) -> None:
        store, now_us = self._store, self._store._clock.now_us()
        if self._upload_id is None:
            store._request("begin_upload", self.key)
            self._upload_id = store._change("begin_upload", self.key, lambda held: held.begin_upload(self.key, now_us))
        upload_id = self._upload_id
        store._request("upload_part", self.key, bytes_written=len(part))
        store._change("upload_part", self.key, lambda held: held.add_part(upload_id, part, now_us))


# An in-memory metadata store that dies and fails where a test says so.
#
# Invariants
# - It keeps the contract of `tidelog.store.metadata.MetadataStore` (one suite runs over this and the real ones).
# - A commit is one numbered, atomic call. `put` and `delete` are commits.
# - With `multi_key=False` it offers what a bucket offers: one key at a time.


MetadataRequest = Literal["get", "range", "keys", "floor", "commit"]


class Entries(MemoryMetadataStore):
    """What the faulty store holds: a memory store that can be copied."""

    def copy(self) -> Entries:
        """The entries themselves are shared: they never change."""
        fresh = Entries()
        with self._guard:
            fresh._entries = dict(self._entries)
            fresh._last_version = self._last_version
        return fresh

    def image(self) -> object:
        """Equal for two that show the same, versions included."""
        with self._guard:
            return dict(self._entries)


class FaultyMetadata(Client[Entries], MetadataStore):
    """A metadata store in memory. Give it to the product in place of a real one.

    crash_at    the changing call with this number (from 1) raises Crash; `after_crash` has it done or not done
    on_call     called with every changing call before it takes effect, on the calling thread
    faults      in place of those two: what is shared with a disk or a store, so that their calls have one numbering
    on_request  called with (operation, keys) of every request, reading ones too; it may wait, or raise
    multi_key   whether one commit may name several keys
    """

    url = "memory://"
    supports_leases = False
    operations = frozenset(get_args(MetadataRequest))
    reading_operations = frozenset({"get", "range", "floor"})
    possible_faults = frozenset(STORE_FAULTS) - {"not_found"}

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        on_call: Callable[[Call], None] | None = None,
        faults: Faults | None = None,
        on_request: OnRequest | None = None,
        multi_key: bool = True,
    ) -> None:
        shared = faults or Faults(crash_at=crash_at, on_call=on_call)
        super().__init__(Server(Entries()), shared.sharing("metadata"), on_request)
        self._multi_key = multi_key

    @property
    def supports_multi_key(self) -> bool:
        return self._multi_key

    @property
    def floor_is_cheap(self) -> bool:
        return self._multi_key

    def contents(self) -> dict[str, bytes]:
        """Every key with its value. Also in a dead process."""
        return self._read(lambda held: {entry.key: entry.value for entry in held.range("")})

    def end_leases(self) -> None:
        """Ends the leases of all nodes. No call is counted, and none fails."""
        writes = [Delete(key) for key in self.contents() if is_node_key(key)]
        self._read(lambda held: held.commit([], writes))

    def get(self, key: str) -> Entry | None:
        failure = self._look("get", check_key(key))
        return self._one(self._read(lambda held: held.get(key)), failure)

    def floor(self, prefix: str, key: str) -> Entry | None:
        check_prefix(prefix)
        failure = self._look("floor", check_key(key))
        return self._one(self._read(lambda held: held.floor(prefix, key)), failure)

    def close(self) -> None:
        """Nothing to give back."""

    def _range(self, prefix: str, start: str, limit: int | None) -> list[Entry]:
        failure = self._look("range", prefix)
        return self._arrived(self._read(lambda held: held.range(prefix, start=start, limit=limit)), failure)

    def _keys(self, prefix: str, start: str, limit: int | None) -> list[str]:
        self._look("keys", prefix)
        return self._read(lambda held: held.keys(prefix, start=start, limit=limit))

    def _commit(self, checks: Sequence[Check], writes: Sequence[Write]) -> Mapping[str, str]:
        # A caller that keeps using these lists must not change what is done late.
        checked, written = list(checks), list(writes)
        place = ",".join(dict.fromkeys(change.key for change in (*written, *checked)))
        sent_bytes = sum(len(write.value) for write in written if isinstance(write, Put))
        self._request("commit", place, bytes_written=sent_bytes)
        return self._change("commit", place, lambda held: held.commit(checked, written))

    def _one(self, entry: Entry | None, failure: StoreFailure | None) -> Entry | None:
        return None if entry is None else self._arrived([entry], failure)[0]

    def _arrived(self, entries: Iterable[Entry], failure: StoreFailure | None) -> list[Entry]:
        found = [entry._replace(value=failure.damaged(entry.value)) if failure else entry for entry in entries]
        self._meter.answered(sum(len(entry.value) for entry in found))
        return found

    def _connected_to(self, server: Server[Entries], faults: Faults) -> Self:
        fresh = type(self)(faults=faults, multi_key=self._multi_key)
        fresh._server = server
        return fresh

    def __reduce__(self) -> NoReturn:
        raise InputError(f"{self.url} exists only in this process and cannot be pickled")
