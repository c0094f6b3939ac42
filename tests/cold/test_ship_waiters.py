"""Group commit to the store: those who wait together share one round."""

from __future__ import annotations

from threading import Event

import pytest
from tests.log.workbench import LIMIT_SECONDS

from tidelog.cold.shipper import ShipWaiters
from tidelog.errors import InternalError, StoreUnavailableError


class Shipping:
    """Counts its rounds, and holds the first one up until it may go on."""

    def __init__(self) -> None:
        self.rounds = 0
        self.accepted = 0
        self.is_under_way = Event()
        self.may_go_on = Event()
        self.error: Exception | None = None

    def ship(self) -> int:
        accepted = self.accepted
        self.rounds += 1
        self.is_under_way.set()
        assert self.may_go_on.wait(LIMIT_SECONDS)
        if self.error is not None:
            raise self.error
        return accepted

    def begin(self) -> None:
        """From here on it is not held up."""
        self.may_go_on.set()


def test_those_who_come_during_a_round_share_the_next() -> None:
    """Twenty appends while one object is sent become one more object, not twenty."""
    shipping = Shipping()
    waiters = ShipWaiters(shipping.ship)
    shipping.accepted = 1
    first = waiters.join(0)
    assert shipping.is_under_way.wait(LIMIT_SECONDS)
    shipping.accepted = 21
    others = [waiters.join(offset) for offset in range(1, 21)]
    assert not any(future.done() for future in [first, *others])
    shipping.begin()
    for future in [first, *others]:
        future.result(LIMIT_SECONDS)
    assert shipping.rounds == 2


def test_a_failed_round_fails_those_who_waited_for_it() -> None:
    """They get its error; who comes after it gets a round of its own."""
    shipping = Shipping()
    waiters = ShipWaiters(shipping.ship)
    shipping.accepted, shipping.error = 1, StoreUnavailableError("away")
    first = waiters.join(0)
    shipping.begin()
    with pytest.raises(StoreUnavailableError, match="away"):
        first.result(LIMIT_SECONDS)
    shipping.error = None
    waiters.join(0).result(LIMIT_SECONDS)
    assert shipping.rounds == 2


def test_who_gives_up_does_not_hold_up_others() -> None:
    """A cancelled waiter is passed over."""
    shipping = Shipping()
    waiters = ShipWaiters(shipping.ship)
    shipping.accepted = 3
    first = waiters.join(0)
    assert shipping.is_under_way.wait(LIMIT_SECONDS)
    given_up, last = waiters.join(1), waiters.join(2)
    assert given_up.cancel()
    shipping.begin()
    first.result(LIMIT_SECONDS)
    last.result(LIMIT_SECONDS)


def test_a_round_that_leaves_a_message_out_does_not_pass_for_shipped() -> None:
    """A message that was not published is never reported as shipped."""
    shipping = Shipping()
    shipping.begin()
    with pytest.raises(InternalError, match="left out offset 0"):
        ShipWaiters(shipping.ship).join(0).result(LIMIT_SECONDS)
