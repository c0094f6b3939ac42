"""Output: tables on a terminal, tab-separated text in a pipe, JSON on request.

Invariants
- Only data goes to stdout. Notes, progress and errors go to stderr.
- A table in a pipe is one header line and one line per row; tabs and line ends inside a value are escaped.
- The names of columns are the keys of the JSON, so one reference serves both.
- The terminal library is imported only if there is a terminal to draw on.
- On a terminal no name or number is ever broken: a table that is too wide gets fewer columns, or one line per property.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Literal, TextIO

import msgspec
import typer

from tidelog.clock import iso_time, to_microseconds
from tidelog.errors import InputError
from tidelog.findings import OnStep
from tidelog.topics.message import HeaderPairs, Headers, Message
from tidelog.topics.subscription.queue import Delivery
from tidelog.units import human_bytes

# Lines of text for people: wrapped at words on a terminal, left alone in a pipe.
#
# A command in backticks is meant to be pasted, so it is never broken; the terminal itself wraps it where it must.


_COMMAND = re.compile(r"`[^`]*`")
# Stands for a blank inside a command while lines are broken at blanks.
_HELD_BLANK = "\x00"


def say(text: str, stream: TextIO, indent: str = "") -> None:
    """Writes a paragraph; `indent` is what its further lines begin with."""
    if stream.isatty():
        text = wrapped(text, terminal_columns(stream), indent)
    print(text, file=stream, flush=True)


def wrapped(text: str, columns: int, indent: str = "") -> str:
    """The text wrapped at `columns`, as far as its words and commands allow."""
    held = _COMMAND.sub(lambda found: found[0].replace(" ", _HELD_BLANK), text)
    lines = textwrap.wrap(
        held,
        max(columns, 20),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        drop_whitespace=True,
    )
    return "\n".join(lines).replace(_HELD_BLANK, " ")


def terminal_columns(stream: TextIO) -> int:
    """The width of a stream's terminal; COLUMNS in the environment wins."""
    if os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


Row = Mapping[str, object]
OnDone = Callable[[int], None]

_ESCAPES = str.maketrans({"\\": "\\\\", "\t": "\\t", "\n": "\\n", "\r": "\\r"})
# Columns of prose, which may be wrapped.
_PROSE = frozenset({"detail", "fix"})
_BETWEEN_COLUMNS = 1


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
        """A line of a result in words; `indent` is for continuation lines."""
        say(text, sys.stdout, indent)

    def document(self, document: object) -> None:
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
        print(text)

    def result(self, document: object, note: str) -> None:
        """What was done: a document with --json, else a remark."""
        if self.as_json:
            self.document(document)
        else:
            self.note(note)

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
    def working(self, what: str) -> Iterator[None]:
        """Says on stderr that something takes a while which has no steps to count, such as the start of a server.

        On a terminal the line moves, and is gone when the body ends; elsewhere it is a plain one, and none with JSON.
        """
        if not sys.stderr.isatty():
            if not self.as_json:
                self.note(f"{what} ...")
            yield
            return
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text(f"{what} ...")):
            yield

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

    @contextmanager
    def steps(self) -> Iterator[OnStep]:
        """A bar for each step of long work; a new step takes the place of the one before."""
        shown: tuple[str, int] | None = None
        on_done: OnDone = lambda done: None  # noqa: E731
        with ExitStack() as bar:

            def show(step: str, done: int, total: int) -> None:
                nonlocal shown, on_done
                if shown != (step, total):
                    shown = (step, total)
                    bar.close()
                    on_done = bar.enter_context(self.progress(step, max(1, total)))
                on_done(done)

            yield show


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
    """At least three digits, and no more decimals than they need."""
    decimals = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{decimals}f}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 file`, `2 files`; with a plural that is not `noun` and s, `2 entries`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {plural or noun + 's'}"


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
    """One line per property; long values continue on the next line, and the terminal breaks paths."""
    if title:
        print(title)
    name_width = max(map(len, record), default=0)
    for name, value in record.items():
        line = f"{name.replace('_', ' '):<{name_width}}  {terminal_text(name, value)}"
        say(line, sys.stdout, indent=" " * (name_width + 2))


# Messages as bytes for stdout: by a template such as `%o %k %v\n`, or as one JSON object a line.
#
# A template is compiled once. Bytes that are not valid UTF-8 stay unchanged in a template; in JSON they become base64,
# and a field beside it says so: `"value_encoding": "base64"`. What was written as JSON can be read back.


ToBytes = Callable[[Message], bytes]

_CONTROL_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\x00", "\\": b"\\"}


def _time(message: Message) -> bytes:
    return b"" if message.timestamp is None else iso_time(message.timestamp).encode()


def _unix_ms(message: Message) -> bytes:
    return b"" if message.timestamp is None else b"%d" % (to_microseconds(message.timestamp) // 1000)


def _headers(message: Message) -> bytes:
    """`name=value` each, and the name alone where the value is null."""
    return b",".join(name.encode() + (b"" if value is None else b"=" + value) for name, value in message.header_list)


_FIELDS: dict[str, ToBytes] = {
    "o": lambda message: b"%d" % message.offset,
    "t": _time,
    "T": _unix_ms,
    "k": lambda message: message.key or b"",
    "v": lambda message: message.value or b"",
    "h": _headers,
    "s": lambda message: b"%d" % len(message.value or b""),
    "%": lambda message: b"%",
}


def compile_template(template: str) -> ToBytes:
    """A function from a message to its bytes; InputError names what is not understood."""
    parts = _parse(template)

    def fill(message: Message) -> bytes:
        return b"".join([part if isinstance(part, bytes) else part(message) for part in parts])

    return fill


def _parse(template: str) -> list[bytes | ToBytes]:
    parts: list[bytes | ToBytes] = []
    characters = iter(template)
    for character in characters:
        if character == "%":
            parts.append(_field(next(characters, "")))
        elif character == "\\":
            parts.append(_escape(next(characters, "")))
        else:
            parts.append(character.encode("utf-8", "surrogateescape"))
    return parts


def _field(letter: str) -> ToBytes:
    if letter not in _FIELDS:
        hint = "Known are %o offset, %t time, %T unix milliseconds, %k key, %v value, %h headers, %s size, %%"
        raise InputError(f"the format has an unknown field %{letter}", hint=hint)
    return _FIELDS[letter]


def _escape(letter: str) -> bytes:
    if letter not in _CONTROL_ESCAPES:
        raise InputError(f"the format has an unknown escape \\{letter}", hint=r"Known are \n \t \r \0 \\")
    return _CONTROL_ESCAPES[letter]


def json_lines(topic: str) -> ToBytes:
    """A function from a message to one line of JSON. The partition is 0 in a topic without partitions."""
    encoder = msgspec.json.Encoder()

    def line(message: Message) -> bytes:
        return encoder.encode({"topic": topic, "partition": message.partition, **describe_message(message)}) + b"\n"

    return line


def describe_message(message: Message) -> dict[str, object]:
    """A message as JSON can hold it."""
    key, key_encoding = _text(message.key)
    value, value_encoding = _text(message.value)
    described: dict[str, object] = {
        "offset": message.offset,
        "timestamp": None if message.timestamp is None else iso_time(message.timestamp),
        "key": key,
        "value": value,
        "headers": {},
    }
    if message.deliver_at is not None:
        described["deliver_at"] = iso_time(message.deliver_at)
    if isinstance(message, Delivery):
        described["delivery_count"] = message.delivery_count
    if key_encoding:
        described["key_encoding"] = key_encoding
    if value_encoding:
        described["value_encoding"] = value_encoding
    return described | _describe_headers(message.header_list) if message.headers else described


def _describe_headers(headers: HeaderPairs) -> dict[str, object]:
    """By name; in a list of its own where names repeat."""
    texts = {name: _text(content) for name, content in headers}
    described: dict[str, object] = {"headers": {name: text for name, (text, _) in texts.items()}}
    encodings = {name: encoding for name, (_, encoding) in texts.items() if encoding}
    if encodings:
        described["headers_encoding"] = encodings
    if len(texts) < len(headers):
        described["header_list"] = [_listed(name, *_text(content)) for name, content in headers]
    return described


def _listed(name: str, text: str | None, encoding: str | None) -> tuple[str | None, ...]:
    return (name, text, encoding) if encoding else (name, text)


def _text(data: bytes | None) -> tuple[str | None, str | None]:
    """The text of bytes, and how it was encoded when it is not plain."""
    if data is None:
        return None, None
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError:
        return base64.b64encode(data).decode("ascii"), "base64"


# And back


class _JsonHeader(msgspec.Struct, array_like=True):
    """`[name, text]`, or `[name, text, encoding]`."""

    name: str
    text: str | None
    encoding: str | None = None


class _JsonMessage(msgspec.Struct):
    """The known fields of a line of JSON; the offset and other fields are ignored.

    `header_list`, where there is one, counts and `headers` does not.
    """

    value: str | None
    key: str | None = None
    headers: dict[str, str | None] = {}
    header_list: list[_JsonHeader] = []
    timestamp: datetime | None = None
    deliver_at: datetime | None = None
    value_encoding: str | None = None
    key_encoding: str | None = None
    headers_encoding: dict[str, str] = {}


def from_json_line(line: bytes) -> Message:
    """The message in a line that `json_lines` wrote; InputError says what is wrong with it."""
    try:
        found = msgspec.json.decode(line, type=_JsonMessage)
        return Message(
            _bytes(found.value, found.value_encoding),
            key=_bytes(found.key, found.key_encoding),
            headers=_headers_of(found),
            timestamp=found.timestamp,
            deliver_at=found.deliver_at,
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise InputError(
            f"not a message in JSON: {error}", hint="Use the lines that `tidelog consume --json` writes"
        ) from error


def _headers_of(found: _JsonMessage) -> dict[str, bytes]:
    pairs = [(header.name, _bytes(header.text, header.encoding)) for header in found.header_list] or [
        (name, _bytes(text, found.headers_encoding.get(name))) for name, text in found.headers.items()
    ]
    headers = Headers(pairs)
    return dict(headers) if headers.is_plain else headers


def _bytes(text: str | None, encoding: str | None) -> bytes | None:
    if text is None:
        return None
    if encoding is None:
        return text.encode("utf-8")
    if encoding != "base64":
        raise ValueError(f"unknown encoding {encoding!r}")
    return base64.b64decode(text, validate=True)


# Sizes on the command line: a number of bytes, or a text with a unit such as 64MiB.


def parse_size(text: str | int) -> int:
    """The parser of an option that is a size."""
    from tidelog.units import parse_bytes

    found = parse_bytes(str(text))
    if not isinstance(found, int):
        raise typer.BadParameter(f"{text!r} is not a size; expected bytes or a text such as 64MiB")
    return found
