"""Which topics a job works on."""

from __future__ import annotations

import pytest

from tidelog.errors import NotFoundError, TopicNameError
from tidelog.pipeline.jobs.tally import chosen_topics

KNOWN = ["shop/orders", "shop/returns"]


def test_all_topics_are_meant_by_none_alone() -> None:
    """A program that has found nothing to name does not have everything compacted or removed."""
    assert chosen_topics(KNOWN, None, "here") == KNOWN
    assert chosen_topics(KNOWN, [], "here") == []


def test_each_is_taken_once_and_in_the_order_given() -> None:
    """However often it is named."""
    assert chosen_topics(KNOWN, ["shop/returns", "shop/orders", "shop/returns"], "here") == KNOWN[::-1]


def test_a_name_that_is_wrong_is_told() -> None:
    """One that there is not, and one that cannot be."""
    with pytest.raises(NotFoundError, match="there is no topic shop/none"):
        chosen_topics(KNOWN, ["shop/none"], "here")
    with pytest.raises(TopicNameError):
        chosen_topics(KNOWN, ["orders"], "here")
