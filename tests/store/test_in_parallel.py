"""Work on several things at once: all results in order, or what went wrong."""

from __future__ import annotations

from threading import Event, current_thread

import pytest
from tests.log.workbench import LIMIT_SECONDS

from tidelog.store.scheduler import in_parallel


class EndError(BaseException):
    """What ends a thread, as an interrupt does."""


@pytest.mark.parametrize("kind", [ValueError, EndError])
def test_what_one_of_them_raises_is_raised(kind: type[BaseException]) -> None:
    """Whichever thread met it, and whatever kind it is: never an error of our own bookkeeping."""

    is_raised, caller = Event(), current_thread()

    def work(number: int) -> int:
        if current_thread() is caller:
            assert is_raised.wait(LIMIT_SECONDS)
            return number
        is_raised.set()
        raise kind(str(number))

    with pytest.raises(kind):
        in_parallel(work, range(20), 2, "test")


def test_results_are_in_order() -> None:
    """As if they had been made one after the other."""
    assert in_parallel(lambda number: number * 2, range(50), 4, "test") == [number * 2 for number in range(50)]
