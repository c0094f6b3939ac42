"""`tidelog config`: every effective setting, and where its value comes from."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from tidelog.cli.session import Session, command
from tidelog.config import explain_settings
from tidelog.secret import HIDDEN
from tidelog.topics.directory_info import remembered_place

if TYPE_CHECKING:
    from tidelog.config import InForce

_COLUMNS = ("setting", "value", "source", "table")


def add_to(app: typer.Typer) -> None:
    """Registers the command."""
    command(app, "config")(config)


def config(
    session: Session,
    changed: Annotated[bool, typer.Option("--changed", help="Only those that are not the default.")] = False,
) -> None:
    """Shows the settings in force and where each comes from.

    The source is the settings file, an environment variable, an option of this command line, tidelog.json of the log
    directory, or default. A setting that was given by another name of it says so. Secrets are not shown.
    """
    named = {"dir": session.directory, "store": session.store, "metadata": session.metadata}
    rows = [
        {"setting": one.name, "value": _shown(one.value), "source": _source(one), "table": one.table}
        for one in explain_settings(session.config, os.environ, named)
    ]
    remembered = remembered_place(session.root)
    for row in rows:
        if row["setting"] == "dir" and row["value"] is None:
            row["value"] = str(session.root)  # the command line has a default where the library has none
    for row in rows:
        known = remembered.get(str(row["setting"]))
        if row["value"] is None and known is not None:
            row |= {"value": known, "source": "tidelog.json"}
    session.output.rows(_COLUMNS, [row for row in rows if not changed or row["source"] != "default"])


def _shown(value: object) -> object:
    """A URL without the user and password that it should not have."""
    if not isinstance(value, str) or "://" not in value or "@" not in value:
        return value
    scheme, _, rest = value.partition("://")
    return f"{scheme}://{HIDDEN}@{rest.rpartition('@')[2]}"


def _source(one: InForce) -> str:
    return one.source if one.alias is None else f"{one.source}, as {one.alias}"
