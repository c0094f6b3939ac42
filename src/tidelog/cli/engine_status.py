"""`tidelog engine status`: where an engine stands, from its files and its store alone.

Invariants
- It takes no lock and changes nothing: it works beside the owner, after a crash, and on a damaged engine.
- What cannot be read is told as a problem, and the rest is shown all the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidelog.cli.engine_session import described, engine_config, find_engine, keys_of, open_objects
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.engine.analysis import Analysis
    from tidelog.engine.engine_directory import EngineDirectory
    from tidelog.engine.manifest import Manifest
    from tidelog.engine.master import CheckpointState

_PROC_LOCKS = Path("/proc/locks")


def status(session: Session) -> None:
    """Shows the marks of an engine, its log, its index, its last checkpoint, what opening would do, and its store.

    It reads files and asks the store, and takes no lock: it works beside the process that has the engine open. Entries
    between low_water_mark and applied_seq may still be rolled back; those between high_water_mark and low_water_mark
    wait for the store, and lag_seconds says how long the oldest of them does; lag_bytes counts all that is not in the
    store. Up to truncation_mark the orchestrator may forget its log. What cannot be read is listed as a problem, and
    the exit code stays 0.
    """
    root = find_engine(session)
    problems: list[str] = []
    info = info_of(session, root, problems)
    local = _Local(root, problems)
    document = local.document(engine_config(session).storage_engine.buffer_pool_size)
    document |= _store_document(session, info, local, problems)
    document |= _marks(document)
    about = {"directory": str(root), "is_open": is_open(root), "node": info.node or None}
    if session.as_json:
        session.output.document({**about, **document, "problems": problems})
        return
    session.output.record(_flat({**about, **document}))
    for problem in problems:
        session.output.note(f"problem: {problem}")


def info_of(session: Session, root: Path, problems: list[str]) -> EngineDirectory:
    """What the directory says about itself; damage to that is a problem, and the rest can be looked at without."""
    from tidelog.cli.errors import text_of
    from tidelog.engine.engine_directory import EngineDirectory
    from tidelog.errors import DataError

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
        from tidelog.engine.analysis import Analysis
        from tidelog.engine.master import read_master
        from tidelog.files import LocalFiles

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
        from tidelog.cli.engine_wal import Damage, walk
        from tidelog.errors import DataError
        from tidelog.log.names import wal_files

        wal = self._root / "wal"
        listed = wal_files([path.name for path in wal.iterdir()]) if wal.is_dir() else []
        self._files = len(listed)
        self._file_bytes = sum(_size(wal / name) for _, name in listed)
        self.first_lsn = _first_lsn(wal) if listed else None
        try:
            for one in walk(wal, self.next_lsn) if listed else ():
                if isinstance(one, Damage):
                    if not one.is_at_end:
                        self._problems.append(str(one))
                        return
                    continue
                self.analysis.take(one.frames)
                self.next_lsn = one.frames.next_offset
                self._redo_bytes += one.size
                self.next_position += one.size
            if listed and self.state is not None and not self._redo_bytes and self._file_bytes:
                self._problems.append(f"engine.ckpt tells of LSN {self.state.begin_lsn}, and the log ends before it")
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

        from tidelog.cli.engine_wal import Damage, walk
        from tidelog.engine.lag import LOOKED_AT, first_time

        start = max(shipped_lsn, self.first_lsn or 1)
        for one in walk(self._root / "wal", start):
            if isinstance(one, Damage) or one.frames.first_offset >= start + LOOKED_AT:
                break
            if (time_us := first_time(one.frames, self.analysis.low_water_mark)) is not None:
                return max(0.0, time.time() - time_us / 1_000_000)
        return 0.0


def _first_lsn(wal: Path) -> int | None:
    from tidelog.cli.engine_wal import Piece, walk

    first = next(walk(wal), None)
    return first.frames.first_offset if isinstance(first, Piece) else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _checkpoint(state: CheckpointState | None) -> dict[str, Any] | None:
    from tidelog.clock import to_datetime

    if state is None:
        return None
    return {"seq": state.applied_seq, "lsn": state.begin_lsn, "time": to_datetime(state.time_us)}


def _store_document(
    session: Session, info: EngineDirectory, local: _Local, problems: list[str]
) -> dict[str, dict[str, Any] | None]:
    from tidelog.cli.errors import text_of
    from tidelog.engine.manifest import read_manifest
    from tidelog.errors import TidelogError
    from tidelog.tier.catalog import Catalog
    from tidelog.tier.metadata.open import BUCKET, open_metadata_store

    if info.store is None:
        return {"store": None}
    about: dict[str, Any] = {"url": info.store}
    try:
        objects = open_objects(session, info.store)
        with open_metadata_store(BUCKET, objects, read_only=True) as metadata:
            found = read_manifest(metadata, keys_of(info))
            owner = Catalog(metadata, keys_of(info)).owner()
    except TidelogError as error:
        problems.append(f"the store: {text_of(error)}")
        return {"store": about}
    is_ours = owner is not None and owner[0].node == info.node
    about |= {"owner": None if owner is None else owner[0].node, "is_ours": is_ours}
    if owner is not None and not is_ours:
        problems.append(f"{owner[0].node} owns the engine in the store now, with epoch {owner[0].epoch}")
    return {"store": about if found is None else about | _published(found[0], local)}


def _marks(document: dict[str, Any]) -> dict[str, int]:
    """With what the store has, where it is ours and was read: the files know that as of the last checkpoint only."""
    store = document["store"] or {}
    shipped = store.get("truncation_mark", 0) if store.get("is_ours") else 0
    return {name: max(document[name], shipped) for name in ("low_water_mark", "high_water_mark")}


def _published(manifest: Manifest, local: _Local) -> dict[str, Any]:
    from tidelog.clock import to_datetime

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
