"""`tidelog pipeline shell`: Python with a Spark session, and the session that stays for later commands."""

from __future__ import annotations

from typing import Annotated

import typer

from tidelog.cli.pipeline.job import MasterOption, spark_for
from tidelog.cli.session import Session
from tidelog.errors import InputError

_BANNER = "spark is the session, which knows the formats tidelog, tidelog_entries and tidelog_objects; Ctrl-D ends"
_MINUTES = 60


def shell(
    session: Session,
    keep: Annotated[
        bool, typer.Option("--keep", help="Start a session that stays, for the next `tidelog pipeline` commands.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the session that stays.")] = False,
    idle_minutes: Annotated[
        float, typer.Option("--idle", metavar="MINUTES", min=0, help="It ends when nobody used it for so long.")
    ] = 30,
    master: MasterOption = None,
) -> None:
    """A Spark session to try things in; with --keep, one that stays.

    Without options: Python with `spark` in it. With --keep a session stays in the background, and commands of
    `tidelog pipeline` take it instead of starting their own, which is most of the time of a small one. It serves those
    of the same user, Python, environment and master; it ends with --stop, or when it was idle.
    """
    if keep and stop:
        raise InputError("--keep and --stop are opposites", hint="Give one of them")
    if stop:
        _stop(session)
    elif keep:
        _keep(session, master, idle_minutes * _MINUTES)
    else:
        _interact(session, master)


def _keep(session: Session, master: str | None, idle_seconds: float) -> None:
    from tidelog.pipeline.session.kept import keep

    with session.output.working("Starting Spark"):
        kept = keep(master, idle_seconds)
    if session.as_json:
        document = {"pid": kept.pid, "remote": kept.remote, "master": kept.master, "idle_seconds": kept.idle_seconds}
        session.output.document(document)
        return
    minutes = kept.idle_seconds / _MINUTES
    session.output.line(
        f"the session is kept (pid {kept.pid}, {kept.master}); it ends when idle for {minutes:g} minutes"
    )
    session.output.note("`tidelog pipeline` commands use it from now on; `tidelog pipeline shell --stop` ends it")


def _stop(session: Session) -> None:
    from tidelog.pipeline.session.kept import stop_kept

    was_there = stop_kept()
    if session.as_json:
        session.output.document({"stopped": was_there})
    else:
        session.output.line("the kept session has ended" if was_there else "there is no kept session")


def _interact(session: Session, master: str | None) -> None:
    import code

    import tidelog

    with spark_for(session.output, "shell", master) as spark:
        code.interact(_BANNER, local={"spark": spark, "tidelog": tidelog}, exitmsg="")
