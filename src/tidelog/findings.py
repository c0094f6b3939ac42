"""What a verification says: findings, and the report that holds them.

    check -> findings -> report

Invariants
- A finding says what it is about (`subject`), where that is (`path`, `byte`, offsets), what is wrong, and what to do.
- A check takes what it needs and yields findings; it changes nothing, and damage does not make it raise. What prevents
  a look (a store that does not answer) is raised: nothing was verified then.
- The same damage gives the same findings in the library, on the command line and in Spark.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from tidelog.errors import TidelogError

Severity = Literal["error", "warning"]
"""A warning needs nobody: opening the log mends it."""
Unit = Literal["offset", "LSN"]
Verdict = Literal["ok", "torn", "damaged"]

OnStep = Callable[[str, int, int], None]
"""How far a step is: its name, how much is done, and of how much."""

TORN_TAIL = "torn tail"
UNREADABLE = "message"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong."""

    subject: str
    """What it belongs to: the name of a topic, `engine NAME`, a table."""
    message: str
    kind: str = "damage"
    """What was checked: frames, catalog, object, manifest, snapshot, index, value, page, ..."""
    severity: Severity = "error"
    path: str | None = None
    """The file, the object, or the key of the document."""
    byte: int | None = None
    first_offset: int | None = None
    last_offset: int | None = None
    """The offsets, or LSNs, that are lost or concerned, both included; without a last one, all from the first on."""
    unit: Unit = "offset"
    fix: str | None = None
    """What to do about it."""

    @property
    def where(self) -> str:
        """Path and byte as text; empty where neither is known."""
        if self.path is None:
            return ""
        return self.path if self.byte is None else f"{self.path}, byte {self.byte}"

    @property
    def text(self) -> str:
        """All of it but the subject and the fix."""
        where = f"{self.where}: " if self.path is not None else ""
        return f"{where}{self.message}{self._offsets()}"

    def _offsets(self) -> str:
        if self.first_offset is None:
            return ""
        if self.last_offset is None:
            return f" ({self.unit} {self.first_offset} on)"
        if self.last_offset == self.first_offset:
            return f" ({self.unit} {self.first_offset})"
        return f" ({self.unit}s {self.first_offset} to {self.last_offset})"

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was verified, and what is wrong with it. True if nothing is."""

    subject: str
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    """What is not wrong, and may be worth knowing."""
    read: dict[str, int] = {}
    """How much was read of what: files, frames, bytes, objects, values."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    @property
    def verdict(self) -> Verdict:
        """The report in a word: `ok`; `torn` if only a torn tail was found, which the next opening cuts; `damaged`."""
        if self.ok:
            return "ok"
        return "torn" if all(one.severity == "warning" for one in self.findings) else "damaged"

    def __bool__(self) -> bool:
        return self.ok


def merged(subject: str, reports: Iterable[VerifyReport]) -> VerifyReport:
    """The reports of the parts of something as one: all findings and notes, and the sums of what was read."""
    listed = list(reports)
    return VerifyReport(
        subject=subject,
        findings=tuple(finding for one in listed for finding in one.findings),
        notes=tuple(note for one in listed for note in one.notes),
        read=dict(sum((Counter(one.read) for one in listed), Counter())),
    )


class About(msgspec.Struct, frozen=True):
    """What findings of one verification have in common. It may travel to a worker."""

    subject: str
    unit: Unit = "offset"
    fix: str | None = None

    def finding(
        self,
        kind: str,
        path: str | Path | None,
        message: str,
        first: int | None = None,
        last: int | None = None,
        *,
        byte: int | None = None,
    ) -> Finding:
        """Something wrong: what was checked, where, and which offsets it concerns."""
        where = None if path is None else str(path)
        return Finding(
            subject=self.subject,
            message=message,
            kind=kind,
            path=where,
            byte=byte,
            first_offset=first,
            last_offset=last,
            unit=self.unit,
            fix=self.fix,
        )

    def finding_of(self, error: TidelogError, kind: str, path: str | Path | None = None) -> Finding:
        """What an error says, with its own path and byte where it knows them."""
        found = self.finding(kind, error.path or path, error.reason, byte=error.byte)
        return found if self.fix is not None else msgspec.structs.replace(found, fix=error.hint)


def ignore_step(step: str, done: int, total: int) -> None:
    """For callers that do not want progress."""
