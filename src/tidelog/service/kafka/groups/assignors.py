"""How the coordinator distributes partitions over the members of a group (KIP-848): `range` and `uniform`.

Both are pure and deterministic, and give every partition of a topic that somebody subscribes to exactly one member.

- range: each topic by itself, its partitions in runs over the members that subscribe to it, in the order of their ids.
  Topics with the same count of partitions are cut alike, so that one member has the same partitions of all.
- uniform: over all topics, so that no member could hand a partition to another one that may have it and still have as
  many; as few as possible move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

Partition = tuple[str, int]
Subscriptions = Mapping[str, frozenset[str]]
Assignment = dict[str, frozenset[Partition]]


def assign_range(
    members: Subscriptions, topics: Mapping[str, int], previous: Mapping[str, frozenset[Partition]]
) -> Assignment:
    """Runs of partitions; what was before does not count."""
    found: dict[str, set[Partition]] = {member: set() for member in members}
    for topic, count in topics.items():
        subscribed = sorted(member for member, wanted in members.items() if topic in wanted)
        if not subscribed:
            continue
        least, more = divmod(count, len(subscribed))
        at = 0
        for index, member in enumerate(subscribed):
            stop = at + least + (index < more)
            found[member].update((topic, partition) for partition in range(at, stop))
            at = stop
    return {member: frozenset(partitions) for member, partitions in found.items()}


def assign_uniform(
    members: Subscriptions, topics: Mapping[str, int], previous: Mapping[str, frozenset[Partition]]
) -> Assignment:
    """As even as subscriptions allow, beginning with what each member had."""
    every = {(topic, partition) for topic, count in topics.items() for partition in range(count)}
    found: dict[str, set[Partition]] = {}
    taken: set[Partition] = set()
    for member in sorted(members):
        kept = {
            one for one in previous.get(member, ()) if one in every and one[0] in members[member] and one not in taken
        }
        found[member] = kept
        taken |= kept
    for partition in sorted(every - taken):
        able = [member for member in found if partition[0] in members[member]]
        if able:
            found[min(able, key=lambda member: (len(found[member]), member))].add(partition)
    while _move_one(members, found):
        pass
    return {member: frozenset(partitions) for member, partitions in found.items()}


def _move_one(members: Subscriptions, found: dict[str, set[Partition]]) -> bool:
    """Moves what one member has too many of; each move brings two loads closer, so this ends."""
    by_load = sorted(found, key=lambda member: (len(found[member]), member))
    moved = False
    for giver in reversed(by_load):
        for taker in by_load:
            surplus = (len(found[giver]) - len(found[taker])) // 2
            if surplus < 1:
                break
            movable = sorted(one for one in found[giver] if one[0] in members[taker])
            for partition in movable[len(movable) - min(surplus, len(movable)) :]:
                found[giver].remove(partition)
                found[taker].add(partition)
                moved = True
    return moved


ASSIGNORS: dict[str, Callable[[Subscriptions, Mapping[str, int], Mapping[str, frozenset[Partition]]], Assignment]] = {
    "uniform": assign_uniform,
    "range": assign_range,
}
DEFAULT_ASSIGNOR = "uniform"
