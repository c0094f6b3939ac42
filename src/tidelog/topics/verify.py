"""Verifies a topic: its files, its objects and catalog, and that the files continue the objects.

    topic.json -> finding        WAL files -> frames, messages -> findings        catalog, objects -> findings

It takes no lock and changes nothing: it works on a topic that is in use, here or in another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tidelog.cold.catalog import Catalog
from tidelog.cold.verify import FIX, ColdCheck, check_cold
from tidelog.errors import DataError
from tidelog.files import Files, LocalFiles
from tidelog.findings import About, Finding, OnStep, VerifyReport, ignore_step
from tidelog.log.binding import bound
from tidelog.log.verify import LogFindings, Unreadable, verify_files
from tidelog.store.object_store import ObjectStore
from tidelog.topics.columns import unreadable_frames
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.names import read_topic_info


def verify_topic(
    name: str,
    directory: Path | None,
    catalog: Catalog | None = None,
    objects: ObjectStore | None = None,
    *,
    files: Files | None = None,
    durable_offset: int = 0,
    holds_messages: bool = True,
    on_step: OnStep = ignore_step,
) -> VerifyReport:
    """Reads every frame on this disk and, with a catalog, in the store.

    `durable_offset` is what an owner knows to be synced: nothing below it is a torn tail. `holds_messages` is false for
    a log of something else, whose payloads are opaque.
    """
    unreadable = unreadable_frames if holds_messages else None
    time_field = TIMESTAMP_FIELD if holds_messages else None
    below = files or LocalFiles()
    findings: list[Finding] = []
    read: dict[str, int] = {}
    local = LogFindings()
    if directory is not None and below.is_directory(directory):
        local = verify_local(name, directory, below, unreadable, on_step, durable_offset)
        findings += [*local.findings, *_check_topic_file(name, directory, below)]
        read = {"files": len(local.files), "frames": local.frames, "bytes": local.total_bytes}
    if catalog is not None and objects is not None:
        on_progress = partial(on_step, f"reading objects of {name}")
        cold = check_cold(catalog, objects, About(name, fix=FIX), time_field, on_progress, unreadable)
        begin = next((file.first_offset for file in local.files if file.first_offset is not None), None)
        findings += [*cold.findings(), *check_joint(cold, begin)]
        read |= cold.counts()
    return VerifyReport(subject=name, findings=tuple(findings), read=read)


def verify_local(
    name: str,
    directory: Path,
    files: Files,
    unreadable: Unreadable | None,
    on_step: OnStep = ignore_step,
    durable_offset: int = 0,
) -> LogFindings:
    """Every frame on this disk; a frame that the owner is writing right now is not a finding."""
    return verify_files(
        directory,
        files=bound(files, examining=True),
        subject=name,
        on_progress=lambda done, total: on_step(f"verifying {name}", done, total),
        unreadable=unreadable,
        waits=True,
        durable_offset=durable_offset,
    )


def _check_topic_file(name: str, directory: Path, files: Files) -> Iterator[Finding]:
    try:
        read_topic_info(files, directory)
    except DataError as error:
        yield About(name).finding_of(error, "settings")


def check_joint(cold: ColdCheck[Any], begin: int | None) -> Iterator[Finding]:
    """The files, which begin at an offset, do so where the objects end, or before."""
    if begin is not None and cold.descriptors and begin > cold.next_offset:
        message = "a gap: neither an object nor a file has them"
        yield cold.about.finding("catalog", None, message, cold.next_offset, begin - 1)
