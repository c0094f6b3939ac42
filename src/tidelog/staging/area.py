"""The staging area of a topic, for writers that do not own it: stage rows, commit them, query the outcome.

    area = StagingArea(objects, metadata, keys)
    with area.open_part("nightly", 7, partition=0, attempt="f00d") as writer:     # in a task, anywhere
        writer.write(frames, rows)
    area.commit("nightly", 7, [writer.part])                                      # once, by the coordinator
    area.wait("nightly", 7, timeout_seconds=60)

Invariants
- A commit is one compare-and-swap: it adds all rows of a version to the topic, or none.
- Commits are idempotent: committing the same version again, or an older one, changes nothing. So a writer that does not
  know whether a commit was done repeats it.
- Committed rows are never touched here again. `discard` first ensures that no commit in flight can still land.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Literal, Self

import msgspec

from tidelog.clock import Clock, SystemClock
from tidelog.codec import JSON_ERRORS, from_json
from tidelog.cold.catalog import Catalog, Descriptor
from tidelog.cold.fetch import Fetcher
from tidelog.cold.reader import ObjectFrames
from tidelog.cold.upload import checksum_text
from tidelog.errors import ConflictError, CorruptionError, DataError, InputError, RetryError
from tidelog.log.binding import encode_staged_binding, is_log_id
from tidelog.log.frame import Frames, crc32
from tidelog.staging.document import StagedCommit, StagingDocument, StagingStatus, decode_staging, encode_staging
from tidelog.store.document import VersionedDocument
from tidelog.store.keys import MAX_NUMBER, ObjectId, TopicKeys, staged_commit_name
from tidelog.store.metadata.base import MetadataStore
from tidelog.store.object_store import ObjectStore, ObjectWriter

# Staged rows: frames in objects of their own, numbered from 0 in each, and the manifest that lists those that count.
#
#     .../staging/{staged_commit}/{partition:05}-{attempt}.tlog     frames as in a file of the log, after a header
#     .../staging/{staged_commit}/manifest-{token}.json      {"id": ..., "parts": [{"key": ..., "rows": ..., ...}]}
#
# Invariants
# - A part is written once, under a name that no other attempt has, and appears whole or not at all.
# - Everything read of a part has been verified: every frame, its number, how many there are, how many bytes. The first
#   reader of a whole part verifies its checksum as well.
# - A part without rows is not written.
# - A part that names its log begins with the header of staged rows (`log/binding.py`), and has all that an object of
#   that log has to have: it may become one as it is (`publish.py`). One that names none has no header.


class StagedPart(msgspec.Struct, frozen=True, kw_only=True):
    """The rows of one task, in the object store. Plain data: the task sends it to the coordinator, which commits."""

    key: str
    rows: int
    bytes: int
    checksum: str
    log_id: str = ""
    """Which log its header names."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a staged commit, in the order of their rows."""

    id: str
    parts: tuple[StagedPart, ...]


def header_of(part: StagedPart) -> bytes:
    """What a part begins with."""
    return encode_staged_binding(part.log_id) if part.log_id else b""


class PartWriter:
    """Writes one part. Leaving its `with` publishes it, leaving by an exception leaves nothing.

    `part` is set afterwards, unless there was no row.
    """

    def __init__(self, objects: ObjectStore, key: str, log_id: str = "") -> None:
        """`log_id` is that of the log that the rows are for, where it is known."""
        self.part: StagedPart | None = None
        self.rows = 0
        """So many rows were written: the number that the next frame must have."""
        self.bytes_written = 0
        self._objects = objects
        self._key = key
        self._log_id = log_id
        self._writer: ObjectWriter | None = None
        self._crc = 0

    def write(self, frames: bytes | memoryview, rows: int) -> None:
        """Takes whole frames, of which the first has the number `rows` of this writer."""
        if rows < 1 or not len(frames):
            raise InputError(f"{rows} rows in {len(frames)} bytes cannot be written")
        if self._writer is None:
            self._writer = self._objects.open_writer(self._key)
            if self._log_id:
                self._write(self._writer, encode_staged_binding(self._log_id))
        self._write(self._writer, frames)
        self.rows += rows

    def _write(self, writer: ObjectWriter, data: bytes | memoryview) -> None:
        writer.write(data)
        self._crc = crc32(data, self._crc)
        self.bytes_written = writer.bytes_written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is None:
            return
        self._writer.__exit__(kind, error, traceback)
        if kind is None:
            self.part = StagedPart(
                key=self._key,
                rows=self.rows,
                bytes=self.bytes_written,
                checksum=checksum_text(self._crc),
                log_id=self._log_id,
            )


def read_part(
    fetcher: Fetcher, part: StagedPart, first_row: int = 0, done_below: Callable[[int], None] | None = None
) -> Iterator[Frames]:
    """The frames of a part from a row on, verified; CorruptionError or NotFoundError when they are damaged or missing.

    `done_below` is called with the byte of the part up to which its frames have been used.
    """
    reader = ObjectFrames(fetcher, part.key, _described(part), first_row, part.rows, ahead=True)
    try:
        while (frames := reader.next_frames()) is not None:
            passed = max(0, first_row - frames.first_offset)
            yield frames.slice(passed, frames.count)
            if done_below is not None:
                done_below(reader.position)
    finally:
        reader.close()


def read_whole_part(
    fetcher: Fetcher, part: StagedPart, done_below: Callable[[int], None] | None = None
) -> Iterator[Frames]:
    """All frames of a part; after the last one the part is known to be what was committed."""
    crc = crc32(header_of(part))
    for frames in read_part(fetcher, part, 0, done_below):
        crc = crc32(memoryview(frames.buffer)[frames.start_of(0) : frames.end], crc)
        yield frames
    if checksum_text(crc) != part.checksum:
        raise CorruptionError(
            f"a checksum that is not {part.checksum} of its manifest", path=part.key, byte=0, operation="ingest"
        )


def _described(part: StagedPart) -> Descriptor:
    """What the reader of objects wants to know."""
    return Descriptor(
        object_id=str(ObjectId(0, part.rows - 1, 0)),
        start_offset=0,
        end_offset=part.rows - 1,
        first_time_us=None,
        last_time_us=None,
        reached_time_us=None,
        size=part.bytes,
        raw_size=part.bytes - len(header_of(part)),
        etag="",
        checksum=part.checksum,
        codec="none",
        epoch=0,
        created_us=0,
        log_id=part.log_id,
        offset_index=((0, len(header_of(part))),),
        largest_bytes=part.bytes,  # ingest refuses rows that are too large, and names them
    )


def encode_manifest(manifest: Manifest) -> bytes:
    """The JSON of it."""
    return msgspec.json.encode(manifest)


def decode_manifest(data: bytes, key: str, checksum: str) -> Manifest:
    """The parts that count; DataError when it is not what was committed."""
    if checksum_text(crc32(data, 0)) != checksum:
        raise DataError(f"{key} is not the manifest that was committed", operation="ingest")
    try:
        manifest = from_json(data, Manifest)
    except JSON_ERRORS as error:
        raise DataError(f"{key} cannot be understood: {error}", operation="ingest") from error
    for part in manifest.parts:
        if part.log_id and not is_log_id(part.log_id):
            raise DataError(f"{key} lists {part.key} for a log {part.log_id!r:.80}", operation="ingest")
        if not (0 < part.rows <= MAX_NUMBER and 0 < part.bytes <= MAX_NUMBER):
            raise DataError(f"{key} lists {part.key} with {part.rows} rows in {part.bytes} bytes", operation="ingest")
    return manifest


MAX_APP_BYTES = 200
Outcome = Literal["committed", "already committed"]
Change = Callable[[StagingDocument], StagingDocument | None]

# Many tasks of many applications commit at once; and a commit knows its own work, so it may be made again.
_ATTEMPTS = 50
_UNANSWERED_ATTEMPTS = 4
_FIRST_PAUSE_SECONDS = 0.01
_LONGEST_PAUSE_SECONDS = 0.5
_DELETED_AT_ONCE = 200


class StagedVersions:
    """Versions of applications that were committed to a staging document, and the manifests of their parts."""

    def __init__(
        self, objects: ObjectStore, metadata: MetadataStore, keys: TopicKeys, document_key: str, clock: Clock | None
    ) -> None:
        self._objects = objects
        self._keys = keys
        self._clock = clock or SystemClock()
        self._document = VersionedDocument(
            metadata,
            document_key,
            encode_staging,
            decode_staging,
            attempts=_ATTEMPTS,
            unanswered_attempts=_UNANSWERED_ATTEMPTS,
            gave_up=RetryError,
        )

    def _load(self) -> StagingDocument:
        found = self._document.read()
        return StagingDocument() if found is None else found.value

    def _put_manifest(
        self, key: str, data: bytes, app: str, version: int, parts: Sequence[StagedPart], is_once: bool
    ) -> StagedCommit:
        """Writes the manifest, under a name of its own: another coordinator may be about to commit the same version."""
        self._objects.put(key, data)
        return StagedCommit(
            id=staged_commit_of(app, version),
            app=app,
            version=version,
            manifest=key,
            checksum=checksum_text(crc32(data, 0)),
            rows=sum(part.rows for part in parts),
            bytes=sum(part.bytes for part in parts),
            committed_us=self._clock.now_us(),
            is_once=is_once,
        )


class StagingArea(StagedVersions):
    """The staging area of one topic. Threads may share it."""

    def __init__(
        self, objects: ObjectStore, metadata: MetadataStore, keys: TopicKeys, clock: Clock | None = None
    ) -> None:
        super().__init__(objects, metadata, keys, keys.staging, clock)
        self._metadata = metadata
        self._layout = Catalog(metadata, keys).partitions_document()

    # In tasks

    def part_key(self, app: str, version: int, partition: int, attempt: str) -> str:
        """Where a task puts its rows. No two attempts may have the same name."""
        return self._keys.staged_part(staged_commit_of(app, version), partition, attempt)

    def open_part(self, app: str, version: int, partition: int, attempt: str) -> PartWriter:
        """A writer for the rows of one task."""
        return PartWriter(self._objects, self.part_key(app, version, partition, attempt))

    # For the coordinator

    def commit(
        self,
        app: str,
        version: int,
        parts: Sequence[StagedPart],
        *,
        is_once: bool = False,
        after: int | None = None,
    ) -> Outcome:
        """Commits the rows of these parts, in this order; InputError for a topic with partitions, which has no log.

        `is_once` says that the application has a random name and never comes back. With `after`, what `newest` said
        when the rows were chosen: ConflictError when the application has committed more since. StoreUnavailableError
        means that it is not known whether it was done: commit again.
        """
        layout = self._layout.read()
        if layout is not None and not layout.value.has_grown:
            raise InputError(
                "the topic has partitions, and rows are staged for one log",
                operation="commit",
                hint="Write to its partitions by name, such as the name with -part-0",
            )
        id = staged_commit_of(app, version)
        self._check_parts(id, parts)
        if self._is_committed(self._load(), app, version):
            return "already committed"
        staged_commit = self._manifested(id, app, version, parts, is_once)

        def add(document: StagingDocument) -> StagingDocument | None:
            if self._is_committed(document, app, version):
                return None
            if after is not None and document.newest(app) != after:
                raise ConflictError(f"{app} has staged more commits meanwhile", operation="commit", hint="Run it again")
            return document.committed(staged_commit)

        if self._change(add):
            return "committed"
        mine = self._load().find(id)
        return "committed" if mine is not None and mine.manifest == staged_commit.manifest else "already committed"

    def newest(self, app: str) -> int:
        """The newest version that an application has committed, ingested or not; -1 when there is none."""
        return self._load().newest(app)

    def status(self, app: str, version: int) -> StagingStatus:
        """What became of a version: unknown, pending, placed, taken or refused."""
        staged_commit_of(app, version)
        return self._load().status(app, version)

    def wait(self, app: str, version: int, timeout_seconds: float) -> StagingStatus:
        """Returns once a committed version is in the topic. When the time has passed, the status says how far it is.

        DataError when it was refused, or was never committed.
        """
        deadline, pause = time.monotonic() + timeout_seconds, _FIRST_PAUSE_SECONDS
        while True:
            status = self.status(app, version)
            if status.state == "refused":
                raise DataError(f"version {version} of {app} was refused: {status.error}", operation="ingest")
            if status.state == "unknown":
                raise DataError(f"version {version} of {app} was never committed", operation="ingest")
            left = deadline - time.monotonic()
            if status.state == "taken" or left <= 0:
                return status
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def discard(self, app: str, version: int, keys: Iterable[str] | None = None) -> int:
        """Removes what was staged for a version that is not to be committed; returns how many objects.

        What is committed stays, all of it: then nothing is removed. Without `keys` everything goes that was staged
        for the version, by whichever attempt.
        """
        id = staged_commit_of(app, version)
        if not self._bar_late_commits(app, version):
            return 0
        prefix = self._keys.staged_commit_prefix(id)
        names = iter(keys) if keys is not None else (info.key for info in self._objects.list(prefix))
        removed = 0
        while some := [key for key in islice(names, _DELETED_AT_ONCE) if key.startswith(prefix)]:
            self._objects.delete(some)
            removed += len(some)
        self._objects.remove_folder(prefix)
        return removed

    def drop(self, app: str, version: int, parts: Iterable[StagedPart]) -> int:
        """Removes rows staged again for a version that had been committed before; returns how many objects.

        While the version is listed nothing is removed here: the process that takes it off the list removes all its
        rows.
        """
        keys = [part.key for part in parts]
        document = self._load()
        if document.find(staged_commit_of(app, version)) is not None or document.status(app, version).state != "taken":
            return 0
        self._objects.delete(keys)
        self._objects.remove_folder(self._keys.staged_commit_prefix(staged_commit_of(app, version)))
        return len(keys)

    def give_up(self, app: str, version: int) -> bool:
        """Forgets a version that was refused: its rows stay missing, and later versions go on. False: there is none."""
        id = staged_commit_of(app, version)
        return self._change(lambda known: None if known.given_up(id) == known else known.given_up(id))

    # How that is done

    def _check_parts(self, id: str, parts: Sequence[StagedPart]) -> None:
        prefix = self._keys.staged_commit_prefix(id)
        keys = [part.key for part in parts]
        if any(not key.startswith(prefix) for key in keys) or len(set(keys)) < len(keys):
            raise InputError("a part of another version, or the same part twice, cannot be committed")

    def _is_committed(self, document: StagingDocument, app: str, version: int) -> bool:
        return document.status(app, version).state not in ("unknown", "refused")

    def _manifested(self, id: str, app: str, version: int, parts: Sequence[StagedPart], is_once: bool) -> StagedCommit:
        key = self._keys.manifest(id, secrets.token_hex(8))
        data = encode_manifest(Manifest(id=id, parts=tuple(parts)))
        return self._put_manifest(key, data, app, version, parts, is_once)

    def _bar_late_commits(self, app: str, version: int) -> bool:
        """Gives the document a new version, so that a commit in flight can no longer land. False: one has landed."""
        return self._change(lambda known: None if self._is_committed(known, app, version) else known)

    def _change(self, change: Change) -> bool:
        """Whether something was to be changed, and was. Others may be faster, many times."""
        return self._document.update(lambda known: change(known or StagingDocument()), rewrites=True) is not None


def staged_commit_of(app: str, version: int) -> str:
    """The name of a version's staged commit; InputError when there can be no such version."""
    if not app or not app.isprintable() or len(app.encode()) > MAX_APP_BYTES:
        raise InputError(f"an application is named by 1 to {MAX_APP_BYTES} bytes of printable text, not {app!r:.80}")
    if version < 0:
        raise InputError(f"a version is a number from 0 on, not {version}")
    return staged_commit_name(app, version)
