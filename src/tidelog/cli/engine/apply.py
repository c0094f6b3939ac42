"""`tidelog engine apply`: entries from lines of JSON, applied in order."""

# ruff: noqa: ERA001 (comments draw formats and formulas)
from __future__ import annotations

import base64
import binascii
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import msgspec
import typer

from tidelog.cli.engine.session import TakeOverOption, changing_anywhere
from tidelog.cli.errors import command_hint
from tidelog.cli.output import plain_text
from tidelog.cli.session import Session
from tidelog.engine.engine import Engine
from tidelog.engine.entry import (
    Batch,
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    Entry,
    Operation,
    PutObject,
    Result,
)
from tidelog.errors import InputError

if TYPE_CHECKING:
    from tidelog.client.engine import RemoteEngine

_BATCH_ENTRIES = 256
_BATCH_BYTES = 4 << 20
_COLUMNS = ("seq", "status", "reason")


def apply_entries(
    session: Session,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", readable=False, help="Lines of JSON [default: stdin].")
    ] = None,
    low_water_mark: Annotated[
        bool, typer.Option("--low-water-mark", help="There are no other replicas: all of it may be shipped.")
    ] = False,
    take_over: TakeOverOption = False,
) -> None:
    """Applies entries from lines of JSON. Writes what became of each: applied, nothing or refused.

    A line is {"seq": 2, "op": "put_object", "bucket": "b", "key": "k", "data": "text", "metadata": {}}, with
    "data_base64" for bytes; other ops are create_bucket, delete_bucket ("force": true), delete_object, copy_object
    ("src_bucket", "src_key", "dest_bucket", "dest_key") and batch ("entries": [...]). Conditions on the object before
    are "if_absent": true, "if_match": seq and "if_match_crc": crc. Seqs grow; lines that were applied before do nothing
    the second time. The engine is created if absent.

    What the state does not allow is refused, the same on every replica, and is no error. A line that is wrong ends the
    command with code 2; those before it are applied.
    """
    refused = total = 0
    with _lines(session, file) as lines, changing_anywhere(session, take_over=take_over, creates=True) as engine:
        if not session.as_json:
            print("\t".join(_COLUMNS))
        for result in _applied(engine, lines):
            total += 1
            refused += result.status == "refused"
            _show(session, result)
        if low_water_mark:
            engine.update_low_water_mark(engine.applied_seq)
        applied_seq = engine.applied_seq
    session.output.note(f"{total} entries, {refused} refused; the engine is at seq {applied_seq}")


def _applied(engine: Engine | RemoteEngine, lines: Iterable[bytes]) -> Iterator[Result]:
    """The result of each line; a wrong line is reported after those before it are on disk."""
    waiting: list[tuple[int, int, Entry]] = []
    waiting_bytes = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            waiting.append((number, *parse_entry(line)))
        except InputError as error:
            yield from _apply(engine, waiting)
            raise _wrong_line(number, error) from error
        waiting_bytes += len(line)
        if len(waiting) == _BATCH_ENTRIES or waiting_bytes >= _BATCH_BYTES:
            yield from _apply(engine, waiting)
            waiting, waiting_bytes = [], 0
    yield from _apply(engine, waiting)


def _apply(engine: Engine | RemoteEngine, lines: list[tuple[int, int, Entry]]) -> Iterator[Result]:
    """All with one sync; if one of them cannot be, those before it are."""
    try:
        yield from engine.apply_many((seq, entry) for _, seq, entry in lines)
    except InputError:
        for number, seq, entry in lines:
            try:
                result = engine.apply(seq, entry)
            except InputError as error:  # the one that is wrong says so again
                raise _wrong_line(number, error) from error
            yield result


def _wrong_line(number: int, error: InputError) -> InputError:
    more = "" if error.hint is None else f"{command_hint(error)}. "
    return InputError(f"line {number}: {error.message}", hint=f"{more}The lines before it are applied")


def _show(session: Session, result: Result) -> None:
    row = {"seq": result.seq, "status": result.status, "reason": result.reason}
    if session.as_json:
        import msgspec

        print(msgspec.json.encode(row).decode())
    else:
        print("\t".join(plain_text(row[column]) for column in _COLUMNS))


@contextmanager
def _lines(session: Session, path: Path | None) -> Iterator[Iterable[bytes]]:
    """The lines, with a bar for a file."""
    if path is None or str(path) == "-":
        yield sys.stdin.buffer
        return
    with path.open("rb") as stream, session.output.progress(f"applying {path.name}", path.stat().st_size) as on_read:
        yield _counted(stream, on_read)


def _counted(stream: BinaryIO, on_read: Callable[[int], None]) -> Iterator[bytes]:
    done = 0
    for line in stream:
        yield line
        done += len(line)
        on_read(done)


# Entries as lines of JSON, for `tidelog engine apply`.
#
#     {"seq": 1, "op": "create_bucket", "bucket": "photos"}
#     {"seq": 2, "op": "put_object", "bucket": "photos", "key": "cat", "data": "meow", "metadata": {"type": "sound"}}
#     {"seq": 3, "op": "put_object", "bucket": "photos", "key": "raw", "data_base64": "AAEC"}
#     {"seq": 4, "op": "copy_object", "src_bucket": "photos", "src_key": "cat", "dest_bucket": "b", "dest_key": "dog"}
#     {"seq": 5, "op": "delete_object", "bucket": "photos", "key": "cat"}
#     {"seq": 6, "op": "batch", "entries": [{"op": "create_bucket", "bucket": "b"}, ...]}
#     {"seq": 7, "op": "delete_bucket", "bucket": "photos", "force": true}
#
# A field that is not known, or missing, or of another type is an error that names it: nothing is guessed.


Seq = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct, tag_field="op", forbid_unknown_fields=True, kw_only=True):
    """What every line has; inside a batch there is no seq."""

    seq: Seq | None = None


class _CreateBucket(_Line, tag="create_bucket", kw_only=True):
    bucket: str

    def operation(self) -> Operation:
        return CreateBucket(self.bucket)


class _DeleteBucket(_Line, tag="delete_bucket", kw_only=True):
    bucket: str
    force: bool = False

    def operation(self) -> Operation:
        return DeleteBucket(self.bucket, self.force)


class _PutObject(_Line, tag="put_object", kw_only=True):
    bucket: str
    key: str
    if_absent: bool = False
    if_match: Seq | None = None
    if_match_crc: int | None = None
    data: str | None = None
    data_base64: str | None = None
    metadata: dict[str, Any] = {}

    def operation(self) -> Operation:
        return PutObject(
            self.bucket,
            self.key,
            self._bytes(),
            self.metadata,
            if_absent=self.if_absent,
            if_match=self.if_match,
            if_match_crc=self.if_match_crc,
        )

    def _bytes(self) -> bytes:
        if (self.data is None) == (self.data_base64 is None):
            raise InputError("put_object takes either `data` (text) or `data_base64`")
        if self.data is not None:
            return self.data.encode()
        try:
            return base64.b64decode(self.data_base64 or "", validate=True)
        except (binascii.Error, ValueError) as error:
            raise InputError(f"data_base64 is not base64: {error}") from error


class _DeleteObject(_Line, tag="delete_object", kw_only=True):
    bucket: str
    key: str
    if_match: Seq | None = None
    if_match_crc: int | None = None

    def operation(self) -> Operation:
        return DeleteObject(self.bucket, self.key, if_match=self.if_match, if_match_crc=self.if_match_crc)


class _CopyObject(_Line, tag="copy_object", kw_only=True):
    src_bucket: str
    src_key: str
    dest_bucket: str
    dest_key: str
    if_absent: bool = False
    if_match: Seq | None = None
    if_match_crc: int | None = None

    def operation(self) -> Operation:
        return CopyObject(
            self.src_bucket,
            self.src_key,
            self.dest_bucket,
            self.dest_key,
            if_absent=self.if_absent,
            if_match=self.if_match,
            if_match_crc=self.if_match_crc,
        )


_Lone = _CreateBucket | _DeleteBucket | _PutObject | _DeleteObject | _CopyObject


class _Batch(_Line, tag="batch", kw_only=True):
    entries: list[_Lone]


_decode = msgspec.json.Decoder(_Lone | _Batch).decode
_KINDS = (_CreateBucket, _DeleteBucket, _PutObject, _DeleteObject, _CopyObject, _Batch)
OPERATIONS = tuple(str(kind.__struct_config__.tag) for kind in _KINDS)
"""What a line may have as its `op`."""


def parse_entry(line: bytes) -> tuple[int, Entry]:
    """The seq and the entry in a line; InputError says what is wrong with it."""
    try:
        found = _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(_told(str(error))) from error
    if found.seq is None:
        raise InputError("`seq` is missing; it must be an integer from 1 on")
    if isinstance(found, _Batch):
        if any(one.seq is not None for one in found.entries):
            raise InputError("entries of a batch must not have a `seq`")
        return found.seq, Batch([one.operation() for one in found.entries])
    return found.seq, found.operation()


def _told(reason: str) -> str:
    """With the list of operations, if the named one is unknown."""
    return f"{reason}; an `op` is one of {', '.join(OPERATIONS)}" if "op`" in reason else reason
