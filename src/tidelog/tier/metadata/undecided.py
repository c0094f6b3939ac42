"""Writing to a store that may not answer.

A write without an answer was done, or was not, or will be. So: read back, and write again only what is safe to be
written twice (the same stamp under the same condition). Only when that does not settle it the caller hears that it is
undecided.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from tidelog.errors import ConflictError, StoreUnavailableError

ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.05
# A client retries by itself before it says that there was no answer: after that long, no more attempts are begun.
PATIENCE_SECONDS = 30.0

Versions = Mapping[str, str]


def settle(write: Callable[[], Versions], landed: Callable[[], Versions | None]) -> Versions:
    """The outcome of a write. `landed` reads back: the versions when the write is there, None when it is not seen.

    A conflict after an attempt without an answer proves nothing: that attempt may have been done and then replaced.
    """
    unanswered: StoreUnavailableError | None = None
    deadline = time.monotonic() + PATIENCE_SECONDS
    for attempt in range(ATTEMPTS):
        try:
            return write()
        except ConflictError as conflict:
            if unanswered is None:
                raise
            found = landed()
            if found is not None:
                return found
            raise _undecided(unanswered) from conflict
        except StoreUnavailableError as error:
            unanswered = error
        time.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        found = _landed_if_known(landed)
        if found is not None:
            return found
        if time.monotonic() > deadline:
            break
    assert unanswered is not None
    raise _undecided(unanswered) from unanswered


def _landed_if_known(landed: Callable[[], Versions | None]) -> Versions | None:
    try:
        return landed()
    except StoreUnavailableError:
        return None


def _undecided(error: StoreUnavailableError) -> StoreUnavailableError:
    return StoreUnavailableError(f"whether it was written is not known: {error.message}", hint="Read it and decide")
