"""`tidelog engine`: the group of engine commands, and the commands that read an engine."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import typer

from tidelog.cli.engine.admin import checkpoint, compact, gc, rebuild_manifest, restore, ship, verify
from tidelog.cli.engine.apply import apply_entries
from tidelog.cli.engine.session import SeqOption, engine_command, reading_anywhere
from tidelog.cli.engine.show import dump_page, dump_wal, status
from tidelog.cli.output import plain_text
from tidelog.cli.session import Session, command_group
from tidelog.client.engine import RemoteEngine
from tidelog.engine.changes import Change
from tidelog.engine.engine import Engine
from tidelog.engine.entry import (
    CopyObject,
    CreateBucket,
    DeleteBucket,
    DeleteObject,
    ObjectInfo,
    ObjectStat,
    Operation,
    PutObject,
    ScannedObject,
    operations,
)
from tidelog.engine.reader import EngineReader
from tidelog.errors import ConflictError

_PIECE_BYTES = 64 << 20

# `tidelog engine get`, `stat`, `ls`, `versions` and `digest`: read an engine, now or at an earlier seq.


BucketArgument = Annotated[str, typer.Argument(metavar="BUCKET", help="The bucket.")]
KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help="The key of the object.")]


def get(
    session: Session,
    bucket: BucketArgument,
    key: KeyArgument,
    seq: SeqOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the data there [default: stdout].")
    ] = None,
) -> None:
    """Writes the data of an object to stdout, byte for byte. From this disk or from the store.

    With --json it writes what is known about the object instead: size, seq, metadata, and from which tier it was read
    (bytes in metadata are in base64). -o puts the data into a file in both cases.
    """
    with reading_anywhere(session) as engine:
        found = engine.stat(bucket, key, seq)
        if output is not None:
            with output.open("wb") as target:
                _copy(engine, (bucket, key, seq), found, target)
        elif not session.as_json:
            _copy(engine, (bucket, key, seq), found, sys.stdout.buffer)
    if session.as_json:
        about = {"bucket": bucket, "key": key, "seq": found.seq, "size": found.size, "tier": found.tier}
        session.output.document({**about, "metadata": found.metadata})


def _copy(
    engine: Engine | EngineReader | RemoteEngine,
    wanted: tuple[str, str, int | None],
    found: ObjectStat,
    target: BinaryIO,
) -> None:
    """Writes the data of a version, in pieces if there is much of it."""
    for offset in range(0, found.size, _PIECE_BYTES):
        piece = engine.read(*wanted, offset=offset, length=_PIECE_BYTES)
        if piece.seq != found.seq:
            raise ConflictError("the object was put again while it was read", hint="Try again, or name a --seq")
        target.write(piece.data)


def stat(session: Session, bucket: BucketArgument, key: KeyArgument, seq: SeqOption = None) -> None:
    """Writes what is known about an object without its data. Size, seq, metadata, and in which tier it is.

    Data that has left this disk is not fetched for it, unless the object has metadata. Bytes in metadata are in base64.
    """
    with reading_anywhere(session) as engine:
        found = engine.stat(bucket, key, seq)
    about = {"bucket": bucket, "key": key, "size": found.size, "seq": found.seq, "tier": found.tier}
    if session.as_json:
        session.output.document({**about, "metadata": found.metadata})
    else:
        session.output.record({**about, **{f"metadata {name}": value for name, value in found.metadata.items()}})


def ls(
    session: Session,
    bucket: Annotated[str | None, typer.Argument(metavar="BUCKET", help="[default: list the buckets].")] = None,
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that begin like this.")] = "",
    seq: SeqOption = None,
    delimiter: Annotated[
        str, typer.Option("--delimiter", metavar="TEXT", help="Group keys up to this, as directories do with /.")
    ] = "",
) -> None:
    """Lists the buckets, or the objects of one. Objects in the order of their keys.

    With --delimiter / keys that have a slash after PREFIX are one line, what they begin with up to it (`is_prefix`): a
    bucket is listed like a directory.
    """
    with reading_anywhere(session) as engine:
        if bucket is None:
            session.output.rows(("bucket",), [{"bucket": name} for name in engine.list_buckets(seq)])
            return
        listed = engine.list_objects(bucket, prefix, seq, delimiter=delimiter)
        rows = [{"key": one.key, **_about(one, is_grouped=bool(delimiter))} for one in listed]
    session.output.rows(("key", "bytes", "seq", *(("is_prefix",) if delimiter else ())), rows)


def _about(one: ObjectInfo, *, is_grouped: bool) -> dict[str, object]:
    """A common prefix is no object: it has no size and no seq."""
    about: dict[str, object] = {"bytes": one.size, "seq": one.seq}
    if is_grouped:
        about = {**(dict.fromkeys(about) if one.is_prefix else about), "is_prefix": one.is_prefix}
    return about


def versions(session: Session, bucket: BucketArgument, key: KeyArgument) -> None:
    """Lists all versions of an object that are kept. Newest first; a deletion is one too.

    Each can be read with `tidelog engine get --seq N`.
    """
    with reading_anywhere(session) as engine:
        found = engine.versions(bucket, key)
    rows = [{"seq": one.seq, "bytes": one.size, "is_deleted": one.is_deleted, "tier": one.tier} for one in found]
    session.output.rows(("seq", "bytes", "is_deleted", "tier"), rows)


def digest(session: Session, seq: SeqOption = None) -> None:
    """Writes the digest of the whole state. It is the same on every replica and after every restore, at the same
    seq.
    """
    with reading_anywhere(session) as engine:
        at = engine.applied_seq if seq is None else seq
        text = engine.digest(at)
    if session.as_json:
        session.output.document({"seq": at, "digest": text})
    else:
        session.output.line(text)


# `tidelog engine scan` and `changes`: many objects, many entries, a line each, as they come.

LimitOption = Annotated[int | None, typer.Option("--limit", "-n", metavar="N", min=1, help="At most so many.")]


def scan(
    session: Session,
    bucket: BucketArgument,
    start: Annotated[str | None, typer.Option("--start", metavar="KEY", help="From this key on.")] = None,
    end: Annotated[str | None, typer.Option("--end", metavar="KEY", help="Before this key.")] = None,
    prefix: Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Only keys that begin like this.")] = "",
    reverse: Annotated[bool, typer.Option("--reverse", help="From the last key to the first.")] = False,
    limit: LimitOption = None,
    values: Annotated[bool, typer.Option("--values", help="With data and metadata.")] = False,
    seq: SeqOption = None,
) -> None:
    """Lists a range of the objects of a bucket. In the order of keys, a line each; with --json a document each.

    With --values the lines have the data too: as text if it is UTF-8, as JSON `data_base64` otherwise.
    """
    columns = ("key", "bytes", "seq", *(("data",) if values else ()))
    with reading_anywhere(session) as engine:
        found = engine.scan(
            bucket, start, end, prefix=prefix, reverse=reverse, limit=limit, with_values=values, seq=seq
        )
        rows = ({"key": one.key, "bytes": one.size, "seq": one.seq, **_value_of(one)} for one in found)
        _write_lines(session, columns, rows)


def changes(
    session: Session,
    start_seq: Annotated[int, typer.Option("--start-seq", metavar="N", min=0, help="From this seq on.")] = 1,
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="TEXT", help="Only entries that write a BUCKET/KEY like this.")
    ] = "",
    limit: LimitOption = None,
    values: Annotated[bool, typer.Option("--values", help="With data and metadata of puts.")] = False,
    committed: Annotated[bool, typer.Option("--committed", help="Only up to the low-water mark.")] = False,
) -> None:
    """Lists what was applied, with its result. From the log on this disk and in the store, a line for each operation;
    with --json a document for each entry.
    """
    with reading_anywhere(session) as engine:
        found = islice(engine.changes(start_seq, prefix=prefix, with_values=values, committed=committed), limit)
        if session.as_json:
            _write_lines(session, (), map(_entry_document, found))
            return
        rows = (
            {"seq": one.seq, "status": one.result.status, **_operation_document(part), "reason": one.result.reason}
            for one in found
            for part in operations(one.entry)
        )
        _write_lines(session, ("seq", "status", "op", "bucket", "key", "reason"), rows)


def _entry_document(change: Change) -> dict[str, object]:
    parts = [_operation_document(part) for part in operations(change.entry)]
    return {"seq": change.seq, "status": change.result.status, "reason": change.result.reason, "operations": parts}


def _operation_document(operation: Operation) -> dict[str, object]:
    match operation:
        case PutObject(bucket, key):
            return {"op": "put_object", "bucket": bucket, "key": key, **_value_of(operation)}
        case DeleteObject(bucket, key):
            return {"op": "delete_object", "bucket": bucket, "key": key}
        case CopyObject(src_bucket, src_key, bucket, key):
            source = {"src_bucket": src_bucket, "src_key": src_key}
            return {"op": "copy_object", "bucket": bucket, "key": key, **source}
        case CreateBucket(bucket):
            return {"op": "create_bucket", "bucket": bucket}
        case DeleteBucket(bucket, force):
            return {"op": "delete_bucket", "bucket": bucket, "force": force}


def _value_of(one: ScannedObject | PutObject) -> dict[str, object]:
    if one.data is None or (isinstance(one, PutObject) and not one.data):
        return {}
    whole = one.data if isinstance(one.data, bytes) else b"".join(one.data)
    try:
        data: dict[str, object] = {"data": whole.decode()}
    except UnicodeDecodeError:
        data = {"data_base64": base64.b64encode(whole).decode()}
    return {**data, "metadata": one.metadata}


def _write_lines(session: Session, columns: Sequence[str], rows: Iterable[dict[str, object]]) -> None:
    """A line each, as they come."""
    if not session.as_json:
        print("\t".join(columns))
    for row in rows:
        if session.as_json:
            print(msgspec.json.encode(row).decode())
        else:
            print("\t".join(plain_text(row.get(column)) for column in columns))


# Commands without arguments of their own take the directory as one.
_ABOUT_A_DIRECTORY: dict[str, Callable[..., None]] = {
    "status": status,
    "checkpoint": checkpoint,
    "ship": ship,
    "compact": compact,
    "gc": gc,
    "restore": restore,
    "rebuild-manifest": rebuild_manifest,
    "verify": verify,
    "digest": digest,
    "dump-wal": dump_wal,
}
_OTHERS: dict[str, Callable[..., None]] = {
    "get": get,
    "stat": stat,
    "ls": ls,
    "scan": scan,
    "changes": changes,
    "versions": versions,
    "apply": apply_entries,
    "dump-page": dump_page,
}

_THROUGH_A_SERVER = (
    *("get", "stat", "ls", "scan", "versions", "digest", "status", "changes"),
    *("apply", "checkpoint", "ship", "compact", "gc", "verify"),
)
_FROM_A_STORE = ("get", "stat", "ls", "scan", "changes", "versions", "digest")
COMMANDS = (*_ABOUT_A_DIRECTORY, *_OTHERS)


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("Look into engines; apply, ship, compact, restore, verify.")
    for name, work in _ABOUT_A_DIRECTORY.items():
        _add(group, name, work, takes_place=True)
    for name, work in _OTHERS.items():
        _add(group, name, work, takes_place=False)
    engine_command(group, "put-log", apply_entries, is_hidden=True, takes_server=True)  # its name before
    app.add_typer(group, name="engine")


def _add(group: typer.Typer, name: str, work: Callable[..., None], *, takes_place: bool) -> None:
    takes_server, reads_stores = name in _THROUGH_A_SERVER, name in _FROM_A_STORE
    engine_command(group, name, work, takes_place=takes_place, takes_server=takes_server, reads_stores=reads_stores)
