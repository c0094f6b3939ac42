"""The owner's shell: a claim that is made when the store answers, undone when it cannot be used, and lost once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cold.published import KEYS
from tests.cold.station import DIRECTORY, Stores
from tests.cold.station import Node as Station

from tidelog.cold.catalog import Catalog
from tidelog.cold.owned_log import Node, OwnedLog, Policy
from tidelog.cold.settings import TierSettings
from tidelog.cold.shipper import Shipper
from tidelog.cold.takeover import Taken, Takeover
from tidelog.errors import ClosedError, DataError, FencedError, StoreUnavailableError
from tidelog.testing import FaultyMetadata

SETTINGS = TierSettings()


class Recorded(Policy):
    """Ships everything, and writes down what it is told."""

    def __init__(self, station: Station, node: Node) -> None:
        self._station = station
        self._node = node
        self.told: list[str] = []
        self.refuses = False

    def claim(self) -> Taken:
        stores = self._station.stores
        takeover = Takeover(
            self._station.files,
            DIRECTORY,
            Catalog(self._node.metadata, KEYS),
            stores.objects,
            stores.clock,
            self._node.lease,
        )
        return takeover.take(take_over=True)

    def new_shipper(self, taken: Taken) -> Shipper:
        stores = self._station.stores
        return Shipper(
            self._station.log, taken.catalog, stores.objects, SETTINGS, stores.clock, None, taken.next_offset
        )

    def settle_in(self, taken: Taken, shipper: Shipper) -> None:
        if self.refuses:
            raise DataError("a document that cannot be")
        self.told.append("settled in")

    def catch_up(self) -> None:
        self.told.append("caught up")

    def fenced(self, make_error: Callable[[], FencedError]) -> None:
        self.told.append("fenced")


class Shell:
    """An owned log over stores in memory."""

    def __init__(self) -> None:
        self.stores = Stores()
        self.station = Station(self.stores)
        self.station.open_log()
        assert isinstance(self.stores.metadata, FaultyMetadata)
        self.metadata = self.stores.metadata
        self.node = Node(
            self.stores.objects,
            self.metadata,
            clock=self.stores.clock,
            name="a",
            directory=Path("/data"),
            renews_lease=False,
        )
        self.policy = Recorded(self.station, self.node)
        self.owned = OwnedLog(self.station.log, self.node, KEYS, self.policy, SETTINGS)


@pytest.fixture
def shell() -> Shell:
    return Shell()


def test_log_is_claimed_when_the_store_first_answers(shell: Shell) -> None:
    """Until then it waits on this disk, and failures are counted."""
    shell.station.append(5)
    shell.metadata.fail("*", times=None)
    with pytest.raises(StoreUnavailableError):
        shell.owned.ship()
    assert (shell.owned.is_claimed, shell.owned.failures.in_a_row) == (False, 1)
    shell.metadata.heal()
    assert shell.owned.ship() == 5
    assert (shell.owned.is_claimed, shell.owned.failures.in_a_row) == (True, 0)
    assert shell.policy.told == ["settled in", "caught up", "caught up"]


def test_claim_that_cannot_be_used_is_released(shell: Shell) -> None:
    """Others may open the log at once, and so may this node."""
    shell.policy.refuses = True
    with pytest.raises(DataError, match="cannot be"):
        shell.owned.claim()
    found = shell.stores.catalog.owner()
    assert found is not None
    assert (shell.owned.is_claimed, found[0].session) == (False, "")
    shell.policy.refuses = False
    shell.owned.claim()
    assert shell.owned.owned.epoch == 2


def test_lost_claim_is_noticed_once_and_refuses_everything(shell: Shell) -> None:
    """Whoever asks gets the same error, and the store is not asked again."""
    shell.owned.claim()
    Station(shell.stores, "b").take()
    with pytest.raises(FencedError):
        shell.owned.verify()
    shell.metadata.reset_traffic()
    for use in (shell.owned.ship, shell.owned.verify, shell.owned.check, lambda: shell.owned.change(str)):
        with pytest.raises(FencedError, match="taken over by node b"):
            use()
    assert shell.metadata.traffic.request_count == 0
    assert shell.policy.told.count("fenced") == 1


def test_stopped_log_publishes_nothing(shell: Shell) -> None:
    """What is left is on this disk."""
    shell.owned.claim()
    shell.station.append(5)
    shell.owned.stop()
    with pytest.raises(ClosedError):
        shell.owned.ship()
    assert shell.stores.descriptors() == []
