"""`tidelog engine status`, `dump-wal` and `dump-page`: show an engine from its files and its store alone.

Invariants
- It takes no lock and changes nothing: it works beside the owner, after a crash, and on a damaged engine.
- Anything unreadable is reported as a problem, and the rest is still shown.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidelog.cli.engine.session import described, engine_config, find_engine, open_metadata, open_objects, served
from tidelog.cli.errors import ExitCode, text_of
from tidelog.cli.output import plain_text
from tidelog.cli.session import Session
from tidelog.clock import to_datetime
from tidelog.cold.catalog import Catalog
from tidelog.engine.btree.page import HEADER_BYTES, PAGE_BYTES, check_page, verify_crc
from tidelog.engine.cold.manifest import Manifest, read_manifest
from tidelog.engine.cold.shipping import LOOKED_AT, first_time
from tidelog.engine.directory import EngineDirectory
from tidelog.engine.recovery.checkpoint import read_master
from tidelog.engine.recovery.recovery import Analysis
from tidelog.engine.verify.describe import describe_cell, describe_record
from tidelog.engine.wal.records import CheckpointState
from tidelog.errors import DataError, NotFoundError, TidelogError
from tidelog.files import LocalFiles
from tidelog.findings import About, Finding
from tidelog.log.directory import wal_files
from tidelog.log.frame import HEADER_BYTES as FRAME_HEADER_BYTES
from tidelog.log.verify import LogWalk, Piece

if TYPE_CHECKING:
    from collections.abc import Iterator

_PROC_LOCKS = Path("/proc/locks")


def status(session: Session) -> None:
    """Shows how an engine is. Its marks, its log, its index, its last checkpoint, what opening would do, and its store.

    It reads files and asks the store, and takes no lock: it works beside the process that has the engine open. Entries
    between low_water_mark and applied_seq may still be rolled back; those between high_water_mark and low_water_mark
    wait for the store, and lag_seconds says how long the oldest of them does; lag_bytes counts all that is not in the
    store. Up to truncation_mark the orchestrator may forget its log. What cannot be read is listed as a problem, and
    the exit code stays 0. With --server it shows the marks, and with --json all statistics of the server.
    """
    if session.server is not None:
        _served_status(session)
        return
    root = find_engine(session)
    problems: list[str] = []
    info = info_of(session, root, problems)
    local = _Local(root, problems)
    document = local.document(engine_config(session).storage_engine.buffer_pool_bytes)
    document |= _store_document(session, info, local, problems)
    document |= _marks(document)
    about = {"directory": str(root), "is_open": is_open(root), "is_drill": info.is_drill, "node": info.node or None}
    if session.as_json:
        session.output.document({**about, **document, "problems": problems})
        return
    session.output.record(_flat({**about, **document}))
    for problem in problems:
        session.output.note(f"problem: {problem}")


def _served_status(session: Session) -> None:
    with served(session) as engine:
        assert engine is not None
        found = engine._bridge.wait(engine._http.json("GET", engine._path))
    if session.as_json:
        session.output.document(found)
    else:
        session.output.record({name: value for name, value in found.items() if name not in ("statistics", "directory")})


def info_of(session: Session, root: Path, problems: list[str]) -> EngineDirectory:
    """What the directory says about itself; damage to that is a problem, and the rest can be looked at without."""
    try:
        return described(session, root)
    except DataError as error:
        problems.append(text_of(error))
        return EngineDirectory(node="")


def is_open(root: Path) -> bool | None:
    """Whether some process has the engine open, without getting in its way; None where the system does not say."""
    try:
        inode = (root / "wal" / "lock").stat().st_ino
        lines = _PROC_LOCKS.read_text("ascii", "replace").splitlines()
    except FileNotFoundError:
        return False if _PROC_LOCKS.exists() else None
    except OSError:
        return None
    return any(" FLOCK " in line and f":{inode} " in line for line in lines)


class _Local:
    """What the files say."""

    def __init__(self, root: Path, problems: list[str]) -> None:
        self._root = root
        self._problems = problems
        self.state, reason = read_master(LocalFiles(), root)
        if reason is not None:
            problems.append(f"engine.ckpt cannot be used: {reason}")
        self.analysis: Analysis = Analysis(self.state)
        self.first_lsn: int | None = None
        self.next_lsn = 1 if self.state is None else self.state.begin_lsn
        self.next_position = 0 if self.state is None else self.state.begin_position
        self._files = self._file_bytes = self._redo_bytes = 0
        self._read()

    def _read(self) -> None:
        """What was written since the last checkpoint is looked at record by record; it is what opening would redo."""
        wal = self._root / "wal"
        listed = wal_files([path.name for path in wal.iterdir()]) if wal.is_dir() else []
        self._files = len(listed)
        self._file_bytes = sum(_size(wal / name) for _, name in listed)
        self.first_lsn = _first_lsn(wal) if listed else None
        try:
            for one in _walk(wal, self.next_lsn) if listed else ():
                if not isinstance(one, Piece):
                    if one.severity == "error":
                        self._problems.append(one.text)
                        return
                    continue
                self.analysis.take(one.frames)
                self.next_lsn = one.frames.next_offset
                self._redo_bytes += one.size
                self.next_position += one.size
            if listed and self.state is not None and not self._redo_bytes and self._file_bytes:
                self._problems.append(f"engine.ckpt refers to LSN {self.state.begin_lsn}, but the log ends before it")
        except DataError as error:
            self._problems.append(error.message)

    @property
    def redo_lsn(self) -> int:
        return (self.first_lsn or 1) if self.state is None else self.state.begin_lsn

    def document(self, pool_bytes: int) -> dict[str, Any]:
        analysis, index_bytes = self.analysis, _size(self._root / "pages.db")
        rollback = analysis.rollback
        return {
            "applied_seq": analysis.applied_seq if rollback is None else rollback.target_seq,
            "low_water_mark": analysis.low_water_mark,
            "high_water_mark": analysis.high_water_mark,
            "history_start_seq": analysis.history_start_seq,
            "wal": {
                "first_lsn": self.first_lsn,
                "next_lsn": self.next_lsn,
                "next_position": self.next_position,
                "files": self._files,
                "file_bytes": self._file_bytes,
            },
            "index": {"file_bytes": index_bytes, "pool_bytes": pool_bytes, "fits_in_pool": index_bytes <= pool_bytes},
            "checkpoint": _checkpoint(self.state),
            "recovery": {
                "redo_lsn": self.redo_lsn,
                "redo_records": self.next_lsn - self.redo_lsn,
                "redo_bytes": self._redo_bytes,
                "undone_seq": analysis.open_seq or None,
                "rollback_to": None if rollback is None else rollback.target_seq,
            },
        }

    def lag_seconds(self, shipped_lsn: int) -> float:
        """How long the oldest entry waits that may be shipped and is not in the store; 0 when none does."""
        import time

        start = max(shipped_lsn, self.first_lsn or 1)
        for one in _walk(self._root / "wal", start):
            if not isinstance(one, Piece) or one.frames.first_offset >= start + LOOKED_AT:
                break
            if (time_us := first_time(one.frames, self.analysis.low_water_mark)) is not None:
                return max(0.0, time.time() - time_us / 1_000_000)
        return 0.0


def _walk(wal: Path, start: int) -> LogWalk:
    return LogWalk(wal, start, about=About(str(wal), "LSN"), least_offset=1)


def _first_lsn(wal: Path) -> int | None:
    first = next(iter(_walk(wal, 0)), None)
    return first.frames.first_offset if isinstance(first, Piece) else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _checkpoint(state: CheckpointState | None) -> dict[str, Any] | None:
    if state is None:
        return None
    return {"seq": state.applied_seq, "lsn": state.begin_lsn, "time": to_datetime(state.time_us)}


def _store_document(
    session: Session, info: EngineDirectory, local: _Local, problems: list[str]
) -> dict[str, dict[str, Any] | None]:
    if info.store is None:
        return {"store": None}
    about: dict[str, Any] = {"url": info.store}
    try:
        objects = open_objects(session, info.store)
        with open_metadata(session, info, objects) as metadata:
            found = read_manifest(metadata, info.keys)
            owner = Catalog(metadata, info.keys).owner()
    except TidelogError as error:
        problems.append(f"the store: {text_of(error)}")
        return {"store": about}
    is_ours = owner is not None and owner[0].node == info.node
    about |= {"owner": None if owner is None else owner[0].node, "is_ours": is_ours}
    if owner is not None and not is_ours and not info.is_drill:  # a drill claims nothing
        problems.append(f"{owner[0].node} owns the engine in the store now, with epoch {owner[0].epoch}")
    published = {} if found is None else _published(found[0], local)
    if published and info.is_drill:
        published |= {"lag_bytes": None, "lag_seconds": None}  # it ships nothing
    return {"store": about | published}


def _marks(document: dict[str, Any]) -> dict[str, int]:
    """With what the store has, where it is ours and was read: the files know that as of the last checkpoint only."""
    store = document["store"] or {}
    shipped = store.get("truncation_mark", 0) if store.get("is_ours") else 0
    return {name: max(document[name], shipped) for name in ("low_water_mark", "high_water_mark")}


def _published(manifest: Manifest, local: _Local) -> dict[str, Any]:
    newest = manifest.checkpoints[-1] if manifest.checkpoints else None
    return {
        "epoch": manifest.epoch,
        "truncation_mark": manifest.high_water_mark,
        "shipped_lsn": manifest.shipped_lsn,
        "lag_bytes": max(0, local.next_position - manifest.shipped_position),
        "lag_seconds": local.lag_seconds(manifest.shipped_lsn),
        "states": len(manifest.checkpoints),
        "state_seq": None if newest is None else newest.seq,
        "state_time": None if newest is None else to_datetime(newest.created_us),
    }


def _flat(document: dict[str, Any]) -> dict[str, Any]:
    """Nested parts as properties of their own: wal.files becomes wal_files."""
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, dict):
            flat |= {f"{name}_{inner}": one for inner, one in value.items()}
        else:
            flat[name] = value
    return flat


# `tidelog engine dump-wal` and `dump-page`: print the contents of an engine's files.
#
# They only read files: they take no lock, run no recovery, and continue after damage.


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
    limit: Annotated[
        int | None, typer.Option("--limit", "-n", metavar="N", min=0, help="Show at most N records.")
    ] = None,
    seq: Annotated[
        int | None, typer.Option("--seq", "-s", metavar="N", min=1, help="Only records of the entry of this seq.")
    ] = None,
) -> None:
    """Shows the records of the engine's log, one per line. Its position, its kind, and its contents.

    With --json a line is an object with everything that is in the record, page updates included; of values only size
    and checksum. It takes no lock, so it works beside the process that has the engine open, and it continues after
    damage, which is shown in its position.
    """
    from itertools import islice

    rows = _rows(find_engine(session) / "wal", from_lsn)
    wanted = (row for row in rows if seq is None or row.get("seq") == seq)
    if not session.as_json and not session.output.is_terminal:
        print("\t".join(_COLUMNS))
    for row in islice(wanted, limit):
        _show(session, row)


def _rows(directory: Path, from_lsn: int) -> Iterator[dict[str, Any]]:
    for one in _walk(directory, from_lsn):
        if isinstance(one, Piece):
            yield from _record_rows(one)
        else:
            yield _damage_row(one)


def _damage_row(found: Finding) -> dict[str, Any]:
    return {
        "lsn": found.first_offset,
        "last_lsn": found.last_offset,
        "file": Path(found.path or "").name,
        "byte": found.byte,
        "kind": "damaged" if found.severity == "error" else "unfinished",
        "text": found.text,
    }


def _record_rows(piece: Piece) -> Iterator[dict[str, Any]]:
    frames = piece.frames
    for index in range(frames.count):
        payload, lsn = frames.payloads(index, index + 1)[0], frames.first_offset + index
        place = {"lsn": lsn, "file": piece.file, "byte": piece.byte + frames.start_of(index)}
        yield {**place, "bytes": FRAME_HEADER_BYTES + len(payload), **describe_record(payload, lsn)}


def _show(session: Session, row: dict[str, Any]) -> None:
    if session.as_json:
        import msgspec

        print(msgspec.json.encode(row).decode())
        return

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
    """Shows a page of the index as it is in the page file. Its header, and its cells in order.

    It takes no lock. The page file may be behind the log: changes since the last checkpoint are in the log alone until
    the page is written again. A damaged page is shown as far as it can be read, and the exit code is 5.
    """
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
            hint="Pages created since the last checkpoint are only in the log: `tidelog engine dump-wal`",
        )
    return data


def _fault_of(data: bytes, page: int) -> str | None:
    if not any(data):
        return "it was never written"
    if not verify_crc(data):
        return "checksum does not match"
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
    if header["kind"] != "tree":
        return [], None
    found: list[dict[str, Any]] = []
    fault: str | None = None
    for index in range(min(header["cell_count"], (PAGE_BYTES - HEADER_BYTES) // 2)):
        (at,) = struct.unpack_from("<H", data, HEADER_BYTES + 2 * index)
        key_bytes, value_bytes = struct.unpack_from("<HH", data, at) if at + 4 <= PAGE_BYTES else (PAGE_BYTES, 0)
        end = at + 4 + key_bytes + value_bytes
        if at < HEADER_BYTES or end > PAGE_BYTES:
            fault = fault or f"cell {index} has the invalid position {at}"
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
