"""What was handed over to a topic and is to be taken in: one small document, changed by compare-and-swap.

    {"pending": [{"id": "9f86...-7", "app": "nightly", "version": 7, "manifest": "storage/...", "rows": 1000, ...,
                  "first_offset": 5000, "epoch": 3}],
     "applied": {"nightly": [6, 4000, 5000, 1767225600000000]},
     "refused": [], "epoch": 3}

A *consignment* is the rows of one write, named by the application and its version. It goes this way:

    committed (by its writer) -> placed (the owner has written down where it begins) -> taken (all rows are in the log)
                             \\-> refused (a part is missing or damaged: nothing of it is in the log)

Invariants
- Everything in here is pure: a change is a new document. Who stores it names the version that it was made from.
- Consignments are in order of their commit, and are taken in that order.
- An (app, version) is committed once. What is not above the newest version of its app is done, unless it was refused.
- What is taken stays in the list, with the place where it begins, until its rows cannot be lost with a disk any more.
- The document is bounded: what does not fit is refused when it is committed; the applications that wrote last longest
  ago are forgotten, those that never come back (`is_once`) first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from tidelog.codec import JSON_ERRORS
from tidelog.errors import BackpressureError, DataError
from tidelog.tier.bounds import Number, impossible_number
from tidelog.tier.keys import MAX_OFFSET
from tidelog.tier.metadata.store import MAX_VALUE_BYTES

MAX_PENDING = 1000
MAX_REFUSED = 100
MAX_APPLIED = 4000
MAX_APPLIED_ONCE = 100
_MAX_BYTES = MAX_VALUE_BYTES * 7 // 8
_HINT = "Restore the metadata. If that is not possible, delete this entry: what it lists must then be written again"

State = Literal["unknown", "pending", "placed", "taken", "refused"]


class Consignment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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
        """The first offset behind it."""
        assert self.first_offset is not None
        return self.first_offset + self.rows

    def is_within(self, offset: int) -> bool:
        """Whether all of its rows are below an offset."""
        return self.first_offset is not None and (not self.rows or self.next_offset <= offset)


class Applied(msgspec.Struct, frozen=True, array_like=True):
    """The newest version of an application that was taken in."""

    version: Number
    first_offset: Number
    next_offset: Number
    taken_us: Number
    is_once: bool = False


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A consignment of which nothing is in the log, and why."""

    id: str
    app: str
    version: Number
    rows: Number
    error: str
    refused_us: Number


class IntakeStatus(msgspec.Struct, frozen=True):
    """How far a consignment is. Offsets are known from "placed" on, while it is the newest of its application."""

    state: State
    first_offset: int | None = None
    next_offset: int | None = None
    error: str | None = None


class IntakeDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is known of a topic's intake. `epoch` is that of the last owner that wrote it."""

    pending: tuple[Consignment, ...] = ()
    applied: dict[str, Applied] = {}
    refused: tuple[Refused, ...] = ()
    epoch: int = 0

    # Looking

    def find(self, id: str) -> Consignment | None:
        return next((one for one in self.pending if one.id == id), None)

    @property
    def waiting(self) -> tuple[Consignment, ...]:
        """Those that are not taken in yet, in order."""
        return tuple(one for one in self.pending if not one.is_taken)

    @property
    def consignments(self) -> set[str]:
        """The names of all whose objects are still needed, or may be looked at."""
        return {one.id for one in self.pending} | {one.id for one in self.refused}

    def status(self, app: str, version: int) -> IntakeStatus:
        """How far this version of an application is."""
        for one in self.pending:
            if (one.app, one.version) == (app, version):
                return _status_of(one)
        for refused in self.refused:
            if (refused.app, refused.version) == (app, version):
                return IntakeStatus("refused", error=refused.error)
        known = self.applied.get(app)
        if known is not None and known.version == version:
            return IntakeStatus("taken", known.first_offset, known.next_offset)
        return IntakeStatus("taken" if version <= self._newest(app) else "unknown")

    def _newest(self, app: str) -> int:
        """The newest version that was committed; -1 when there is none."""
        known = self.applied.get(app)
        return max([-1 if known is None else known.version, *(one.version for one in self.pending if one.app == app)])

    # What writers do

    def committed(self, consignment: Consignment) -> IntakeDocument:
        """With one more. The caller has made sure that it is not known yet, or was refused."""
        for other in self.refused:
            if other.app == consignment.app and other.version != consignment.version:
                raise DataError(
                    f"version {other.version} of {other.app} was refused, and its rows are missing: {other.error}",
                    operation="commit",
                    hint="Write that version again, or give it up with `IntakeArea.give_up`",
                )
        if len(self.pending) >= MAX_PENDING:
            raise _too_much(len(self.pending))
        added = msgspec.structs.replace(self.given_up(consignment.id), pending=(*self.pending, consignment))
        return added._bounded()

    def given_up(self, id: str) -> IntakeDocument:
        """Without a refused consignment."""
        return msgspec.structs.replace(self, refused=tuple(one for one in self.refused if one.id != id))

    # What the owner does

    def placed(self, id: str, first_offset: int, epoch: int) -> IntakeDocument:
        """Written down where it begins."""
        return self._changed(id, first_offset=first_offset, epoch=epoch, is_taken=False)

    def taken(self, id: str, now_us: int) -> IntakeDocument:
        """All of its rows are on the disk."""
        one = self.find(id)
        if one is None or one.first_offset is None:
            return self
        applied = dict(self.applied)
        if one.version >= self._applied_version(one.app):
            applied[one.app] = Applied(one.version, one.first_offset, one.next_offset, now_us, one.is_once)
        return msgspec.structs.replace(self._changed(id, is_taken=True), applied=applied)._bounded()

    def refuse(self, id: str, error: str, now_us: int) -> IntakeDocument:
        """Set aside: nothing of it is in the log."""
        one = self.find(id)
        if one is None:
            return self
        entry = Refused(id=id, app=one.app, version=one.version, rows=one.rows, error=error[:500], refused_us=now_us)
        kept = self.without([id])
        return msgspec.structs.replace(kept, refused=(*self.refused, entry)[-MAX_REFUSED:])

    def without(self, ids: Iterable[str]) -> IntakeDocument:
        """Nothing of them is needed any more."""
        gone = set(ids)
        return msgspec.structs.replace(self, pending=tuple(one for one in self.pending if one.id not in gone))

    def settled(self, next_offset: int) -> IntakeDocument:
        """As a log that ends at `next_offset` has it: what begins there or behind was lost with its end, and is to be
        taken in again. Only a new owner may ask that, before anything else is appended."""
        return msgspec.structs.replace(self, pending=tuple(_settled(one, next_offset) for one in self.pending))

    def owned_by(self, epoch: int) -> IntakeDocument:
        """The same, under a new owner: what an earlier one is about to change has another version from here on."""
        return msgspec.structs.replace(self, epoch=epoch)

    def _changed(self, id: str, **changes: object) -> IntakeDocument:
        pending = (msgspec.structs.replace(one, **changes) if one.id == id else one for one in self.pending)
        return msgspec.structs.replace(self, pending=tuple(pending))

    def _applied_version(self, app: str) -> int:
        known = self.applied.get(app)
        return -1 if known is None else known.version

    # Staying small

    def _bounded(self) -> IntakeDocument:
        document = self._remembering(_newest_of(self.applied, lambda one: one.is_once, MAX_APPLIED_ONCE))
        document = document._remembering(_newest_of(document.applied, lambda _: True, MAX_APPLIED))
        while len(encode_intake(document)) > _MAX_BYTES:
            if not document.applied:
                raise _too_much(len(document.pending))
            fewer = len(document.applied) * 9 // 10
            document = document._remembering(_newest_of(document.applied, lambda _: True, fewer))
        return document

    def _remembering(self, applied: dict[str, Applied]) -> IntakeDocument:
        return msgspec.structs.replace(self, applied=applied)


def _newest_of(applied: dict[str, Applied], counts: Callable[[Applied], bool], limit: int) -> dict[str, Applied]:
    """All that do not count, and of the others as many of the newest."""
    counted = [app for app, one in applied.items() if counts(one)]
    if len(counted) <= limit:
        return applied
    oldest = sorted(counted, key=lambda app: (not applied[app].is_once, applied[app].taken_us))
    gone = set(oldest[: len(counted) - limit])
    return {app: one for app, one in applied.items() if app not in gone}


def _status_of(one: Consignment) -> IntakeStatus:
    if one.first_offset is None:
        return IntakeStatus("pending")
    return IntakeStatus("taken" if one.is_taken else "placed", one.first_offset, one.next_offset)


def _settled(one: Consignment, next_offset: int) -> Consignment:
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


def encode_intake(document: IntakeDocument) -> bytes:
    """The JSON of it."""
    return msgspec.json.encode(document)


def decode_intake(data: bytes, key: str) -> IntakeDocument:
    """What is stored under the key; DataError when it is something else, or cannot be true."""
    try:
        document = msgspec.json.decode(data, type=IntakeDocument)
    except JSON_ERRORS as error:
        raise DataError(f"{key} in the metadata store cannot be understood: {error}", hint=_HINT) from error
    impossible = impossible_number(document)
    if impossible is not None:
        raise DataError(f"{key} in the metadata store makes no sense: {impossible}", hint=_HINT)
    for one in document.pending:
        numbers = (one.version, one.rows, one.bytes, one.first_offset or 0)
        if any(not 0 <= number <= MAX_OFFSET for number in numbers) or (one.is_taken and one.first_offset is None):
            raise DataError(f"{key} in the metadata store makes no sense: {one}", hint=_HINT)
    return document
