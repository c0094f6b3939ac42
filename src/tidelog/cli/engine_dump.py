"""`tidelog engine dump-wal` and `dump-page`: what is in the files, in words.

They read files and nothing else: they take no lock, recover nothing, and go on behind damage.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidelog.cli.engine_session import find_engine
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidelog.cli.engine_wal import Damage, Piece

_PAGES = "pages.db"
_COLUMNS = ("lsn", "file", "byte", "bytes", "kind", "text")
_HEADER = struct.Struct("<IHBBIIQHHH")
_HEADER_NAMES = (
    *("crc32", "magic", "kind", "level", "page", "right_sibling"),
    *("page_lsn", "cell_count", "heap_start", "dead_bytes"),
)


def dump_wal(
    session: Session,
    from_lsn: Annotated[
        int, typer.Option("--from", metavar="LSN", min=0, help="Begin here [default: the oldest record].")
    ] = 0,
    limit: Annotated[int | None, typer.Option("--limit", "-n", metavar="N", min=0, help="So many records.")] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", "-s", metavar="N", min=1, help="Only records of the entry of this seq.")
    ] = None,
) -> None:
    """Shows the records of the engine's log, one a line: where it is, its kind, and what it says.

    With --json a line is an object with everything that is in the record, page updates included; of values only size
    and checksum. It takes no lock, so it works beside the process that has the engine open, and it goes on behind
    damage, which is shown in its place.
    """
    from itertools import islice

    rows = _rows(find_engine(session) / "wal", from_lsn)
    wanted = (row for row in rows if seq is None or row.get("seq") == seq)
    if not session.as_json and not session.output.is_terminal:
        print("\t".join(_COLUMNS))
    for row in islice(wanted, limit):
        _show(session, row)


def _rows(directory: Path, from_lsn: int) -> Iterator[dict[str, Any]]:
    from tidelog.cli.engine_wal import Damage, walk

    for one in walk(directory, from_lsn):
        if isinstance(one, Damage):
            yield _damage_row(one)
        else:
            yield from _record_rows(one)


def _damage_row(damage: Damage) -> dict[str, Any]:
    kind = "unfinished" if damage.is_at_end else "damaged"
    lost = None if damage.next_lsn is None else damage.next_lsn - 1
    return {
        "lsn": damage.lsn,
        "last_lsn": lost,
        "file": damage.file,
        "byte": damage.byte,
        "kind": kind,
        "text": damage.reason if lost is None else f"{damage.reason}; lost: LSN {damage.lsn} to {lost}",
    }


def _record_rows(piece: Piece) -> Iterator[dict[str, Any]]:
    from tidelog.cli.engine_words import describe_record
    from tidelog.log.frame import HEADER_BYTES

    frames = piece.frames
    for index in range(frames.count):
        payload, lsn = frames.payloads(index, index + 1)[0], frames.first_offset + index
        place = {"lsn": lsn, "file": piece.file, "byte": piece.byte + frames.start_of(index)}
        yield {**place, "bytes": HEADER_BYTES + len(payload), **describe_record(payload, lsn)}


def _show(session: Session, row: dict[str, Any]) -> None:
    if session.as_json:
        import msgspec

        print(msgspec.json.encode(row).decode())
        return
    from tidelog.cli.output import plain_text

    text = row["text"] + _updates_text(row.get("updates") or [])
    if session.output.is_terminal:
        print(f"{row['lsn']:>10}  {row['kind']:<16}  {plain_text(text)}")
    else:
        print("\t".join(plain_text(row.get(column) if column != "text" else text) for column in _COLUMNS))


def _updates_text(updates: list[dict[str, Any]]) -> str:
    shown = ", ".join(f"{one['what']} page {one['page']}" for one in updates[:4])
    return f" [{shown}{', ...' if len(updates) > 4 else ''}]" if shown else ""


def dump_page(
    session: Session,
    page: Annotated[int, typer.Argument(metavar="PAGE", min=0, help="The root of the tree is 1.")],
) -> None:
    """Shows a page of the index as it is in the page file: its header, and its cells in order.

    It takes no lock. The page file may be behind the log: changes since the last checkpoint are in the log alone until
    the page is written again. A damaged page is shown as far as it can be read, and the exit code is 5.
    """
    from tidelog.cli.errors import ExitCode

    root = find_engine(session)
    data = _page_bytes(root / _PAGES, page)
    fault = _fault_of(data, page)
    header = _header(data)
    cells, cell_fault = _cells(data, header)
    fault = fault or cell_fault
    if session.as_json:
        session.output.document({**header, "problem": fault, "cells": cells})
    else:
        _show_page(session, header, cells)
    if fault is not None:
        session.output.note(f"problem: page {page}: {fault}")
        raise typer.Exit(ExitCode.DAMAGED)


def _page_bytes(path: Path, page: int) -> bytes:
    from tidelog.engine.page import PAGE_BYTES
    from tidelog.errors import NotFoundError
    from tidelog.files import LocalFiles

    file = LocalFiles().open(path)
    try:
        count = file.size() // PAGE_BYTES
        data = file.read_at(page * PAGE_BYTES, PAGE_BYTES)
    finally:
        file.close()
    if page >= count and len(data) < PAGE_BYTES:
        raise NotFoundError(
            f"page {page} is not in the page file, which has {count} pages (the header page included)",
            path=path,
            hint="Pages that were made since the last checkpoint are in the log alone: `tidelog engine dump-wal`",
        )
    return data


def _fault_of(data: bytes, page: int) -> str | None:
    from tidelog.engine.page import check_page, verify_crc

    if not any(data):
        return "it was never written"
    if not verify_crc(data):
        return "a checksum that does not match"
    return None if page == 0 else check_page(data, page)


def _header(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = dict(zip(_HEADER_NAMES, _HEADER.unpack_from(data), strict=True))
    kinds = {0: "header of the file", 1: "tree"}
    words = {
        "crc32": f"{header['crc32']:08x}",
        "magic": f"{header['magic']:04x}",
        "kind": kinds.get(header["kind"], str(header["kind"])),
    }
    header |= words
    if header["kind"] != kinds[0]:
        return header
    version, page_bytes, made_lsn = struct.unpack_from("<II4xQ", data, 12)
    return {
        **{name: header[name] for name in ("crc32", "magic", "kind", "page")},
        "format": version,
        "page_bytes": page_bytes,
        "made_lsn": made_lsn,
    }


def _cells(data: bytes, header: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """Cell by cell, so that one bad place does not hide the others."""
    from tidelog.cli.engine_words import describe_cell
    from tidelog.engine.page import HEADER_BYTES, PAGE_BYTES

    if header["kind"] != "tree":
        return [], None
    found: list[dict[str, Any]] = []
    fault: str | None = None
    for index in range(min(header["cell_count"], (PAGE_BYTES - HEADER_BYTES) // 2)):
        (at,) = struct.unpack_from("<H", data, HEADER_BYTES + 2 * index)
        key_bytes, value_bytes = struct.unpack_from("<HH", data, at) if at + 4 <= PAGE_BYTES else (PAGE_BYTES, 0)
        end = at + 4 + key_bytes + value_bytes
        if at < HEADER_BYTES or end > PAGE_BYTES:
            fault = fault or f"cell {index} is said to be at byte {at}, where none can be"
            continue
        key, value = data[at + 4 : at + 4 + key_bytes], data[at + 4 + key_bytes : end]
        words = describe_cell(key, value, is_leaf=header["level"] == 0)
        found.append({"cell": index, "byte": at, "bytes": end - at, **words})
    return found, fault


def _show_page(session: Session, header: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    session.output.record(header)
    if cells:
        print()
        session.output.table(("cell", "byte", "bytes", "key", "text"), cells)
