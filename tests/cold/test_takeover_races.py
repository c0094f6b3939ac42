"""Several nodes open one topic at the same moment: one gets it, the others hear that, and nobody hears of damage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from tests.cold.station import Node, Stores
from tests.log.workbench import Threads

from tidelog.errors import ConflictError, FencedError, HeldError, TidelogError
from tidelog.testing import FaultyMetadata

Interfere = Callable[[], None]
METADATA_KINDS = ["multi-key", "single-key"]


def interrupted_at(stores: Stores, number: int, interfere: Interfere) -> Callable[[], bool]:
    """Before the request with this number, to either store, something happens; the answer says whether it has."""
    seen = 0

    def on_request(_operation: str, _keys: str) -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            interfere()

    assert isinstance(stores.metadata, FaultyMetadata)
    stores.metadata.on_request = on_request
    stores.objects.on_request = on_request
    return lambda: seen >= number


def sealed(kind: str) -> Stores:
    """A topic that its last owner has sealed behind five messages."""
    stores = Stores(kind)
    with Node(stores, "first").open() as node:
        node.append(5)
        node.shipper.ship()
        node.owned.seal(5)
        node.lease.release()
    return stores


def empty(kind: str) -> Stores:
    """A topic that nobody has made yet."""
    return Stores(kind)


def left(kind: str) -> Stores:
    """A topic whose owner has closed it without sealing it."""
    stores = Stores(kind)
    with Node(stores, "first").open() as node:
        node.append(5)
        node.shipper.ship()
        node.lease.release()
    return stores


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("seals", [False, True])
@pytest.mark.parametrize("kind", METADATA_KINDS)
@pytest.mark.parametrize("begin", [sealed, empty, left])
def test_opening_beside_another_node_is_a_conflict_and_never_damage(
    begin: Callable[[str], Stores], kind: str, seals: bool, remembers: bool
) -> None:
    """Another node opens the topic, appends and ships between any two requests of the opening, and goes on or seals.

    Topics are opened with a catalog that remembers what it was asked for, engines without.
    """
    number, outcomes = 0, set[str]()
    while True:
        number += 1
        stores = begin(kind)
        fast = Node(stores, "fast")

        def interfere(fast: Node = fast, stores: Stores = stores) -> None:
            with contextlib.suppress(ConflictError, HeldError), fast.open(take_over=False):
                fast.append(3)
                fast.shipper.ship()
                if seals:
                    fast.owned.seal(fast.log.next_offset)

        has_interfered = interrupted_at(stores, number, interfere)
        try:
            catalog = stores.opening_catalog if remembers else stores.catalog
            Node(stores, "slow").take(take_over=False, catalog=catalog)
            outcomes.add("opened")
        except (ConflictError, HeldError) as error:
            outcomes.add(type(error).__name__)
        if not has_interfered():
            break
    assert outcomes == {"opened", "ConflictError", "HeldError"} - ({"HeldError"} if seals else set())


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("kind", METADATA_KINDS)
def test_taking_a_topic_from_an_owner_that_ships_meanwhile_is_never_damage(kind: str, remembers: bool) -> None:
    """The bucket has more than what was read of the catalog a moment ago: that catalog is not stale."""
    number, ends = 0, list[int]()
    while True:
        number += 1
        stores = Stores(kind)
        with Node(stores, "first").open() as owner:
            owner.append(2)
            owner.shipper.ship()

            def ship(owner: Node = owner) -> None:
                with contextlib.suppress(FencedError):
                    owner.append(1)
                    owner.shipper.ship()
                    owner.append(1)
                    owner.shipper.ship()

            has_interfered = interrupted_at(stores, number, ship)
            catalog = stores.opening_catalog if remembers else stores.catalog
            ends.append(Node(stores, "slow").take(catalog=catalog).next_offset)
        if not has_interfered():
            break
    assert set(ends) == {2, 4}


@pytest.mark.parametrize("kind", METADATA_KINDS)
def test_many_nodes_open_a_sealed_topic_at_once(kind: str) -> None:
    """One of them gets it; the others hear of a conflict, or of a living node that has it."""
    for _ in range(10):
        outcomes = _raced(sealed(kind))
        assert outcomes.count(None) == 1
        assert {type(error) for error in outcomes if error is not None} <= {ConflictError, HeldError}, outcomes


def _raced(stores: Stores) -> list[TidelogError | None]:
    """What four nodes get that open the topic at once; None for one that has it, appends and ships."""
    outcomes: list[TidelogError | None] = []

    def race(name: str) -> None:
        node = Node(stores, name)
        try:
            node.open(take_over=False)
        except TidelogError as error:
            outcomes.append(error)
            return
        with node:
            node.append(2)
            node.shipper.ship()
            outcomes.append(None)

    with Threads() as threads:
        for number in range(4):
            threads.start(lambda name=f"n{number}": race(name))  # type: ignore[misc]  # binds the loop's value
    return outcomes
