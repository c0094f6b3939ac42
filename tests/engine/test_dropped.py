"""Engines that nobody has any more, and that nobody has closed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

import tidelog
from tidelog.engine.engine import Engine
from tidelog.errors import ClosedError

DROPPED = "was dropped without being closed"


def filled(directory: Path, store: str | None = None) -> Engine:
    """An engine with an object, and with everything in the background that there is."""
    engine = tidelog.open_engine(directory, store=store, keep_versions=2)
    engine.apply_many([(1, tidelog.CreateBucket("b")), (2, tidelog.PutObject("b", "k", b"v" * 500))])
    return engine


def drop(engines: list[Engine]) -> None:
    """Nobody has them any more, not even an error that somebody has caught."""
    engines.clear()
    gc.collect()


def new_threads(before: list[threading.Thread]) -> list[str]:
    """The names of those of ours that came since then, after those that are ending had the time for it."""
    deadline = time.monotonic() + 120
    while True:
        found = [one.name for one in threading.enumerate() if one.name.startswith("tidelog") and one not in before]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


@pytest.mark.parametrize("has_store", [False, True])
def test_an_engine_that_is_dropped_is_told_and_given_back(tmp_path: Path, has_store: bool) -> None:
    """The directory can be opened again at once, has everything, and no thread is left."""
    before = threading.enumerate()  # other tests of this process may have left some
    store = (tmp_path / "store").as_uri() if has_store else None
    engines = [filled(tmp_path / "e", store)]
    with pytest.warns(ResourceWarning, match=DROPPED):
        drop(engines)
    with tidelog.open_engine(tmp_path / "e") as again:
        assert again.read("b", "k").data == b"v" * 500
    assert new_threads(before) == []


def test_an_engine_in_a_circle_is_given_back_when_the_circle_is_found(tmp_path: Path) -> None:
    """The garbage collector may come in any thread, at any moment."""
    circle: list[object] = [filled(tmp_path / "e")]
    circle.append(circle)
    del circle
    with pytest.warns(ResourceWarning, match=DROPPED):
        gc.collect()
    tidelog.open_engine(tmp_path / "e").close()


def test_an_engine_that_was_closed_is_dropped_silently(tmp_path: Path) -> None:
    """Filters of this project make errors of warnings."""
    engine = filled(tmp_path / "e")
    engine.close()
    del engine
    gc.collect()


def test_what_an_engine_gave_out_keeps_it(tmp_path: Path) -> None:
    """Who goes through a listing, or has a transaction open, still has the engine."""
    engine = filled(tmp_path / "e")
    listing = engine.list_objects("b")
    transaction = engine.transaction()
    again = engine
    del engine
    gc.collect()
    assert [one.key for one in listing] == ["k"]
    with transaction:
        assert transaction.read("b", "k").seq == 2
    again.close()
    with pytest.raises(ClosedError):
        again.read("b", "k")


def _drop_in_child(engines: list[Engine]) -> None:
    engines.clear()
    gc.collect()
    os._exit(0)


def test_a_forked_child_gives_nothing_back(tmp_path: Path) -> None:
    """What it drops is a copy: the engine of the parent goes on."""
    engines = [filled(tmp_path / "e")]
    child = multiprocessing.get_context("fork").Process(target=_drop_in_child, args=(engines,))
    child.start()
    child.join(120)
    assert child.exitcode == 0
    engines[0].apply(3, tidelog.PutObject("b", "k", b"new"))
    engines[0].close()


def test_an_engine_says_what_it_is(tmp_path: Path) -> None:
    """Its directory, how far it is, and whether it can be used."""
    engine = filled(tmp_path / "e")
    assert repr(engine) == f"<tidelog.Engine '{tmp_path / 'e'}' applied_seq=2 open>"
    engine.close()
    assert repr(engine).endswith("applied_seq=2 closed>")
