"""Of all objects in a bucket, those that are the topic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples

from tidelog.cold.rebuild import choose_chain
from tidelog.store.keys import ObjectId


@pytest.mark.parametrize(
    ("names", "chain", "holes"),
    [
        ([(0, 9, 1), (10, 19, 1)], [(0, 9, 1), (10, 19, 1)], []),
        ([(0, 9, 1), (0, 9, 2)], [(0, 9, 2)], []),
        ([(0, 9, 1), (0, 4, 2)], [(0, 4, 2)], []),
        ([(0, 9, 1), (0, 4, 1)], [(0, 9, 1)], []),
        ([(0, 9, 1), (0, 4, 2), (10, 19, 3)], [(0, 9, 1), (10, 19, 3)], []),
        ([(0, 9, 1), (0, 4, 1), (5, 19, 1)], [(0, 4, 1), (5, 19, 1)], []),
        ([(0, 9, 1), (20, 29, 1)], [(0, 9, 1), (20, 29, 1)], [(10, 19)]),
        ([(0, 9, 1), (0, 14, 0), (20, 29, 1)], [(0, 14, 0), (20, 29, 1)], [(15, 19)]),
        ([(5, 9, 7)], [(5, 9, 7)], []),
        ([], [], []),
    ],
)
def test_of_overlapping_objects_the_highest_epoch_wins_that_leads_on(
    names: list[tuple[int, int, int]], chain: list[tuple[int, int, int]], holes: list[tuple[int, int]]
) -> None:
    """Then the one that leads furthest, then the longest; a hole only where nothing leads on."""
    found = choose_chain(ObjectId(*name) for name in names)
    assert list(found.objects) == [ObjectId(*name) for name in chain]
    assert list(found.holes) == holes
    assert {*found.objects, *found.unused} == {ObjectId(*name) for name in names}


def test_a_topic_that_begins_within_an_object_begins_with_it() -> None:
    """Of those that hold the start the best one is taken, wherever it begins."""
    names = [ObjectId(0, 9, 1), ObjectId(5, 9, 2), ObjectId(10, 19, 1), ObjectId(0, 3, 9)]
    assert choose_chain(names, 7).objects == (ObjectId(5, 9, 2), ObjectId(10, 19, 1))
    assert choose_chain(names, 3).objects[0] == ObjectId(0, 9, 1)
    assert choose_chain(names, 25) == ((), (), tuple(sorted(names)))
    assert choose_chain([ObjectId(10, 19, 1)], 4).holes == ((4, 9),)


NAMES = st.lists(
    st.builds(
        lambda start, count, *rest: ObjectId(start, start + count, *rest), *[st.integers(0, 7)] * 3, st.integers(0, 1)
    ),
    max_size=7,
    unique=True,
)


def all_chains(names: list[ObjectId], at: int) -> Iterator[list[ObjectId]]:
    """Every way on from an offset: to whatever begins there, else to what begins next."""
    behind = [name.start for name in names if name.start >= at]
    if not behind:
        yield []
        return
    for name in names:
        if name.start == min(behind):
            for rest in all_chains(names, name.end + 1):
                yield [name, *rest]


def missing_in(chain: list[ObjectId]) -> int:
    """How many offsets a chain leaves out."""
    return sum(b.start - a.end - 1 for a, b in itertools.pairwise(chain))


@settings(max_examples=examples(100))
@given(names=NAMES)
def test_the_chain_is_the_best_of_all(names: list[ObjectId]) -> None:
    """Against every chain there is: none misses less, and from each link on none is better."""
    chosen = list(choose_chain(names).objects)
    if not names:
        assert chosen == []
        return
    assert chosen in list(all_chains(names, 0))
    for index in range(len(chosen)):
        ways = [chain for chain in all_chains(names, chosen[index].start) if chain]
        assert missing_in(chosen[index:]) == min(missing_in(chain) for chain in ways)
        fewest = [chain for chain in ways if missing_in(chain) == missing_in(chosen[index:])]
        assert chosen[index][2:] == max(chain[0][2:] for chain in fewest), "epoch first, then generation"
