"""A campaign of misfortunes over real processes, and a checker over everything that clients were told.

CHAOS_MINUTES says how long (3 without it; 30 with `make test-long` and no limit), CHAOS_DIR where the history and the
report go (build/chaos with `make test-long`). A busy machine makes it slow, not wrong: how long clients waited is
reported, and only what they were promised is asserted; and that all is served again four minutes after a fault has
ended.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path

import pytest
from tests.campaign import SEED
from tests.cluster.chaos.campaign import Campaign
from tests.cluster.chaos.machines import Machines

MINUTES = float(os.environ.get("CHAOS_MINUTES", "3"))
# Longer than the pauses of a machine that is shared: a lease that runs out too often would be all that is tested.
LEASE_SECONDS = 10.0
# In ten minutes a campaign of three is over, as every other test. What a longer one left is read and checked meanwhile.
_SETTLE_SECONDS = 420.0 if MINUTES <= 3 else 1500.0


@pytest.mark.long
def test_promises_hold_in_minutes_of_misfortunes(tmp_path: Path) -> None:
    """Kills, pauses, cuts, clocks, full disks, drains and balance: nothing acknowledged is lost, doubled or out of
    order, groups do not go back, transactions are atomic, copies are exactly once, and partitions are linearizable."""
    faulthandler.dump_traceback_later(60 * MINUTES + _SETTLE_SECONDS, exit=True)  # instead of pytest's own limit
    directory = Path(os.environ.get("CHAOS_DIR") or tmp_path / "chaos").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    with Machines(tmp_path / "machines", LEASE_SECONDS) as machines:
        outcome = Campaign(machines, directory, SEED).run(MINUTES)
    shown = (directory / "report.md").read_text()
    assert outcome.anomalies == [], shown
    assert outcome.not_linearizable == [], shown
    assert outcome.fatal == [], shown
