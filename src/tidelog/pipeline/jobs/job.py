"""What every job has: progress, reconciliations, a report, and the translation of Spark's errors.

Invariants
- A job is a function of a session, a root and plain arguments, and returns its report. It prints nothing; it reports
  progress to `on_progress`, always from the calling thread.
- A killed job is rerun with the same arguments, and ends as if it had run once.
- A report has everything that is shown on a terminal, so `--json` shows the same.
"""

from __future__ import annotations

import functools
import logging
import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from tidelog import errors
from tidelog.errors import ConfigError, InputError, TidelogError
from tidelog.events import tell, turn_on_output
from tidelog.findings import Finding
from tidelog.pipeline.work import error_with_text

# Reconciliations: the input and the output of a job, as numbers that anyone can recompute.
#
# Invariants
# - A checksum is a sum over messages modulo 2**64, of a mix of each message: it is the same for any split and any
#   order, so workers sum up their parts and the driver adds those. It detects loss, duplication and change; it is not a
#   signature.
# - The prefix of `checksum` says what was summed up: `frames` (offset and payload of whole frames), `rows` (offset,
#   key, value and time of messages), `xxhash64` (the same, by a Spark function) or another. Two kinds are never equal.
# - Totals without messages have no offsets.


_MODULUS = 1 << 64


def sum_text(kind: str, digest: int) -> str:
    """A sum as text, with what was summed up."""
    return f"{kind}:{digest % _MODULUS:016x}"


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """How many messages there are, the first and the last offset of them, and their sum.

    `unit` says what was counted, if not messages.
    """

    messages: int = 0
    first_offset: int | None = None
    last_offset: int | None = None
    checksum: str = sum_text("frames", 0)
    unit: str = "messages"

    def __add__(self, other: Totals) -> Totals:
        kind, _, digest = self.checksum.partition(":")
        other_kind, _, other_digest = other.checksum.partition(":")
        if kind != other_kind:
            raise InputError(f"sums over {kind} and over {other_kind} cannot be added")
        firsts = [one.first_offset for one in (self, other) if one.first_offset is not None]
        lasts = [one.last_offset for one in (self, other) if one.last_offset is not None]
        return Totals(
            messages=self.messages + other.messages,
            first_offset=min(firsts, default=None),
            last_offset=max(lasts, default=None),
            checksum=f"{kind}:{(int(digest, 16) + int(other_digest, 16)) % _MODULUS:016x}",
            unit=self.unit,
        )

    def __str__(self) -> str:
        offsets = "" if self.first_offset is None else f"offsets {self.first_offset} to {self.last_offset}, "
        return f"{self.messages:,} {self.unit}, {offsets}{self.checksum}"


NO_FRAMES = Totals()
NO_ROWS = Totals(checksum=sum_text("rows", 0))


def total(parts: Iterable[Totals], start: Totals = NO_FRAMES) -> Totals:
    """All of them together."""
    return functools.reduce(operator.add, parts, start)


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """What a job read of something and what it made of it. `came_out` is absent where a job only reads."""

    subject: str
    went_in: Totals
    came_out: Totals | None = None

    @property
    def holds(self) -> bool:
        return self.came_out is None or self.came_out == self.went_in

    def __str__(self) -> str:
        if self.came_out is None:
            return f"{self.subject}: {self.went_in}"
        verdict = "equal" if self.holds else "NOT EQUAL"
        return f"{self.subject}: in {self.went_in}; out {self.came_out}; {verdict}"


OPEN_TRANSACTION_SECONDS = 60.0
"""How long a job that copies messages waits for the end of a transaction: what it passes over it never copies."""

_logger = logging.getLogger("tidelog.pipeline")
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


class Progress(NamedTuple):
    """How far a step of a job is: `done` of `total`, in objects, messages or bytes as the step says."""

    step: str
    done: int
    total: int


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """For callers that do not want progress."""


def counted_progress(results: Iterable[Result], step: str, total: int, on_progress: OnProgress) -> Iterator[Result]:
    """Yields the results as they come, and reports each as one more that is done."""
    on_progress(Progress(step, 0, total))
    for done, result in enumerate(results, 1):
        yield result
        on_progress(Progress(step, done, total))


class JobReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a job did. Those of the jobs derive from it and add what is theirs."""

    job: str
    reconciliations: tuple[Reconciliation, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Nothing is wrong, and everything that came out is what went in."""
        return not self.findings and all(one.holds for one in self.reconciliations)

    @property
    def is_good(self) -> bool:
        """The same as `ok`."""
        return self.ok


def logged(work: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A job that tells its begin and its end as events, under the name of its function; its report has the seconds."""

    @functools.wraps(work)
    def run(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
        turn_on_output()
        root = next((one.location for one in (*arguments, *named.values()) if hasattr(one, "location")), None)
        begin = time.monotonic()
        tell(_logger, "job_started", job=work.__name__, root=root)
        try:
            result = work(*arguments, **named)
        except BaseException as error:
            outcome = {"outcome": "failed", "error": type(error).__name__}
            tell(_logger, "job_ended", job=work.__name__, root=root, **outcome, seconds=time.monotonic() - begin)
            raise
        seconds = time.monotonic() - begin
        # A report comes alone, or after its plan.
        *plan, report = result if isinstance(result, tuple) else (result,)
        problems = 0
        if isinstance(report, JobReport):
            problems = len(report.findings) + sum(not each.holds for each in report.reconciliations)
            report = msgspec.structs.replace(report, seconds=round(seconds, 3))
        state = "problems" if problems else "done"
        ended = {"job": work.__name__, "root": root, "outcome": state, "problems": problems, "seconds": seconds}
        tell(_logger, "job_ended", **ended)
        return (*plan, report) if plan else report  # type: ignore[return-value]

    return run


# Translates Spark's errors into ours: a mistake in SQL, unreadable files, data that does not fit, or an error raised by
# one of our tasks.


# How the traceback of a task ends.
_RAISED = re.compile(r"tidelog\.errors\.(\w+): ([^\n]+)")
# What Spark says of values that cannot be what they are taken for (the class 22 of SQL's states, data exceptions), of
# files that it cannot read (KD001), and of rows that an expression refuses with `raise_error` (P0001).
_DATA = re.compile(r"\[[A-Z][A-Z_.]+\] ((?:(?!SQLSTATE: ).)+) SQLSTATE: (?:22|KD001|P0001)", re.DOTALL)
_NO_PACKAGE = re.compile(r"ModuleNotFoundError: No module named '(tidelog|pyspark_tidelog)")
_NO_PACKAGE_HINT = "Set PYSPARK_PYTHON, or spark.pyspark.python, to one that has it, before the session starts"
# Errors without a Python class are reported with the Java class in front.
_FROM_JAVA = re.compile(r"An error occurred while calling [^\n]*\n: (?:[\w.$]+: )*([^\n]+)")


@contextmanager
def told_in_our_words(what: str) -> Iterator[None]:
    """Turns what Spark raises in the body into the error that a task raised, or into InputError if the input is wrong.

    Anything else stays what it is.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    try:
        yield
    except (AnalysisException, ParseException) as error:
        raise _ours(error) or InputError(f"{what}: {first_line(error)}", hint="Check the SQL") from error
    except (PySparkException, Py4JJavaError) as error:
        ours = _ours(error)
        if ours is None:
            raise
        raise ours from error


@contextmanager
def told_as_bad_input(what: str, hint: str) -> Iterator[None]:
    """Turns what Spark raises in the body into InputError: only Spark runs there, on what the user named."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise InputError(f"{what}: {first_line(error)}", hint=hint) from error


def _ours(error: Exception) -> TidelogError | None:
    if _NO_PACKAGE.search(str(error)) is not None:
        return ConfigError("the workers of Spark run a Python that does not have tidelog", hint=_NO_PACKAGE_HINT)
    wrong = _DATA.search(str(error))
    if wrong is not None:
        return InputError(f"the data does not fit: {' '.join(wrong[1].split())}")
    raised = _RAISED.findall(str(error))
    name, text = raised[-1] if raised else ("", "")  # before it come those that it was raised from
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, TidelogError)):
        return None
    return error_with_text(kind, text)


def first_line(error: Exception) -> str:
    """What an error says, without what it adds."""
    text = str(error).strip()
    from_java = _FROM_JAVA.match(text)
    return text.partition("\n")[0] if from_java is None else from_java[1]
