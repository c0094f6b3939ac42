"""`tidelog inspect`: the files of a log, or one frame of it byte by byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.quantities import parse_size
from tidelog.cli.session import Session, command

if TYPE_CHECKING:
    from datetime import datetime

    from tidelog.cli.targets import Target
    from tidelog.log.examine import FileExamination, LogExamination

_COLUMNS = (
    "file",
    "first_offset",
    "next_offset",
    "frames",
    "bytes",
    "created",
    "first_time",
    "last_time",
    "checkpoint",
    "problems",
)

_NARROWER = (
    ("file", "first_offset", "next_offset", "bytes", "first_time", "last_time", "problems"),
    ("file", "first_offset", "next_offset", "bytes", "last_time", "problems"),
)


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "inspect")(inspect)


def inspect(
    session: Session,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A topic, or a directory with WAL files.")],
    offset: Annotated[
        int | None, typer.Option("--offset", "-o", metavar="N", min=0, help="Show the frame of this offset.")
    ] = None,
    shown_bytes: Annotated[
        int, typer.Option("--bytes", metavar="N", parser=parse_size, help="How much to show in hex.")
    ] = 256,
) -> None:
    """Shows the files of a log: offsets, sizes, times, and what its checkpoint says of them.

    It reads every frame, takes no lock and changes nothing. The column checkpoint says whether the hint for opening
    covers a file whole, in part or not at all. With --offset it shows one frame instead: its header, the message in it,
    and its bytes with their places in the file, damaged ones included.
    """
    from tidelog.cli.targets import examine_target, find_target, require_files

    found = find_target(session, target)
    require_files(found)
    if offset is not None:
        from tidelog.cli.frame_view import show_frame

        show_frame(session.output, found, offset, shown_bytes)
        return
    _show_files(session, found, examine_target(session, found, "reading"))


def _show_files(session: Session, target: Target, examined: LogExamination) -> None:
    from tidelog.files import LocalFiles
    from tidelog.log.bound_files import known_log_id

    output, log_id = session.output, known_log_id(LocalFiles(), target.directory)
    rows = [_file_row(examined, file) for file in examined.files]
    if session.as_json:
        output.document(
            {
                "target": target.name,
                "directory": str(target.directory),
                "log_id": log_id,
                "frames": examined.frames,
                "bytes": examined.total_bytes,
                "checkpoint": examined.checkpoint,
                "checkpoint_problem": examined.checkpoint_problem,
                "files": rows,
                "problems": [str(problem) for problem in examined.problems],
            }
        )
        return
    output.table(_COLUMNS, rows, title=str(target.directory), narrower=_NARROWER)
    output.note(f"log id: {log_id or 'none yet'}")
    output.note(f"checkpoint: {_checkpoint_state(examined)}")
    for problem in examined.problems:
        output.note(f"problem: {problem}")


def _checkpoint_state(examined: LogExamination) -> str:
    from tidelog.cli.output import iso_time
    from tidelog.clock import to_datetime
    from tidelog.errors import offsets_text

    checkpoint = examined.checkpoint
    if checkpoint is None:
        return f"{examined.checkpoint_problem}; opening reads the files instead"
    is_empty = checkpoint.last_offset < checkpoint.start_offset
    covered = "no messages" if is_empty else offsets_text(checkpoint.start_offset, checkpoint.last_offset)
    return f"{covered}, {iso_time(to_datetime(checkpoint.written_us))}"


def _file_row(examined: LogExamination, file: FileExamination) -> dict[str, object]:
    created, first, last = map(_moment, (file.created_us, file.min_time_us, file.max_time_us))
    return {
        "file": file.name,
        "first_offset": file.first_offset,
        "next_offset": file.next_offset,
        "frames": file.frames,
        "bytes": file.size,
        "created": created,
        "first_time": first,
        "last_time": last,
        "checkpoint": _coverage(examined, file),
        "problems": len(file.problems),
    }


def _moment(time_us: int | None) -> datetime | None:
    """None also for a time that no calendar has; the message with it is listed as a problem."""
    from tidelog.clock import to_datetime

    try:
        return None if time_us is None else to_datetime(time_us)
    except OverflowError:
        return None


def _coverage(examined: LogExamination, file: FileExamination) -> str:
    hint = examined.checkpoint.file(file.seq) if examined.checkpoint is not None else None
    if hint is None:
        return "none"
    return "whole" if hint.size == file.size else f"{hint.size} bytes"
