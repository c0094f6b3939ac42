"""The id of a log, and the header that carries it at the start of every WAL file and every shipped object.

    byte   0        4         8                24             32      36
           +--------+---------+----------------+--------------+-------+------------
           | "TLOG" | version | id of the log  | first_offset | crc32 | frames or
           | 4s     | u32     | 16 bytes       | u64          | u32   | blocks ...       all little-endian
           +--------+---------+----------------+--------------+-------+------------

Invariants
- The id is 16 random bytes, generated with the log, and never changes: a log that is deleted and created again is
  another log. In documents it is written as 32 hex digits.
- `first_offset` is that of the first frame after the header. The crc32 is zlib's, over the 32 bytes before it.
- Version 1 is that of WAL files and of objects. Version 2 is that of staged rows, which do not know their offsets: the
  frames are numbered from 0, and so is `first_offset`. Such an object may become part of its log as it is. Its name
  says where in the log it begins, and readers add that.
- Bytes of another log are refused with an error that names both ids: they are never read as data.
"""

from __future__ import annotations

import re
import secrets
import struct
from collections.abc import Hashable
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import CorruptionError, DataError, OtherLogError
from tidelog.files import File, Files, LocalFiles, Lock
from tidelog.log.directory import LOG_ID, PREPARED_FILE, wal_files
from tidelog.log.frame import crc32, find_frame

MAGIC = b"TLOG"
VERSION = 1
STAGED_VERSION = 2
_CLAIMS = struct.Struct("<4sI16sQ")
_CRC = struct.Struct("<I")
BINDING_BYTES = _CLAIMS.size + _CRC.size
OBJECT_HINT = "Put the log's own object back"
_LOG_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


class Binding(NamedTuple):
    """The content of a good header."""

    log_id: str
    first_offset: int
    is_staged: bool = False
    """Whether the frames are numbered from 0, wherever in the log they are."""


def new_log_id() -> str:
    """An id that no other log has."""
    return secrets.token_hex(16)


def is_log_id(text: str) -> bool:
    """Whether it is the id of some log."""
    return _LOG_ID.fullmatch(text) is not None


def encode_binding(log_id: str, first_offset: int) -> bytes:
    """The header of a file or an object."""
    return _encoded(VERSION, log_id, first_offset)


def encode_staged_binding(log_id: str) -> bytes:
    """The header of rows that are staged for a log."""
    return _encoded(STAGED_VERSION, log_id, 0)


def _encoded(version: int, log_id: str, first_offset: int) -> bytes:
    claims = _CLAIMS.pack(MAGIC, version, bytes.fromhex(log_id), first_offset)
    return claims + _CRC.pack(crc32(claims))


def decode_binding(data: bytes | memoryview) -> Binding:
    """Decodes the header at the start; DataError when it is cut short or damaged."""
    if len(data) < BINDING_BYTES:
        raise DataError("truncated header")
    claims = bytes(data[: _CLAIMS.size])
    magic, version, log_id, first_offset = _CLAIMS.unpack(claims)
    if magic != MAGIC:
        raise DataError("not the header of a log")
    if _CRC.unpack_from(data, _CLAIMS.size)[0] != crc32(claims):
        raise DataError("damaged header")
    if version not in (VERSION, STAGED_VERSION):
        raise DataError(f"header version {version}; this tidelog reads versions {VERSION} and {STAGED_VERSION}")
    return Binding(log_id.hex(), first_offset, version == STAGED_VERSION)


def check_binding(data: bytes | memoryview, key: str, log_id: str, first_offset: int) -> int:
    """DataError unless the header at the start of an object is that of this log and this offset. Returns what the
    numbers of its frames lack to be offsets: 0, but for staged rows."""
    found = decode_binding(data)
    if found.log_id != log_id:
        raise OtherLogError(path=key, expected=log_id, found=found.log_id, operation="read", hint=OBJECT_HINT)
    expected = 0 if found.is_staged else first_offset
    if found.first_offset != expected:
        raise DataError(f"header for offset {found.first_offset}, expected offset {expected}")
    return first_offset - expected


# Files over other files: everything is passed on, and a subclass changes what it is for.


class WrappedFiles(Files):
    """The same files as those below."""

    def __init__(self, files: Files) -> None:
        self.below = files

    def create(self, path: Path) -> File:
        return self.below.create(path)

    def open(self, path: Path, *, write: bool = False) -> File:
        return self.below.open(path, write=write)

    def list(self, directory: Path) -> list[str]:
        return self.below.list(directory)

    def exists(self, path: Path) -> bool:
        return self.below.exists(path)

    def is_directory(self, path: Path) -> bool:
        return self.below.is_directory(path)

    def is_link(self, path: Path) -> bool:
        return self.below.is_link(path)

    def make_directory(self, path: Path) -> None:
        self.below.make_directory(path)

    def remove(self, path: Path) -> None:
        self.below.remove(path)

    def remove_directory(self, path: Path) -> None:
        self.below.remove_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        self.below.rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self.below.sync_directory(path)

    def lock(self, path: Path) -> Lock:
        return self.below.lock(path)

    def free_bytes(self, path: Path) -> int:
        return self.below.free_bytes(path)

    def device(self, path: Path) -> Hashable:
        return self.below.device(path)


# WAL files bound to their log: the header described above precedes byte 0, and is checked at every opening.
#
#     log.id     beside the WAL files: the id of the log, made before the first of them
#
# Code that uses WAL files through here sees only frames. Positions count from the first frame, after the header, so
# indexes, checkpoints and pointers do not know that there is one.
#
# Invariants
# - Opening a WAL file of another log is an error that names the file.
# - The header is written together with the first frame: a crash leaves both, or a torn tail, or nothing. A file whose
#   header is not whole and that has no good frame is a torn tail from its first byte on; with good frames it is damage.
# - The id is in `log.id`. Where that is missing, the files supply it, and must agree.
# - During verification (`examining`) a bad header is no error: the file reports what is wrong with it.


_KIND = "log-id"
_VERSION = 1
_WAL_FILE = re.compile(r"wal\.\d{1,19}\.log(\.tmp)?", re.ASCII)
_OFFSET = struct.Struct("<Q")
_MAX_OFFSET = (1 << 64) - 1
FOREIGN_HINT = (
    "Nothing was changed. Put the log's own file back, or let `tidelog repair` move this one aside and repair the "
    "log without it"
)
REPAIR_HINT = "Nothing was changed. `tidelog verify` shows what is wrong; `tidelog repair` repairs it"


class _LogIdentity(msgspec.Struct, frozen=True):
    id: str


class BoundFile:
    """An open WAL file, from its first frame on."""

    def __init__(
        self,
        file: File,
        log_id: str,
        binding: Binding | None,
        problem: str | None = None,
        is_foreign: bool = False,
    ) -> None:
        self._file = file
        self._log_id = log_id
        self.binding = binding
        """The content of its header; None where it has no good one of this log."""
        self.problem = problem
        """What is wrong with the header, where that is looked for."""
        self.is_foreign = is_foreign
        self.sync = file.sync
        self.close = file.close

    def write_at(self, position: int, data: bytes | memoryview) -> None:
        if position:
            self._file.write_at(position + BINDING_BYTES, data)
        else:
            (first_offset,) = _OFFSET.unpack_from(data)
            self._file.write_at(0, b"".join((encode_binding(self._log_id, first_offset), data)))

    def read_at(self, position: int, size: int) -> bytes:
        return self._file.read_at(position + BINDING_BYTES, size)

    def read_ranges(self, position: int, ranges: bytes) -> bytes:
        return self._file.read_ranges(position + BINDING_BYTES, ranges)

    def truncate(self, size: int) -> None:
        self._file.truncate(size + BINDING_BYTES if size else 0)

    def size(self) -> int:
        return max(0, self._file.size() - BINDING_BYTES)


class BoundFiles(WrappedFiles):
    """Files of logs. What is no WAL file is passed on as it is."""

    def __init__(self, files: Files | None = None, *, examining: bool = False) -> None:
        super().__init__(files or LocalFiles())
        self._examining = examining

    def create(self, path: Path) -> File:
        if not _is_wal(path.name):
            return self.below.create(path)
        log_id = made_log_id(self.below, path.parent)  # first: if it cannot be had, no file is left
        return BoundFile(self.below.create(path), log_id, None)

    def open(self, path: Path, *, write: bool = False) -> File:
        file = self.below.open(path, write=write)
        if not _is_wal(path.name):
            return file
        try:
            return self._bound(file, path)
        except BaseException:
            file.close()
            raise

    def read(self, path: Path) -> bytes:
        """The bytes of a WAL file with its header, valid or not, to keep them aside."""
        return self.below.read(path)

    def _bound(self, file: File, path: Path) -> BoundFile:
        log_id = known_log_id(self.below, path.parent)
        if file.size() == 0:  # just created: by a running writer, or by one that a crash ended
            return BoundFile(file, log_id or "", None)
        try:
            binding = decode_binding(file.read_at(0, BINDING_BYTES))
            if binding.is_staged:
                raise DataError("the header of staged rows, which are no file of a log")
        except DataError as error:
            return self._without_header(file, path, log_id or "", error.message)
        if log_id is not None and binding.log_id != log_id:
            refusal = OtherLogError(path=path, expected=log_id, found=binding.log_id, hint=FOREIGN_HINT)
            if not self._examining:
                raise refusal
            return BoundFile(file, log_id, None, refusal.reason, is_foreign=True)
        return BoundFile(file, binding.log_id, binding)

    def _without_header(self, file: File, path: Path, log_id: str, problem: str) -> BoundFile:
        """One that a crash left, unless there are good frames in it."""
        size = file.size()
        has_frames = size > BINDING_BYTES and find_frame(file.read_at(0, size), 0, 0, _MAX_OFFSET) is not None
        if has_frames and not self._examining:
            raise CorruptionError(problem, path=path, byte=0, hint=REPAIR_HINT)
        return BoundFile(file, log_id, None, problem if has_frames else None)


def bound(files: Files | None, *, examining: bool = False) -> BoundFiles:
    """These files with bound WAL files; those that are bound already as they are."""
    return BoundFiles(unbound(files), examining=examining)


def unbound(files: Files | None) -> Files:
    """The files below, in which WAL files are as they are."""
    return files.below if isinstance(files, BoundFiles) else files or LocalFiles()


def first_offset_of(file: File) -> int | None:
    """The first offset in the header of a WAL file; None without a good one, and for files that are not bound."""
    return file.binding.first_offset if isinstance(file, BoundFile) and file.binding is not None else None


def is_foreign(file: File) -> bool:
    """Whether a WAL file that was opened for an examination belongs to another log."""
    return isinstance(file, BoundFile) and file.is_foreign


def header_problem(file: File) -> str | None:
    """What is wrong with the header of a WAL file that was opened for an examination."""
    return file.problem if isinstance(file, BoundFile) else None


def known_log_id(files: Files, directory: Path) -> str | None:
    """The id of the log in a directory; None while it has none."""
    return _written_log_id(files, directory) or _id_in_files(files, directory)


def _written_log_id(files: Files, directory: Path) -> str | None:
    path = directory / LOG_ID
    try:
        data = files.read(path)
    except FileNotFoundError:
        return None
    try:
        found = decode_document(_KIND, _VERSION, data, _LogIdentity).id
        if not is_log_id(found):
            raise DataError(f"{found!r} is not the id of a log")
    except DataError as error:
        hint = "Move it away: it is rebuilt from the WAL files beside it"
        raise DataError(f"{LOG_ID} cannot be understood: {error.message}", path=path, hint=hint) from error
    return found


def made_log_id(files: Files, directory: Path) -> str:
    """The id of the log in a directory, written down there; a new one for a log that has none."""
    written = _written_log_id(files, directory)
    if written is not None:
        return written
    known = _id_in_files(files, directory) or new_log_id()
    write_log_id(files, directory, known)
    return known


def write_log_id(files: Files, directory: Path, log_id: str) -> None:
    """Durable when it returns."""
    files.write_atomically(directory / LOG_ID, encode_document(_KIND, _VERSION, _LogIdentity(log_id)))


def _id_in_files(files: Files, directory: Path) -> str | None:
    """The id that the files say, all the same one."""
    found: dict[str, str] = {}
    for _, name in wal_files(files.list(directory)):
        file = unbound(files).open(directory / name)
        try:
            found.setdefault(decode_binding(file.read_at(0, BINDING_BYTES)).log_id, name)
        except DataError:
            continue  # what is wrong with it is said when it is opened
        finally:
            file.close()
    if len(found) > 1:
        listed = ", ".join(f"{name} of log {log_id}" for log_id, name in found.items())
        hint = f"Put {LOG_ID} back, or move away the files that do not belong to the log"
        raise DataError(f"the directory has files of several logs: {listed}", path=directory, hint=hint)
    return next(iter(found), None)


def _is_wal(name: str) -> bool:
    return bool(_WAL_FILE.fullmatch(name) or PREPARED_FILE.fullmatch(name))
