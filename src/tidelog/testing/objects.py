"""The content of a faulty object store: objects, and uploads that were begun.

Invariants
- An etag is given once, also where contents are alike or an object is made again.
- The parts of an upload are not visible as an object before it is completed. Its id is `<key>#<number>`, no key.
- A condition is looked at in the same step in which the object changes. (The caller holds the lock.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from tidelog.errors import ConflictError, NotFoundError
from tidelog.tier.object_store import ObjectInfo


class HeldObject(NamedTuple):
    """An object and what the store knows about it."""

    data: bytes
    etag: str
    modified_us: int

    def info(self, key: str) -> ObjectInfo:
        """As it is listed."""
        return ObjectInfo(key, len(self.data), self.etag, self.modified_us)


class Upload(NamedTuple):
    """What was sent of an object that nobody sees yet."""

    key: str
    parts: tuple[bytes, ...]
    etag: str
    modified_us: int

    def info(self, upload_id: str) -> ObjectInfo:
        """As it is listed, by its id."""
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
        """The next ones by key."""
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
        """What is not there may be deleted too."""
        self.objects.pop(key, None)

    def begin_upload(self, key: str, now_us: int) -> str:
        """Returns the id of the upload."""
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
    return ConflictError(f"{key}: somebody else was first", hint="Read it again and decide")
