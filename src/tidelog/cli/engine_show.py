"""`tidelog engine get`, `stat`, `ls`, `versions` and `digest`: what is in an engine, now or at an earlier seq."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tidelog.cli.engine_session import SeqOption, reading
from tidelog.cli.session import Session

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
    """Writes the data of an object to stdout, byte for byte, wherever it is: on this disk or in the store.

    With --json it writes what is known about the object instead: size, seq, metadata, and from which tier it was read
    (bytes in metadata are in base64). -o puts the data into a file in both cases.
    """
    with reading(session) as engine:
        found = engine.read(bucket, key, seq)
    if output is not None:
        output.write_bytes(found.data)
    if session.as_json:
        about = {"bucket": bucket, "key": key, "seq": found.seq, "size": len(found.data), "tier": found.tier}
        session.output.document({**about, "metadata": found.metadata})
    elif output is None:
        sys.stdout.buffer.write(found.data)


def stat(session: Session, bucket: BucketArgument, key: KeyArgument, seq: SeqOption = None) -> None:
    """Writes what is known about an object without its data: size, seq, metadata, and in which tier it is.

    Data that has left this disk is not fetched for it, unless the object has metadata. Bytes in metadata are in base64.
    """
    with reading(session) as engine:
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
) -> None:
    """Lists the buckets, or the objects of one in the order of their keys."""
    with reading(session) as engine:
        if bucket is None:
            session.output.rows(("bucket",), [{"bucket": name} for name in engine.list_buckets(seq)])
            return
        rows = [{"key": one.key, "bytes": one.size, "seq": one.seq} for one in engine.list_objects(bucket, prefix, seq)]
    session.output.rows(("key", "bytes", "seq"), rows)


def versions(session: Session, bucket: BucketArgument, key: KeyArgument) -> None:
    """Lists all versions of an object that are kept, newest first; a deletion is one too.

    Each can be read with `tidelog engine get --seq N`.
    """
    with reading(session) as engine:
        found = engine.versions(bucket, key)
    rows = [{"seq": one.seq, "bytes": one.size, "is_deleted": one.is_deleted, "tier": one.tier} for one in found]
    session.output.rows(("seq", "bytes", "is_deleted", "tier"), rows)


def digest(session: Session, seq: SeqOption = None) -> None:
    """Writes the digest of the whole state: the same on every replica and after every restore, at the same seq."""
    with reading(session) as engine:
        at = engine.applied_seq if seq is None else seq
        text = engine.digest(at)
    if session.as_json:
        session.output.document({"seq": at, "digest": text})
    else:
        session.output.line(text)
