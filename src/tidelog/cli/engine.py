"""`tidelog engine`: the group of commands about engines."""

from __future__ import annotations

from collections.abc import Callable

import typer

from tidelog.cli.engine_compact import compact
from tidelog.cli.engine_dump import dump_page, dump_wal
from tidelog.cli.engine_gc import gc
from tidelog.cli.engine_put_log import put_log
from tidelog.cli.engine_session import engine_command
from tidelog.cli.engine_show import digest, get, ls, stat, versions
from tidelog.cli.engine_status import status
from tidelog.cli.engine_upkeep import checkpoint, restore, ship
from tidelog.cli.engine_verify import verify
from tidelog.cli.session import command_group

# Commands without arguments of their own take the directory as one.
_ABOUT_A_DIRECTORY: dict[str, Callable[..., None]] = {
    "status": status,
    "checkpoint": checkpoint,
    "ship": ship,
    "compact": compact,
    "gc": gc,
    "restore": restore,
    "verify": verify,
    "digest": digest,
    "dump-wal": dump_wal,
}
_OTHERS: dict[str, Callable[..., None]] = {
    "get": get,
    "stat": stat,
    "ls": ls,
    "versions": versions,
    "put-log": put_log,
    "dump-page": dump_page,
}

COMMANDS = (*_ABOUT_A_DIRECTORY, *_OTHERS)


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("Look into engines, apply entries, ship, compact, restore, verify and take them apart.")
    for name, work in _ABOUT_A_DIRECTORY.items():
        engine_command(group, name, work, takes_place=True)
    for name, work in _OTHERS.items():
        engine_command(group, name, work)
    app.add_typer(group, name="engine")
