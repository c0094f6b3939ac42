"""Campaigns: the same promises as in `make test`, looked at much harder, by `make test-long`.

Invariants
- `make test` has the same examples every time: hypothesis is derandomized, and every other chance has a fixed seed.
- A campaign (HYPOTHESIS_PROFILE=deep) has ten times the examples, every cut, and one seed, which it prints. With that
  seed as CAMPAIGN_SEED it makes the same choices again; an example that failed is kept, and comes first the next time.
- A test that only campaigns run has the marker `long`. One that runs always, and looks harder in a campaign, has the
  marker `deeper`; tests of hypothesis have it by themselves.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

FACTOR = 10
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "tidelog")
IS_DEEP = PROFILE == "deep"
# The processes that share a campaign inherit the choice of the first one.
SEED = int(os.environ.setdefault("CAMPAIGN_SEED", str(random.SystemRandom().randrange(1 << 32)))) if IS_DEEP else 0

_EXAMPLES = 60
# A deadline, or a limit on how long examples may take to make, measures how busy the machine is; a test that hangs is
# ended by pytest's own limit.
_BOTH = hypothesis.settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])


def load_profile() -> None:
    """Before any test is imported: what a test does not say for itself comes from the profile."""
    hypothesis.settings.register_profile("tidelog", _BOTH, max_examples=_EXAMPLES, derandomize=True)
    hypothesis.settings.register_profile("deep", _BOTH, max_examples=_EXAMPLES * FACTOR, derandomize=False)
    hypothesis.settings.load_profile(PROFILE)


def examples(count: int) -> int:
    """So many examples (seeds, rounds, kills), and ten times as many in a campaign."""
    return count * FACTOR if IS_DEEP else count


def every(step: int) -> int:
    """At each so-many-th call (or seed), and at each one in a campaign."""
    return 1 if IS_DEEP else step


def first_seed() -> int:
    """Where seeds begin that are counted up: at 0, and in a campaign at a place that its seed says."""
    return random.Random(SEED).randrange(1 << 31) if IS_DEEP else 0


def run_machine(
    machine: type[RuleBasedStateMachine], count: int, steps: int, phases: Collection[Phase] = tuple(Phase)
) -> None:
    """So many runs of a state machine, of so many steps each. The test that calls this has the marker `deeper`."""
    if IS_DEEP:
        hypothesis.seed(SEED)(machine)
    wanted = hypothesis.settings(max_examples=examples(count), stateful_step_count=steps, phases=phases)
    run_state_machine_as_test(machine, settings=wanted)
