"""What the job `table` asks of a table, whichever format it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from tidelog.pipeline.jobs.proof import Proof
from tidelog.pipeline.jobs.table_columns import TableShape
from tidelog.pipeline.jobs.table_commits import Values
from tidelog.pipeline.jobs.table_files import FilePlace
from tidelog.pipeline.jobs.table_rewriter import RewrittenFile
from tidelog.pipeline.jobs.table_writer import WrittenPart


class TargetState(msgspec.Struct, frozen=True, kw_only=True):
    """What a table is now: of which topic, up to which offset (exclusive), with which columns."""

    topic: str
    values: Values
    columns: dict[str, Any]
    first_offset: int
    next_offset: int


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What a run adds to a table, all of it or nothing."""

    topic: str
    attempt: str
    shape: TableShape
    first_offset: int
    next_offset: int
    written: tuple[WrittenPart, ...]
    rewritten: tuple[RewrittenFile, ...]
    proof: Proof


class TableTarget(Protocol):
    """A table that is written step by step."""

    @property
    def name(self) -> str:
        """For reports."""
        ...

    @property
    def place(self) -> FilePlace: ...

    def begin(self) -> TargetState | None:
        """Finishes what a run before left behind, and says what the table is; None for one that is not there yet."""
        ...

    def prepare(self, shape: TableShape) -> None:
        """Makes what has to be there before files can be written."""
        ...

    def new_key(self, attempt: str, first_offset: int, number: int) -> str:
        """Where a run writes a file."""
        ...

    def files(self) -> Sequence[str]:
        """All files of the table, for rewriting."""
        ...

    def commit(self, step: Step) -> None:
        """Makes a step count; ConflictError when another run was first. What was written goes then."""
        ...

    def discard(self, attempt: str, keys: Sequence[str]) -> None:
        """Removes the files of a run that will not be committed."""
        ...
