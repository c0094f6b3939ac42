"""How results reach the reader: tables on a terminal, tab-separated text in a pipe, JSON when asked for.

Invariants
- Only data goes to stdout. Notes, progress and errors go to stderr.
- A table in a pipe is one header line and one line a row; tabs and line ends inside a value are escaped.
- The names of columns are the keys of the JSON, so both can be looked up in the same place.
- Nothing of the terminal library is imported before there is a terminal to draw on.
- On a terminal no name or number is ever broken: a table that is too wide gets fewer columns, or a line a property.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Literal

from tidelog.cli.wrapping import say, terminal_columns

Row = Mapping[str, object]
OnDone = Callable[[int], None]

_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
# Columns of prose, which may be wrapped.
_PROSE = frozenset({"detail", "fix"})
_BETWEEN_COLUMNS = 1
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Output:
    """Where a command puts its results."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    def note(self, text: str) -> None:
        """A remark for people."""
        say(text, sys.stderr)

    def line(self, text: str, indent: str = "") -> None:
        """A line of a result that is told in words; `indent` is for what does not fit on it."""
        say(text, sys.stdout, indent)

    def document(self, document: object) -> None:
        """One JSON document."""
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
        print(text)

    def rows(self, columns: Sequence[str], rows: Sequence[Row], title: str | None = None) -> None:
        """A table; as JSON an array of objects."""
        if self.as_json:
            self.document(rows)
        else:
            self.table(columns, rows, title)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Row],
        title: str | None = None,
        narrower: Sequence[Sequence[str]] = (),
    ) -> None:
        """A table for people or for cut and awk; `narrower` are choices of columns for smaller terminals."""
        if self.is_terminal:
            _draw_what_fits([columns, *narrower], rows, title)
            return
        print("\t".join(columns))
        for row in rows:
            print("\t".join(plain_text(row.get(column)) for column in columns))

    def record(self, record: Row, title: str | None = None) -> None:
        """One thing with its properties; as JSON an object."""
        if self.as_json:
            self.document(record)
        elif self.is_terminal:
            _draw_record(record, title)
        else:
            print("name\tvalue")
            for name, value in record.items():
                print(f"{name}\t{plain_text(value)}")

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[OnDone]:
        """A bar for long work; the body calls what it gets with how much is done so far."""
        if not sys.stderr.isatty():
            yield lambda done: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda done: bar.update(task, completed=done)


def plain_text(value: object) -> str:
    """A value in a line of text."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, datetime):
        return iso_time(value)
    if isinstance(value, Mapping):
        return ",".join(f"{plain_text(name)}={plain_text(one)}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ",".join(plain_text(one) for one in value)
    return str(value).translate(_ESCAPES)


def terminal_text(name: str, value: object) -> str:
    """A value for people; the name says what kind of number it is."""
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return plain_text(value)
    if name == "bytes" or name.endswith("_bytes"):
        return human_bytes(value)
    return f"{value:,}" if isinstance(value, int) else _rounded(value)


def _rounded(value: float) -> str:
    """Three digits at least, and no more behind the point than they need."""
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{decimals}f}"


def counted(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def human_bytes(count: float) -> str:
    """A size in the largest unit that leaves a number before the point."""
    size, unit = float(count), 0
    while size >= 1024 and unit < len(_BYTE_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_BYTE_UNITS[unit]}"


def iso_time(moment: datetime) -> str:
    """A UTC time as `--from` accepts it again."""
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _draw_what_fits(choices: Sequence[Sequence[str]], rows: Sequence[Row], title: str | None) -> None:
    available = terminal_columns(sys.stdout)
    fitting = next((columns for columns in choices if table_width(columns, rows) <= available), None)
    if fitting is not None:
        _draw_table(fitting, rows, title)
        return
    if title:
        print(title)
    for row in rows:
        _draw_record({column: row.get(column) for column in choices[0]}, None)
        print()


def table_width(columns: Sequence[str], rows: Sequence[Row]) -> int:
    """How many columns of the terminal a table needs at least."""
    widths = [_column_width(column, rows) for column in columns]
    return sum(widths) + _BETWEEN_COLUMNS * (len(widths) - 1)


def _column_width(column: str, rows: Sequence[Row]) -> int:
    texts = [terminal_text(column, row.get(column)) for row in rows]
    if column in _PROSE:
        texts = [word for text in texts for word in text.split()]
    return max(map(len, [*column.split("_"), *texts]))


def _draw_table(columns: Sequence[str], rows: Sequence[Row], title: str | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=terminal_columns(sys.stdout))
    has_room = sum(max(len(column), _column_width(column, rows)) + 1 for column in columns) <= console.width
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for column in columns:
        numeric = any(isinstance(row.get(column), int | float) for row in rows)
        heading = column.replace("_", " " if has_room else "\n")
        justify: Literal["left", "right"] = "right" if numeric else "left"
        table.add_column(heading, justify=justify, overflow="fold", no_wrap=column not in _PROSE)
    for row in rows:
        table.add_row(*(Text(terminal_text(column, row.get(column))) for column in columns))
    console.print(table)


def _draw_record(record: Row, title: str | None) -> None:
    """A line a property; what is too long goes on below, and a path is left to the terminal to break."""
    if title:
        print(title)
    name_width = max(map(len, record), default=0)
    for name, value in record.items():
        line = f"{name.replace('_', ' '):<{name_width}}  {terminal_text(name, value)}"
        say(line, sys.stdout, indent=" " * (name_width + 2))
