"""One machine of several parts for the crash driver: disks of nodes, an object store, a metadata store.

    def workload(world: World, history: History) -> None: ...   # on world.files("a"), world.store and world.metadata
    def check(world: World, history: History) -> None: ...      # on what is left: the same node again, or node "b"

    cut_world_everywhere(workload, check)

Invariants
- All parts share one numbering of calls and one death: the process that runs the workload, on whatever node, dies.
- The stores are other machines. A crash leaves them as they are, except that the call which was the cut was done or was
  not; of the disks it leaves what the policy grants.
- A world that was made from another changes by itself: one crash can be looked at in every way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Self

from tidelog.clock import Clock, SystemClock
from tidelog.testing.crash import CrashSummary, Step, crash_machine_everywhere
from tidelog.testing.crash_plan import CrashPlan
from tidelog.testing.faults import Call, Faults
from tidelog.testing.faulty_files import FaultyFiles
from tidelog.testing.faulty_metadata import FaultyMetadata
from tidelog.testing.faulty_store import DEFAULT_PART_BYTES, FaultyStore
from tidelog.testing.survival import Policy

_DEFAULT_PLAN = CrashPlan()


class World:
    """Disks by node, one object store, one metadata store.

    crash_at    the changing call with this number (from 1), on whichever part, is the last
    on_call     called with every changing call before it takes effect: "a.write_at", "store.put", "metadata.commit"
    part_bytes  of the store's writers: small ones make cut points inside an object
    multi_key   of the metadata store: False for one that changes one key at a time, as a bucket does
    clock       where objects get their time from; give the same one to the product
    """

    def __init__(
        self,
        *,
        crash_at: int | None = None,
        on_call: Callable[[Call], None] | None = None,
        part_bytes: int = DEFAULT_PART_BYTES,
        multi_key: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self.faults = Faults(crash_at=crash_at, on_call=on_call)
        self.clock = clock or SystemClock()
        self.store = FaultyStore(faults=self.faults, part_bytes=part_bytes, clock=self.clock)
        self.metadata = FaultyMetadata(faults=self.faults, multi_key=multi_key)
        self._disks: dict[str, FaultyFiles] = {}
        self._lock = threading.Lock()

    def files(self, node: str = "a") -> FaultyFiles:
        """The disk of a node; one that is asked for the first time is empty."""
        with self._lock:
            if node not in self._disks:
                self._disks[node] = FaultyFiles(faults=self.faults.sharing(node))
            return self._disks[node]

    def heal(self) -> None:
        """Nothing fails any more, on any part."""
        for part in self._parts():
            part.heal()

    def end_leases(self) -> None:
        """Every node has been silent for longer than its lease: another one may open what it held.

        For worlds whose clock nobody moves; with a ManualClock, `clock.advance(lease_seconds)` is the same.
        """
        self.metadata.end_leases()
        self.store.end_leases()

    def lose_disk(self, node: str = "a") -> Self:
        """The same world after all processes were killed and that node got an empty disk; this one is left as it is."""
        fresh = self.after_crash("keep")
        fresh._disks.pop(node, None)
        return fresh

    # What the crash driver asks

    @property
    def calls(self) -> list[Call]:
        """The changing calls of all parts so far."""
        return self.faults.calls

    @property
    def crashed(self) -> bool:
        return self.faults.crashed

    @property
    def in_flight_bytes(self) -> int:
        """Size of the write that the crash interrupted; 1 for a call of a store, which was done or was not."""
        return max(part.in_flight_bytes for part in self._parts())

    def crash(self) -> None:
        """The process dies now, between two calls."""
        self.faults.crash()

    def after_crash(
        self, policy: Policy = "lose", *, seed: int = 0, torn_bytes: int = 0, crash_at: int | None = None
    ) -> Self:
        """The world that is found afterwards; this one is left as it is. `crash_at` cuts the next life short.

        `torn_bytes` of the interrupted write count as written; an interrupted call of a store is done with any of them.
        """
        fresh = type(self)(crash_at=crash_at, clock=self.clock)
        fresh.store = self.store.after_crash(torn_bytes=torn_bytes, faults=fresh.faults)
        fresh.metadata = self.metadata.after_crash(torn_bytes=torn_bytes, faults=fresh.faults)
        for node, disk in self._all_disks().items():
            faults = fresh.faults.sharing(node)
            fresh._disks[node] = disk.after_crash(policy, seed=seed, torn_bytes=torn_bytes, faults=faults)
        return fresh

    def image(self) -> object:
        """Equal for two worlds of which only one needs to be checked."""
        disks = {node: disk.image() for node, disk in self._all_disks().items()}
        return disks, self.store.image(), self.metadata.image()

    def _parts(self) -> list[FaultyFiles | FaultyStore | FaultyMetadata]:
        return [*self._all_disks().values(), self.store, self.metadata]

    def _all_disks(self) -> dict[str, FaultyFiles]:
        with self._lock:
            return dict(self._disks)


def cut_world_everywhere(
    workload: Step[World],
    check: Step[World],
    plan: CrashPlan = _DEFAULT_PLAN,
    start: Callable[[int | None], World] | None = None,
) -> CrashSummary:
    """Runs `workload` in an empty world to its death at every changing call, and `check` on what is left of it.

    `start` makes another world that crashes at the given call: `lambda crash_at: prepared.after_crash("keep",
    crash_at=crash_at)` for one with a past, `lambda crash_at: World(crash_at=crash_at, multi_key=False)`, ...
    """
    return crash_machine_everywhere(start or (lambda crash_at: World(crash_at=crash_at)), workload, check, plan)
