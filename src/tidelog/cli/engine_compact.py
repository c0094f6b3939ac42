"""`tidelog engine compact`: small objects of the store become large ones, half-empty pages of the index full ones."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from tidelog.cli.engine_session import TakeOverOption, changing, require_store
from tidelog.cli.session import Session


def compact(
    session: Session,
    index: Annotated[
        bool, typer.Option("--index", help="The index on this disk instead: written anew, in full pages.")
    ] = False,
    grace_seconds: Annotated[
        float | None,
        typer.Option("--grace-seconds", metavar="S", min=0, help="Delete what was replaced longer ago than this."),
    ] = None,
    take_over: TakeOverOption = False,
) -> None:
    """Puts small objects of the store together, as `compaction_size_threshold` says.

    What was replaced stays for a while, for those who are reading it, and is deleted by a later run. With --index the
    page file is written anew instead, which gives room back after versions were removed.
    """
    with changing(session, take_over=take_over) as engine:
        if index:
            report: object = engine.compact_index()
        else:
            require_store(engine, session)
            report = engine.compact() if grace_seconds is None else engine.compact(grace_seconds)
    session.output.record(msgspec.to_builtins(report))
