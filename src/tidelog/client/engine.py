"""An engine of a server: its entries, objects and marks, over the network.

Invariants
- An entry carries its seq: a request that got no answer is sent again, and the same seq with the same entry changes
  nothing. So an entry is applied once.
- A listing or a scan that takes several requests shows one state: that of its seq, which is fixed when it begins.
- Entries say what this client has seen applied before them: an engine that lost its end with a node refuses them, and
  nothing is left out in between.
- JSON has no bytes: metadata with values that are bytes is refused here, not changed on the way.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from tidelog.client.bridge import Bridge, both
from tidelog.client.transport import Http, ended_operation, operate, path_of
from tidelog.codec import JSON_ERRORS
from tidelog.cold.gc import DEFAULT_GRACE_SECONDS
from tidelog.engine.changes import Change
from tidelog.engine.cold.garbage import GarbagePlan, GarbageReport
from tidelog.engine.cold.merge import CompactionReport
from tidelog.engine.core import IndexCompactionReport
from tidelog.engine.entry import (
    Batch,
    Conditional,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    ObjectInfo,
    ObjectStat,
    Operation,
    PutObject,
    Result,
    ScannedObject,
    StoredObject,
    Tier,
    VersionInfo,
    pieces_of,
    taken_data,
)
from tidelog.engine.object_file import AsyncObjectFile, SeekableObject
from tidelog.engine.reads import check_limit, check_text
from tidelog.engine.scan import checked_keys
from tidelog.engine.sst.value_file import PIECE_BYTES
from tidelog.errors import DataError, InputError, NotFoundError, NotSupportedError
from tidelog.findings import VerifyReport

_PAGE = 1000
_WAIT_SECONDS = 30.0
_READ_AT_ONCE = 4
"""Half of the connections of a client, which others use too."""
_Kind = TypeVar("_Kind")


class _Marks(msgspec.Struct, frozen=True, kw_only=True):
    applied_seq: int
    low_water_mark: int
    high_water_mark: int
    truncation_mark: int


class _Applied(msgspec.Struct, frozen=True):
    results: list[Result]
    applied_seq: int


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    key: str
    size: int
    seq: int
    is_prefix: bool = False
    crc: int | None = None
    data: bytes | None = None
    metadata: dict[str, Any] | None = None


class _Scanned(msgspec.Struct, frozen=True):
    objects: list[_Item]
    is_cut: bool


class _Stat(msgspec.Struct, frozen=True, kw_only=True):
    size: int
    metadata: dict[str, Any]
    seq: int
    tier: str
    crc: int


class _Put(Conditional, frozen=True, tag="PutObject", kw_only=True):
    """A put whose value may not have been asked for."""

    bucket: str
    key: str
    data: bytes = b""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


_Operation = CreateBucket | DeleteBucket | _Put | DeleteObject | CopyObject


class _Batch(msgspec.Struct, frozen=True, tag="Batch"):
    entries: list[_Operation]


class _Change(msgspec.Struct, frozen=True):
    seq: int
    entry: _Operation | _Batch
    result: Result


class _Changes(msgspec.Struct, frozen=True):
    changes: list[_Change]
    next_seq: int
    rollbacks: int | None = None


class ServedPlan(GarbagePlan, frozen=True, kw_only=True):
    """A plan of a server, which applies exactly this one by its id."""

    id: str


class _Versions(msgspec.Struct, frozen=True):
    versions: list[VersionInfo]


class _Scan:
    """One scan, page by page. Everything here runs in the client's loop."""

    def __init__(self, http: Http, path: str, query: dict[str, object], limit: int | None) -> None:
        self._http = http
        self._path = path
        self._query = query
        self._left = limit
        self._is_over = limit == 0

    async def page(self) -> list[_Item] | None:
        """The next objects; None at the end."""
        if self._is_over:
            return None
        limit = _PAGE if self._left is None else min(_PAGE, self._left)
        found: _Scanned = await self._http.json("GET", self._path, query={**self._query, "limit": limit}, kind=_Scanned)
        if self._left is not None:
            self._left -= len(found.objects)
        self._is_over = not found.is_cut or self._left == 0 or not found.objects
        if found.objects:
            last = found.objects[-1].key
            if self._query.get("delimiter"):
                self._query |= {"start_after": last}
            else:
                self._query |= {"end": last} if self._query.get("reverse") else {"start": last + "\0"}
        return found.objects


def _changed(one: _Change) -> Change:
    entry = one.entry
    read = Batch([_operation(part) for part in entry.entries]) if isinstance(entry, _Batch) else _operation(entry)
    return Change(one.seq, read, one.result)


def _operation(one: _Operation) -> Operation:
    return PutObject(**msgspec.structs.asdict(one)) if isinstance(one, _Put) else one


class _Feed:
    """Changes, page by page. Everything here runs in the client's loop."""

    def __init__(self, http: Http, path: str, start_seq: int, which: dict[str, object], *, follows: bool) -> None:
        self._http = http
        self._path = path
        self._next_seq = start_seq
        self._query: dict[str, object] = {**which, "limit": _PAGE, "wait": _WAIT_SECONDS if follows else None}
        self._follows = follows
        self._is_over = False

    async def page(self) -> list[Change] | None:
        """The next changes, none where a wait was in vain; None at the end."""
        if self._is_over:
            return None
        query, seconds = {**self._query, "start_seq": self._next_seq}, self._http.timeout_seconds
        if self._follows:
            more: dict[str, Any] = {"waits": True, "timeout": 2 * seconds + _WAIT_SECONDS}
            more["attempt"] = seconds + _WAIT_SECONDS
        else:
            more = {}
        found: _Changes = await self._http.json("GET", self._path, query=query, kind=_Changes, **more)
        if self._follows:
            self._query["rollbacks"] = found.rollbacks
            if found.next_seq > self._next_seq:  # else it waits for a seq that nothing has yet
                self._query["seen_seq"] = found.next_seq - 1
        self._next_seq = found.next_seq
        self._is_over = not self._follows and len(found.changes) < _PAGE
        return [_changed(one) for one in found.changes]


class RemoteObject(io.BufferedReader):
    """An object of a server that is read like a file, with its `size`, `metadata`, `seq` and `tier`."""

    def __init__(self, read: Callable[[int, int], bytes], found: ObjectStat) -> None:
        super().__init__(SeekableObject(found.size, read), PIECE_BYTES)
        self.size = found.size
        self.metadata = found.metadata
        self.seq = found.seq
        self.tier = found.tier


async def _pieces(put: PutObject) -> AsyncIterator[bytes]:
    """The data of a stream, which another thread reads: it may block."""
    given = pieces_of(taken_data(put))
    while (piece := await asyncio.to_thread(next, given, None)) is not None:
        yield bytes(piece)


def _checked_seq(seq: object) -> int:
    if type(seq) is not int or seq < 1:
        raise InputError(f"seq must be a whole number from 1 to 2**64 - 1, not {seq!r}")
    return seq


class RemoteEngine:
    """An engine of a server; `client.engine(name)` makes it. Entries are those of `tidelog.open_engine`'s."""

    def __init__(self, bridge: Bridge, http: Http, name: str) -> None:
        self._bridge = bridge
        self._http = http
        self._name = name
        self._path = path_of("engines", name)
        self._seen_seq = 0

    @property
    def name(self) -> str:
        """As the server calls it."""
        return self._name

    def __repr__(self) -> str:
        return f"<RemoteEngine {self._name}>"

    # Marks

    async def _marks(self) -> _Marks:
        found: _Marks = await self._http.json("GET", self._path, kind=_Marks)
        self._seen_seq = max(self._seen_seq, found.applied_seq)
        return found

    @property
    def applied_seq(self) -> int:
        """The seq of the last entry that was applied. Each look at a mark is a request."""
        return self._bridge.wait(self._marks()).applied_seq

    @property
    def low_water_mark(self) -> int:
        """Entries up to here are committed."""
        return self._bridge.wait(self._marks()).low_water_mark

    @property
    def high_water_mark(self) -> int:
        """Entries up to here are in the store."""
        return self._bridge.wait(self._marks()).high_water_mark

    @property
    def truncation_mark(self) -> int:
        """The orchestrator may truncate its log up to here."""
        return self._bridge.wait(self._marks()).truncation_mark

    async def _update_low_water_mark(self, seq: int) -> None:
        """Tells the engine up to which seq entries are committed."""
        await self._http.json("POST", f"{self._path}/low-water-mark", {"seq": seq})

    async def _rollback_to(self, seq: int) -> None:
        """Undoes every entry above a seq: the orchestrator threw an uncommitted tail away."""
        await self._http.json("POST", f"{self._path}/rollback", {"seq": seq})
        self._seen_seq = min(self._seen_seq, seq)

    update_low_water_mark, update_low_water_mark_async = both(_update_low_water_mark)
    rollback_to, rollback_to_async = both(_rollback_to)

    # Entries

    async def _apply(self, seq: int, entry: Entry) -> Result:
        """Applies an entry; returns once it is on the server's disk."""
        return (await self._apply_many([(seq, entry)]))[0]

    async def _apply_many(self, entries: Iterable[tuple[int, Entry]]) -> list[Result]:
        """Applies entries in order, with one sync. ConflictError when another node serves the engine since, and its
        store has less than this client has seen applied: go on after `applied_seq`.
        """
        given = [(_checked_seq(seq), _sendable(entry)) for seq, entry in entries]
        if not given:
            return []
        streams = [entry for _, entry in given if isinstance(entry, PutObject) and not isinstance(entry.data, bytes)]
        if streams:
            return [await self._put_stream(given[0][0], streams[0], len(given))]
        seen_seq = min(self._seen_seq, given[0][0] - 1)  # what is applied again goes back on purpose
        body = {"entries": [{"seq": seq, "entry": entry} for seq, entry in given], "seen_seq": max(0, seen_seq)}
        found: _Applied = await self._http.json("POST", f"{self._path}/apply", body, kind=_Applied)
        self._seen_seq = found.applied_seq
        return found.results

    async def _put_stream(self, seq: int, put: PutObject, entries: int) -> Result:
        """Data from a file object or an iterator is sent as it comes: it is not held in memory, nor sent again."""
        if entries > 1:
            raise NotSupportedError("data from a stream is applied alone", hint="Use `apply`, or pass bytes")
        await self._marks()  # the node that serves the engine is known then
        query = {
            "seq": seq,
            "metadata": msgspec.json.encode(put.metadata).decode(),
            "if_absent": put.if_absent,
            "if_match": put.if_match,
            "if_match_crc": put.if_match_crc,
            "seen_seq": max(0, min(self._seen_seq, seq - 1)),
        }
        answer = await self._http.upload(self._object(put.bucket, put.key), query, _pieces(put), self._path)
        found: Result = answer.json(Result)
        self._seen_seq = max(self._seen_seq, seq)
        return found

    apply, apply_async = both(_apply)
    apply_many, apply_many_async = both(_apply_many)

    # Objects

    async def _read(
        self, bucket: str, key: str, seq: int | None = None, *, offset: int = 0, length: int | None = None
    ) -> StoredObject:
        """Returns an object as of a seq; by default the last applied one. With `offset` and `length`, its data from
        that byte on, so many bytes at most.
        """
        query = {"seq": seq, "offset": offset or None, "length": length}
        answer = await self._http.ask("GET", self._object(bucket, key), query, accept="application/octet-stream")
        said = [answer.headers.get(f"x-tidelog-{name}", "") for name in ("metadata", "seq", "tier")]
        try:
            metadata = msgspec.json.decode(said[0], type=dict[str, Any])
            return StoredObject(answer.body, metadata, int(said[1]), "hot" if said[2] == "hot" else "cold")
        except (*JSON_ERRORS, ValueError):
            raise DataError("the server does not say which version of the object this is") from None

    def read_many(self, keys: Iterable[tuple[str, str]], seq: int | None = None) -> list[StoredObject | None]:
        """Returns the objects of these (bucket, key) as of one seq, in their order; None for those that do not exist.
        Several are asked for at once.
        """
        wanted = checked_keys(keys)  # here: an iterator may itself ask the server
        return self._bridge.wait(self._read_many(wanted, seq))

    async def read_many_async(
        self, keys: Iterable[tuple[str, str]], seq: int | None = None
    ) -> list[StoredObject | None]:
        """Like `read_many`, without blocking the event loop."""
        return await asyncio.wrap_future(self._bridge.start(self._read_many(checked_keys(keys), seq)))

    async def _read_many(self, wanted: Sequence[tuple[str, str]], seq: int | None) -> list[StoredObject | None]:
        at = await self._as_of(seq)
        found: list[StoredObject | None] = [None] * len(wanted)
        left = iter(enumerate(wanted))

        async def read() -> None:
            for number, (bucket, key) in left:
                with suppress(NotFoundError):
                    found[number] = await self._read(bucket, key, at)

        reading = [asyncio.ensure_future(read()) for _ in wanted[:_READ_AT_ONCE]]
        try:
            await asyncio.gather(*reading)
        finally:
            for one in reading:
                one.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        if None in found:
            await self._list_buckets(at)  # NotFoundError where the state is not there, instead of the object
        return found

    async def _as_of(self, seq: int | None) -> int | None:
        """The seq that several requests are to show; None for an engine without entries."""
        return seq if seq is not None else (await self._marks()).applied_seq or None

    async def _versions(self, bucket: str, key: str) -> list[VersionInfo]:
        """Returns all kept versions of an object, newest first, including deletions."""
        found: _Versions = await self._http.json("GET", f"{self._object(bucket, key)}/versions", kind=_Versions)
        return found.versions

    async def _list_buckets(self, seq: int | None = None) -> list[str]:
        """Returns the buckets as of a seq."""
        found = await self._http.json("GET", f"{self._path}/buckets", query={"seq": seq})
        buckets: list[str] = found["buckets"]
        return buckets

    async def _digest(self, seq: int | None = None) -> str:
        """Returns a digest of the whole state at a seq: equal on every replica."""
        return (await self._http.ask("GET", f"{self._path}/digest", {"seq": seq}, accept="text/plain")).body.decode()

    async def _stat(self, bucket: str, key: str, seq: int | None = None) -> ObjectStat:
        """Returns an object as of a seq (by default the last applied one), without its data."""
        found = await self._http.json("GET", f"{self._object(bucket, key)}/stat", query={"seq": seq}, kind=_Stat)
        tier: Tier = "hot" if found.tier == "hot" else "cold"
        return ObjectStat(found.size, found.metadata, found.seq, tier, found.crc)

    def open_object(self, bucket: str, key: str, seq: int | None = None) -> RemoteObject:
        """Opens an object as of a seq as a file object: buffered, seekable, read by pieces. It has `size`, `metadata`,
        `seq` and `tier`, and shows this version as long as the engine keeps it.
        """
        opened = self.stat(bucket, key, seq)
        as_of = seq

        def read(offset: int, length: int) -> bytes:
            nonlocal as_of
            with suppress(NotFoundError):  # this state is no longer kept, or the object was deleted since
                found = self.read(bucket, key, as_of, offset=offset, length=length)
                if found.seq == opened.seq:
                    return found.data
            as_of = self._shown_at(bucket, key, opened.seq)
            found = self.read(bucket, key, as_of, offset=offset, length=length)
            if found.seq != opened.seq:
                raise _replaced(bucket, key, opened.seq)
            return found.data

        return RemoteObject(read, opened)

    def _shown_at(self, bucket: str, key: str, version: int) -> int | None:
        """The last seq as of which a version is shown; None: it is the newest. The state at its own seq may be gone
        while the version is kept."""
        seqs: list[int] = []
        with suppress(NotFoundError):  # nothing of the object is kept
            seqs = [one.seq for one in self.versions(bucket, key)]
        if version not in seqs:
            raise _replaced(bucket, key, version)
        return min((seq - 1 for seq in seqs if seq > version), default=None)

    async def open_object_async(self, bucket: str, key: str, seq: int | None = None) -> AsyncObjectFile:
        """Like `open_object`, without blocking the event loop: each call on it is awaited, and so is each step of
        `async for`, which yields pieces.
        """
        return AsyncObjectFile(await asyncio.to_thread(self.open_object, bucket, key, seq), asyncio.to_thread)

    read, read_async = both(_read)
    stat, stat_async = both(_stat)
    versions, versions_async = both(_versions)
    list_buckets, list_buckets_async = both(_list_buckets)
    digest, digest_async = both(_digest)

    def _object(self, bucket: str, key: str) -> str:
        return path_of("engines", self._name, "buckets", bucket, "objects", key)

    # Listings

    def scan(
        self,
        bucket: str,
        start: str | None = None,
        end: str | None = None,
        *,
        prefix: str = "",
        reverse: bool = False,
        limit: int | None = None,
        with_values: bool = False,
        seq: int | None = None,
    ) -> Iterator[ScannedObject]:
        """Yields the objects of a range of keys, in their order or the other way round, as of a seq."""
        begun = self._bridge.wait(self._scan(bucket, start, end, prefix, reverse, limit, with_values, seq))
        while (page := self._bridge.wait(begun.page())) is not None:
            yield from map(_scanned, page)

    async def scan_async(
        self,
        bucket: str,
        start: str | None = None,
        end: str | None = None,
        *,
        prefix: str = "",
        reverse: bool = False,
        limit: int | None = None,
        with_values: bool = False,
        seq: int | None = None,
    ) -> AsyncIterator[ScannedObject]:
        """Like `scan`, without blocking the event loop."""
        work = self._scan(bucket, start, end, prefix, reverse, limit, with_values, seq)
        begun = await asyncio.wrap_future(self._bridge.start(work))
        while (page := await asyncio.wrap_future(self._bridge.start(begun.page()))) is not None:
            for one in page:
                yield _scanned(one)

    def list_objects(
        self,
        bucket: str,
        prefix: str = "",
        seq: int | None = None,
        *,
        start_after: str | None = None,
        limit: int | None = None,
        delimiter: str = "",
    ) -> Iterator[ObjectInfo]:
        """Yields the objects of a bucket whose keys start with the prefix, in key order, as of a seq. With a
        `delimiter`, keys that contain it after the prefix are grouped into one item, their common prefix (`is_prefix`).
        """
        begun = self._bridge.wait(self._listing(bucket, prefix, seq, start_after, limit, delimiter))
        while (page := self._bridge.wait(begun.page())) is not None:
            yield from map(_listed, page)

    async def list_objects_async(
        self,
        bucket: str,
        prefix: str = "",
        seq: int | None = None,
        *,
        start_after: str | None = None,
        limit: int | None = None,
        delimiter: str = "",
    ) -> AsyncIterator[ObjectInfo]:
        """Like `list_objects`, without blocking the event loop."""
        work = self._listing(bucket, prefix, seq, start_after, limit, delimiter)
        begun = await asyncio.wrap_future(self._bridge.start(work))
        while (page := await asyncio.wrap_future(self._bridge.start(begun.page()))) is not None:
            for one in page:
                yield _listed(one)

    async def _listing(
        self, bucket: str, prefix: str, seq: int | None, start_after: str | None, limit: int | None, delimiter: str
    ) -> _Scan:
        check_text("delimiter", delimiter)
        check_limit(limit)
        if not delimiter:
            start = None if start_after is None else start_after + "\0"
            return await self._scan(bucket, start, None, prefix, False, limit, False, seq)
        query: dict[str, object] = {"prefix": prefix or None, "delimiter": delimiter, "start_after": start_after}
        return await self._scanned_as_of(bucket, query, limit, seq)

    async def _scan(
        self,
        bucket: str,
        start: str | None,
        end: str | None,
        prefix: str,
        reverse: bool,
        limit: int | None,
        with_values: bool,
        seq: int | None,
    ) -> _Scan:
        query: dict[str, object] = {"start": start, "end": end, "prefix": prefix or None}
        return await self._scanned_as_of(bucket, query | {"reverse": reverse, "with_values": with_values}, limit, seq)

    async def _scanned_as_of(self, bucket: str, query: dict[str, object], limit: int | None, seq: int | None) -> _Scan:
        path = path_of("engines", self._name, "buckets", bucket, "objects")
        return _Scan(self._http, path, {**query, "seq": await self._as_of(seq)}, limit)

    # The log

    def changes(
        self,
        start_seq: int = 1,
        *,
        follow: bool = False,
        prefix: str = "",
        with_values: bool = False,
        committed: bool = False,
    ) -> Iterator[Change]:
        """The entries that were applied from a seq on, and what became of each, up to the last one of now; with
        `follow` it waits for more. ConflictError if what was read is rolled back; with `committed` nothing is.
        """
        feed = self._feed(start_seq, follow=follow, prefix=prefix, with_values=with_values, committed=committed)
        while (page := self._bridge.wait(feed.page())) is not None:
            yield from page

    async def changes_async(
        self,
        start_seq: int = 1,
        *,
        follow: bool = False,
        prefix: str = "",
        with_values: bool = False,
        committed: bool = False,
    ) -> AsyncIterator[Change]:
        """Like `changes`, without blocking the event loop."""
        feed = self._feed(start_seq, follow=follow, prefix=prefix, with_values=with_values, committed=committed)
        while (page := await asyncio.wrap_future(self._bridge.start(feed.page()))) is not None:
            for change in page:
                yield change

    def _feed(self, start_seq: int, *, follow: bool, **which: object) -> _Feed:
        return _Feed(self._http, f"{self._path}/changes", max(1, start_seq), which, follows=follow)

    # Operations

    async def _create_checkpoint(self) -> int:
        """Writes a checkpoint; returns its seq."""
        seq: int = (await operate(self._http, f"{self._path}/checkpoint"))["seq"]
        return seq

    async def _compact(self, grace_seconds: float = DEFAULT_GRACE_SECONDS) -> CompactionReport:
        """Has the server merge small objects of the log in the store; see `Engine.compact`."""
        found = await operate(self._http, f"{self._path}/compact", {"grace_seconds": grace_seconds})
        return _converted(found, CompactionReport)

    async def _compact_index(self) -> IndexCompactionReport:
        """Has the server rewrite the version index in full pages."""
        found = await operate(self._http, f"{self._path}/compact", {"index": True})
        return _converted(found, IndexCompactionReport)

    async def _statistics_of(self) -> dict[str, Any]:
        """All statistics, as the server tells them."""
        found: dict[str, Any] = (await self._http.json("GET", self._path))["statistics"]
        return found

    async def _ship(self) -> int:
        """Ships everything at or below the low-water mark; returns the high-water mark."""
        mark: int = (await operate(self._http, f"{self._path}/ship"))["high_water_mark"]
        return mark

    async def _verify(self, *, cold: bool = True) -> VerifyReport:
        """Has the server read and check the files of the engine and, with `cold`, what its store has of it."""
        found = await operate(self._http, f"{self._path}/verify", {"cold": cold})
        return msgspec.convert({name: found[name] for name in VerifyReport.__struct_fields__}, VerifyReport)

    async def _plan_garbage(self, horizon: int | None = None) -> GarbagePlan:
        """Returns what a collection would do now. Changes nothing."""
        found = await ended_operation(self._http, f"{self._path}/garbage", _horizon(horizon), "GET")
        return _converted({**found["result"], "id": found["id"]}, ServedPlan)

    async def _find_plan(self, plan_id: str) -> ServedPlan:
        """A plan that the server has shown before."""
        found = await self._http.json("GET", path_of("operations", plan_id))
        if found["kind"] != "plan-garbage" or found["state"] != "done":
            raise NotFoundError(f"{plan_id} is no plan of garbage", hint="`tidelog engine gc` makes one, with its id")
        return _converted({**found["result"], "id": found["id"]}, ServedPlan)

    async def _collect_garbage(self, plan: GarbagePlan | None = None, horizon: int | None = None) -> GarbageReport:
        """Has the server remove what a plan of it says, exactly that, or what there is to remove now.

        ConflictError if it is no longer what the plan has shown.
        """
        if plan is not None and not isinstance(plan, ServedPlan):
            raise InputError("this plan was not made by the server", hint="Use one that this server has made")
        if plan is not None and horizon is not None:
            raise InputError("a plan has its own horizon", hint="Give one of them")
        query = _horizon(horizon) if plan is None else {"plan": plan.id}
        found = await operate(self._http, f"{self._path}/garbage/collect", query)
        return _converted(found, GarbageReport)

    plan_garbage, plan_garbage_async = both(_plan_garbage)
    collect_garbage, collect_garbage_async = both(_collect_garbage)
    create_checkpoint, create_checkpoint_async = both(_create_checkpoint)
    compact, compact_async = both(_compact)
    compact_index, compact_index_async = both(_compact_index)
    ship, ship_async = both(_ship)
    verify, verify_async = both(_verify)


def _horizon(seq: int | None) -> dict[str, object]:
    return {} if seq is None else {"horizon": seq}


def _converted(found: object, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise DataError(f"the result of the server does not fit: {error}") from None


def _scanned(one: _Item) -> ScannedObject:
    return ScannedObject(one.key, one.size, one.seq, one.crc or 0, one.data, one.metadata)


def _listed(one: _Item) -> ObjectInfo:
    return ObjectInfo(one.key, one.size, one.seq, one.is_prefix)


def _replaced(bucket: str, key: str, version: int) -> NotFoundError:
    return NotFoundError(
        f"{bucket}/{key}: its version of seq {version} is no longer kept",
        operation="read",
        hint="Open the object again: it shows the newest version",
    )


def _sendable(entry: Entry) -> Entry:
    """The entry, if JSON can carry it."""
    for one in entry.entries if isinstance(entry, Batch) else (entry,):
        if isinstance(entry, Batch) and isinstance(one, PutObject) and not isinstance(one.data, bytes):
            raise NotSupportedError("data from a stream cannot be sent in a batch", hint="Put it alone, or pass bytes")
        if isinstance(one, PutObject) and any(isinstance(value, bytes) for value in one.metadata.values()):
            raise NotSupportedError(
                "values of metadata that are bytes cannot be sent to a server", hint="Encode them as text first"
            )
    return entry
