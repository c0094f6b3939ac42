"""Leases of engines: nobody takes an engine from a living node by accident, and one that was replaced hears of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.engine.stations import EngineNode, new_store, successor, usurp
from tests.log.workbench import wait_until

import tidelog
from tidelog.cold.lease import DEFAULT_LEASE_SECONDS, NodeLease
from tidelog.engine.cold.store_link import RESTORE_HINT
from tidelog.engine.recovery.restore import LocalSteps
from tidelog.errors import ConfigError, FencedError, HeldError, StoreUnavailableError
from tidelog.testing import FaultyStore

LEASE = DEFAULT_LEASE_SECONDS


@pytest.fixture
def node() -> EngineNode:
    """An engine that is open, and has shipped something."""
    node = EngineNode(new_store()).open()
    node.apply(20)
    node.ship_all()
    return node


# Taking it


def test_restore_of_a_living_engine_is_refused(node: EngineNode) -> None:
    """Before anything is made in the directory; the engine goes on shipping."""
    other = successor(node)
    with pytest.raises(HeldError, match=r"the engine is open on a \(host .* 0.0 s old"):
        other.restore(take_over=False)
    assert not other.files.exists(Path("/engine"))
    node.apply(5)
    assert node.ship_all() == node.engine.applied_seq
    node.close()


def test_restore_on_purpose_fences_the_living_engine(node: EngineNode) -> None:
    """That is what `take_over` is for; it hears of it although it has nothing to ship."""
    other = successor(node)
    other.restore(take_over=True)
    with pytest.raises(FencedError):
        node.engine.ship()
    with other.open(take_over=False):
        other.assert_same()
    node.close()


def test_copy_that_was_never_opened_and_was_replaced_is_refused(node: EngineNode) -> None:
    """It has no log that would show how old it is, and takes nothing away from the one that has gone on."""
    node.close()
    second = successor(node)
    second.restore()
    third = successor(second, "c")
    third.restore()
    with third.open():
        third.apply(5)
        third.ship_all()
        with pytest.raises(FencedError, match="has gone on where this directory has not"):
            second.open(take_over=True)
        third.apply(5)
        assert third.ship_all() == third.engine.applied_seq


def test_restore_after_the_lease_or_a_close_needs_no_leave(node: EngineNode) -> None:
    """Who was silent for so long, or has closed its engine, holds it no more."""
    node.clock.advance(LEASE - 0.001)
    with pytest.raises(HeldError):
        successor(node).restore(take_over=False)
    node.clock.advance(0.001)
    second = successor(node)
    second.restore(take_over=False)
    with second.open(take_over=False):
        second.assert_same()
    third = successor(second, "c")
    third.restore(take_over=False)
    with third.open(take_over=False):
        third.assert_same()


def test_engine_opens_at_once_in_its_own_directory_after_a_kill(node: EngineNode) -> None:
    """The lock of the directory proves that the process is dead; its lease has not run out yet."""
    again = EngineNode(node.objects, files=node.files.after_crash("keep"), clock=node.clock)
    again.model = node.model
    with again.open(take_over=False):
        again.assert_same()
        again.apply(5)
        assert again.ship_all() == again.engine.applied_seq


def test_restore_that_was_killed_is_begun_again_at_once(node: EngineNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """It claims late, and its own lease must not keep out the same call in the same directory."""
    node.close()
    other = successor(node)
    with monkeypatch.context() as killed:
        killed.setattr(LocalSteps, "build", _dies)  # after the claim
        killed.setattr(NodeLease, "release", lambda lease: None)
        with pytest.raises(ZeroDivisionError):
            other.restore(take_over=False)
    assert other.view.manifest.epoch == 2, "it has claimed"
    with pytest.raises(HeldError):
        successor(node, "c").restore(take_over=False)
    other.name = "b-started-again"
    other.restore(take_over=False)
    with other.open(take_over=False):
        other.assert_same()


def test_copy_of_an_open_directory_is_another_node(tmp_path: Path) -> None:
    """Both would ship under the same name; the copy has to be meant."""
    url = f"file://{tmp_path}/store"
    with tidelog.open_engine(tmp_path / "engine", store=url) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        shutil.copytree(tmp_path / "engine", tmp_path / "copy")
        with pytest.raises(HeldError, match=str(tmp_path / "engine")):
            tidelog.open_engine(tmp_path / "copy")
        with tidelog.open_engine(tmp_path / "copy", take_over=True) as copy:
            assert copy.list_buckets() == ["b"]
            with pytest.raises(FencedError):
                engine.ship()


def test_directory_that_was_replaced_hears_that_and_not_of_a_lease(node: EngineNode) -> None:
    """To take the engine over would not help it: it needs a new copy."""
    other = successor(node)
    other.restore()
    with other.open():
        node.crash()
        with pytest.raises(FencedError) as raised:
            node.open(take_over=False)
        assert RESTORE_HINT in str(raised.value)


def _dies(*_: object) -> None:
    raise ZeroDivisionError


# Keeping it


def test_replaced_engine_with_nothing_to_ship_hears_of_it(node: EngineNode) -> None:
    """As a topic does, when it ships: nothing would be published, and so nothing would be noticed."""
    usurp(node.objects)
    with pytest.raises(FencedError):
        node.engine.ship()
    with pytest.raises(FencedError):
        node.apply(1)
    node.close()


def test_replaced_engine_that_does_nothing_hears_of_it(tmp_path: Path) -> None:
    """It asks now and then, and then refuses to apply, with nothing to ship and no state to write."""
    url = f"file://{tmp_path}/store"
    with tidelog.open_engine(
        tmp_path / "engine",
        store=url,
        ownership_check_seconds=0.05,
        ship_interval_seconds=3600,
        compaction_enabled=False,
    ) as engine:
        engine.apply(1, tidelog.CreateBucket("b"))
        tidelog.restore_engine(tmp_path / "other", store=url, take_over=True).close()

        def is_fenced() -> bool:
            statistics = engine.statistics().shipping
            return statistics is not None and statistics.is_fenced

        wait_until(is_fenced, "the answer")
        with pytest.raises(FencedError):
            engine.apply(2, tidelog.CreateBucket("c"))


def test_question_without_an_answer_stops_nothing(node: EngineNode) -> None:
    """Nobody can tell then; the engine goes on, and hears of it later."""
    assert isinstance(node.objects, FaultyStore)
    usurp(node.objects)
    node.objects.fail("*", times=None)
    asking = node.shipping.owner._retried("asking", node.shipping.owner._verify_once)
    asking()
    node.apply(1)
    node.objects.heal()
    asking()
    with pytest.raises(FencedError):
        node.apply(1)
    node.close()


def test_engine_that_was_opened_without_its_store_waits_for_a_living_node(node: EngineNode) -> None:
    """It applies, claims nothing while the other lives, and gets its store when that one is gone."""
    copied = node.files.after_crash("keep")
    late = EngineNode(node.objects, name="late", files=copied, clock=node.clock)
    late.model = node.model
    assert isinstance(node.objects, FaultyStore)
    node.objects.fail("*", times=None)
    late.open(connects=False, take_over=False)
    with pytest.raises(StoreUnavailableError):
        late.engine.ship()
    node.objects.heal()
    late.apply(3)
    late.engine.update_low_water_mark(late.engine.applied_seq)
    with pytest.raises(HeldError):
        late.engine.ship()
    node.clock.advance(LEASE)
    assert late.engine.ship() == late.engine.applied_seq
    late.close()


def test_lease_is_a_setting_of_engines(tmp_path: Path) -> None:
    """As it is of topics."""
    with pytest.raises(ConfigError, match="lease_seconds"):
        tidelog.open_engine(tmp_path / "engine", lease_seconds=0)
    url = f"file://{tmp_path}/store"
    with (
        tidelog.open_engine(tmp_path / "engine", store=url, lease_seconds=1234),
        pytest.raises(HeldError, match="counts for 1234 s"),
    ):
        tidelog.restore_engine(tmp_path / "other", store=url)
