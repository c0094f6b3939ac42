"""Where the messages of each owner begin: what tells a reader that a later owner has lost what it read."""

from __future__ import annotations

import contextlib

from tests.crash.tier_promises import NAME, open_node, tier_settings

from tidelog.cold.catalog import EpochStarts
from tidelog.testing import World


def test_an_epoch_ends_where_the_next_owner_begins() -> None:
    """Also one that was never an owner here: the last one before it counts."""
    starts = EpochStarts().with_owner(1, 0).with_owner(3, 10).with_owner(4, 25)
    assert starts.end_of(1, 40) == (1, 10)
    assert starts.end_of(2, 40) == (1, 10)
    assert starts.end_of(4, 40) == (4, 40)
    assert starts.end_of(9, 40) == (4, 40)
    assert starts.end_of(0, 40) is None


def test_a_lost_tail_shortens_the_epoch_that_wrote_it() -> None:
    """The next owner begins below what the one before had; owners that wrote nothing leave no trace."""
    starts = EpochStarts().with_owner(1, 0).with_owner(2, 30).with_owner(3, 30).with_owner(4, 20)
    assert starts.starts == ((1, 0), (4, 20))
    assert starts.end_of(2, 50) == (1, 20)


def test_owners_of_a_topic_record_where_they_begin() -> None:
    """The second node begins at what was shipped: the unshipped tail of the first is lost to readers."""
    world = World()
    with contextlib.closing(open_node(world, "a", tier_settings())) as log:
        first = log.topic(NAME)
        assert first._tiered is not None
        before = first._tiered.epoch_starts()
        first.append_many([b"a", b"b"])
        first.ship()
        first.append_many([b"c"], sync=True)
        with contextlib.closing(open_node(world, "b", tier_settings())) as other:
            second = other.topic(NAME, take_over=True)
            assert second._tiered is not None
            after = second._tiered.epoch_starts()
            epochs = [epoch for epoch, _ in after.starts]
            assert before.starts == ((epochs[0], 0),)
            assert after.starts == ((epochs[0], 0), (epochs[1], 2))
            assert second._tiered.epoch_starts() is after
