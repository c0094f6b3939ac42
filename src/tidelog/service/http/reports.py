"""Reports of jobs: what the pipeline found or did, kept by the server for those who look at it.

    tidelog --json pipeline verify ... | curl -T - -H 'content-type: application/json' $TIDELOG/v1/reports/verify-1

Invariants
- A report is a JSON document below `.reports/` of the log directory, durable when the answer comes. The server does not
  read anything into it.
- At most `_KEPT` of them are kept: a new one replaces the oldest.
"""

from __future__ import annotations

from datetime import datetime
from http import HTTPStatus
from pathlib import Path
from typing import Annotated

import msgspec

from tidelog.clock import to_datetime
from tidelog.codec import JSON_ERRORS, from_json
from tidelog.errors import InputError, NotFoundError
from tidelog.service.auth.access import Permission
from tidelog.service.http.call import Call, Reply
from tidelog.service.http.routes import JSON, RouteTable
from tidelog.service.http.service import Service
from tidelog.store.scheduler import in_store_thread
from tidelog.topics.names import is_name_part

routes = RouteTable("Reports")
_FOLDER = ".reports"
_SUFFIX = ".json"
_KEPT = 1000
_MAX_BYTES = 8 << 20


class StoredReport(msgspec.Struct, frozen=True, kw_only=True):
    """A report in the list."""

    name: str
    bytes: int
    stored: datetime


class ReportList(msgspec.Struct, frozen=True, kw_only=True):
    """Reports, newest first."""

    reports: list[StoredReport]


class ReportsQuery(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which reports."""

    prefix: str = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=_KEPT)] = 100


class _Kept(msgspec.Struct, frozen=True):
    """What is in a file."""

    stored_us: int
    report: msgspec.Raw


class _Folder:
    """The files of a log directory. In a thread; one change at a time."""

    def __init__(self, service: Service) -> None:
        directory = service.broker.directory
        self._files, self._clock = directory._files, directory._clock
        self._path = Path(directory.root) / _FOLDER

    def names(self) -> list[str]:
        if not self._files.has_own_directory(self._path):
            return []
        return [name.removesuffix(_SUFFIX) for name in self._files.list(self._path) if name.endswith(_SUFFIX)]

    def read(self, name: str) -> _Kept:
        try:
            return from_json(self._files.read(self._path / f"{name}{_SUFFIX}"), _Kept)
        except (FileNotFoundError, *JSON_ERRORS):
            raise NotFoundError(f"there is no report {name}", hint="GET /v1/reports lists them") from None

    def store(self, name: str, report: bytes) -> None:
        self._files.make_own_directory(self._path)
        kept = _Kept(self._clock.now_us(), msgspec.Raw(report))
        self._files.write_atomically(self._path / f"{name}{_SUFFIX}", msgspec.json.encode(kept))
        known = self.all("")
        for old in known[_KEPT:]:
            self._files.remove(self._path / f"{old.name}{_SUFFIX}")

    def all(self, prefix: str) -> list[StoredReport]:
        found = [(name, self.read(name)) for name in self.names() if name.startswith(prefix)]
        found.sort(key=lambda one: (-one[1].stored_us, one[0]))
        return [
            StoredReport(name=name, bytes=len(bytes(kept.report)), stored=to_datetime(kept.stored_us))
            for name, kept in found
        ]


def _name(call: Call) -> str:
    name = call.path["report"]
    if not is_name_part(name):
        raise InputError("the name of a report has 1 to 200 of the characters A-Z a-z 0-9 . _ - and no dot in front")
    return name


@routes.add("GET", "/v1/reports", Permission.READ, ReportList, query=ReportsQuery)
async def list_reports(call: Call) -> ReportList:
    """Lists the reports of jobs, newest first."""
    query: ReportsQuery = call.query
    found = await in_store_thread(_Folder(call.service).all, query.prefix)
    return ReportList(reports=found[: query.limit])


@routes.add("GET", "/v1/reports/{report}", Permission.READ, response_types=(JSON,))
async def read_report(call: Call) -> Reply:
    """Reads a report, as it was stored."""
    kept = await in_store_thread(_Folder(call.service).read, _name(call))
    return Reply(bytes(kept.report))


@routes.add("PUT", "/v1/reports/{report}", Permission.ADMIN, body_types=(JSON,), max_body_bytes=_MAX_BYTES)
async def store_report(call: Call) -> Reply:
    """Stores the report of a job, which is any JSON; one of the same name is replaced."""
    name, body = _name(call), call.body
    try:
        msgspec.json.decode(body)
    except JSON_ERRORS as error:
        raise InputError(f"the report is not JSON: {error}") from None
    async with call.service.lock("reports"):
        await in_store_thread(_Folder(call.service).store, name, body)
    return Reply(b"", status=HTTPStatus.NO_CONTENT)
