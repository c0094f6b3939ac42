"""The change feed: every entry once, in order, with its result, wherever the log is."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.campaign import examples
from tests.engine.engines import RandomEntries, copy_alive, open_local
from tests.engine.stations import EngineNode, new_store, successor

from tidelog.engine.changes import Change
from tidelog.engine.engine import Engine
from tidelog.engine.entry import Batch, CreateBucket, DeleteBucket, DeleteObject, Entry, PutObject, Result, operations
from tidelog.errors import ClosedError, ConflictError, GapError, InputError

Applied = dict[int, tuple[Entry, Result]]


def as_shown(entry: Entry, result: Result) -> Entry:
    """An entry as the feed has it: the data of refused puts is not in the log."""
    if result.status != "refused":
        return entry
    parts = [PutObject(one.bucket, one.key, b"") if isinstance(one, PutObject) else one for one in operations(entry)]
    return Batch(parts) if isinstance(entry, Batch) and len(parts) > 1 else parts[0]


def expected(applied: Applied, start_seq: int = 1, last_seq: int = 1 << 63) -> list[Change]:
    """What the feed must give."""
    return [
        Change(seq, _alone(as_shown(entry, result)), result)
        for seq, (entry, result) in sorted(applied.items())
        if start_seq <= seq <= last_seq
    ]


def _alone(entry: Entry) -> Entry:
    """A batch of one is in the log what its operation is."""
    return entry.entries[0] if isinstance(entry, Batch) and len(entry.entries) == 1 else entry


def apply(engine: Engine, applied: Applied, entries: list[tuple[int, Entry]]) -> None:
    """Applies entries and notes what became of them."""
    for (seq, entry), result in zip(entries, engine.apply_many(entries), strict=True):
        applied[seq] = (entry, result)


STEPS = st.lists(st.tuples(st.sampled_from(["apply", "apply", "roll back", "mark", "crash"]), st.integers(0, 30)))


@settings(max_examples=examples(40))
@given(STEPS, st.integers(0, 99), st.data())
def test_the_feed_is_what_was_applied(steps: list[tuple[str, int]], seed: int, data: st.DataObject) -> None:
    """From any seq on, after rollbacks and crashes, up to the low-water mark where that is asked for."""
    entries, applied = RandomEntries(seed, keys=4, largest=300), Applied()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch, "0")
        engine = open_local(directory)
        for number, (step, amount) in enumerate(steps):
            last = engine.applied_seq
            if step == "apply":
                apply(engine, applied, entries.entries(amount % 12 + 1, last + 1 + amount % 3))
            elif step == "roll back":
                target = max(engine.low_water_mark, last - amount)
                engine.rollback_to(target)
                applied = {seq: one for seq, one in applied.items() if seq <= target}
            elif step == "mark":
                engine.update_low_water_mark(max(engine.low_water_mark, last - amount))
            else:
                copy_alive(directory, Path(scratch, str(number + 1)))
                engine.close(checkpoint=False)
                directory = Path(scratch, str(number + 1))
                engine = open_local(directory)
            assert list(engine.changes(with_values=True)) == expected(applied)
        start_seq = data.draw(st.integers(0, engine.applied_seq + 3))
        assert list(engine.changes(start_seq, with_values=True)) == expected(applied, start_seq)
        committed = list(engine.changes(start_seq, with_values=True, committed=True))
        assert committed == expected(applied, start_seq, engine.low_water_mark)
        engine.close(checkpoint=False)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_what_has_left_the_disk_comes_from_the_store(codec: str) -> None:
    """After a restore the beginning is in the store, and the rest on the disk; a rolled-back tail is in neither."""
    node = EngineNode(new_store(), ship_compression=codec).open()
    applied = Applied()
    entries = RandomEntries("feed")
    apply(node.engine, applied, entries.entries(60))
    doomed = entries.entries(10, node.engine.applied_seq + 1)
    mark = node.engine.applied_seq
    node.engine.apply_many(doomed)
    node.engine.rollback_to(mark)
    apply(node.engine, applied, entries.entries(60, mark + 1))
    node.ship_all()
    node.engine.create_checkpoint()
    apply(node.engine, applied, entries.entries(30, node.engine.applied_seq + 1))
    node.ship_all()
    node.crash()
    with successor(node) as other:
        other.restore()
        other.open()
        assert other.core.wal.first_lsn > 1
        shipped = other.engine.applied_seq
        assert list(other.engine.changes(with_values=True)) == expected(applied)
        apply(other.engine, applied, entries.entries(20, shipped + 1))
        for start_seq in (1, 2, mark, mark + 1, mark + 40, shipped, shipped + 1, shipped + 5):
            assert list(other.engine.changes(start_seq, with_values=True)) == expected(applied, start_seq)
        feed = other.engine.changes(with_values=True)
        first = [next(feed) for _ in range(5)]
        other.ship_all()
        assert first + list(feed) == expected(applied), "shipping in the middle changes nothing"


def test_what_leaves_the_disk_while_it_is_read_comes_from_the_store() -> None:
    """A feed in the middle of the files goes on in the store; one that begins later does so behind what is gone."""
    node = EngineNode(new_store(), local_retention_bytes=0, rotate_max_bytes=4 << 10).open()
    applied, entries = Applied(), RandomEntries("leaving")
    apply(node.engine, applied, entries.entries(60))
    feed, last_seq = node.engine.changes(with_values=True), node.engine.applied_seq
    first = [next(feed) for _ in range(3)]
    for _ in range(2):
        apply(node.engine, applied, entries.entries(60, node.engine.applied_seq + 1))
        node.ship_all()
        node.engine.create_checkpoint()
        node.ship_all()
    assert node.core.wal.first_lsn > 100
    assert first + list(feed) == expected(applied, last_seq=last_seq)
    assert list(node.engine.changes(with_values=True)) == expected(applied)
    node.close()


def test_a_log_without_its_beginning_says_so() -> None:
    """Nothing is skipped in silence."""
    node = EngineNode(new_store()).open()
    node.apply(50)
    node.ship_all()
    node.crash()
    with successor(node) as other:
        other.restore()
        engine = other.open().engine
        engine._change_log()._cold = None  # type: ignore[attr-defined]
        with pytest.raises(GapError, match="no longer in the log"):
            list(engine.changes())


def test_values_prefixes_and_results(tmp_path: Path) -> None:
    """Without values puts are empty; an entry is chosen by what it writes."""
    with open_local(tmp_path) as engine:
        entries: list[Entry] = [
            CreateBucket("a"),
            CreateBucket("ab"),
            PutObject("a", "x/1", b"data", {"by": "ann"}),
            Batch([PutObject("ab", "x", b""), PutObject("a", "y", b"")]),
            DeleteObject("a", "none"),
            PutObject("a", "x/1", b"more", if_absent=True),
            DeleteBucket("ab", force=True),
        ]
        engine.apply_many(enumerate(entries, 1))
        found = {change.seq: change for change in engine.changes()}
        assert found[3] == Change(3, PutObject("a", "x/1", b""), Result(3, "applied"))
        assert [one.result.status for one in found.values()] == [*["applied"] * 4, "nothing", "refused", "applied"]
        assert found[6].result.reason == "if_absent: 'a'/'x/1' is there, with seq 3"
        chosen: dict[str, list[int]] = {
            prefix: [seq for seq, _ in engine.changes(prefix=prefix)]
            for prefix in ("a/", "a/x", "a/y", "ab/", "ab", "b", "a")
        }
        assert chosen == {
            "a/": [1, 3, 4, 5, 6],
            "a/x": [1, 3, 6],
            "a/y": [1, 4],
            "ab/": [2, 4, 7],
            "ab": [2, 4, 7],
            "b": [],
            "a": [1, 2, 3, 4, 5, 6, 7],
        }


def test_a_follower_gets_what_is_applied_and_ends_with_the_engine(tmp_path: Path) -> None:
    """It waits without asking again and again; a committed one waits for the low-water mark."""
    engine = open_local(tmp_path)
    engine.apply(1, CreateBucket("b"))
    seen: dict[bool, list[int]] = {True: [], False: []}
    progress = threading.Condition()
    ended: list[type[BaseException]] = []

    def follow(committed: bool) -> None:
        try:
            for seq, _ in engine.changes(follow=True, committed=committed):
                with progress:
                    seen[committed].append(seq)
                    progress.notify_all()
        except ClosedError as error:
            ended.append(type(error))

    threads = [threading.Thread(target=follow, args=(committed,)) for committed in (True, False)]
    for thread in threads:
        thread.start()
    with progress:
        assert progress.wait_for(lambda: seen[False] == [1], 60)
    engine.apply_many([(seq, PutObject("b", "k", b"%d" % seq)) for seq in range(2, 50)])
    engine.update_low_water_mark(20)
    with progress:
        assert progress.wait_for(lambda: seen == {True: list(range(1, 21)), False: list(range(1, 50))}, 60)
    engine.close()
    for thread in threads:
        thread.join(60)
    assert ended == [ClosedError] * 2


def test_a_rollback_of_what_was_given_out_ends_the_feed(tmp_path: Path) -> None:
    """Of what was not, it does not: the feed goes on with what came in its place."""
    with open_local(tmp_path) as engine:
        engine.apply_many([(1, CreateBucket("b")), *((seq, PutObject("b", "k", b"old")) for seq in range(2, 9))])
        feed = engine.changes(follow=True, with_values=True)
        assert [next(feed).seq for _ in range(4)] == [1, 2, 3, 4]
        engine.rollback_to(4)
        engine.apply(5, PutObject("b", "k", b"new"))
        assert next(feed).entry == PutObject("b", "k", b"new")
        engine.rollback_to(4)
        engine.apply(5, PutObject("b", "k", b"newest"))
        with pytest.raises(ConflictError):
            next(feed)


def test_a_feed_in_a_task(tmp_path: Path) -> None:
    """With and without `follow`; a cancelled task leaves nothing behind."""

    async def look() -> None:
        assert [seq async for seq, _ in engine.changes_async(2)] == [2, 3]
        seen: asyncio.Queue[int] = asyncio.Queue()

        async def follow() -> None:
            async for seq, _ in engine.changes_async(follow=True):
                await seen.put(seq)

        task = asyncio.create_task(follow())
        assert [await asyncio.wait_for(seen.get(), 60) for _ in range(3)] == [1, 2, 3]
        await engine.apply_async(4, PutObject("b", "k", b""))
        assert await asyncio.wait_for(seen.get(), 60) == 4
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    with open_local(tmp_path) as engine:
        engine.apply_many([(1, CreateBucket("b")), (2, PutObject("b", "k", b"")), (3, PutObject("b", "k", b""))])
        asyncio.run(look())
        assert engine._news._wakers == ()
        engine.apply(5, PutObject("b", "k", b""))


def test_wrong_arguments_of_a_feed_are_named(tmp_path: Path) -> None:
    """At once, not at the first entry."""
    wrong: list[dict[str, Any]] = [{"start_seq": -1}, {"start_seq": "1"}, {"prefix": 7}]
    with open_local(tmp_path) as engine:
        for arguments in wrong:
            with pytest.raises(InputError):
                engine.changes(**arguments)
    with pytest.raises(ClosedError):
        engine.changes()
