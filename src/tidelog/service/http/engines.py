"""Engines over HTTP: apply, marks, read as of any seq, list, scan, history, changes, checkpoint.

Invariants
- Engines are served that the server was started with, and those that a cluster gives to this node. The orchestrator
  keeps the order: every entry that is applied comes with its seq, and the same seq with the same entry again changes
  nothing, so a client may repeat it.
- An answer to `apply` comes when the entries are on the disk.
- An engine that another node has restored may be behind what the orchestrator has seen of it: entries with a `seen_seq`
  that it does not have are refused, so that none are left out between two that it has.
- While an engine is being restored it is read from its store; what changes it is 503 until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any

import msgspec

from tidelog.cold.gc import DEFAULT_GRACE_SECONDS
from tidelog.engine.changes import Change
from tidelog.engine.engine import Engine
from tidelog.engine.entry import (
    Batch,
    Conditional,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    ObjectInfo,
    PutObject,
    Result,
    ScannedObject,
    VersionInfo,
    operations,
)
from tidelog.engine.mvcc.retention import rolled_back
from tidelog.engine.restoring import RestoringEngine
from tidelog.errors import ConflictError, InputError, NotFoundError
from tidelog.service.auth.access import Kind, Permission, Resource
from tidelog.service.http.admin import VerifyQuery, report_of
from tidelog.service.http.call import Call, Reply
from tidelog.service.http.large_values import WHOLE_BYTES, asked_range, pieces_of, put_stream
from tidelog.service.http.operations import Report, WaitQuery, begun, starting
from tidelog.service.http.problems import RETRY_SECONDS, HttpError
from tidelog.service.http.routes import BYTES, RouteTable

routes = RouteTable("Engines")
_ENGINE = "/v1/engines/{engine}"
_BUCKET = _ENGINE + "/buckets/{bucket}/objects"
_OBJECT = _BUCKET + "/{key}"
_MOST = 10_000
_MAX_SEQ = (1 << 64) - 1
Seq = Annotated[int, msgspec.Meta(ge=1)]
AnyOperation = CreateBucket | DeleteBucket | PutObject | DeleteObject | CopyObject
AnyEntry = AnyOperation | Batch
_MAX_CHANGE_BYTES = 64 << 20


class EngineMarks(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine stands."""

    name: str
    applied_seq: int
    low_water_mark: int
    high_water_mark: int
    truncation_mark: int
    """The orchestrator may truncate its log up to here."""
    directory: str | None = None
    """Where it is; only in a list for commands on the server's machine, which have the directory."""
    is_restoring: bool = False
    """It can only be read, and shows what its store has."""


class EngineElsewhere(msgspec.Struct, frozen=True, kw_only=True):
    """An engine of the cluster that this node does not serve."""

    name: str
    node: str | None
    """Who does; None: nobody at the moment."""


class EngineList(msgspec.Struct, frozen=True, kw_only=True):
    """The engines that are served."""

    engines: list[EngineMarks]
    elsewhere: list[EngineElsewhere] = []
    """Those of other nodes."""


class EngineDescription(EngineMarks, frozen=True, kw_only=True):
    """An engine, with all its statistics."""

    statistics: dict[str, Any]


class NumberedEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of the orchestrator's log. `type` of the entry is the name of its class, data is in base64."""

    seq: Seq
    entry: AnyEntry


class Entries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Entries to apply, in the order of their seqs."""

    entries: Annotated[list[NumberedEntry], msgspec.Meta(min_length=1, max_length=100_000)]
    seen_seq: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The last seq that the client has seen applied: an engine that has less is behind, and refuses (409)."""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the entries."""

    results: list[Result]
    applied_seq: int


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A seq."""

    seq: Annotated[int, msgspec.Meta(ge=0)]


class AsOf(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """As of which seq."""

    seq: Seq | None = None
    """Default: the last that was applied."""


class ObjectQuery(AsOf, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which bytes of an object."""

    offset: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The first byte."""
    length: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How many at most. Default: all that follow."""


class ScanQuery(AsOf, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which objects."""

    prefix: str = ""
    start: str | None = None
    """The first key."""
    end: str | None = None
    """The key to stop before."""
    start_after: str | None = None
    """The key, or the common prefix, that the page before ended with."""
    reverse: bool = False
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MOST)] = 1000
    with_values: bool = False
    """Also data (in base64) and metadata."""
    delimiter: str = ""
    """Groups keys that have it after the prefix, as a directory does; without values, in order of keys."""


class Buckets(msgspec.Struct, frozen=True, kw_only=True):
    """The buckets of an engine."""

    buckets: list[str]


class ScannedItem(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An object of a bucket, or the common prefix of several."""

    key: str
    size: int
    seq: int
    is_prefix: bool = False
    crc: int | None = None
    """The checksum of data and metadata."""
    data: bytes | None = None
    """In base64."""
    metadata: dict[str, Any] | None = None


class Scanned(msgspec.Struct, frozen=True, kw_only=True):
    """Objects of a bucket."""

    objects: list[ScannedItem]
    is_cut: bool
    """There are more: go on from the last key."""


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """The versions of an object, newest first; a deletion is one too."""

    versions: list[VersionInfo]


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """An object without its data."""

    size: int
    metadata: dict[str, Any]
    seq: int
    tier: str
    """`hot`: its data is on the server's disk; `cold`: in the store."""
    crc: int
    """The checksum of data and metadata."""


class EngineCompactQuery(WaitQuery, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What to compact."""

    index: bool = False
    """The index on the disk, instead of the log in the store."""
    grace_seconds: Annotated[float, msgspec.Meta(ge=0)] = DEFAULT_GRACE_SECONDS
    """Objects that were replaced longer ago than this are deleted."""


class PutQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The entry that puts an object."""

    seq: Seq
    metadata: str = ""
    """As JSON."""
    if_absent: bool = False
    if_match: int | None = None
    """The seq of the version that it replaces."""
    if_match_crc: int | None = None
    """The checksum of that version."""
    seen_seq: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The last seq that the client has seen applied: an engine that has less is behind, and refuses (409)."""


class DeleteQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The entry that deletes an object."""

    seq: Seq
    if_match: int | None = None
    if_match_crc: int | None = None


class ChangesQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which changes."""

    start_seq: Seq = 1
    limit: Annotated[int, msgspec.Meta(ge=1, le=_MOST)] = 1000
    prefix: str = ""
    """Of `bucket/key`."""
    with_values: bool = False
    committed: bool = False
    """Only what is never rolled back."""
    wait: Annotated[float, msgspec.Meta(ge=0, le=60)] = 0.0
    """Seconds to wait for a change when there is none."""
    rollbacks: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """What the page before said: 409 if something before `start_seq` was rolled back since."""
    seen_seq: Annotated[int, msgspec.Meta(ge=0)] = 0
    """The last seq that was read: 409 from an engine that has less, for instance after it was moved."""


class PutObjectShown(Conditional, frozen=True, tag="PutObject", kw_only=True, omit_defaults=True):
    """Puts a new version of an object. Without `data`, values were not asked for."""

    bucket: str
    key: str
    data: bytes | None = None
    """In base64; only with `with_values`."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


OperationShown = CreateBucket | DeleteBucket | PutObjectShown | DeleteObject | CopyObject


class BatchShown(msgspec.Struct, frozen=True, tag="Batch"):
    """Several operations that were applied atomically, in order, or refused together."""

    entries: list[OperationShown]


class ChangeShown(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of an engine's log, and what became of it."""

    seq: int
    entry: OperationShown | BatchShown
    result: Result


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """Entries that were applied, in order."""

    changes: list[ChangeShown]
    next_seq: int
    """Go on from here."""
    rollbacks: int
    """How often entries were rolled back since the engine was opened."""


def engine_of(call: Call) -> Engine:
    """The engine in the path; NotFoundError where it is not served, 503 while it is being restored."""
    found = readable_of(call)
    if isinstance(found, RestoringEngine):
        raise HttpError(
            HTTPStatus.SERVICE_UNAVAILABLE,
            f"the engine {call.path['engine']} is being restored here, and can only be read",
            hint="Try again in a moment",
            error="ServerUnavailableError",
            headers=(("retry-after", str(RETRY_SECONDS)),),
        )
    return found


def readable_of(call: Call) -> Engine | RestoringEngine:
    """The same for reading: one that is being restored is read from its store."""
    name, service = call.path["engine"], call.service
    found = service.engines.get(name) or service.restoring.get(name)
    if found is None:
        raise NotFoundError(
            f"there is no engine {name[:80]!r}",
            hint="Start the server with --engine NAME=DIR, or add it to a cluster: tidelog cluster add-engine NAME",
        )
    return found


def _not_behind(engine: Engine, seen_seq: int) -> Engine:
    if engine.applied_seq < seen_seq:
        raise ConflictError(
            f"the engine is at seq {engine.applied_seq}, and had applied {seen_seq} before it was moved",
            hint=f"Apply the entries from seq {engine.applied_seq + 1} on again: they are in the orchestrator's log",
        )
    return engine


def _checked_seq(seq: int) -> int:
    if seq > _MAX_SEQ:
        raise InputError(f"seq must be between 1 and 2**64-1, got {seq}")
    return seq


def marks(name: str, engine: Engine | RestoringEngine) -> EngineMarks:
    """Where an engine stands. What is read from its store alone is all committed, and shipped."""
    if isinstance(engine, RestoringEngine):
        seq = engine.applied_seq
        return EngineMarks(
            name=name, applied_seq=seq, low_water_mark=seq, high_water_mark=seq, truncation_mark=seq, is_restoring=True
        )
    return EngineMarks(
        name=name,
        applied_seq=engine.applied_seq,
        low_water_mark=engine.low_water_mark,
        high_water_mark=engine.high_water_mark,
        truncation_mark=engine.truncation_mark,
    )


@routes.add("GET", "/v1/engines", None, EngineList)
async def list_engines(call: Call) -> EngineList:
    """Lists the engines that the client may see, with their marks."""
    service = call.service
    here: dict[str, Engine | RestoringEngine] = {**service.restoring, **service.engines}
    served = sorted(here.items())
    found = [_listed(call, name, engine) for name, engine in served if _is_seen(call, name)]
    placed = sorted(service.broker.placement.engines().items())
    elsewhere = [
        EngineElsewhere(name=name, node=None if owner is None else owner.node)
        for name, owner in placed
        if not service.serves_engine(name) and _is_seen(call, name)
    ]
    return EngineList(engines=found, elsewhere=elsewhere)


def _is_seen(call: Call, name: str) -> bool:
    return call.allows(None, Resource(Kind.ENGINE, name))


def _listed(call: Call, name: str, engine: Engine | RestoringEngine) -> EngineMarks:
    found = marks(name, engine)
    if call.peer.is_local_socket and isinstance(engine, Engine):
        found = msgspec.structs.replace(found, directory=str(engine._core.directory))
    return found


@routes.add("GET", _ENGINE, Permission.READ, EngineDescription, resource=Kind.ENGINE)
async def describe_engine(call: Call) -> EngineDescription:
    """Describes an engine: marks and statistics."""
    engine = readable_of(call)
    known = msgspec.structs.asdict(marks(call.path["engine"], engine))
    statistics = {} if isinstance(engine, RestoringEngine) else msgspec.to_builtins(engine.statistics())
    return EngineDescription(**known, statistics=statistics)


@routes.add("POST", f"{_ENGINE}/apply", Permission.WRITE, Applied, resource=Kind.ENGINE, body=Entries, max_body_bytes=0)
async def apply_entries(call: Call) -> Applied:
    """Applies entries of the orchestrator's log; answers when they are on the disk.

    The same seq with the same entry again is a no-op; with another entry it is an error; a smaller new one is an error.
    An engine that was restored without the end of its log refuses what comes after `seen_seq`.
    """
    wanted: Entries = call.body
    engine = _not_behind(engine_of(call), wanted.seen_seq)
    given = [(_checked_seq(one.seq), one.entry) for one in wanted.entries]
    results = await engine.apply_many_async(given)
    return Applied(results=results, applied_seq=engine.applied_seq)


@routes.add("POST", f"{_ENGINE}/low-water-mark", Permission.WRITE, EngineMarks, resource=Kind.ENGINE, body=Mark)
async def update_low_water_mark(call: Call) -> EngineMarks:
    """Tells the engine up to which seq entries are committed: those are shipped, and never rolled back."""
    engine = engine_of(call)
    await engine.update_low_water_mark_async(_checked_seq(call.body.seq))
    return marks(call.path["engine"], engine)


@routes.add("POST", f"{_ENGINE}/rollback", Permission.ADMIN, EngineMarks, resource=Kind.ENGINE, body=Mark)
async def rollback(call: Call) -> EngineMarks:
    """Undoes every entry above a seq: the orchestrator threw an uncommitted tail away."""
    engine = engine_of(call)
    await engine.rollback_to_async(_checked_seq(call.body.seq))
    return marks(call.path["engine"], engine)


# Reading


@routes.add("GET", f"{_ENGINE}/buckets", Permission.READ, Buckets, resource=Kind.ENGINE, query=AsOf)
async def list_buckets(call: Call) -> Buckets:
    """Lists the buckets as of a seq."""
    return Buckets(buckets=await readable_of(call).list_buckets_async(call.query.seq))


@routes.add("GET", _BUCKET, Permission.READ, Scanned, resource=Kind.ENGINE, query=ScanQuery)
async def scan_objects(call: Call) -> Scanned:
    """Lists the objects of a bucket as of a seq: a range of keys, in either direction, with or without their values."""
    query: ScanQuery = call.query
    engine, bucket = readable_of(call), call.path["bucket"]
    found: list[ScannedItem] = []
    start, after = query.start, query.start_after
    if start is not None and after is not None:
        raise InputError("start and start_after both say where to begin", hint="Give one of them")
    if query.delimiter:
        if query.with_values or query.reverse or start is not None or query.end is not None:
            raise InputError("delimiter goes with prefix, start_after, limit and seq only")
        listed: Any = engine.list_objects_async(
            bucket, query.prefix, query.seq, start_after=after, delimiter=query.delimiter
        )
    else:
        listed = engine.scan_async(
            bucket,
            start if after is None else after + "\0",
            query.end,
            prefix=query.prefix,
            reverse=query.reverse,
            limit=query.limit + 1,
            with_values=query.with_values,
            seq=query.seq,
        )
    async for one in listed:
        if len(found) == query.limit:
            return Scanned(objects=found, is_cut=True)
        found.append(_item(one))
    return Scanned(objects=found, is_cut=False)


def _item(found: ScannedObject | ObjectInfo) -> ScannedItem:
    if isinstance(found, ObjectInfo):
        return ScannedItem(key=found.key, size=found.size, seq=found.seq, is_prefix=found.is_prefix)
    metadata = None if found.metadata is None else dict(found.metadata)
    return ScannedItem(key=found.key, size=found.size, seq=found.seq, crc=found.crc, data=found.data, metadata=metadata)


@routes.add("GET", _OBJECT, Permission.READ, resource=Kind.ENGINE, query=ObjectQuery, response_types=(BYTES,))
async def read_object(call: Call) -> Reply:
    """Reads an object as of a seq. Headers have its `x-tidelog-seq`, `x-tidelog-tier` and `x-tidelog-metadata`.

    With `offset` and `length`, or a header `range` (206), some bytes of it. A large one is sent piece by piece.
    """
    query: ObjectQuery = call.query
    engine, bucket, key = readable_of(call), call.path["bucket"], call.path["key"]
    is_whole = query.offset == 0 and query.length is None and "if-range" not in call.headers
    asked = call.headers.get("range") if is_whole else None
    known = await engine.find_object_async(bucket, key, query.seq)
    most = 0 if known is None else max(0, known.size - query.offset)
    if asked is None and (most if query.length is None else min(most, query.length)) <= WHOLE_BYTES:
        found = await engine.read_async(bucket, key, query.seq, offset=query.offset, length=query.length)
        return Reply(found.data, BYTES, headers=_said_of(found.seq, found.tier, found.metadata))
    file = await engine.open_object_async(bucket, key, query.seq)
    try:
        size, status = file.size, HTTPStatus.OK
        first, length = query.offset, max(0, size - query.offset)
        length = length if query.length is None else min(length, query.length)
        headers = _said_of(file.seq, file.tier, file.metadata)
        part = asked_range(asked, size)
        if part is not None:
            (first, length), status = part, HTTPStatus.PARTIAL_CONTENT
            headers += (("content-range", f"bytes {first}-{first + length - 1}/{size}"),)
    except BaseException:
        await file.close()
        raise
    return Reply(pieces_of(file, first, length), BYTES, status, headers, length)


def _said_of(seq: int, tier: str, metadata: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    told = json.dumps(msgspec.to_builtins(metadata))
    said = (("x-tidelog-seq", str(seq)), ("x-tidelog-tier", tier), ("x-tidelog-metadata", told))
    return (*said, ("accept-ranges", "bytes"))


@routes.add("GET", f"{_OBJECT}/stat", Permission.READ, Stat, resource=Kind.ENGINE, query=AsOf)
async def stat_object(call: Call) -> Stat:
    """Describes an object as of a seq, without its data."""
    found = await readable_of(call).stat_async(call.path["bucket"], call.path["key"], call.query.seq)
    return Stat(**msgspec.to_builtins(found))


@routes.add(
    "PUT",
    _OBJECT,
    Permission.WRITE,
    Result,
    resource=Kind.ENGINE,
    query=PutQuery,
    body_types=(BYTES,),
    max_body_bytes=0,
    streams_body=True,
)
async def put_object(call: Call) -> Result:
    """Applies an entry that puts the body as an object; answers when it is on the disk.

    The body may have up to 5 GiB, and is written as it arrives. One that breaks off puts nothing.
    """
    query: PutQuery = call.query
    try:
        metadata = json.loads(query.metadata or "{}")
    except (ValueError, RecursionError):
        raise InputError("metadata is not JSON") from None
    entry = PutObject(
        call.path["bucket"],
        call.path["key"],
        b"",
        metadata,
        if_absent=query.if_absent,
        if_match=query.if_match,
        if_match_crc=query.if_match_crc,
    )
    engine = _not_behind(engine_of(call), query.seen_seq)
    seq, size = _checked_seq(query.seq), call.announced_bytes
    if size is None or size > WHOLE_BYTES:
        return await put_stream(call, engine, seq, entry)
    with call.service.bodies.spending() as take:
        whole = msgspec.structs.replace(entry, data=await call.read(take))
        return await engine.apply_async(seq, whole)


@routes.add("DELETE", _OBJECT, Permission.WRITE, Result, resource=Kind.ENGINE, query=DeleteQuery)
async def delete_object(call: Call) -> Result:
    """Applies an entry that deletes an object; earlier versions stay readable."""
    query: DeleteQuery = call.query
    entry = DeleteObject(
        call.path["bucket"], call.path["key"], if_match=query.if_match, if_match_crc=query.if_match_crc
    )
    return await engine_of(call).apply_async(_checked_seq(query.seq), entry)


@routes.add("GET", f"{_OBJECT}/versions", Permission.READ, Versions, resource=Kind.ENGINE)
async def list_versions(call: Call) -> Versions:
    """Lists the versions of an object."""
    return Versions(versions=await readable_of(call).versions_async(call.path["bucket"], call.path["key"]))


@routes.add(
    "GET", f"{_ENGINE}/changes", Permission.READ, Changes, resource=Kind.ENGINE, query=ChangesQuery, mode="wait"
)
async def read_changes(call: Call) -> Changes:
    """Reads the entries that were applied from a seq on, and what became of each; with `wait` it waits for the first
    one.
    """
    query: ChangesQuery = call.query
    _checked_seq(query.start_seq)
    engine = engine_of(call)
    if engine.applied_seq < query.seen_seq:
        raise rolled_back(query.seen_seq)
    page = await _page_of(engine, query, query.start_seq, query.rollbacks)
    if not page.changes and query.wait:
        await call.service.unless_stopping(_news(engine, query, page.next_seq))
        page = await _page_of(engine, query, page.next_seq, page.rollbacks)
    return page


async def _page_of(engine: Engine, query: ChangesQuery, start_seq: int, since: int | None) -> Changes:
    """From a seq on, if nothing before it was rolled back `since` so many rollbacks."""
    history = engine._core.history
    rollbacks = history.rollbacks  # before everything else: what is rolled back from here on is noticed
    if since is not None and history.was_rolled_back(start_seq - 1, since):
        raise rolled_back(start_seq - 1)
    # All that is applied by now is in this page. What comes while it is read may be, too.
    reached = max(start_seq - 1, engine.low_water_mark if query.committed else engine.applied_seq)
    found: list[Change] = []
    feed: Any = _feed(engine, query, start_seq, follow=False)
    try:
        async for change in feed:
            found.append(await asyncio.to_thread(_with_bytes, change) if query.with_values else change)
            if len(found) == query.limit:
                break
    finally:
        await feed.aclose()
    if found:
        reached = found[-1].seq if len(found) == query.limit else max(reached, found[-1].seq)
    if history.was_rolled_back(reached, rollbacks):
        raise rolled_back(reached)
    shown = [_shown(one, query.with_values) for one in found]
    return Changes(changes=shown, next_seq=reached + 1, rollbacks=rollbacks)


async def _news(engine: Engine, query: ChangesQuery, start_seq: int) -> None:
    """Waits for a change, as long as the client does."""
    feed: Any = _feed(engine, query, start_seq, follow=True)
    with contextlib.suppress(TimeoutError):
        async with contextlib.aclosing(feed), asyncio.timeout(query.wait):
            await anext(feed)


def _feed(engine: Engine, query: ChangesQuery, start_seq: int, *, follow: bool) -> Any:
    return engine.changes_async(
        start_seq, follow=follow, prefix=query.prefix, with_values=query.with_values, committed=query.committed
    )


def _shown(change: Change, with_values: bool) -> ChangeShown:
    entry = change.entry
    shown: OperationShown | BatchShown
    if isinstance(entry, Batch):
        shown = BatchShown([_shown_operation(one, with_values) for one in entry.entries])
    else:
        shown = _shown_operation(entry, with_values)
    return ChangeShown(seq=change.seq, entry=shown, result=change.result)


def _shown_operation(operation: AnyOperation, with_values: bool) -> OperationShown:
    if not isinstance(operation, PutObject):
        return operation
    fields = msgspec.structs.asdict(operation)
    return PutObjectShown(**{**fields, "data": operation.data if with_values else None})


def _with_bytes(change: Change) -> Change:
    """The same change, with data that was to be read from a value file."""
    parts = [_with_data(part) for part in operations(change.entry)]
    entry = Batch(parts) if isinstance(change.entry, Batch) else parts[0]
    return Change(change.seq, entry, change.result)


def _with_data(operation: AnyOperation) -> AnyOperation:
    if not isinstance(operation, PutObject) or isinstance(operation.data, bytes):
        return operation
    data = bytearray()
    for piece in operation.data:
        data += piece
        if len(data) > _MAX_CHANGE_BYTES:
            raise InputError(
                f"the value of {operation.bucket}/{operation.key} has more than {_MAX_CHANGE_BYTES} bytes",
                hint="Read the changes without values, and the object by ranges",
            )
    return PutObject(operation.bucket, operation.key, bytes(data), operation.metadata)


# Operations


async def _begun(call: Call, kind: str, work: Callable[[Engine], Any]) -> Reply:
    engine = engine_of(call)

    async def run(report: Report) -> Any:
        return await work(engine)

    resource = Resource(Kind.ENGINE, call.path["engine"])
    return await begun(call, kind, resource, run, call.query.wait)


@starting(routes, "POST", f"{_ENGINE}/checkpoint", Kind.ENGINE)
async def checkpoint(call: Call) -> Reply:
    """Writes a checkpoint; the result has its seq."""

    async def work(engine: Engine) -> dict[str, int]:
        return {"seq": await engine.create_checkpoint_async()}

    return await _begun(call, "checkpoint", work)


@starting(routes, "POST", f"{_ENGINE}/ship", Kind.ENGINE)
async def ship_engine(call: Call) -> Reply:
    """Ships everything at or below the low-water mark; the result has the high-water mark."""

    async def work(engine: Engine) -> dict[str, int]:
        return {"high_water_mark": await engine.ship_async()}

    return await _begun(call, "ship", work)


@starting(routes, "POST", f"{_ENGINE}/verify", Kind.ENGINE, VerifyQuery)
async def verify_engine(call: Call) -> Reply:
    """Reads and checks the files of an engine and, with `cold`, what its store has of it."""
    cold = call.query.cold

    async def work(engine: Engine) -> dict[str, Any]:
        return report_of(await engine.verify_async(cold=cold))

    return await _begun(call, "verify", work)


@starting(routes, "POST", f"{_ENGINE}/compact", Kind.ENGINE, EngineCompactQuery)
async def compact_engine(call: Call) -> Reply:
    """Merges small objects of the engine's log in the store, or rewrites its index; the result is the report.

    Replaced objects stay for a while, for those who read them, and are deleted by a later run.
    """
    query: EngineCompactQuery = call.query

    async def work(engine: Engine) -> Any:
        if query.index:
            return await engine.compact_index_async()
        return await engine.compact_async(query.grace_seconds)

    return await _begun(call, "compact", work)


@routes.add(
    "GET", f"{_ENGINE}/digest", Permission.READ, resource=Kind.ENGINE, query=AsOf, response_types=("text/plain",)
)
async def digest(call: Call) -> Reply:
    """The digest of the state as of a seq: the same on every replica."""
    found = await readable_of(call).digest_async(call.query.seq)
    return Reply(found.encode(), "text/plain", HTTPStatus.OK)
