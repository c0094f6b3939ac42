"""What a worker does for `verify` with the files of a topic: every frame of them, and how they continue its objects.

Invariants
- It takes no lock and changes nothing. A last frame without an end in a file that grows is being written: no problem.
- Files that are no longer the topic's end (another node owns it) are checked, and not counted.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from tidelog.errors import TidelogError
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.examine import LogExamination, examine_log
from tidelog.log.examine import Problem as FileProblem
from tidelog.log.readable import ReadableLog
from tidelog.pipeline.jobs.frame_tally import lost_offsets, tally_frames
from tidelog.pipeline.jobs.job import Problem
from tidelog.pipeline.jobs.proof import Tally
from tidelog.pipeline.root import Root
from tidelog.tier.joined import JoinedLog
from tidelog.topics.columns import unreadable_frames
from tidelog.topics.message import TIMESTAMP_FIELD
from tidelog.topics.storage import LogDirectory

_GROWTH_WAIT_SECONDS = 0.2


class FilesWork(msgspec.Struct, frozen=True, kw_only=True):
    """A topic whose files are to be read. What is below `cold_end` is in objects, and counted there."""

    topic: str
    root: Root
    cold_end: int


class FilesFinding(msgspec.Struct, frozen=True, kw_only=True):
    """What the files have, and what is wrong with them. `start_offset` is where they begin, None without any."""

    topic: str
    files: int = 0
    size: int = 0
    start_offset: int | None = None
    tally: Tally = Tally()
    lost: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def check_files(work: FilesWork) -> FilesFinding:
    """Reads all of them."""
    with work.root.open() as log:
        directory = log.topic_directory(work.topic)
        if not directory.is_dir():
            return FilesFinding(topic=work.topic)
        examined = examine_log(directory, time_field=TIMESTAMP_FIELD, unreadable=unreadable_frames)
        problems = [_told(work.topic, one) for one in examined.problems if not _is_growing(directory, examined, one)]
        finding = FilesFinding(
            topic=work.topic, files=len(examined.files), size=examined.total_bytes, problems=tuple(problems)
        )
        return finding if problems else _counted(log, work, finding)


def _counted(log: LogDirectory, work: FilesWork, finding: FilesFinding) -> FilesFinding:
    try:
        readable = log.topic(work.topic).readable
        hot = readable.hot if isinstance(readable, JoinedLog) else readable
    except TidelogError as error:
        problem = Problem(topic=work.topic, reason=f"it cannot be opened: {error.message}")
        return msgspec.structs.replace(finding, problems=(problem,))
    if not isinstance(hot, ReadableLog):
        notes = () if not finding.size else (f"{work.topic}: its files here are not its end, another node has that",)
        return msgspec.structs.replace(finding, notes=notes)
    tally, lost = _sum_up(hot, max(work.cold_end, hot.start_offset))
    return msgspec.structs.replace(finding, start_offset=hot.start_offset, tally=tally, lost=tuple(lost))


def _sum_up(hot: ReadableLog, start: int) -> tuple[Tally, list[int]]:
    tally, lost = Tally(), list[int]()
    if start >= hot.next_offset:
        return tally, lost
    for batch in hot.read(start, hot.next_offset):
        assert batch.frames is not None, "whoever looks from outside reads files"
        tally += tally_frames(batch.frames, batch.start, batch.stop)
        lost += [offset for offset in lost_offsets(batch.frames) if start <= offset < batch.next_offset]
    return tally, lost


def _is_growing(directory: Path, examined: LogExamination, problem: FileProblem) -> bool:
    if not problem.is_torn_tail:
        return False
    time.sleep(_GROWTH_WAIT_SECONDS)
    size = next(file.size for file in examined.files if file.name == problem.file)
    return (directory / problem.file).stat().st_size > BINDING_BYTES + size


def _told(topic: str, problem: FileProblem) -> Problem:
    return Problem(
        topic=topic,
        place=f"{problem.file}, byte {problem.byte}",
        reason=f"{problem.reason} (a torn tail: the next opening cuts it off)"
        if problem.is_torn_tail
        else problem.reason,
        first_offset=problem.lost_first,
        last_offset=problem.lost_last,
    )
