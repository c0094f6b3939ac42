"""Which crashes to play: at which calls, and what each leaves.

Invariant: a crash point depends on the plan, the call and the size of the interrupted write, on nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from tidelog.testing.survival import Policy


@dataclass(frozen=True)
class CrashPoint:
    """One way to die: at which call, and what the crash leaves."""

    call: int
    policy: Policy
    seed: int
    torn_bytes: int

    def __str__(self) -> str:
        return f"{self.call}:{self.policy}:{self.seed}:{self.torn_bytes}"

    @classmethod
    def parse(cls, text: str) -> CrashPoint:
        """The opposite of `str`."""
        call, policy, seed, torn_bytes = text.split(":")
        return cls(int(call), cast(Policy, policy), int(seed), int(torn_bytes))


@dataclass(frozen=True)
class CrashPlan:
    """How thoroughly to look.

    policies         what to look at after each crash; the same remains are checked only once
    seeds            how many remains to draw for each policy that draws
    seed             another number draws other remains
    every            only each so-many-th call is a cut point, for long workloads
    timeout_seconds  a run or a check that takes longer has failed
    grace_seconds    so long the threads of a dead run may take to end; then they are left behind
    """

    policies: tuple[Policy, ...] = ("lose", "keep", "tear", "reorder")
    seeds: int = 1
    seed: int = 0
    every: int = 1
    timeout_seconds: float = 300.0
    grace_seconds: float = 30.0

    def points(self, call: int, in_flight_bytes: int) -> Iterator[CrashPoint]:
        """What to look at after a crash at `call`."""
        for policy in self.policies:
            # Of a call that is done or is not (a store's counts as one byte), both are looked at.
            outcomes = (0, 1) if in_flight_bytes == 1 else (None,)
            for draw in range(self._draws(policy, in_flight_bytes)):
                for torn_bytes in outcomes:
                    yield self._point(call, policy, self.seed + draw, in_flight_bytes, torn_bytes)

    def _draws(self, policy: Policy, in_flight_bytes: int) -> int:
        """Nothing is drawn for "lose"; for "keep" only how much of the interrupted write is there."""
        is_given = policy == "lose" or (policy == "keep" and in_flight_bytes <= 1)
        return 1 if is_given else self.seeds

    def _point(self, call: int, policy: Policy, seed: int, in_flight_bytes: int, torn_bytes: int | None) -> CrashPoint:
        chance = random.Random(f"{seed}:{call}:{policy}")
        somewhere = chance.randint(0, in_flight_bytes)
        drawn = chance.choice((0, in_flight_bytes, somewhere, somewhere, somewhere))
        return CrashPoint(call, policy, chance.randrange(1 << 32), drawn if torn_bytes is None else torn_bytes)
