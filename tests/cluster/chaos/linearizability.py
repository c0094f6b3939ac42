"""Asks Porcupine (Go) whether each partition behaved as one log, and each object of an engine as one register, whoever
owned it.

Invariants
- Only operations whose effect is known are asked about: an append that nobody answered is one if the log has its
  message in the end, and then it may have happened at any time after it was sent.
- Without Go there is no answer, and the report says so. Where Go is, everything but "Ok" is a failure: a question that
  was not answered is no promise that holds.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.cluster.chaos.history import Append, EndOffset, EnginePut, EngineRead, Event, Final

_SOURCE = Path(__file__).with_name("porcupine")
_NEVER = 1 << 60
_SECONDS = 900
NOT_ASKED = "not asked: "
"""How the reason begins why Porcupine said nothing."""
WITHOUT_GO = f"{NOT_ASKED}Go is not installed"


def operations(events: Iterable[Event], topic: str) -> dict[str, list[dict[str, Any]]]:
    """What Porcupine is given, by partition."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    events = list(events)
    final = {
        (event.partition, value): offset
        for event in events
        if isinstance(event, Final) and event.topic == topic
        for offset, value in event.messages
    }
    clients: dict[str, int] = {}
    for event in events:
        if not isinstance(event, Append | EndOffset) or event.topic != topic:
            continue
        if isinstance(event, Append):
            kind, who, offset = "append", event.value.partition(":")[0], event.offset
            offset = final.get((event.partition, event.value)) if offset is None else offset
        else:
            kind, who, offset = "end", event.client, event.offset
        if offset is None:
            continue
        one = {"client": clients.setdefault(who, len(clients)), "kind": kind, "offset": offset}
        one |= {"call": _nanoseconds(event.begin), "return": _NEVER if event.end is None else _nanoseconds(event.end)}
        found[f"{topic}/{event.partition}"].append(one)
    return found


def register_operations(events: Iterable[Event], engine: str) -> dict[str, list[dict[str, Any]]]:
    """The same for the objects of an engine."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    clients: dict[str, int] = {}
    for event in events:
        if isinstance(event, EnginePut):
            # Those that were applied together are of clients of their own.
            who, one = f"put {event.seq}", {"kind": "put", "match": event.match, "isApplied": event.is_applied}
        elif isinstance(event, EngineRead):
            who, one = event.client, {"kind": "read"}
        else:
            continue
        one |= {"client": clients.setdefault(who, len(clients)), "offset": event.seq}
        one |= {"call": _nanoseconds(event.begin), "return": _nanoseconds(event.end)}
        found[f"{engine}/{event.key}"].append(one)
    return found


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1_000_000_000)


def ask_porcupine(asked: dict[str, list[dict[str, Any]]], directory: Path) -> dict[str, str]:
    """ "Ok", "Illegal" or "Unknown" for each; why there is none, if Go is not here."""
    go = shutil.which("go")
    if go is None:
        return dict.fromkeys(asked, WITHOUT_GO)
    program = directory / "porcupine"
    command = [go, "build", "-o", str(program), "."]
    built = subprocess.run(command, cwd=_SOURCE, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if built.returncode:
        return dict.fromkeys(asked, f"{NOT_ASKED}{built.stderr.strip().splitlines()[-1]}")
    done = subprocess.run(
        [str(program)], input=json.dumps(asked), capture_output=True, text=True, timeout=_SECONDS, check=True
    )
    results: dict[str, str] = json.loads(done.stdout)
    return results


def not_linearizable(results: dict[str, str]) -> list[str]:
    """What does not hold, or was asked and not answered."""
    return [f"{name}: {result}" for name, result in sorted(results.items()) if result not in ("Ok", WITHOUT_GO)]
