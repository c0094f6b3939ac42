"""Structured log records: one for each event in the life of a log, topic, engine or pipeline.

    tell(_logger, "object_shipped", topic="shop/orders", first_offset=0, next_offset=1000, bytes=52311)

logs through `logging` at INFO, under the logger `tidelog.log`, `.tier`, `.topics`, `.engine` or `.pipeline`. An
application that configures `logging` receives the records through its own handlers, with `event` and the fields as
attributes of the record. tidelog changes no levels and no handlers: they are the application's, and at the default
level, WARNING, nothing is shown.

TIDELOG_LOG turns output on for applications that do not configure `logging`: `info` and `debug` write key=value lines
to stderr, `json` writes one JSON object per line, `warning` writes only what went wrong.

    time=2026-11-17T10:36:51.250Z level=info event=object_shipped topic=shop/orders first_offset=0 ...
    {"time":"2026-11-17T10:36:51.250Z","level":"info","logger":"tidelog.cold","event":"object_shipped",...}

Invariants
- Events are occasional (a file ends, an object is shipped); there is never one per message.
- A line is one line, whatever a value contains.
- A field is a name, a number or a location. Message contents and credentials are never fields.
- Output is turned on once per process, by the first thing opened; opening more adds no second line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock
from typing import Literal, TextIO

from tidelog.errors import ConfigError

VARIABLE = "TIDELOG_LOG"
LOGGER = "tidelog"
Mode = Literal["warning", "info", "debug", "json"]
Subject = dict[str, str]
"""The subject of an event: {"topic": "shop/orders"} or {"engine": "/data/engine"}."""

_LEVELS: dict[Mode, int] = {
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "json": logging.INFO,
}
_turning_on = Lock()


class Event:
    """The message of a record: its text is the event as key=value, its fields are at hand for formatters."""

    __slots__ = ("fields", "name")

    def __init__(self, name: str, fields: dict[str, object]) -> None:
        self.name = name
        self.fields = fields

    def __str__(self) -> str:
        return " ".join([f"event={self.name}", *(f"{key}={_text(value)}" for key, value in self.fields.items())])


def tell(logger: logging.Logger, event: str, /, **fields: object) -> None:
    """Logs an event at INFO. Fields that are None are omitted, seconds are rounded to milliseconds, paths become
    text."""
    if logger.isEnabledFor(logging.INFO):
        known = {name: _plain(value) for name, value in fields.items() if value is not None}
        logger.info(Event(event, known), extra={"event": event, **known}, stacklevel=2)


def subject_of(noun: str, directory: Path) -> Subject:
    """The subject of the log in a directory: a topic by its name, an engine by its own directory."""
    if noun == "topic":
        return {noun: "/".join(directory.parts[-2:])}
    return {noun: str(directory.parent)}


def log_mode() -> Mode | None:
    """The value of TIDELOG_LOG; None where it is not set. ConfigError when it is invalid."""
    text = os.environ.get(VARIABLE, "").strip().lower()
    if not text:
        return None
    for mode in _LEVELS:
        if text == mode:
            return mode
    raise ConfigError(f"{VARIABLE} is {text!r:.60}", hint=f"It is one of {', '.join(_LEVELS)}")


def turn_on_output() -> None:
    """Writes to stderr what TIDELOG_LOG asks for, from now on. Called by whatever opens something."""
    mode = log_mode()
    if mode is None:
        return
    logger = logging.getLogger(LOGGER)
    with _turning_on:
        if any(isinstance(handler, StderrHandler) for handler in logger.handlers):
            return
        logger.addHandler(StderrHandler(mode))
        if logger.getEffectiveLevel() > _LEVELS[mode]:
            logger.setLevel(_LEVELS[mode])


class StderrHandler(logging.Handler):
    """Writes to whatever stderr is at that moment."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(_LEVELS[mode])
        self._format = _json_line if mode == "json" else _text_line

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream: TextIO | None = sys.stderr
            if stream is not None:
                stream.write(self._format(record) + "\n")
                stream.flush()
        except (OSError, ValueError, UnicodeError):  # as every handler of `logging`: what cannot be logged stops nobody
            self.handleError(record)


def _text_line(record: logging.LogRecord) -> str:
    head = f"time={_time(record)} level={record.levelname.lower()}"
    if isinstance(record.msg, Event):
        return f"{head} {record.msg}"
    return f"{head} logger={record.name} message={_text(_message(record))}"


def _json_line(record: logging.LogRecord) -> str:
    document: dict[str, object] = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name}
    if isinstance(record.msg, Event):
        document |= {"event": record.msg.name, **record.msg.fields}
    else:
        document |= {"event": "message", "message": _message(record)}
    return json.dumps(document, separators=(",", ":"), default=str)


def _message(record: logging.LogRecord) -> str:
    """The text, with its traceback if it has one."""
    text = record.getMessage()
    if record.exc_info:
        text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
    return text


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: object) -> object:
    """A value that JSON can represent."""
    if isinstance(value, float):
        return round(value, 3)
    return value if isinstance(value, str | int | list | tuple) else str(value)


def _text(value: object) -> str:
    """A value in a line of key=value: quoted where it would be taken for more than one."""
    text = json.dumps(value) if isinstance(value, bool | list | tuple) else str(value)
    if not text or not text.isprintable() or any(character in text for character in ' "='):
        return json.dumps(text, ensure_ascii=False)
    return text
