"""WAL files that are bound to their log: the header of `binding.py` is before byte 0, and is checked at every opening.

    log.id     beside the WAL files: the id of the log, made before the first of them

Whoever works with WAL files through here meets frames alone. Positions count from the first frame, behind the header,
so neither indexes nor checkpoints nor pointers know that there is one.

Invariants
- A WAL file of another log is refused by name, whoever opens it for whatever.
- The header is written together with the first frame: a crash leaves both, or a torn tail, or nothing. A file whose
  header is not whole and that has no good frame is a torn tail from its first byte on; with good frames it is damage.
- The id is in `log.id`. Where that is missing, the files say it, and must agree.
- For an examination (`examining`) a bad header is no error: the file says itself what is wrong with it.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path

import msgspec

from tidelog.codec import decode_document, encode_document
from tidelog.errors import CorruptionError, DataError, OtherLogError
from tidelog.files import File, Files, LocalFiles
from tidelog.log.binding import BINDING_BYTES, Binding, decode_binding, encode_binding, is_log_id, new_log_id
from tidelog.log.frame import find_frame
from tidelog.log.names import LOG_ID, is_prepared, wal_files
from tidelog.log.wrapped_files import WrappedFiles

_KIND = "log-id"
_VERSION = 1
_WAL_FILE = re.compile(r"wal\.\d{1,19}\.log(\.tmp)?", re.ASCII)
_OFFSET = struct.Struct("<Q")
_MAX_OFFSET = (1 << 64) - 1
FOREIGN_HINT = (
    "Nothing was changed. Put the log's own file back, or let `tidelog repair` put this one aside and mend the log "
    "without it"
)
REPAIR_HINT = "Nothing was changed. See what is wrong with `tidelog verify`, mend it with `tidelog repair`"


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
        """What its header says; None where it has no good one of this log."""
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
        file = self.below.create(path)
        if not _is_wal(path.name):
            return file
        try:
            return BoundFile(file, made_log_id(self.below, path.parent), None)
        except BaseException:
            file.close()
            raise

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
        """Of a WAL file with its header, whatever that is: for keeping it aside."""
        return self.below.read(path)

    def _bound(self, file: File, path: Path) -> BoundFile:
        log_id = known_log_id(self.below, path.parent)
        try:
            binding = decode_binding(file.read_at(0, BINDING_BYTES))
        except DataError as error:
            return self._without_header(file, path, log_id or "", error.message)
        if log_id is not None and binding.log_id != log_id:
            refusal = OtherLogError(path=path, expected=log_id, found=binding.log_id, hint=FOREIGN_HINT)
            if not self._examining:
                raise refusal
            return BoundFile(file, log_id, None, refusal.message.partition(" at byte ")[0], is_foreign=True)
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
    """What the header of a WAL file says; None without a good one, and for files that are not bound."""
    return file.binding.first_offset if isinstance(file, BoundFile) and file.binding is not None else None


def is_foreign(file: File) -> bool:
    """Whether a WAL file that was opened for an examination belongs to another log."""
    return isinstance(file, BoundFile) and file.is_foreign


def header_problem(file: File) -> str | None:
    """What is wrong with the header of a WAL file that was opened for an examination."""
    return file.problem if isinstance(file, BoundFile) else None


def known_log_id(files: Files, directory: Path) -> str | None:
    """The id of the log in a directory; None while it has none."""
    path = directory / LOG_ID
    if not files.exists(path):
        return _id_in_files(files, directory)
    try:
        found = decode_document(_KIND, _VERSION, files.read(path), _LogIdentity).id
        if not is_log_id(found):
            raise DataError(f"{found!r} is no id of a log")
    except DataError as error:
        hint = "Move it away: it is written again as the WAL files beside it say"
        raise DataError(f"{LOG_ID} cannot be understood: {error.message}", path=path, hint=hint) from error
    return found


def made_log_id(files: Files, directory: Path) -> str:
    """The id of the log in a directory, written down there; a new one for a log that has none."""
    known = known_log_id(files, directory)
    if known is None or not files.exists(directory / LOG_ID):
        known = known or new_log_id()
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
        hint = f"Put {LOG_ID} back, or move those files away that do not belong to the log"
        raise DataError(f"there are files of several logs: {listed}", path=directory, hint=hint)
    return next(iter(found), None)


def _is_wal(name: str) -> bool:
    return _WAL_FILE.fullmatch(name) is not None or is_prepared(name)
