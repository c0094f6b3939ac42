"""What Spark says when something goes wrong, as errors of ours: a mistake in SQL, files that cannot be read, data that
does not fit, or what a task of ours has raised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tidelog import errors
from tidelog.errors import InputError, TidelogError

# How the traceback of a task ends.
_RAISED = re.compile(r"tidelog\.errors\.(\w+): ([^\n]+)")
# What Spark says of values that cannot be what they are taken for (the class 22 of SQL's states, data exceptions), and
# of files that it cannot read (KD001).
_DATA = re.compile(r"\[[A-Z][A-Z_.]+\] ((?:(?!SQLSTATE: ).)+) SQLSTATE: (?:22|KD001)", re.DOTALL)
# Errors that Python has no class for are told with the Java class in front.
_FROM_JAVA = re.compile(r"An error occurred while calling [^\n]*\n: (?:[\w.$]+: )*([^\n]+)")


@contextmanager
def told_in_our_words(what: str) -> Iterator[None]:
    """Whatever Spark raises in the body, as the error that a task raised, or as InputError where the input is wrong.

    Anything else stays what it is.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import AnalysisException, ParseException, PySparkException

    try:
        yield
    except (AnalysisException, ParseException) as error:
        raise _ours(error) or InputError(f"{what}: {_first_line(error)}", hint="Check the SQL") from error
    except (PySparkException, Py4JJavaError) as error:
        ours = _ours(error)
        if ours is None:
            raise
        raise ours from error


@contextmanager
def told_as_bad_input(what: str, hint: str) -> Iterator[None]:
    """Whatever Spark raises in the body is InputError: nothing but Spark is at work there, on what somebody named."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise InputError(f"{what}: {_first_line(error)}", hint=hint) from error


def _ours(error: Exception) -> TidelogError | None:
    wrong = _DATA.search(str(error))
    if wrong is not None:
        return InputError(f"the data does not fit: {_one_line(wrong[1])}")
    found = _RAISED.search(str(error))
    kind = None if found is None else getattr(errors, found[1], None)
    if found is None or not (isinstance(kind, type) and issubclass(kind, TidelogError)):
        return None
    made = kind.__new__(kind)
    TidelogError.__init__(made, found[2])  # its own constructor may ask for more than the text tells
    return made


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    from_java = _FROM_JAVA.match(text)
    return text.partition("\n")[0] if from_java is None else from_java[1]


def _one_line(text: str) -> str:
    return " ".join(text.split())
