"""The history of a campaign: what clients asked and were told, and what was done to the nodes, as lines of JSON.

Invariants
- Times are seconds of one monotonic clock. An operation lies somewhere between its `begin` and its `end`; one whose
  answer never came has no end.
- A message's value is unique: the name of its producer, which says the partition as well, and a number that grows,
  `a.0:17`.
- What is read at the end, when everything has healed, is `Final`; what a node's disk kept of a tail is `Rescued`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

Outcome = Literal["ok", "failed", "unknown"]


class Append(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A message was sent. `transaction` names the one that it belongs to."""

    topic: str
    partition: int
    value: str
    begin: float
    end: float | None = None
    outcome: Outcome = "unknown"
    offset: int | None = None
    transaction: str = ""
    error: str = ""


class Transaction(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A transaction ended; unknown: nobody was told how."""

    name: str
    outcome: Literal["committed", "aborted", "unknown"]
    begin: float
    end: float


class Read(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A reader got messages, in this order. `life` counts its assignments: it may go back between two of them."""

    topic: str
    partition: int
    reader: str
    life: int
    messages: list[tuple[int, str]]
    end: float


class EndOffset(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A client asked where a partition ends."""

    topic: str
    partition: int
    client: str
    offset: int
    begin: float
    end: float


class Commit(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A group committed an offset."""

    group: str
    topic: str
    partition: int
    offset: int
    begin: float
    end: float
    outcome: Outcome


class Committed(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A client asked for the committed offset of a group; None: there is none."""

    group: str
    topic: str
    partition: int
    offset: int | None
    begin: float
    end: float


class EnginePut(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A put with a condition was applied, or refused: `match` is the seq of the version that it asks for, 0 for none,
    -1 for any."""

    key: str
    seq: int
    match: int
    is_applied: bool
    begin: float
    end: float


class EngineRead(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A client read an object of the engine; `seq` is that of its version, 0 if there was none."""

    key: str
    client: str
    seq: int
    begin: float
    end: float


class Final(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A partition as it is at the end, for readers of committed messages; `unstable`: how many offsets they do not get,
    for they are behind an open transaction."""

    topic: str
    partition: int
    messages: list[tuple[int, str]]
    unstable: int = 0


class Rescued(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """What a disk has of messages that another owner does not know."""

    topic: str
    partition: int
    node: str
    messages: list[tuple[int, str]]


class Fault(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Something was done to a node, from `begin` to `end`; `recovered`: when all was served again."""

    kind: str
    target: str
    begin: float
    end: float
    recovered: float | None = None
    detail: str = ""


class Note(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Something a reader of the history should know: an error of a client, an end that nobody asked for."""

    who: str
    text: str
    end: float


Event = (
    Append
    | Transaction
    | Read
    | EndOffset
    | Commit
    | Committed
    | EnginePut
    | EngineRead
    | Final
    | Rescued
    | Fault
    | Note
)


class Recorder:
    """Writes a history from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self._begun = time.monotonic()
        self._file = path.open("wb")
        self._guard = threading.Lock()
        self._encode = msgspec.json.Encoder().encode

    def now(self) -> float:
        """Seconds since the beginning."""
        return round(time.monotonic() - self._begun, 6)

    def add(self, *events: Event) -> None:
        lines = b"".join(self._encode(event) + b"\n" for event in events)
        with self._guard:
            self.events += events
            self._file.write(lines)

    def note(self, who: str, text: object) -> None:
        self.add(Note(who=who, text=str(text)[:500], end=self.now()))

    def close(self) -> None:
        with self._guard:
            self._file.close()


def read_history(lines: Iterable[bytes]) -> list[Event]:
    """What a recorder wrote."""
    decode = msgspec.json.Decoder(Event).decode
    return [decode(line) for line in lines]
