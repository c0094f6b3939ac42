"""Messages as bytes for stdout: by a template such as `%o %k %v\\n`, or as one JSON object a line.

A template is compiled once. Whatever is not valid UTF-8 stays as it is in a template; in JSON it becomes base64, and a
field beside it says so: `"value_encoding": "base64"`. What was written as JSON can be read back.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from datetime import datetime

import msgspec

from tidelog.cli.output import iso_time
from tidelog.clock import to_microseconds
from tidelog.errors import InputError
from tidelog.topics.delivery_queue import Delivery
from tidelog.topics.message import Message

ToBytes = Callable[[Message], bytes]

_ESCAPES = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\x00", "\\": b"\\"}


def _time(message: Message) -> bytes:
    return b"" if message.timestamp is None else iso_time(message.timestamp).encode()


def _unix_ms(message: Message) -> bytes:
    return b"" if message.timestamp is None else b"%d" % (to_microseconds(message.timestamp) // 1000)


def _headers(message: Message) -> bytes:
    return b",".join(name.encode() + b"=" + value for name, value in message.headers.items())


_FIELDS: dict[str, ToBytes] = {
    "o": lambda message: b"%d" % message.offset,
    "t": _time,
    "T": _unix_ms,
    "k": lambda message: message.key or b"",
    "v": lambda message: message.value,
    "h": _headers,
    "s": lambda message: b"%d" % len(message.value),
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
    if letter not in _ESCAPES:
        raise InputError(f"the format has an unknown escape \\{letter}", hint=r"Known are \n \t \r \0 \\")
    return _ESCAPES[letter]


def json_lines(topic: str) -> ToBytes:
    """A function from a message to one line of JSON."""
    encoder = msgspec.json.Encoder()
    return lambda message: encoder.encode({"topic": topic, **describe_message(message)}) + b"\n"


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
    return described | _describe_headers(message.headers) if message.headers else described


def _describe_headers(headers: Mapping[str, bytes]) -> dict[str, object]:
    texts = {name: _text(content) for name, content in headers.items()}
    described: dict[str, object] = {"headers": {name: text for name, (text, _) in texts.items()}}
    encodings = {name: encoding for name, (_, encoding) in texts.items() if encoding}
    if encodings:
        described["headers_encoding"] = encodings
    return described


def _text(data: bytes | None) -> tuple[str | None, str | None]:
    """The text of bytes, and how it was encoded when it is not plain."""
    if data is None:
        return None, None
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError:
        return base64.b64encode(data).decode("ascii"), "base64"


# And back


class _JsonMessage(msgspec.Struct):
    """What a line of JSON may say; the offset and whatever else is in it counts for nothing."""

    value: str
    key: str | None = None
    headers: dict[str, str] = {}
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
            key=None if found.key is None else _bytes(found.key, found.key_encoding),
            headers={name: _bytes(text, found.headers_encoding.get(name)) for name, text in found.headers.items()},
            timestamp=found.timestamp,
            deliver_at=found.deliver_at,
        )
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise InputError(
            f"not a message in JSON: {error}", hint="Lines are as `tidelog consume --json` writes"
        ) from error


def _bytes(text: str, encoding: str | None) -> bytes:
    if encoding is None:
        return text.encode("utf-8")
    if encoding != "base64":
        raise ValueError(f"the encoding {encoding!r} is not known")
    return base64.b64decode(text, validate=True)
