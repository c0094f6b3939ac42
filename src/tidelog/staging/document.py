"""The staging document: the commits that a topic has yet to ingest, in one small document changed by compare-and-swap.

    {"pending": [{"id": "9f86...-7", "app": "nightly", "version": 7, "manifest": "storage/...", "rows": 1000, ...,
                  "first_offset": 5000, "epoch": 3}],
     "applied": {"nightly": [6, 4000, 5000, 1767225600000000]},
     "refused": [], "epoch": 3}

A *staged commit* is the rows of one write, named by the application and its version. Its states:

    committed (by its writer) -> placed (the owner has recorded its first offset) -> ingested (all rows are in the log)
                             \\-> refused (a part is missing or damaged: nothing of it is in the log)

Invariants
- Everything in here is pure: a change is a new document. Its writer names the version that it was made from.
- Staged commits are listed in commit order, and are ingested in that order.
- An (app, version) is committed once. A version not above the newest of its app is done, unless it was refused.
- An ingested commit stays in the list, with its first offset, until the loss of a disk cannot lose its rows.
- The document is bounded: a commit that does not fit is refused; the least recently writing applications are forgotten,
  those that never come back (`is_once`) first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from tidelog.codec import JSON_ERRORS, MAX_OFFSET, from_json
from tidelog.cold.catalog import impossible_number
from tidelog.cold.cursor import Number
from tidelog.errors import BackpressureError, DataError
from tidelog.store.keys import MAX_NUMBER
from tidelog.store.metadata.base import MAX_VALUE_BYTES

MAX_PENDING = 1000
MAX_REFUSED = 100
MAX_APPLIED = 4000
MAX_APPLIED_ONCE = 100
_MAX_BYTES = MAX_VALUE_BYTES * 7 // 8
_HINT = "Restore the metadata. If that is not possible, delete this entry: what it lists must then be written again"

State = Literal["unknown", "pending", "placed", "taken", "refused"]


class StagedCommit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The rows of one write. `first_offset` is where they begin in the log, as soon as that is settled."""

    id: str
    app: str
    version: int
    manifest: str
    checksum: str
    rows: int
    bytes: int
    committed_us: int
    is_once: bool = False
    first_offset: int | None = None
    epoch: int = 0
    is_taken: bool = False

    @property
    def next_offset(self) -> int:
        assert self.first_offset is not None
        return self.first_offset + self.rows

    def is_within(self, offset: int) -> bool:
        """Whether all of its rows are below an offset."""
        return self.first_offset is not None and (not self.rows or self.next_offset <= offset)


class Applied(msgspec.Struct, frozen=True, array_like=True):
    """The newest version of an application that was ingested."""

    version: Number
    first_offset: Number
    next_offset: Number
    taken_us: Number
    is_once: bool = False


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A staged commit of which nothing is in the log, and why."""

    id: str
    app: str
    version: Number
    rows: Number
    error: str
    refused_us: Number


class StagingStatus(msgspec.Struct, frozen=True):
    """The progress of a staged commit. Offsets are known from "placed" on, while it is the newest of its
    application."""

    state: State
    first_offset: int | None = None
    next_offset: int | None = None
    error: str | None = None


class StagingDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The staging state of a topic. `epoch` is that of the last owner that wrote it."""

    pending: tuple[StagedCommit, ...] = ()
    applied: dict[str, Applied] = {}
    refused: tuple[Refused, ...] = ()
    epoch: int = 0

    # Looking

    def find(self, id: str) -> StagedCommit | None:
        return next((one for one in self.pending if one.id == id), None)

    @property
    def waiting(self) -> tuple[StagedCommit, ...]:
        """Those that are not ingested yet, in order."""
        return tuple(one for one in self.pending if not one.is_taken)

    @property
    def staged_commits(self) -> set[str]:
        """The names of all whose objects are still needed, or may be looked at."""
        return {one.id for one in self.pending} | {one.id for one in self.refused}

    def status(self, app: str, version: int) -> StagingStatus:
        """How far this version of an application is."""
        for one in self.pending:
            if (one.app, one.version) == (app, version):
                return _status_of(one)
        for refused in self.refused:
            if (refused.app, refused.version) == (app, version):
                return StagingStatus("refused", error=refused.error)
        known = self.applied.get(app)
        if known is not None and known.version == version:
            return StagingStatus("taken", known.first_offset, known.next_offset)
        return StagingStatus("taken" if version <= self.newest(app) else "unknown")

    def newest(self, app: str) -> int:
        """The newest version that was committed; -1 when there is none."""
        known = self.applied.get(app)
        return max([-1 if known is None else known.version, *(one.version for one in self.pending if one.app == app)])

    # What writers do

    def committed(self, staged_commit: StagedCommit) -> StagingDocument:
        """With one more. The caller has made sure that it is not known yet, or was refused."""
        for other in self.refused:
            if other.app == staged_commit.app and other.version != staged_commit.version:
                raise DataError(
                    f"version {other.version} of {other.app} was refused, and its rows are missing: {other.error}",
                    operation="commit",
                    hint="Write that version again, or give it up with `StagingArea.give_up`",
                )
        if len(self.pending) >= MAX_PENDING:
            raise _too_much(len(self.pending))
        added = msgspec.structs.replace(self.given_up(staged_commit.id), pending=(*self.pending, staged_commit))
        return added._bounded()

    def given_up(self, id: str) -> StagingDocument:
        """Without a refused staged commit."""
        return msgspec.structs.replace(self, refused=tuple(one for one in self.refused if one.id != id))

    # What the owner does

    def placed(self, id: str, first_offset: int, epoch: int) -> StagingDocument:
        """Written down where it begins."""
        return self._changed(id, first_offset=first_offset, epoch=epoch, is_taken=False)

    def taken(self, id: str, now_us: int) -> StagingDocument:
        """All of its rows are on the disk."""
        one = self.find(id)
        if one is None or one.first_offset is None:
            return self
        applied = dict(self.applied)
        if one.version >= self._applied_version(one.app):
            applied[one.app] = Applied(one.version, one.first_offset, one.next_offset, now_us, one.is_once)
        return msgspec.structs.replace(self._changed(id, is_taken=True), applied=applied)._bounded()

    def refuse(self, id: str, error: str, now_us: int) -> StagingDocument:
        """Set aside: nothing of it is in the log."""
        one = self.find(id)
        if one is None:
            return self
        entry = Refused(id=id, app=one.app, version=one.version, rows=one.rows, error=error[:500], refused_us=now_us)
        kept = self.without([id])
        return msgspec.structs.replace(kept, refused=(*self.refused, entry)[-MAX_REFUSED:])

    def without(self, ids: Iterable[str]) -> StagingDocument:
        """Nothing of them is needed any more."""
        gone = set(ids)
        return msgspec.structs.replace(self, pending=tuple(one for one in self.pending if one.id not in gone))

    def settled(self, next_offset: int) -> StagingDocument:
        """As a log that ends at `next_offset` has it: commits that begin at or after it were lost with the log's end,
        and are ingested again. Only a new owner may call this, before anything else is appended."""
        return msgspec.structs.replace(self, pending=tuple(_settled(one, next_offset) for one in self.pending))

    def owned_by(self, epoch: int) -> StagingDocument:
        """The same, under a new owner: what an earlier one is about to change has another version from here on."""
        return msgspec.structs.replace(self, epoch=epoch)

    def _changed(self, id: str, **changes: object) -> StagingDocument:
        pending = (msgspec.structs.replace(one, **changes) if one.id == id else one for one in self.pending)
        return msgspec.structs.replace(self, pending=tuple(pending))

    def _applied_version(self, app: str) -> int:
        known = self.applied.get(app)
        return -1 if known is None else known.version

    # Staying small

    def _bounded(self) -> StagingDocument:
        document = self._remembering(_newest_of(self.applied, lambda one: one.is_once, MAX_APPLIED_ONCE))
        document = document._remembering(_newest_of(document.applied, lambda _: True, MAX_APPLIED))
        while len(encode_staging(document)) > _MAX_BYTES:
            if not document.applied:
                raise _too_much(len(document.pending))
            fewer = len(document.applied) * 9 // 10
            document = document._remembering(_newest_of(document.applied, lambda _: True, fewer))
        return document

    def _remembering(self, applied: dict[str, Applied]) -> StagingDocument:
        return msgspec.structs.replace(self, applied=applied)


def _newest_of(applied: dict[str, Applied], counts: Callable[[Applied], bool], limit: int) -> dict[str, Applied]:
    """All that do not count, and of the others as many of the newest."""
    counted = [app for app, one in applied.items() if counts(one)]
    if len(counted) <= limit:
        return applied
    oldest = sorted(counted, key=lambda app: (not applied[app].is_once, applied[app].taken_us))
    gone = set(oldest[: len(counted) - limit])
    return {app: one for app, one in applied.items() if app not in gone}


def _status_of(one: StagedCommit) -> StagingStatus:
    if one.first_offset is None:
        return StagingStatus("pending")
    return StagingStatus("taken" if one.is_taken else "placed", one.first_offset, one.next_offset)


def _settled(one: StagedCommit, next_offset: int) -> StagedCommit:
    if one.first_offset is None:
        return one
    if one.first_offset >= next_offset and one.rows:
        return msgspec.structs.replace(one, first_offset=None, epoch=0, is_taken=False)
    return msgspec.structs.replace(one, is_taken=one.is_taken and one.is_within(next_offset))


def _too_much(count: int) -> BackpressureError:
    return BackpressureError(
        f"{count} consignments wait for the owner of the topic, and there is no room for more",
        operation="commit",
        hint="Nothing was committed. Is the owner running, and does it reach its store? Commit again later",
    )


def encode_staging(document: StagingDocument) -> bytes:
    """The JSON of it."""
    return msgspec.json.encode(document)


def decode_staging(data: bytes, key: str) -> StagingDocument:
    """What is stored under the key; DataError when it is something else, or cannot be true."""
    try:
        document = from_json(data, StagingDocument)
    except JSON_ERRORS as error:
        raise DataError(f"{key} in the metadata store cannot be understood: {error}", hint=_HINT) from error
    impossible = impossible_number(document)
    if impossible is not None:
        raise DataError(f"{key} in the metadata store makes no sense: {impossible}", hint=_HINT)
    for one in document.pending:
        numbers = (one.version, one.rows, one.bytes, one.first_offset or 0)
        is_beyond = one.first_offset is not None and one.first_offset + one.rows > MAX_OFFSET + 1
        is_beyond |= any(not 0 <= number <= MAX_NUMBER for number in numbers)
        if is_beyond or (one.is_taken and one.first_offset is None):
            raise DataError(f"{key} in the metadata store makes no sense: {one}", hint=_HINT)
    return document
