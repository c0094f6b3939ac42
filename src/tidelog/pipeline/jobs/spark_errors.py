"""What Spark says when something goes wrong, as errors of ours: a mistake in SQL, data that it does not fit, or what a
task of ours has raised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tidelog import errors
from tidelog.errors import InputError, TidelogError

# How the traceback of a task ends.
_RAISED = re.compile(r"tidelog\.errors\.(\w+): ([^\n]+)")
# What Spark says of values that cannot be what they are taken for: the class 22 of SQL's states, data exceptions.
_DATA = re.compile(r"\[[A-Z][A-Z_.]+\] ([^\n]+?) SQLSTATE: 22")


@contextmanager
def told_in_our_words(what: str) -> Iterator[None]:
    """Whatever Spark raises in the body, as the error that a task raised, or as InputError where the input is wrong.

    Anything else stays what it is.
    """
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    try:
        yield
    except (AnalysisException, ParseException) as error:
        raise _ours(error) or InputError(f"{what}: {_first_line(error)}", hint="Check the SQL") from error
    except PySparkException as error:
        ours = _ours(error)
        if ours is None:
            raise
        raise ours from error


def _ours(error: Exception) -> TidelogError | None:
    wrong = _DATA.search(str(error))
    if wrong is not None:
        return InputError(f"the data does not fit: {wrong[1]}")
    found = _RAISED.search(str(error))
    kind = None if found is None else getattr(errors, found[1], None)
    if found is None or not (isinstance(kind, type) and issubclass(kind, TidelogError)):
        return None
    made = kind.__new__(kind)
    TidelogError.__init__(made, found[2])  # its own constructor may ask for more than the text tells
    return made


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
