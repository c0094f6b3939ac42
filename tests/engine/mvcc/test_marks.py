"""The marks keep their order, whoever moves them."""

from __future__ import annotations

import pytest

from tidelog.engine.mvcc.retention import Marks
from tidelog.errors import InputError, InternalError


def test_marks_that_are_out_of_order_are_refused() -> None:
    """From wherever they come: a checkpoint, a manifest, an orchestrator."""
    for applied, low, high in [(1, 2, 0), (5, 3, 4), (0, 0, 1)]:
        with pytest.raises(InternalError, match="out of order"):
            Marks(applied, low, high)


def test_nothing_above_the_low_water_mark_counts_as_shipped() -> None:
    """A high-water mark that would pass it raises, and nothing moves."""
    marks = Marks(10, 5, 2)
    with pytest.raises(InternalError, match="low-water mark 5"):
        marks.raise_high_water_mark(6)
    assert marks.high_water_mark == 2
    marks.raise_high_water_mark(5)
    marks.raise_high_water_mark(3)
    assert marks.high_water_mark == 5
    marks.check()


def test_the_low_water_mark_stays_between() -> None:
    """It does not pass what was applied, does not fall, and holds rollbacks."""
    marks = Marks(10, 5, 2)
    with pytest.raises(InputError):
        marks.raise_low_water_mark(11)
    assert not marks.raise_low_water_mark(4)
    with pytest.raises(InputError):
        marks.rolled_back(4)
    assert (marks.applied_seq, marks.low_water_mark) == (10, 5)
