"""An object store in memory that dies and fails where a test says so.

Invariants
- It keeps the contract of `tidelog.tier.object_store.ObjectStore` (one suite runs over this and the real ones).
- A changing call is numbered with those of the disk that shares its `Faults`. Many keys that are deleted at once are as
  many calls, since no store deletes them in one step.
- An upload whose writer died is there for `unfinished_uploads`, and never an object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NoReturn, Self, get_args

from tidelog.clock import Clock, SystemClock
from tidelog.errors import InputError, NotSupportedError
from tidelog.testing.faults import Call, Faults
from tidelog.testing.objects import Objects
from tidelog.testing.remote import Client, OnRequest, Server
from tidelog.testing.store_failures import STORE_FAULTS
from tidelog.tier.keys import check_key, check_prefix, is_node_key
from tidelog.tier.object_store import ObjectInfo, ObjectStore, ObjectWriter, StoredObject

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

    # What a test sees and does behind the back of the product

    def contents(self) -> dict[str, bytes]:
        """Every object with its content. Also in a dead process."""
        return self._read(lambda held: {key: held.objects[key].data for key in sorted(held.objects)})

    def end_leases(self) -> None:
        """The heartbeats that are kept in this bucket have run out. No call is counted, and none fails."""
        for key in filter(is_node_key, self.contents()):
            self._server.do(lambda held, key=key: held.delete(key))  # type: ignore[misc]  # binds the loop's value

    def uploads(self) -> dict[str, bytes]:
        """What was begun and neither published nor aborted, by the id of the upload. Also in a dead process."""
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
            page = self._read(lambda held, behind=start_after: held.page(prefix, behind, KEYS_PER_PAGE))  # type: ignore[misc]
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
        raise InputError(f"{self.url} lives in this process alone and cannot be pickled")


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
        # The dead send nothing, and what they died of is the exception on its way.
        if upload_id is not None and not store.crashed:
            try:
                store._request("abort_upload", self.key)
                store._change("abort_upload", self.key, lambda held: held.abort_upload(upload_id))
            except Exception:  # noqa: BLE001  # the exception on its way is the one to be seen
                return

    def _send(self, part: bytes) -> None:
        store, now_us = self._store, self._store._clock.now_us()
        if self._upload_id is None:
            store._request("begin_upload", self.key)
            self._upload_id = store._change("begin_upload", self.key, lambda held: held.begin_upload(self.key, now_us))
        upload_id = self._upload_id
        store._request("upload_part", self.key, bytes_written=len(part))
        store._change("upload_part", self.key, lambda held: held.add_part(upload_id, part, now_us))
