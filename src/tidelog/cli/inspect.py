"""`tidelog inspect`: shows the files of a log, or one frame of it byte by byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from tidelog.cli.output import Output, describe_message, parse_size
from tidelog.cli.session import Session, command
from tidelog.cli.topic.names import Target, examine_target, find_target, require_files
from tidelog.clock import iso_time, to_datetime
from tidelog.errors import DataError, NotFoundError, OffsetOutOfRangeError, offsets_text
from tidelog.files import File, Files, LocalFiles
from tidelog.log.binding import BoundFiles, known_log_id
from tidelog.log.directory import wal_files
from tidelog.log.frame import HEADER, HEADER_BYTES, MAX_PAYLOAD_BYTES, frame_crc, is_control, is_removed
from tidelog.log.recovery import find_good_frames
from tidelog.log.repair import is_lost
from tidelog.log.segment import FileScanner
from tidelog.log.verify import FileFindings, LogFindings, verify_files
from tidelog.topics.message import decode_payloads

if TYPE_CHECKING:
    from datetime import datetime


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
    """Shows the files of a log. Offsets, sizes, times, and what its checkpoint says of them.

    It reads every frame, takes no lock and changes nothing. The column checkpoint says whether the hint for opening
    covers a file whole, in part or not at all. With --offset it shows one frame instead: its header, the message in it,
    and its bytes with their places in the file, damaged ones included.
    """
    found = find_target(session, target)
    require_files(found)
    if offset is not None:
        show_frame(session.output, found, offset, shown_bytes)
        return
    _show_files(session, found, examine_target(session, found, "reading"))


def _show_files(session: Session, target: Target, examined: LogFindings) -> None:
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
                "problems": [finding.text for finding in examined.findings],
            }
        )
        return
    output.table(_COLUMNS, rows, title=str(target.directory), narrower=_NARROWER)
    output.note(f"log id: {log_id or 'none yet'}")
    output.note(f"checkpoint: {_checkpoint_state(examined)}")
    for finding in examined.findings:
        output.note(f"problem: {finding.text}")


def _checkpoint_state(examined: LogFindings) -> str:
    checkpoint = examined.checkpoint
    if checkpoint is None:
        return f"{examined.checkpoint_problem}; opening reads the files instead"
    is_empty = checkpoint.last_offset < checkpoint.start_offset
    covered = "no messages" if is_empty else offsets_text(checkpoint.start_offset, checkpoint.last_offset)
    return f"{covered}, {iso_time(to_datetime(checkpoint.written_us))}"


def _file_row(examined: LogFindings, file: FileFindings) -> dict[str, object]:
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
        "problems": len(file.findings),
    }


def _moment(time_us: int | None) -> datetime | None:
    """None also for a time that no calendar has; the message with it is listed as a problem."""
    try:
        return None if time_us is None else to_datetime(time_us)
    except OverflowError:
        return None


def _coverage(examined: LogFindings, file: FileFindings) -> str:
    hint = examined.checkpoint.file(file.seq) if examined.checkpoint is not None else None
    if hint is None:
        return "none"
    return "whole" if hint.size == file.size else f"{hint.size} bytes"


# Renders one frame: its position, its header, the message in it, and its bytes.
#
# It is meant for damaged logs: a frame that fails its checks is shown with what is wrong, and a frame after damage is
# still found.


_CHUNK_BYTES = 1 << 20
_LINE_BYTES = 16


class _Place(NamedTuple):
    """Where a frame begins, or where it should; `problem` says why it is not one."""

    path: Path
    byte: int
    problem: str | None


def show_frame(output: Output, target: Target, offset: int, shown_bytes: int) -> None:
    """Finds the frame and shows it."""
    place = _find(target.directory, offset)
    file = BoundFiles(examining=True).open(place.path)
    try:
        header = file.read_at(place.byte, HEADER_BYTES)
        payload = _payload(file, place, header)
    finally:
        file.close()
    record: dict[str, object] = {"file": place.path.name, "byte": place.byte, "problem": place.problem}
    record |= _describe_header(header, payload)
    if target.time_field is not None and place.problem is None:
        record |= _describe_envelope(offset, payload)
    data = (header + payload)[:shown_bytes]
    if output.as_json:
        output.document({**record, "bytes_hex": data.hex()})
        return
    output.record({name: value for name, value in record.items() if value is not None})
    for line in hex_lines(data, place.byte):
        print(line)
    if len(header) + len(payload) > len(data):
        output.note(f"{len(header) + len(payload) - len(data)} more bytes; see them with --bytes")


def _payload(file: File, place: _Place, header: bytes) -> bytes:
    """As long as the header says, if that can be; what a damaged one says is not believed beyond the file."""
    if len(header) < HEADER_BYTES:
        return b""
    length = min(HEADER.unpack(header)[1], MAX_PAYLOAD_BYTES, file.size() - place.byte - HEADER_BYTES)
    return file.read_at(place.byte + HEADER_BYTES, length)


def _describe_header(header: bytes, payload: bytes) -> dict[str, object]:
    if len(header) < HEADER_BYTES:
        return {}
    offset, length, checksum = HEADER.unpack(header)
    return {
        "offset": offset,
        "length": length,
        "crc32": f"{checksum:08x}",
        "crc32_computed": f"{frame_crc(offset, payload):08x}",
    }


def _describe_envelope(offset: int, payload: bytes) -> dict[str, object]:
    if is_lost(payload):
        return {"message": "lost: a repair could not save it"}
    if is_removed(payload):
        return {"message": "removed: a compaction by key took it out"}
    if is_control(payload):
        return {"message": f"control record: a transaction was {'committed' if payload[1] == 1 else 'aborted'}"}
    try:
        (message,) = decode_payloads(offset, [payload])
    except DataError as error:
        return {"message": f"cannot be decoded: {error.message}"}
    described = describe_message(message)
    described.pop("offset")
    return {"version": payload[0], "flags": payload[1], "value_bytes": len(message.value or b""), **described}


def hex_lines(data: bytes, address: int) -> Iterator[str]:
    """Lines of 16 bytes: the place in the file, the bytes in hex, and what of them can be printed."""
    for start in range(0, len(data), _LINE_BYTES):
        line = data[start : start + _LINE_BYTES]
        pairs = f"{line[:8].hex(' ')}  {line[8:].hex(' ')}"
        shown = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        yield f"{address + start:010x}  {pairs:<48}  |{shown}|"


def _find(directory: Path, offset: int) -> _Place:
    files = BoundFiles(examining=True)
    path = _file_of(files, directory, offset)
    file = files.open(path)
    try:
        found = _find_in_file(file, path, offset)
    finally:
        file.close()
    if found is None:
        raise _missing(directory, offset)
    return found


def _file_of(files: Files, directory: Path, offset: int) -> Path:
    """The last file that begins at or before the offset."""
    found: Path | None = None
    for _, name in wal_files(files.list(directory)):
        first = _first_offset(files, directory / name)
        if found is None or (first is not None and first <= offset):
            found = directory / name
    if found is None:
        raise NotFoundError("there are no WAL files", path=directory)
    return found


def _first_offset(files: Files, path: Path) -> int | None:
    file = files.open(path)
    try:
        header = file.read_at(0, HEADER_BYTES)
    finally:
        file.close()
    return int(HEADER.unpack(header)[0]) if len(header) == HEADER_BYTES else None


def _missing(directory: Path, offset: int) -> OffsetOutOfRangeError:
    """Says which offsets there are; it takes a look at all files for that."""
    files = [file for file in verify_files(directory).files if file.runs]
    if not files:
        return OffsetOutOfRangeError(f"offset {offset} is not in this log, which is empty", path=directory)
    held = offsets_text(files[0].runs[0].first_offset, files[-1].runs[-1].next_offset - 1)
    return OffsetOutOfRangeError(f"offset {offset} is not in this log, which holds {held}", path=directory)


def _find_in_file(file: File, path: Path, offset: int) -> _Place | None:
    size = file.size()
    header = file.read_at(0, HEADER_BYTES)
    first = int(HEADER.unpack(header)[0]) if len(header) == HEADER_BYTES else 0
    scanner = FileScanner(file, 0, first, _CHUNK_BYTES)
    while scanner.offset <= offset or scanner.position == 0:
        base = scanner.position
        frames = scanner.read(size)
        if frames is not None:
            if frames.first_offset <= offset < frames.next_offset:
                return _Place(path, base + frames.start_of(offset - frames.first_offset), None)
            continue
        after = None
        if base < size:
            after = find_good_frames(file, base, size, scanner.offset, min_offset=scanner.offset)
        if base < size and (after is None or after[1] > offset):
            return _Place(path, base, scanner.stop.reason)
        if after is None:
            break
        scanner = FileScanner(file, after[0], after[1], _CHUNK_BYTES)
    return None
