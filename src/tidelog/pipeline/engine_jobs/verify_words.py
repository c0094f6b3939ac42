"""What is wrong with an engine, in words: problems with a place and a reason, keys of the tree as people read them."""

from __future__ import annotations

from pathlib import Path

from tidelog.engine.version_keys import BUCKETS, OBJECTS, SEQ_BYTES, parse
from tidelog.errors import TidelogError
from tidelog.pipeline.jobs.job import Problem


def engine_problem(name: str, place: str | None, reason: str) -> Problem:
    """Something wrong with an engine."""
    return Problem(topic=f"engine {name}", place=place, reason=reason)


def problem_of(name: str, error: TidelogError, place: str) -> Problem:
    """What an error tells, with the byte where that is known."""
    where: str | Path = error.path or place
    byte = getattr(error, "byte", None)
    reason = error.message.partition(" at byte ")[0]
    return engine_problem(name, f"{where}" if byte is None else f"{where}, byte {byte}", reason)


def in_lsns(problem: Problem) -> Problem:
    """A problem of the catalog, whose offsets are LSNs here."""
    reason = problem.reason.replace("offsets", "records").replace("offset", "LSN")
    if problem.first_offset is not None:
        reason += f" (LSN {problem.first_offset} to {problem.last_offset})"
    return Problem(topic=problem.topic, place=problem.place, reason=reason)


def described_key(key: bytes) -> str:
    """A key of the tree: `photos/cat @7` for a version of an object, `photos @1` for one of a bucket."""
    if key[:1] in (OBJECTS, BUCKETS) and len(key) > SEQ_BYTES + 1:
        try:
            bucket, name, seq = parse(key)
        except UnicodeDecodeError:
            return key.hex()
        return f"{bucket} @{seq}" if name is None else f"{bucket}/{name} @{seq}"
    return key.hex()
