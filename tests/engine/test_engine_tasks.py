"""The async twins of an engine: the same results, a loop that goes on, and threads that end with the engine."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tests.engine.engines import RandomEntries, assert_same, open_local
from tests.engine.model import Model
from tests.engine.stations import EngineNode, new_store
from tests.log.workbench import LIMIT_SECONDS

import tidelog
from tidelog.engine import changes, scan_iterator
from tidelog.engine.changes import Change
from tidelog.engine.engine import Engine
from tidelog.engine.entry import CreateBucket, Entry, PutObject, Result
from tidelog.errors import ClosedError, InputError, NotFoundError, NotSupportedError

# What waits for nothing, or has its own way of waiting (`Transaction.lock_async`).
WITHOUT_TWIN = {"pin", "statistics", "transaction"}


def test_everything_that_may_wait_has_an_async_twin() -> None:
    """A method that is added without one is noticed here."""
    methods = {name for name, _ in inspect.getmembers(Engine, inspect.isfunction) if not name.startswith("_")}
    twins = {name for name in methods if name.endswith("_async")}
    assert methods - twins - {name.removesuffix("_async") for name in twins} <= WITHOUT_TWIN


def test_twins_take_the_same_arguments() -> None:
    """In the same order, under the same names, with the same defaults."""
    for name, method in inspect.getmembers(Engine, inspect.isfunction):
        twin = getattr(Engine, f"{name}_async", None)
        if twin is not None and not name.startswith("_"):
            wanted, found = inspect.signature(method).parameters, inspect.signature(twin).parameters
            assert [(one.name, one.default) for one in found.values()] == [
                (one.name, one.default) for one in wanted.values()
            ], name


def test_an_engine_is_driven_by_tasks_alone(tmp_path: Path) -> None:
    """Everything that can be done in threads can be done in tasks, with the same results."""

    async def play() -> None:
        async with open_local(tmp_path / "e") as engine:
            await engine.apply_async(1, CreateBucket("b"))
            results = await engine.apply_many_async((seq, PutObject("b", f"k{seq}", b"%d" % seq)) for seq in (2, 3, 4))
            assert [result.status for result in results] == ["applied"] * 3
            assert (await engine.read_async("b", "k3")).data == b"3"
            with pytest.raises(NotFoundError):
                await engine.read_async("b", "k3", 2)
            assert [item.key async for item in engine.list_objects_async("b")] == ["k2", "k3", "k4"]
            assert await engine.list_buckets_async() == ["b"]
            assert [one.seq for one in await engine.versions_async("b", "k2")] == [2]
            await engine.update_low_water_mark_async(3)
            assert await engine.digest_async() == engine.digest()
            await engine.rollback_to_async(3)
            assert (engine.applied_seq, engine.low_water_mark) == (3, 3)
            assert await engine.create_checkpoint_async() == 3
            with pytest.raises(NotSupportedError):
                await engine.ship_async()
        with pytest.raises(ClosedError):
            await engine.apply_async(9, CreateBucket("c"))
        await engine.close_async()

    asyncio.run(play())


def test_every_twin_does_what_it_is_the_twin_of(tmp_path: Path) -> None:
    """With a store, and with everything that there is to be done there."""
    called: set[str] = set()

    async def play() -> None:
        engine = await tidelog.open_engine_async(tmp_path / "e", store=(tmp_path / "store").as_uri())

        async def twin(name: str, *args: object, **kwargs: object) -> Any:
            called.add(name)
            return await getattr(engine, f"{name}_async")(*args, **kwargs)

        assert (await twin("apply", 1, CreateBucket("b"))).applied
        puts = [(seq, PutObject("b", f"k{seq % 3}", b"%d" % seq, {"n": seq})) for seq in range(2, 20)]
        assert len(await twin("apply_many", puts)) == 18
        await twin("rollback_to", 15)
        await twin("update_low_water_mark", 15)
        assert await twin("ship") == engine.high_water_mark == 15
        assert await twin("create_checkpoint") == 15
        assert await twin("read", "b", "k0", 9) == engine.read("b", "k0", 9)
        assert await twin("stat", "b", "k0", 9) == engine.stat("b", "k0", 9)
        async with await twin("open_object", "b", "k0", 9) as file:
            assert await file.read() == engine.read("b", "k0", 9).data
        assert await twin("find_object", "b", "k0", 9) == engine.find_object("b", "k0", 9)
        assert await twin("has_bucket", "b") is True
        assert await twin("versions", "b", "k0") == engine.versions("b", "k0")
        assert await twin("digest", 9) == engine.digest(9)
        assert await twin("list_buckets") == ["b"]
        assert await twin("prefetch", "b") == engine.prefetch("b")
        assert await twin("owner_is_alive") is engine.owner_is_alive() is True
        with pytest.raises(NotSupportedError):
            await twin("take_over")
        assert await twin("read_many", [("b", "k0"), ("b", "none")]) == [engine.read("b", "k0"), None]
        called.update(("list_objects", "scan", "changes"))
        assert [one.key async for one in engine.list_objects_async("b")] == ["k0", "k1", "k2"]
        assert [one async for one in engine.scan_async("b", with_values=True)] == [*engine.scan("b", with_values=True)]
        assert [one async for one in engine.changes_async()] == [*engine.changes()]
        plan = await twin("plan_garbage", 12)
        assert plan == engine.plan_garbage(12)
        assert (await twin("collect_garbage", plan)).removed_versions == plan.removable_versions > 0
        assert (await twin("compact", 0.0)).replaced_objects == 0
        assert (await twin("compact_index")).pages_after >= 1
        assert (await twin("verify")).ok
        await twin("close")
        with pytest.raises(ClosedError):
            await twin("plan_garbage")

    asyncio.run(play())
    assert called == {name[: -len("_async")] for name in dir(Engine) if name.endswith("_async")}


def test_a_listing_may_be_longer_than_one_step(tmp_path: Path) -> None:
    """It comes in pieces, and none is lost between them."""

    async def play() -> None:
        async with open_local(tmp_path / "e") as engine:
            engine.apply(1, CreateBucket("b"))
            engine.apply_many([(seq, PutObject("b", f"{seq:06}", b"")) for seq in range(2, 2502)])
            keys = [item.key async for item in engine.list_objects_async("b")]
            assert keys == [f"{seq:06}" for seq in range(2, 2502)]
            with pytest.raises(NotFoundError):
                [item async for item in engine.list_objects_async("nowhere")]

    asyncio.run(play())


def test_tasks_share_a_sync_and_keep_their_order(tmp_path: Path) -> None:
    """Hundreds of applies at once, with other calls between them, come to the disk in few syncs and in order."""
    entries = RandomEntries("tasks").entries(600)
    model = Model()
    for seq, entry in entries:
        model.apply(seq, entry)

    async def play() -> None:
        async with open_local(tmp_path / "e") as engine:
            before = engine.statistics().wal.sync_seconds.count
            calls = [asyncio.create_task(engine.apply_async(*one)) for one in entries[:300]]
            many = asyncio.create_task(engine.apply_many_async(entries[300:310]))
            mark = asyncio.create_task(engine.update_low_water_mark_async(entries[309][0]))
            later = [asyncio.create_task(engine.apply_async(*one)) for one in entries[310:]]
            await asyncio.gather(*calls, many, mark, *later)
            results = [*(call.result() for call in calls), *many.result(), *(call.result() for call in later)]
            assert [result.seq for result in results] == [seq for seq, _ in entries]
            assert engine.statistics().wal.sync_seconds.count - before < 300
            assert engine.low_water_mark == entries[309][0]
            assert_same(engine, model)

    asyncio.run(play())


def test_an_entry_that_is_wrong_fails_alone(tmp_path: Path) -> None:
    """Those who wait with it get what they would have got by themselves."""

    async def play() -> None:
        async with open_local(tmp_path / "e") as engine:
            engine.apply(5, CreateBucket("b"))
            wanted: list[tuple[int, Entry]] = [
                (6, PutObject("b", "x", b"1")),
                (3, CreateBucket("no")),
                (7, PutObject("b", "y", b"2")),
            ]
            first, wrong, last = await asyncio.gather(
                *(engine.apply_async(seq, entry) for seq, entry in wanted), return_exceptions=True
            )
            assert isinstance(wrong, InputError)
            assert [getattr(one, "status", None) for one in (first, last)] == ["applied", "applied"]

    asyncio.run(play())


def test_the_loop_goes_on_while_the_disk_is_waited_for(tmp_path: Path) -> None:
    """An apply that takes long holds up no other task, and reading needs no turn behind it."""

    async def play() -> None:
        async with open_local(tmp_path / "e") as engine:
            engine.apply(1, CreateBucket("b"))
            held, release = threading.Event(), threading.Event()

            def hold() -> None:
                with engine._applying:
                    held.set()
                    release.wait(120)

            holder = threading.Thread(target=hold)
            holder.start()
            held.wait(120)
            applying = asyncio.create_task(engine.apply_async(2, PutObject("b", "k", b"v")))
            assert await engine.list_buckets_async() == ["b"]
            assert holder.is_alive()
            assert not applying.done()
            release.set()
            assert (await applying).applied
            holder.join()

    asyncio.run(play())


def test_who_is_cancelled_before_its_turn_has_not_applied(tmp_path: Path) -> None:
    """And those behind it are served."""

    async def play() -> None:
        async with open_local(tmp_path / "e") as engine:
            held, release = threading.Event(), threading.Event()

            def hold() -> None:
                with engine._applying:
                    held.set()
                    release.wait(120)

            holder = threading.Thread(target=hold)
            holder.start()
            held.wait(120)
            first = asyncio.create_task(engine.apply_async(1, CreateBucket("a")))
            await asyncio.sleep(0.05)  # its turn has begun
            given_up = asyncio.create_task(engine.apply_async(2, CreateBucket("b")))
            behind = asyncio.create_task(engine.apply_async(3, CreateBucket("c")))
            await asyncio.sleep(0.05)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            release.set()
            await asyncio.gather(first, behind)
            assert engine.list_buckets() == ["a", "c"]
            holder.join()

    asyncio.run(play())


def test_threads_end_with_the_engine(tmp_path: Path) -> None:
    """Whichever way it is closed, none is left, and what had not begun is told."""

    async def play() -> None:
        engine = open_local(tmp_path / "e")
        await engine.apply_async(1, CreateBucket("b"))
        engine.close()
        with pytest.raises(ClosedError):
            await engine.read_async("b", "k")
        with pytest.raises(ClosedError):
            await engine.apply_many_async([(2, CreateBucket("c"))])

    asyncio.run(play())
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and _task_threads():
        time.sleep(0.01)
    assert _task_threads() == []


def _task_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("tidelog-engine-")]


@pytest.mark.parametrize("reverse", [False, True])
def test_tasks_read_the_same_as_threads_wherever_values_are(*, reverse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values here, in the log in the store and in files of their own, in turn: nothing is lost or doubled."""
    monkeypatch.setattr(scan_iterator, "ITEMS_AT_ONCE", 7)
    monkeypatch.setattr(changes, "_TAKEN_AT_ONCE", 5)
    settings: dict[str, Any] = {"inline_value_bytes": 0, "local_retention_bytes": 0, "disk_cache_bytes": 0}
    with EngineNode(new_store(), large_value_bytes=5000, **settings).open() as node:
        engine, keys = node.engine, [f"k{number:03}" for number in range(150)]
        puts = [PutObject("b", key, key.encode() * (2000 if key[-1] == "7" else 50), {"key": key}) for key in keys]
        node.apply_these([(1, CreateBucket("b")), *enumerate(puts, 2)])
        node.ship_all()
        engine.create_checkpoint()
        engine.ship()
        again = [PutObject("b", key, key.encode() * (3000 if key[-1] == "7" else 30)) for key in keys[70:90]]
        node.apply_these([(200 + number, put) for number, put in enumerate(again)])
        tiers = [engine.stat("b", key).tier for key in keys]
        assert "cold" in tiers
        assert "hot" in tiers

        async def play() -> None:
            how: dict[str, Any] = {"reverse": reverse, "with_values": True}
            assert [one async for one in engine.scan_async("b", **how)] == [*engine.scan("b", **how)]
            scan = engine.scan_async("b", **how)
            for place in ("k010", "k075", "k089", "k003"):
                scan.seek(place)
                found = [await anext(scan) for _ in range(3)]
                assert (
                    found == [*engine.scan("b", place, None, limit=3, **how)] if not reverse else found[0].key == place
                )
            await scan.aclose()
            everything = [as_bytes(one) async for one in engine.changes_async(with_values=True)]
            assert everything == [as_bytes(one) for one in engine.changes(with_values=True)]
            assert len(everything) == 171
            for key in keys[::9]:
                part = await engine.read_async("b", key, offset=3, length=50)
                assert part == engine.read("b", key, offset=3, length=50)
                async with await engine.open_object_async("b", key) as opened:
                    with engine.open_object("b", key) as other:
                        assert (opened.tier, opened.metadata) == (other.tier, other.metadata)
                        assert await opened.read() == other.read()

        asyncio.run(asyncio.wait_for(play(), LIMIT_SECONDS))


def as_bytes(change: Change) -> tuple[int, bytes, Result]:
    """A change with its data, however that comes."""
    data = getattr(change.entry, "data", b"")
    return change.seq, data if isinstance(data, bytes) else b"".join(data), change.result
