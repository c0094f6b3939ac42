"""One frame for the eye: where it is, its header, the message in it, and its bytes.

Damage is what this is for: a frame that fails its checks is shown with what is wrong, and one that lies behind damage
is found all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tidelog.cli.message_format import describe_message
from tidelog.cli.output import Output
from tidelog.cli.targets import Target
from tidelog.errors import DataError, NotFoundError, OffsetOutOfRangeError, offsets_text
from tidelog.files import File, Files
from tidelog.log.bound_files import BoundFiles
from tidelog.log.damage import find_good_frames
from tidelog.log.examine import examine_log
from tidelog.log.frame import HEADER, HEADER_BYTES, MAX_PAYLOAD_BYTES, frame_crc
from tidelog.log.names import wal_files
from tidelog.log.removed import is_removed
from tidelog.log.repair import is_lost
from tidelog.log.scanner import FileScanner
from tidelog.topics.message import decode_payloads

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
    try:
        (message,) = decode_payloads(offset, [payload])
    except DataError as error:
        return {"message": f"cannot be decoded: {error.message}"}
    described = describe_message(message)
    described.pop("offset")
    return {"version": payload[0], "flags": payload[1], "value_bytes": len(message.value), **described}


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
    files = [file for file in examine_log(directory).files if file.runs]
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
        behind = None
        if base < size:
            behind = find_good_frames(file, base, size, scanner.offset, min_offset=scanner.offset)
        if base < size and (behind is None or behind[1] > offset):
            return _Place(path, base, scanner.stop.reason)
        if behind is None:
            break
        scanner = FileScanner(file, behind[0], behind[1], _CHUNK_BYTES)
    return None
