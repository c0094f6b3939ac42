"""`tidelog bench`: how fast this machine appends and reads, next to what it could do at best."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from tidelog.cli.quantities import parse_size
from tidelog.cli.session import Session, command, command_group

SizeOption = Annotated[int, typer.Option(metavar="BYTES", parser=parse_size, help="Size of a value, such as 4KiB.")]
MessagesOption = Annotated[int, typer.Option("--messages", "-n", metavar="N", min=1, help="How many.")]


class Mode(Enum):
    """Who appends at the same time."""

    THREADS = "threads"
    TASKS = "tasks"


def add_to(app: typer.Typer) -> None:
    """Registers the group."""
    group = command_group("Measure appending and reading on this machine.")
    command(group, "append")(append)
    command(group, "read")(read)
    app.add_typer(group, name="bench")


def append(
    session: Session,
    messages: MessagesOption = 200_000,
    size: SizeOption = 1024,
    sync: Annotated[bool, typer.Option("--sync", help="Wait for the disk with every message.")] = False,
    appenders: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="How many append at once [default: 1, with --sync 64].")
    ] = None,
    mode: Annotated[
        Mode | None, typer.Option(help="What the appenders are [default: threads, with --sync tasks].")
    ] = None,
) -> None:
    """Measures appends: messages and megabytes a second, and the latency of a call.

    With --sync it also measures, before and after, what the disk can do at best: writes of 64 frames of the same size,
    each followed by fdatasync. The ratio says how much of that the log reaches. It works in a temporary directory on
    the disk of the log directory, which is removed afterwards.
    """
    from tidelog.cli.bench_append import AppendBench, measure_append

    appenders = appenders or (64 if sync else 1)
    mode = mode or (Mode.TASKS if sync else Mode.THREADS)
    bench = AppendBench(messages, size, sync, appenders, mode.value)
    with scratch_directory(session.root) as scratch, session.output.progress("appending", messages) as on_done:
        result = measure_append(scratch, session.settings.log, bench, on_done)
    session.output.record(result)


def read(session: Session, messages: MessagesOption = 1_000_000, size: SizeOption = 100) -> None:
    """Measures reading a topic back from its files: time a message, next to the bare scan of the same bytes.

    The scan checks every frame and does nothing else; the difference is what it costs to hand out messages. It works in
    a temporary directory on the disk of the log directory, which is removed afterwards.
    """
    from tidelog.cli.bench_read import measure_read

    with scratch_directory(session.root) as scratch, session.output.progress("reading", 2 * messages) as on_done:
        result = measure_read(scratch, session.settings.log, messages, size, on_done)
    session.output.record(result)


@contextmanager
def scratch_directory(root: Path) -> Iterator[Path]:
    """A directory beside the log directory, and inside it when only that is on the same disk."""
    from tidelog.cli.doctor_checks import nearest_directory

    place = nearest_directory(root)
    beside = place.parent
    if place == root.absolute() and beside.stat().st_dev == place.stat().st_dev and os.access(beside, os.W_OK):
        place = beside
    scratch = Path(tempfile.mkdtemp(prefix=".tidelog-bench-", dir=place))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)
