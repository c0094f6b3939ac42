"""Engines of a server, through a client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.client.conftest import url_of
from tests.fault_proxy import LOSE_ANSWER, FaultProxy
from tests.service.http.serving import WAIT_SECONDS, Served, serving

import tidelog
from tidelog import CreateBucket, DeleteObject, PutObject, RemoteEngine


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A server with an engine."""
    with serving(tmp_path / "data", engine=tmp_path / "engine") as running:
        yield running


@pytest.fixture
def engine(served: Served) -> Iterator[RemoteEngine]:
    with tidelog.connect(url_of(served)) as log:
        (name,) = log.engines()
        yield log.engine(name)


def test_entries_are_applied_and_objects_read(engine: RemoteEngine) -> None:
    """An object is read as of any seq, with its metadata."""
    assert engine.apply(1, CreateBucket("photos")).status == "applied"
    put = PutObject("photos", "a/cat ?%", b"\x00meow", metadata={"n": 1, "t": "x"})
    results = engine.apply_many([(2, put), (3, PutObject("photos", "a/cat ?%", b"purr"))])
    assert [result.seq for result in results] == [2, 3]
    found = engine.read("photos", "a/cat ?%", seq=2)
    assert (found.data, found.metadata, found.seq, found.tier) == (b"\x00meow", {"n": 1, "t": "x"}, 2, "hot")
    assert engine.read("photos", "a/cat ?%").data == b"purr"
    assert (engine.applied_seq, engine.low_water_mark, engine.high_water_mark, engine.truncation_mark) == (3, 0, 0, 0)
    assert [version.seq for version in engine.versions("photos", "a/cat ?%")] == [3, 2]
    assert engine.list_buckets() == ["photos"]
    assert engine.digest() == engine.digest(3) != engine.digest(2)


def test_refusals_have_the_classes_of_the_library(engine: RemoteEngine) -> None:
    """A missing object, a used seq and bytes in metadata raise what the library raises."""
    engine.apply(5, CreateBucket("photos"))
    with pytest.raises(tidelog.NotFoundError):
        engine.read("photos", "none")
    with pytest.raises(tidelog.TidelogError):
        engine.apply(4, CreateBucket("other"))
    with pytest.raises(tidelog.NotSupportedError, match="bytes"):
        engine.apply(6, PutObject("photos", "a", b"", metadata={"raw": b"\xff"}))
    assert engine.applied_seq == 5


def test_seq_that_is_none_is_refused_before_anything_is_sent(engine: RemoteEngine) -> None:
    """Text, and what is no seq of an entry."""
    for wrong in ("a", 0, None, True):
        with pytest.raises(tidelog.InputError, match="seq must be a whole number from 1"):
            engine.apply(wrong, CreateBucket("c"))  # type: ignore[arg-type]


def test_scan_over_many_pages_is_one_state(engine: RemoteEngine) -> None:
    """A scan shows the state of its seq, in both directions, and a listing the same keys."""
    keys = [f"k{number:05}" for number in range(2500)]
    engine.apply_many([(1, CreateBucket("b")), *((n, PutObject("b", key, b"v")) for n, key in enumerate(keys, 2))])
    scanned = engine.scan("b")
    assert next(scanned).key == keys[0]
    engine.apply(9000, DeleteObject("b", keys[2000]))
    assert [one.key for one in scanned] == keys[1:]
    assert [one.key for one in engine.scan("b", reverse=True, seq=8999)] == keys[::-1]
    assert [one.key for one in engine.list_objects("b", "k00", start_after="k00003", limit=3)] == keys[4:7]
    assert [one.data for one in engine.scan("b", "k00001", "k00003", with_values=True)] == [b"v", b"v"]


def test_listing_by_a_delimiter_is_that_of_the_engine(engine: RemoteEngine, served: Served) -> None:
    """Common prefixes and objects, over many pages, from any key or prefix on, as of any seq, in tasks too."""
    local = served.node.http.engines["main"]
    keys = [key for number in range(1100) for key in (f"d{number:04}", f"d{number:04}/a", f"d{number:04}/b/c")]
    engine.apply_many([(1, CreateBucket("b")), *((n, PutObject("b", key, b"v")) for n, key in enumerate(keys, 2))])
    cases: list[dict[str, Any]] = [{}, {"limit": 3, "start_after": "d0007/"}, {"start_after": "d1090/a"}, {"seq": 90}]
    for case in (*cases, {"prefix": "d0002/"}, {"prefix": "d0002/", "limit": 1}, {"prefix": "none"}):
        assert list(engine.list_objects("b", delimiter="/", **case)) == list(
            local.list_objects("b", delimiter="/", **case)
        )
    begun = engine.list_objects("b", delimiter="/")
    first = next(begun)
    engine.apply(9000, DeleteObject("b", keys[-3]))
    assert [first, *begun] == list(local.list_objects("b", seq=8999, delimiter="/"))

    async def in_task() -> list[tidelog.ObjectInfo]:
        return [one async for one in engine.list_objects_async("b", "d0001", delimiter="/")]

    assert [(one.key, one.is_prefix) for one in asyncio.run(in_task())] == [("d0001", False), ("d0001/", True)]
    for wrong in ({"limit": 0}, {"delimiter": 7}):
        with pytest.raises(tidelog.InputError):
            list(engine.list_objects("b", **wrong))  # type: ignore[arg-type]


def test_many_objects_are_read_as_of_one_seq(engine: RemoteEngine, served: Served) -> None:
    """In the order of their keys, None for what is not there; what is no longer kept is an error, not None."""
    local = served.node.http.engines["main"]
    keys = [f"k{number}" for number in range(30)]
    engine.apply_many(
        [(1, CreateBucket("b")), *((n, PutObject("b", key, b"v%d" % n)) for n, key in enumerate(keys, 2))]
    )
    engine.apply_many([(40, DeleteObject("b", "k3")), (41, PutObject("b", "k4", b"new", metadata={"n": 1}))])
    wanted = [("b", "k4"), ("none", "k1"), ("b", "k4"), *(("b", key) for key in (*keys, "other"))]
    for seq in (None, 39, 1):
        assert engine.read_many(wanted, seq) == local.read_many(wanted, seq)
        assert asyncio.run(engine.read_many_async(wanted, seq)) == local.read_many(wanted, seq)
    listed = (("b", one.key) for one in engine.list_objects("b", "k2"))  # asks the server itself
    assert [one.data for one in engine.read_many(listed) if one] == [b"v4", *(b"v%d" % n for n in range(22, 32))]
    assert engine.read_many([]) == []
    for wrong in ("text", [("b",)], [("b", 7)], 7):
        with pytest.raises(tidelog.InputError):
            engine.read_many(wrong)  # type: ignore[arg-type]
    engine.update_low_water_mark(41)
    local.collect_garbage(horizon=41)
    for wrong_seq, kind in ((39, tidelog.NotFoundError), (42, tidelog.InputError)):
        for read in (engine.read_many, local.read_many):
            with pytest.raises(kind):
                read(wanted, wrong_seq)


def test_many_reads_leave_connections_to_others(engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several requests are on their way at once, and no more than half of what a client has."""
    engine.apply_many([(1, CreateBucket("b")), *((n, PutObject("b", f"k{n}", b"v")) for n in range(2, 52))])
    read, running, seen = RemoteEngine._read, 0, set()

    async def counted(*args: Any, **how: Any) -> tidelog.StoredObject:
        nonlocal running
        running += 1
        seen.add(running)
        try:
            return await read(*args, **how)
        finally:
            running -= 1

    monkeypatch.setattr(RemoteEngine, "_read", counted)
    assert len(engine.read_many([("b", f"k{n}") for n in range(2, 52)])) == 50
    assert max(seen) == 4


def test_changes_are_followed(engine: RemoteEngine) -> None:
    """What there is and what comes, in threads and tasks, by prefix; committed ones when they are, none left out."""
    engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "x/1", b"1")), (3, PutObject("b", "y", b"2"))])
    everything = engine.changes(follow=True)
    some = engine.changes(2, follow=True, prefix="b/x", with_values=True)
    assert [next(everything).seq for _ in range(3)] == [1, 2, 3]
    assert next(some).entry == PutObject("b", "x/1", b"1")
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(next, everything), threads.submit(next, some)]
        committed = engine.changes(follow=True, committed=True)
        first = threads.submit(next, committed)
        engine.apply(4, DeleteObject("b", "y"))
        assert waiting[0].result(WAIT_SECONDS).seq == 4
        engine.apply(5, PutObject("b", "x/2", b"3"))
        assert waiting[1].result(WAIT_SECONDS).entry == PutObject("b", "x/2", b"3")
        engine.update_low_water_mark(2)
        assert (first.result(WAIT_SECONDS).seq, next(committed).seq) == (1, 2)
        engine.update_low_water_mark(4)
        assert [next(committed).seq for _ in range(2)] == [3, 4]

    async def in_task() -> list[int]:
        feed = engine.changes_async(5, follow=True)
        seen = [(await anext(feed)).seq]
        coming = asyncio.ensure_future(anext(feed))
        await engine.apply_async(6, DeleteObject("b", "none"))
        seen.append((await asyncio.wait_for(coming, WAIT_SECONDS)).seq)
        return [*seen, *[one.seq async for one in engine.changes_async(6)]]

    assert asyncio.run(in_task()) == [5, 6, 6]


def test_changes_that_are_rolled_back_end_a_feed(engine: RemoteEngine) -> None:
    """Whether it waits then or comes later, when other entries have the same seqs."""
    engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", b"1")), (3, PutObject("b", "k", b"2"))])
    late, waiting = engine.changes(follow=True), engine.changes(follow=True)
    for feed in (late, waiting):
        assert [next(feed).seq for _ in range(3)] == [1, 2, 3]
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(next, waiting)
        engine.rollback_to(2)
        engine.apply_many([(3, PutObject("b", "k", b"other")), (4, PutObject("b", "k", b"more"))])
        with pytest.raises(tidelog.ConflictError, match="rolled back"):
            coming.result(WAIT_SECONDS)
    with pytest.raises(tidelog.ConflictError, match="rolled back"):
        next(late)


def test_entry_whose_answer_was_lost_is_applied_once(served: Served) -> None:
    """The same seq with the same entry is sent again, and changes nothing."""
    with FaultProxy(url_of(served)) as proxy, tidelog.connect(proxy.endpoint) as log:
        engine = log.engine(log.engines()[0])
        engine.apply(1, CreateBucket("b"))
        proxy.misbehave(LOSE_ANSWER, every=2)
        for seq in range(2, 6):
            engine.apply(seq, PutObject("b", "key", b"%d" % seq))
        assert proxy.met[LOSE_ANSWER] > 0
        proxy.heal()
        assert [version.seq for version in engine.versions("b", "key")] == [5, 4, 3, 2]


def test_async_names_do_the_same(engine: RemoteEngine) -> None:
    """Every name has a twin to be awaited."""

    async def work() -> list[str]:
        await engine.apply_async(1, CreateBucket("b"))
        await engine.apply_many_async([(2, PutObject("b", "key", b"v"))])
        assert (await engine.read_async("b", "key")).data == b"v"
        await engine.update_low_water_mark_async(2)
        return [one.key async for one in engine.scan_async("b")]

    assert asyncio.run(work()) == ["key"]
    assert engine.low_water_mark == 2


def test_streams_go_in_and_out_in_pieces(engine: RemoteEngine, tmp_path: Path) -> None:
    """From a file object and an iterator; read back as a file object; one that breaks leaves nothing."""
    data = bytes(range(256)) * (36 << 10)
    engine.apply(1, CreateBucket("b"))
    (tmp_path / "file").write_bytes(data)
    with (tmp_path / "file").open("rb") as file:
        assert engine.apply(2, PutObject("b", "k", file, metadata={"n": 1})).status == "applied"
    assert engine.apply(3, PutObject("b", "k", iter([b"new"]), if_match=2)).status == "applied"
    assert engine.apply(4, PutObject("b", "k", iter([b"x"]), if_absent=True)).status == "refused"
    with engine.open_object("b", "k", seq=2) as opened:
        assert (opened.size, opened.metadata, opened.seq, opened.tier) == (len(data), {"n": 1}, 2, "hot")
        assert (opened.seek(-300, 2), opened.read()) == (len(data) - 300, data[-300:])
        assert (opened.seek(0), opened.read() == data) == (0, True)

    async def in_task() -> tuple[bytes, list[bytes]]:
        async with await engine.open_object_async("b", "k") as file:
            return await file.read(2), [piece async for piece in file]

    assert asyncio.run(in_task()) == (b"ne", [b"w"])

    def breaks() -> Iterator[bytes]:
        yield data[: 5 << 20]
        raise ZeroDivisionError

    broken = PutObject("b", "broken", breaks())
    with pytest.raises(ZeroDivisionError):
        engine.apply(5, broken)
    with pytest.raises(tidelog.InputError, match="was read before"):  # the rest of the stream is not the object
        engine.apply(5, broken)
    with pytest.raises(tidelog.NotFoundError):
        engine.read("b", "broken")
    with pytest.raises(tidelog.NotSupportedError):
        engine.apply(5, tidelog.Batch([PutObject("b", "k", iter([b"x"]))]))
    with pytest.raises(tidelog.NotSupportedError):
        engine.apply_many([(5, PutObject("b", "k", iter([b"x"]))), (6, PutObject("b", "k", b"y"))])


def test_open_object_is_read_to_its_end_when_states_are_forgotten(engine: RemoteEngine, served: Served) -> None:
    """A version is read as long as the engine keeps it: the newest always, one that was replaced or deleted until its
    last state goes, and never bytes of another one."""
    local = served.node.http.engines["main"]
    old, new = b"old" * (3 << 20), b"new" * (3 << 20)
    engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", old)), (3, CreateBucket("c"))])
    engine.update_low_water_mark(3)
    opened = [engine.open_object("b", "k"), engine.open_object("b", "k", seq=2)]
    local.collect_garbage(horizon=3)
    opened.append(engine.open_object("b", "k"))
    assert [one.read(7 << 20) == old[: 7 << 20] for one in opened] == [True] * 3
    engine.apply_many([(4, CreateBucket("d")), (5, PutObject("b", "k", new)), (6, DeleteObject("b", "k"))])
    engine.update_low_water_mark(6)
    replaced = engine.open_object("b", "k", seq=5)
    assert [one.read() == old[7 << 20 :] for one in opened] == [True] * 3
    local.collect_garbage(horizon=6)
    for one in (*opened, replaced):
        one.seek(0)
        with pytest.raises(tidelog.NotFoundError, match="no longer kept"):
            one.read()
