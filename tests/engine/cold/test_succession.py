"""Replicas that take over by themselves: who is waited for and how long, a race of two, and an owner that slept."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.log.workbench import wait_until

import tidelog
from tidelog.clock import ManualClock
from tidelog.cold.catalog import Owner
from tidelog.engine.entry import CreateBucket, Entry, PutObject
from tidelog.engine.succession import Succession
from tidelog.errors import ConflictError, HeldError, InputError, StoreUnavailableError

AFTER_SECONDS = 8.0
_OWNER = """
import sys, tidelog
given = dict(shares_store=True, lease_seconds=1, ship_interval_seconds=3600)
engine = tidelog.open_engine(sys.argv[1], store=sys.argv[2], **given)
engine.apply_many([(1, tidelog.CreateBucket("b")), (2, tidelog.PutObject("b", "k", b"shipped"))])
engine.update_low_water_mark(2)
engine.ship()
engine.apply(3, tidelog.PutObject("b", "k", b"after"))
print("ready", flush=True)
sys.stdin.readline()
engine.update_low_water_mark(3)
try:
    engine.ship()
except tidelog.FencedError:
    print("fenced", flush=True)
engine.close(checkpoint=False)
"""


class Looking:
    """A succession that is looked at by hand: what it finds, and what it takes over from."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.found: Owner | Exception | None = None
        self.taken: list[int] = []
        self.failure: Exception | None = None
        self.failure_of_program: Exception | None = None
        self.succession = Succession(AFTER_SECONDS, self.clock, self._dead_owner, self._take_over)

    def _dead_owner(self) -> Owner | None:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def _take_over(self, owner: Owner) -> Callable[[], None]:
        self.taken.append(owner.epoch)
        if self.failure is not None:
            raise self.failure
        return self._on_take_over

    def _on_take_over(self) -> None:
        if self.failure_of_program is not None:
            raise self.failure_of_program

    def pass_seconds(self, seconds: float) -> None:
        """Looks as often as it wants to meanwhile."""
        end = self.clock.monotonic() + seconds
        while self.clock.monotonic() < end:
            self.clock.advance(self.succession.look())
            if self.succession._attempt is not None:
                self.succession._attempt.result(60)


def dead(epoch: int) -> Owner:
    """An owner whose lease has run out."""
    return Owner(epoch=epoch, claim="c", incarnation=f"i{epoch}", node="a", claimed_us=1, log_id="0" * 32)


def test_owner_that_stays_dead_is_replaced_once_it_was_waited_for() -> None:
    """Not before `take_over_after_seconds`, and at most half of that later; an attempt that fails is made again."""
    looking = Looking()
    looking.pass_seconds(100)
    looking.found = dead(3)
    looking.pass_seconds(AFTER_SECONDS)
    assert looking.taken == []
    looking.failure = HeldError("another replica has taken the store over meanwhile")
    looking.pass_seconds(AFTER_SECONDS)
    assert looking.taken == [3]
    looking.failure = StoreUnavailableError("away")
    looking.pass_seconds(2 * AFTER_SECONDS)
    assert looking.taken == [3, 3]


@pytest.mark.parametrize("failure", [ConflictError("of the program"), tidelog.ClosedError("its own"), KeyError("k")])
def test_failure_of_the_program_is_not_taken_for_a_faster_replica(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss: its replica is closed, nobody drives the new owner, and the log said that all is well."""
    looking = Looking()
    looking.found, looking.failure_of_program = dead(3), failure
    with caplog.at_level("INFO", "tidelog.engine"):
        looking.pass_seconds(2 * AFTER_SECONDS)
    assert looking.taken == [3]
    assert [(one.levelname, "on_take_over" in one.getMessage()) for one in caplog.records] == [("ERROR", True)]


@pytest.mark.parametrize("between", [None, dead(4), StoreUnavailableError("away")])
def test_sign_of_life_begins_the_wait_again(between: Owner | Exception | None) -> None:
    """An owner that lives again, another one, and a store that says nothing: nobody was dead for long enough."""
    looking = Looking()
    for _ in range(5):
        looking.found = dead(3)
        looking.pass_seconds(AFTER_SECONDS * 0.8)
        looking.found = between
        looking.pass_seconds(looking.succession.pause_seconds)
    assert looking.taken == []


def test_one_of_two_replicas_takes_over_from_an_owner_that_sleeps(tmp_path: Path) -> None:
    """The owner is stopped with an entry that it has not shipped. One follower takes over by itself, with what the
    orchestrator has, and ships it; the other follows on; the owner wakes up and can change nothing.
    """
    store = (tmp_path / "store").as_uri()
    entries: list[tuple[int, Entry]] = [
        (1, CreateBucket("b")),
        (2, PutObject("b", "k", b"shipped")),
        (3, PutObject("b", "k", b"after")),
    ]
    settings: dict[str, Any] = {
        "store": store,
        "shares_store": True,
        "lease_seconds": 1,
        "take_over_after_seconds": 0.2,
        "ship_interval_seconds": 3600,
    }
    new: list[tidelog.Engine] = []
    script = tmp_path / "owner.py"
    script.write_text(_OWNER)
    owner = subprocess.Popen(
        [sys.executable, script, tmp_path / "a", store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdin is not None
    assert owner.stdout is not None
    followers: list[tidelog.Engine] = []
    try:
        assert owner.stdout.readline() == "ready\n"
        for name in "bc":
            followers.append(tidelog.open_engine(tmp_path / name, on_take_over=new.append, **settings))
            followers[-1].apply_many(entries)
            followers[-1].update_low_water_mark(2)
        time.sleep(1.5)  # longer than the lease, and than what is waited for: it lives
        assert new == []
        assert all(one.is_follower and one.owner_is_alive() for one in followers)
        owner.send_signal(signal.SIGSTOP)
        wait_until(lambda: bool(new), "one has taken over")
        (winner,) = new
        assert (winner.is_follower, winner.applied_seq) == (False, 2)
        winner.apply_many(entries)
        winner.update_low_water_mark(3)
        assert winner.ship() == 3
        (other,) = (one for one in followers if not one._standing.is_closed)
        other.update_low_water_mark(3)
        assert other.is_follower
        assert other.owner_is_alive()
        assert other.ship() == 3
        assert other.digest() == winner.digest()
        owner.send_signal(signal.SIGCONT)
        owner.stdin.write("\n")
        owner.stdin.flush()
        assert owner.stdout.readline() == "fenced\n"
        assert owner.wait(60) == 0
        assert len(new) == 1
        assert winner.read("b", "k").data == b"after"
    finally:
        owner.kill()
        owner.communicate()
        for one in (*followers, *new):
            one.close()


def test_race_of_two_replicas_has_one_winner(tmp_path: Path) -> None:
    """Both begin at the same moment: one owns the store in the end, and the other follows it, as it did before."""
    given: dict[str, Any] = {"store": (tmp_path / "store").as_uri(), "shares_store": True, "lease_seconds": 1}
    new: list[tidelog.Engine] = []
    with tidelog.open_engine(tmp_path / "a", **given) as a:
        a.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", b"v"))])
        a.update_low_water_mark(2)
        a.ship()
        waiting = {"take_over_after_seconds": 3600, "on_take_over": new.append, **given}
        followers = [tidelog.open_engine(tmp_path / name, **waiting) for name in "bc"]
    shared: list[Any] = [one._upkeep.cold for one in followers]
    owner = shared[0].dead_owner()
    with ThreadPoolExecutor(2) as threads:
        tries = [threads.submit(lambda one: one.succession._take_over(owner)(), one) for one in shared]
        failures = [one.exception(60) for one in tries]
    assert [isinstance(one, HeldError | ConflictError) for one in failures if one is not None] == [True]
    (winner,) = new
    (other,) = (one for one in followers if not one._standing.is_closed)
    assert not list(tmp_path.glob("*/takeover")), "a copy of the whole index, which nobody needs"
    winner.apply_many([(3, PutObject("b", "k", b"w"))])
    winner.update_low_water_mark(3)
    assert winner.ship() == 3
    other.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", b"v")), (3, PutObject("b", "k", b"w"))])
    other.update_low_water_mark(3)
    assert (other.ship(), other.is_follower, winner.is_follower) == (3, True, False)
    assert other.digest() == winner.digest()
    for one in (winner, other):
        one.close()


def test_owner_that_came_after_the_dead_one_is_not_replaced(tmp_path: Path) -> None:
    """Also when it is closed by then: the wait for it begins with its own death, not with that of the one before."""
    given: dict[str, Any] = {"store": (tmp_path / "store").as_uri(), "shares_store": True, "lease_seconds": 1}
    with tidelog.open_engine(tmp_path / "a", **given) as a:
        a.apply(1, CreateBucket("b"))
        a.update_low_water_mark(1)
        a.ship()
        waiting = {"take_over_after_seconds": 3600, "on_take_over": print, **given}
        b = tidelog.open_engine(tmp_path / "b", **waiting)
    shared: Any = b._upkeep.cold
    before = shared.dead_owner()
    with tidelog.open_engine(tmp_path / "a", **given) as a:
        assert not a.is_follower
    with pytest.raises(HeldError, match="meanwhile"):
        shared.succession._take_over(before)
    assert b.is_follower
    assert shared.dead_owner().epoch > before.epoch
    b.close()


def test_copy_that_a_killed_replica_left_goes_when_it_is_opened(tmp_path: Path) -> None:
    """It is as large as the index, and the next takeover may be far away."""
    given: dict[str, Any] = {"store": (tmp_path / "store").as_uri(), "shares_store": True}
    with tidelog.open_engine(tmp_path / "a", **given), tidelog.open_engine(tmp_path / "b", **given) as b:
        assert b.is_follower
        b.close()
        (tmp_path / "b" / "takeover" / "wal").mkdir(parents=True)
        (tmp_path / "b" / "takeover" / "pages.db").write_bytes(b"half")
        with tidelog.open_engine(tmp_path / "b", **given) as again:
            assert again.is_follower
            assert not (tmp_path / "b" / "takeover").exists()


def test_replica_that_is_closed_takes_nothing_over(tmp_path: Path) -> None:
    """Also not one that had begun to: who has closed it is done with it."""
    store = (tmp_path / "store").as_uri()
    given: dict[str, Any] = {"store": store, "shares_store": True, "lease_seconds": 1}
    with tidelog.open_engine(tmp_path / "a", **given) as a:
        a.apply(1, CreateBucket("b"))
        a.update_low_water_mark(1)
        a.ship()
        called = Event()
        b = tidelog.open_engine(
            tmp_path / "b", take_over_after_seconds=0.1, on_take_over=lambda one: called.set(), **given
        )
        shared: Any = b._upkeep.cold
        take_over = shared.succession._take_over
        b.close()
        with pytest.raises(tidelog.ClosedError):
            take_over(dead(1))
        assert not called.is_set()
        assert not (tmp_path / "b" / "takeover").exists()


def test_setting_and_callback_go_together(tmp_path: Path) -> None:
    """Either alone would do nothing, and nobody would know."""
    wrongs: list[dict[str, Any]] = [{"take_over_after_seconds": 5}, {"on_take_over": print}]
    for wrong in wrongs:
        with pytest.raises(InputError, match="go together"):
            tidelog.open_engine(tmp_path / "a", store=(tmp_path / "s").as_uri(), shares_store=True, **wrong)
    uncallable: dict[str, Any] = {"take_over_after_seconds": 5, "on_take_over": 5}
    with pytest.raises(InputError, match="must be a function"):  # it would only be seen when the owner is dead
        tidelog.open_engine(tmp_path / "a", store=(tmp_path / "s").as_uri(), shares_store=True, **uncallable)
