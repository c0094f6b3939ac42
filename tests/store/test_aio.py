"""Async twins: what they look like, where they run, and what becomes of a cancelled task's result."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import pydoc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import assert_type

import pytest

import tidelog
from tidelog.store.aio import ClosedAtExit, at_once, twin, twin_by, twin_iterator, twin_of

_WHO = contextvars.ContextVar("_WHO", default="nobody")


class Shop(ClosedAtExit):
    """Something with twins of every kind."""

    def __init__(self) -> None:
        self.is_closed = False

    def find(self, name: str, *, least: int = 3) -> tuple[str, int, bool, str]:
        """Finds it."""
        return name, least, threading.current_thread() is threading.main_thread(), _WHO.get()

    find_async = twin(find)
    find_at_once_async = twin(find, at_once)

    def count(self, stop: int) -> Iterator[int]:
        """Counts."""
        yield from range(stop)

    count_async = twin_iterator(count)

    @twin_of(find)
    async def written_async(self, name: str, *, least: int = 3) -> tuple[str, int, bool, str]:
        """By hand."""
        return self.find(name, least=least)

    async def _weigh_async(self, name: str, least: int) -> str:
        return f"{name} of {least}"

    weigh_async = twin_by(find, _weigh_async, "By weight.")

    def close(self) -> None:
        """Closes it."""
        self.is_closed = True

    close_async = twin(close)


class LargerShop(Shop):
    """Overrides an original."""

    def find(self, name: str, *, least: int = 5) -> tuple[str, int, bool, str]:
        """Finds more."""
        return super().find(name.upper(), least=least)


def test_a_twin_runs_beside_the_loop_and_sees_the_context() -> None:
    """Its result is that of the original, with the context variables of the task."""

    async def play() -> None:
        _WHO.set("task")
        assert await Shop().find_async("a", least=4) == ("a", 4, False, "task")
        assert await Shop().find_at_once_async("a") == ("a", 3, True, "task")

    asyncio.run(play())


def test_twin_by_other_work_gets_what_the_original_would() -> None:
    """Parameters and defaults are the original's, what comes of them is not."""
    assert asyncio.run(Shop().weigh_async("tea")) == "tea of 3"
    assert asyncio.run(Shop().weigh_async(name="tea", least=5)) == "tea of 5"
    with pytest.raises(TypeError, match="most"):
        asyncio.run(Shop().weigh_async("tea", most=5))  # type: ignore[call-arg]
    assert str(inspect.signature(Shop.weigh_async)) == "(self, name: 'str', *, least: 'int' = 3) -> 'str'"
    assert inspect.getdoc(Shop.weigh_async) == "Like `find`, without blocking the event loop.\n\nBy weight."


def test_a_subclass_that_overrides_the_original_has_its_twin() -> None:
    """With the subclass's default too."""
    assert asyncio.run(LargerShop().find_async("a"))[:2] == ("A", 5)


def test_an_iterator_is_taken_many_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All items come, in order, whatever a portion is."""
    monkeypatch.setattr("tidelog.store.aio.ITEMS_AT_ONCE", 3)

    async def play() -> list[int]:
        return [item async for item in Shop().count_async(10)]

    assert asyncio.run(play()) == list(range(10))


def test_a_twin_looks_like_what_it_is() -> None:
    """Name, signature and docstring, for `help` and for editors."""
    assert Shop.find_async.__name__ == "find_async"
    assert Shop.find_async.__qualname__ == "Shop.find_async"
    assert inspect.iscoroutinefunction(Shop.find_async)
    assert inspect.signature(Shop.find_async) == inspect.signature(Shop.find)
    assert inspect.getdoc(Shop.find_async) == "Like `find`, without blocking the event loop."
    assert inspect.getdoc(Shop.written_async) == "Like `find`, without blocking the event loop.\n\nBy hand."
    assert inspect.isasyncgenfunction(Shop.count_async)
    assert str(inspect.signature(Shop.count_async)) == "(self, stop: 'int') -> 'AsyncIterator[int]'"
    shown = pydoc.plain(pydoc.render_doc(tidelog.Topic))
    assert "async ship_async(self) -> 'int'\n |      Like `ship`, without blocking the event loop." in shown
    assert str(inspect.signature(tidelog.open_async)) == str(inspect.signature(tidelog.open))


@pytest.mark.parametrize(
    "kind", [tidelog.Topic, tidelog.LiveTopic, tidelog.LogDirectory, tidelog.Consumer, tidelog.Producer, tidelog.Engine]
)
def test_every_public_twin_has_its_docstring_from_its_original(kind: type) -> None:
    """One that is written by hand and not declared is noticed here; those of properties are."""
    of_properties = {"lag_async", "last_sequence_async"}
    for name, method in inspect.getmembers(kind, callable):
        if name.endswith("_async") and not name.startswith("_") and name not in of_properties:
            start = f"Like `{name.removesuffix('_async')}`, without blocking the event loop."
            assert (inspect.getdoc(method) or "").startswith(start), name


def test_leaving_closes() -> None:
    """With and without `async`."""
    shop, other = Shop(), Shop()

    async def play() -> None:
        async with other:
            pass

    with shop:
        pass
    asyncio.run(play())
    assert (shop.is_closed, other.is_closed) == (True, True)


async def types_that_checkers_see(topic: tidelog.Topic, engine: tidelog.Engine) -> None:
    """Never run: the type checker reads it. An ignored error that is none is an error there."""
    assert_type(await topic.ship_async(), int)
    assert_type(await topic.append_async(b"", key=b"k", sync="shipped"), int)
    assert_type(await topic.subscribe_async("s", "shared", max_unacked=3), tidelog.Consumer)
    assert_type(engine.list_objects_async("b", limit=3), AsyncIterator[tidelog.ObjectInfo])
    assert_type(await engine.read_async("b", "k", seq=3), tidelog.StoredObject)
    assert_type(await tidelog.open_async(None, fsync_interval_ms=5), tidelog.LogDirectory)
    await topic.ship_async(1)  # type: ignore[call-arg]
    await topic.subscribe_async("s", max_unaked=3)  # type: ignore[call-arg]
    await engine.read_async("b", 5)  # type: ignore[arg-type]
    await tidelog.open_engine_async("e", wal_segment_size=[])  # type: ignore[call-overload]
