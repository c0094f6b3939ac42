"""Replicas under Raft, as real processes that are really killed (`examples/engine_raft.py` is the program)."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = runpy.run_path(str(ROOT / "examples" / "engine_raft.py"))
TIMES = 4


@pytest.fixture
def started() -> Iterator[list[Any]]:
    """Members that are ended with the test, however it ends."""
    members: list[Any] = []
    yield members
    for member in members:
        if member.process.poll() is None:
            member.kill()


def start(addresses: dict[str, str], root: Path, started: list[Any]) -> list[Any]:
    members = [PROGRAM["Member"](name, addresses, root) for name in addresses]
    started += members
    return members


def tell_to_count(members: list[Any], name: str) -> None:
    for member in members:
        member.tell("count", *(f"{name}-{member.name}-{number}" for number in range(TIMES)))


def test_all_replicas_are_killed_in_the_middle_of_their_work(tmp_path: Path, started: list[Any]) -> None:
    """Whatever had been decided by then is there again, and work whose outcome nobody knew is done once in the end."""
    addresses = PROGRAM["free_addresses"]()
    members = start(addresses, tmp_path, started)
    tell_to_count(members, "first")
    members[0].answer()  # one is through, the others are at it
    tell_to_count(members[:1], "second")
    for member in members:
        member.kill()

    members = start(addresses, tmp_path, started)
    for name in ("first", "second"):
        tell_to_count(members, name)  # the same requests again: what was done is not done twice
        for member in members:
            member.answer()
    PROGRAM["wait_until_equal"](members)
    assert [member.ask("read", "counter") for member in members] == [str(2 * 3 * TIMES)] * 3
    for member in members:
        member.close()
