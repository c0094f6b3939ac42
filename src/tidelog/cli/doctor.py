"""`tidelog doctor`: is this machine a good place for a log, and what to do when it is not."""

from __future__ import annotations

import typer

from tidelog.cli.errors import ExitCode
from tidelog.cli.session import Session, command

_COLUMNS = ("check", "status", "detail", "fix")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "doctor")(doctor)


def doctor(session: Session) -> None:
    """Checks Python, the C kernels, Java, Spark, the disk, its speed, the clock, the machine's limits, and the store.

    Every check is ok, warn or fail, and says how to mend what is not ok. Java is needed by the Spark pipeline only, so
    its absence is a warning. Where the log directory has a store, or one is named, it is reached: read, written, its
    clock compared with ours, its catalog read, and with the catalog in the bucket, whether conditional writes are
    honoured. The exit code is 1 when a check fails. Nothing is left behind, in the directory or in the store.
    """
    from tidelog.cli.doctor_checks import run_checks
    from tidelog.cli.doctor_store import store_checks

    checks = run_checks(session.root, store_checks(session))
    session.output.rows(_COLUMNS, [check._asdict() for check in checks])
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(ExitCode.FOUND_WRONG)
