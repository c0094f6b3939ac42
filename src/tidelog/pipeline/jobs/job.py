"""What every job has: progress, and a report that ends in a proof.

Invariants
- A job is a function of a session, a root and plain arguments, and returns its report. It prints nothing; how far it is
  is told to `on_progress`, always from the thread that called it.
- A job that is killed is run again with the same arguments, and ends as if it had run once.
- A report has everything that is shown on a terminal, so `--json` shows the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import msgspec

from tidelog.pipeline.jobs.proof import Proof

Result = TypeVar("Result")


class Progress(NamedTuple):
    """How far a step of a job is: `done` of `total`, in objects, messages or bytes as the step says."""

    step: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """For whoever does not want to know."""


def counted_progress(results: Iterable[Result], step: str, total: int, on_progress: OnProgress) -> Iterator[Result]:
    """The results as they come; each of them is told as one more that is done."""
    on_progress(Progress(step, 0, total))
    for done, result in enumerate(results, 1):
        yield result
        on_progress(Progress(step, done, total))


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a job found wrong: where, what, and which offsets it concerns where that is known."""

    topic: str
    reason: str
    place: str | None = None
    first_offset: int | None = None
    last_offset: int | None = None

    def __str__(self) -> str:
        where = self.topic if self.place is None else f"{self.topic}: {self.place}"
        if self.first_offset is None:
            return f"{where}: {self.reason}"
        return f"{where}: {self.reason} (offsets {self.first_offset} to {self.last_offset})"


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did. Those of the jobs derive from it and add what is theirs."""

    job: str
    proofs: tuple[Proof, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def is_good(self) -> bool:
        """Nothing is wrong, and every proof holds."""
        return not self.problems and all(proof.holds for proof in self.proofs)
