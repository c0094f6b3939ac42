"""What fails at the moment in something that goes on by itself, and is tried again.

Invariants
- A failure is said when it begins, and when it becomes another one; not each time it is tried again.
- It is known here, by what failed, until that has succeeded or is not to be done any more: `len` is a metric of the
  node.
- Nothing but a cancelled task ends a loop whose steps are `step`s. What nobody foresaw is said with its traceback.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from tidelog.errors import TidelogError

_logger = logging.getLogger("tidelog.cluster")
_RETRY_SECONDS = 0.2
_UNFORESEEN_SECONDS = 1.0
Key = TypeVar("Key")


class Step:
    """How a step of a loop went. `pause_seconds`: before the next one; 0 if it did not fail."""

    def __init__(self) -> None:
        self.pause_seconds = 0.0

    @property
    def has_failed(self) -> bool:
        return self.pause_seconds > 0


class Failure(str):
    """The message of an error. `hint` is what to do about it, `told` is all of it, for operators. Clients hear of
    what `is_foreseen` only."""

    told: str
    hint: str
    is_foreseen: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        foreseen = error if isinstance(error, TidelogError) else None
        made = cls(f"{type(error).__name__}: {error}" if foreseen is None else foreseen.message)
        made.told = str(made) if foreseen is None else str(foreseen)
        made.hint = "" if foreseen is None or foreseen.hint is None else foreseen.hint
        made.is_foreseen = foreseen is not None
        return made


class Failures(dict[Key, Failure]):
    """By what failed, the message. Threads may share it."""

    def add(self, key: Key, what: str, error: Exception, level: int = logging.WARNING) -> None:
        """`what` cannot be done: it is said if that is news."""
        failure = Failure.of(error)
        if self.get(key) != failure:
            _logger.log(
                level if failure.is_foreseen else logging.ERROR,
                "%s, and is tried again: %s",
                what,
                error if failure.is_foreseen else failure,
                exc_info=None if failure.is_foreseen else error,
            )
        self[key] = failure

    @contextmanager
    def step(self, key: Key, what: str, level: int = logging.WARNING) -> Iterator[Step]:
        """One step of a loop: what it raises ends here."""
        step = Step()
        try:
            yield step
        except TidelogError as error:
            self.add(key, what, error, level)
            step.pause_seconds = _RETRY_SECONDS
        except Exception as error:  # noqa: BLE001 - `add` says it
            self.add(key, what, error)
            step.pause_seconds = _UNFORESEEN_SECONDS
        else:
            self.pop(key, None)
