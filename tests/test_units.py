"""Sizes and durations as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.units import parse_bytes, parse_milliseconds, parse_seconds


@pytest.mark.parametrize(
    "text", ["", " ", "-1", "+1", "1 2", "1..2", ".5", "1x", "MiB", "1e3", "0x10", "٣", "inf", "nan"]
)
def test_what_is_no_quantity(text: str) -> None:
    """A text that is not a plain number with a known unit is none of the three."""
    assert parse_bytes(text) is parse_seconds(text) is parse_milliseconds(text) is None


def test_units_do_not_mix() -> None:
    """A size is not a duration and a duration is not a size."""
    assert parse_bytes("5s") is None
    assert parse_seconds("5kB") is None
    assert parse_milliseconds("5kB") is None


def test_fractions_stay_fractions() -> None:
    """A result that is not whole is a float, so that whoever wants a whole number can refuse it."""
    assert parse_seconds("1.5s") == 1.5
    assert parse_milliseconds("1us") == 0.001
    assert parse_bytes("0.5B") == 0.5


@given(st.integers(0, 10**9))
def test_milliseconds_are_exact(milliseconds: int) -> None:
    """The same time in any unit is the same number of milliseconds, without rounding."""
    assert parse_milliseconds(f"{milliseconds}ms") == milliseconds
    assert parse_milliseconds(f"{milliseconds // 1000}.{milliseconds % 1000:03d}s") == milliseconds
    assert parse_milliseconds(f"{milliseconds}s") == 1000 * milliseconds


@given(st.text(max_size=30))
def test_any_text_is_answered(text: str) -> None:
    """No text makes the parser raise."""
    for parse in (parse_bytes, parse_seconds, parse_milliseconds):
        quantity = parse(text)
        assert quantity is None or quantity >= 0
