"""`tidelog engine put-log`: entries from lines of JSON, applied in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from tidelog.cli.engine_session import TakeOverOption, changing
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.engine.engine import Engine
    from tidelog.engine.entry import Entry
    from tidelog.engine.results import Result
    from tidelog.errors import InputError

_BATCH_ENTRIES = 256
_BATCH_BYTES = 4 << 20
_COLUMNS = ("seq", "status", "reason")


def put_log(
    session: Session,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", readable=False, help="Lines of JSON [default: stdin].")
    ] = None,
    low_water_mark: Annotated[
        bool, typer.Option("--low-water-mark", help="There are no other replicas: all of it may be shipped.")
    ] = False,
    take_over: TakeOverOption = False,
) -> None:
    """Applies entries from lines of JSON, and writes what became of each: applied, nothing or refused.

    A line is {"seq": 2, "op": "put_object", "bucket": "b", "key": "k", "data": "text", "metadata": {}}, with
    "data_base64" for bytes; other ops are create_bucket, delete_bucket ("force": true), delete_object, copy_object
    ("src_bucket", "src_key", "dest_bucket", "dest_key") and batch ("entries": [...]). Seqs grow; lines that were
    applied before do nothing the second time. The engine is made when there is none.

    What the state does not allow is refused, the same on every replica, and is no error. A line that is wrong ends the
    command with code 2; those before it are applied.
    """
    refused = total = 0
    with _lines(session, file) as lines, changing(session, take_over=take_over, creates=True) as engine:
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


def _applied(engine: Engine, lines: Iterable[bytes]) -> Iterator[Result]:
    """What became of each line; one that is wrong is told after those before it are on the disk."""
    from tidelog.cli.engine_entries import parse_entry
    from tidelog.errors import InputError

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


def _apply(engine: Engine, lines: list[tuple[int, int, Entry]]) -> Iterator[Result]:
    """All with one sync; if one of them cannot be, those before it are."""
    from tidelog.errors import InputError

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
    from tidelog.errors import InputError

    more = "" if error.hint is None else f"{error.hint}. "
    return InputError(f"line {number}: {error.message}", hint=f"{more}The lines before it are applied")


def _show(session: Session, result: Result) -> None:
    row = {"seq": result.seq, "status": result.status, "reason": result.reason}
    if session.as_json:
        import msgspec

        print(msgspec.json.encode(row).decode())
    else:
        from tidelog.cli.output import plain_text

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
