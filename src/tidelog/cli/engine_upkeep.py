"""`tidelog engine checkpoint`, `ship` and `restore`: what an engine does by itself while it is open, by hand."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import typer

from tidelog.cli.engine_session import TakeOverOption, changing, engine_config, require_store
from tidelog.cli.session import Session

if TYPE_CHECKING:
    from tidelog.cli.output import OnDone, Output
    from tidelog.engine.restore import Phase, RestoreProgress


def checkpoint(session: Session, take_over: TakeOverOption = False) -> None:
    """Makes a checkpoint, so that opening has little to do again, and writes the state into the store if there is one.

    A restore begins with the newest state in the store.
    """
    with changing(session, take_over=take_over) as engine:
        started = time.perf_counter()
        seq = engine.create_checkpoint()
        found = engine.statistics()
        shipping = found.shipping
        record = {
            "seq": seq,
            "seconds": time.perf_counter() - started,
            "redo_lsn": found.redo_lsn,
            "state_seq": None if shipping is None else shipping.newest_checkpoint_seq,
            "states": None if shipping is None else shipping.checkpoints,
        }
    session.output.record(record)


def ship(
    session: Session,
    low_water_mark: Annotated[
        int | None,
        typer.Option(
            "--low-water-mark", metavar="N", min=0, help="All replicas have applied everything up to this seq."
        ),
    ] = None,
    take_over: TakeOverOption = False,
) -> None:
    """Ships everything up to the low-water mark to the store, and lets files leave the disk that may.

    The low-water mark is the orchestrator's to say. With --low-water-mark it is raised first: what is at or below it is
    never rolled back any more.
    """
    with changing(session, take_over=take_over) as engine:
        require_store(engine, session)
        if low_water_mark is not None:
            engine.update_low_water_mark(low_water_mark)
        started = time.perf_counter()
        mark = engine.ship()
        shipping = engine.statistics().shipping
        assert shipping is not None
        shipper = shipping.shipper
        record = {
            "store": shipping.store,
            "high_water_mark": mark,
            "low_water_mark": engine.low_water_mark,
            "applied_seq": engine.applied_seq,
            "objects": 0 if shipper is None else shipper.objects_created,
            "shipped_bytes": 0 if shipper is None else shipper.bytes_uploaded,
            "lag_bytes": shipping.lag_bytes,
            "purged_bytes": shipping.purged_bytes,
            "seconds": time.perf_counter() - started,
        }
    session.output.record(record)


def restore(
    session: Session,
    take_over: TakeOverOption = False,
    drill: Annotated[
        bool, typer.Option("--drill", help="Only a copy for reading: nothing is claimed, nobody is disturbed.")
    ] = False,
) -> None:
    """Builds a lost engine anew in an empty directory: the newest state in the store, and the log behind it.

    The new directory owns the engine from then on. One that another node has open is refused, unless --take-over says
    so. Entries above the seq that is reached are the orchestrator's to give again. A restore that was cut off is begun
    again by the same command.

    With --drill the directory becomes a copy of what is shipped, for reading: `tidelog engine get`, `ls`, `status` and
    `verify` work on it, and it never claims or ships anything.
    """
    from tidelog.engine_wiring import open_engine_at, restore_directory
    from tidelog.errors import InputError

    if drill and take_over:
        raise InputError("--drill claims nothing, so there is nothing to take over", hint="Leave one of them out")
    config = engine_config(session)
    if not config.dir:
        raise InputError(
            "no directory was named to restore into",
            hint="Give an empty or a new one: tidelog engine restore ./new --store s3://bucket/prefix",
        )
    directory = Path(config.dir).absolute()
    started = time.perf_counter()
    with _Bars(session.output) as bars:
        report = restore_directory(directory, config, on_progress=bars.show, take_over=take_over, claims=not drill)
    with open_engine_at(directory, config, runs_in_background=False) as engine:
        record = {
            "directory": str(directory),
            "applied_seq": engine.applied_seq,
            "state_seq": report.state_seq,
            "entries_replayed": report.entries,
            "rows": report.rows,
            "damaged_states": list(report.damaged_states),
            "seconds": time.perf_counter() - started,
        }
    session.output.record(record)
    for key in report.damaged_states:
        session.output.note(f"problem: the state {key} could not be used; an older one was")
    if drill:
        session.output.note(f"a copy for reading, up to seq {report.seq}; the engine in the store was not touched")
    else:
        session.output.note(f"entries above seq {report.seq} come from the orchestrator")


_DOING: dict[Phase, str] = {
    "state": "reading the state",
    "log": "replaying the log",
    "claim": "claiming the engine",
    "index": "making the index",
}


class _Bars:
    """One bar after the other, for the phases of a restore."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._open = ExitStack()
        self._shown: tuple[Phase, int] | None = None
        self._on_done: OnDone = lambda done: None

    def show(self, progress: RestoreProgress) -> None:
        """How far it is."""
        if progress.phase not in _DOING:
            return
        if self._shown != (progress.phase, progress.total):
            self._open.close()
            self._shown = progress.phase, progress.total
            bar = self._output.progress(_DOING[progress.phase], max(1, progress.total))
            self._on_done = self._open.enter_context(bar)
        self._on_done(progress.done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.close()
