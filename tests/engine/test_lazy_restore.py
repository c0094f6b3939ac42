"""Lazy restores: reads are answered from the store while the disk is filled, with the answers of the engine itself."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from tests.campaign import every
from tests.engine.engines import RandomEntries, assert_state, copy_alive
from tests.engine.list_orchestrator import ListOrchestrator
from tests.engine.model import Model
from tests.engine.stations import DIRECTORY, KEYS, EngineNode
from tests.log.workbench import LIMIT_SECONDS

import tidelog
from tidelog.clock import ManualClock
from tidelog.engine.cold.manifest import Manifest
from tidelog.engine.engine import Engine
from tidelog.engine.reader import EngineReader
from tidelog.engine.recovery.checkpoint import MARKER, MASTER, read_marker
from tidelog.engine.recovery.restore import OnProgress, RestoreProgress
from tidelog.engine.restoring import RestoringEngine
from tidelog.errors import (
    ClosedError,
    ConfigError,
    DataError,
    HeldError,
    InputError,
    NotSupportedError,
    StoreUnavailableError,
    TidelogError,
)
from tidelog.files import LocalFiles
from tidelog.store.metadata.bucket import BucketMetadataStore
from tidelog.testing import Crash, CrashPlan, History, World, cut_world_everywhere

SETTINGS: dict[str, Any] = {"rotate_max_bytes": "64KiB", "buffer_pool_bytes": 1 << 20}


class Lost:
    """An engine whose disk is gone: what it had in its store, as a model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"file://{path}/store"
        self.model = Model()
        source = RandomEntries("lost")
        with tidelog.open_engine(path / "lost", store=self.url, read_only=False, **SETTINGS) as engine:
            for part in range(3):
                entries = source.entries(60, self.model.applied_seq + 1)
                engine.apply_many(entries)
                for seq, entry in entries:
                    self.model.apply(seq, entry)
                engine.update_low_water_mark(engine.applied_seq)
                engine.ship()
                if part == 1:
                    engine.create_checkpoint()
            self.digest = engine.digest()

    def restore(self, name: str = "new", **more: Any) -> tidelog.RestoringEngine:
        restoring = tidelog.restore_engine(self.path / name, store=self.url, lazy=True, **SETTINGS, **more)
        assert isinstance(restoring, tidelog.RestoringEngine)
        return restoring


@pytest.fixture
def lost(tmp_path: Path) -> Lost:
    return Lost(tmp_path)


class Held:
    """Holds a restore where it first tells of its progress, until it may go on."""

    def __init__(self) -> None:
        self.may_go_on = Event()

    def __call__(self, progress: RestoreProgress) -> None:
        assert self.may_go_on.wait(LIMIT_SECONDS)


@pytest.fixture
def held() -> Iterator[Held]:
    one = Held()
    yield one
    one.may_go_on.set()


def test_lazy_restore_answers_reads_before_the_disk_is_filled(lost: Lost, held: Held) -> None:
    """Every kind of read, at any seq, while the restore stands still; then the engine takes over with the same."""
    with lost.restore(on_progress=held) as restoring:
        assert not restoring.is_restored
        assert restoring.progress is not None
        assert read_marker(LocalFiles(), lost.path / "new").is_lazy  # commands read the store meanwhile
        for seq in (lost.model.applied_seq, 70, 3):
            assert_state(restoring._reader, lost.model, seq)
        assert restoring.digest() == lost.digest
        bucket = restoring.list_buckets()[0]
        before = list(restoring.scan(bucket, with_values=True))
        begun = restoring.scan(bucket, with_values=True)
        first = next(begun, None)
        with pytest.raises(TimeoutError, match="the disk is not filled after 0 seconds"):
            restoring.wait(0)
        with pytest.raises(InputError, match="timeout must be a number of seconds"):
            restoring.wait("x")
        held.may_go_on.set()
        engine = restoring.wait(LIMIT_SECONDS)
        assert engine is restoring._current
        assert [one for one in (first, *begun) if one is not None] == before  # what was begun ends where it began
        assert list(restoring.scan(bucket, with_values=True)) == list(engine.scan(bucket, with_values=True)) == before
        assert restoring.digest() == engine.digest() == lost.digest
        assert restoring.applied_seq == engine.applied_seq == lost.model.applied_seq
        engine.apply(engine.applied_seq + 1, tidelog.CreateBucket("new"))
        assert "new" in restoring.list_buckets()
        engine.update_low_water_mark(engine.applied_seq)
        assert engine.ship() == engine.applied_seq
    with pytest.raises(ClosedError):
        engine.read(bucket, "k")


def test_lazy_restore_catches_up_with_its_orchestrator(lost: Lost) -> None:
    """What `wait` returns has the entries that only the orchestrator had."""
    last = lost.model.applied_seq + 1
    orchestrator = ListOrchestrator({**lost.model.entries, last: tidelog.CreateBucket("only-in-the-log")})
    with lost.restore(orchestrator=orchestrator) as restoring:
        engine = restoring.wait(LIMIT_SECONDS)
        assert engine.applied_seq == last
        assert restoring.has_bucket("only-in-the-log")


def test_lazy_restore_that_was_killed_is_begun_again(lost: Lost, held: Held) -> None:
    """What a process leaves that is killed midway cannot be opened, and the next restore goes on from there."""
    with lost.restore(on_progress=held):
        copy_alive(lost.path / "new", lost.path / "killed")
        with pytest.raises((ConfigError, InputError)):
            tidelog.open_engine(lost.path / "killed", store=lost.url)
        held.may_go_on.set()
    with lost.restore("killed", take_over=True) as again:
        assert again.wait(LIMIT_SECONDS).digest() == lost.digest


def test_lazy_restore_that_is_closed_midway_is_begun_again(lost: Lost) -> None:
    """Closing gives it up at the next step; the same directory takes the next attempt."""
    reached, may_go_on = Event(), Event()

    def hold(progress: RestoreProgress) -> None:
        reached.set()
        assert may_go_on.wait(LIMIT_SECONDS)

    restoring = lost.restore(on_progress=hold)
    assert reached.wait(LIMIT_SECONDS)
    restoring._is_closed = True  # as `close` does first; the restore hears of it at its next step
    may_go_on.set()
    with pytest.raises(ClosedError):
        restoring.wait(LIMIT_SECONDS)
    restoring.close()
    restoring.close()
    with pytest.raises(ClosedError):
        restoring.digest()
    with lost.restore() as again:
        assert again.wait(LIMIT_SECONDS).digest() == lost.digest


def test_lazy_restore_that_cannot_begin_is_refused_at_once(lost: Lost) -> None:
    """A directory with something in it, and an engine that another node has open."""
    (lost.path / "used").mkdir()
    (lost.path / "used" / "file").write_bytes(b"?")
    with pytest.raises(InputError, match="empty directory"):
        lost.restore("used")
    with (
        tidelog.open_engine(lost.path / "lost", store=lost.url, read_only=False, **SETTINGS),
        pytest.raises(HeldError),
    ):
        lost.restore()


def test_lazy_restore_begins_while_its_reader_is_opened(lost: Lost) -> None:
    """The disk is filled from the first moment on; a restore that is quicker than the reader is what answers."""
    has_begun, is_done = Event(), Event()

    def restore(on_progress: OnProgress) -> Engine:
        has_begun.set()
        engine = tidelog.restore_engine(lost.path / "new", store=lost.url, on_progress=on_progress)
        is_done.set()
        return engine

    def open_reader() -> EngineReader:
        assert has_begun.wait(LIMIT_SECONDS)
        assert is_done.wait(LIMIT_SECONDS)
        return tidelog.open_engine(store=lost.url, read_only=True)

    with RestoringEngine(open_reader, restore) as restoring:
        engine = restoring.wait(LIMIT_SECONDS)
        assert restoring._current is engine
        assert restoring.digest() == lost.digest


def test_lazy_restore_ends_where_its_reader_cannot_be_opened(lost: Lost) -> None:
    """The error is raised, and the directory takes the next attempt."""

    def restore(on_progress: OnProgress) -> Engine:
        return tidelog.restore_engine(lost.path / "new", store=lost.url, on_progress=on_progress)

    def open_reader() -> EngineReader:
        raise StoreUnavailableError("the store is away")

    with pytest.raises(StoreUnavailableError, match="is away"):
        RestoringEngine(open_reader, restore)
    if (lost.path / "new" / "engine.json").exists():  # it was quicker, and was closed
        with tidelog.open_engine(lost.path / "new", store=lost.url) as engine:
            assert engine.digest() == lost.digest
    else:
        with lost.restore() as again:
            assert again.wait(LIMIT_SECONDS).digest() == lost.digest


def test_closing_a_restored_engine_leaves_what_began_before_it_came(lost: Lost, held: Held) -> None:
    """A scan of the reader goes on; closing what `restore_engine` has returned closes that too."""
    with lost.restore(on_progress=held) as restoring:
        bucket = restoring.list_buckets()[0]
        begun, expected = restoring.scan(bucket), [one.key for one in restoring.scan(bucket)]
        first = next(begun)
        held.may_go_on.set()
        restoring.wait(LIMIT_SECONDS).close()
        assert [first.key, *(one.key for one in begun)] == expected
    with pytest.raises(ClosedError):
        restoring._reader.digest()


def test_reader_of_a_finished_restore_asks_the_store_only_for_feeds(lost: Lost, held: Held) -> None:
    """Nobody begins to read there any more; a feed that was begun before, and waits, still gets what is shipped."""
    with lost.restore(on_progress=held, refresh_seconds=3600) as restoring:
        reader = restoring._reader
        changes = restoring.changes(lost.model.applied_seq, follow=True)
        before = reader.statistics().refreshes
        reader._refresh_again()
        assert reader.statistics().refreshes == before + 1, "it is what answers"
        held.may_go_on.set()
        engine = restoring.wait(LIMIT_SECONDS)
        requests: list[str] = []
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(reader._follower, "_read_manifest", _noting(requests, reader._follower._read_manifest))
            reader._refresh_again()
            assert requests == []
            assert next(changes).seq == lost.model.applied_seq
            engine.apply(engine.applied_seq + 1, tidelog.CreateBucket("new"))
            engine.update_low_water_mark(engine.applied_seq)
            engine.ship()
            with reader._news.listening(lambda: None):  # as a feed does while it waits
                reader._refresh_again()
            assert requests == ["manifest"]
        assert next(changes).seq == engine.applied_seq


def _noting(requests: list[str], read: Callable[[], Manifest]) -> Callable[[], Manifest]:
    def noted() -> Manifest:
        requests.append("manifest")
        return read()

    return noted


def test_restoring_engine_asked_to_change_something_names_the_fix(lost: Lost) -> None:
    """Only what `wait` returns can be changed, and `hasattr` says so."""
    with lost.restore() as restoring:
        assert not hasattr(restoring, "apply")
        with pytest.raises(NotSupportedError, match=r"being restored.*apply is not possible") as refused:
            getattr(restoring, "apply")  # noqa: B009 - a type checker knows it without
        assert "wait() returns it" in str(refused.value.hint)


def test_lazy_restore_that_fails_later_fails_wait_and_not_reads(lost: Lost, held: Held) -> None:
    """Records are damaged that the restore needs; what was read from the store before is still answered."""
    with lost.restore(on_progress=held) as restoring:
        digest = restoring.digest()
        for path in (lost.path / "store").rglob("data-*.tlog"):
            path.write_bytes(b"?" * path.stat().st_size)
        held.may_go_on.set()
        with pytest.raises(DataError):
            restoring.wait(LIMIT_SECONDS)
        assert not restoring.is_restored
        assert restoring.digest() == digest


@pytest.mark.deeper
def test_lazy_restore_that_is_cut_anywhere_is_begun_again() -> None:
    """Whichever change of disk or store is the last one: reads are right until then, and the next restore, or opening
    where it was complete, has everything and goes on shipping.
    """
    past = World(clock=ManualClock())
    with node_in(past, "a").open() as lost:
        lost.apply(50)
        lost.ship_all()
        lost.engine.create_checkpoint()
        lost.apply(50)
        lost.ship_all()
        model = lost.model
    seen: set[bool] = set()

    def check(world: World, history: History) -> None:
        files = world.files("b")
        is_complete = files.exists(DIRECTORY / MASTER) and not files.exists(DIRECTORY / MARKER)
        seen.add(is_complete)
        restore_and_go_on(world, model, is_complete=is_complete)

    cut_world_everywhere(
        lambda world, history: restore_and_go_on(world, model),
        check,
        CrashPlan(every=every(13), grace_seconds=0.05),
        start=lambda crash_at: past.after_crash("keep", crash_at=crash_at),
    )
    assert seen == {False, True}


def node_in(world: World, name: str) -> EngineNode:
    assert isinstance(world.clock, ManualClock)
    return EngineNode(world.store, name=name, files=world.files(name), clock=world.clock)


def restore_and_go_on(world: World, model: Model, *, is_complete: bool = False) -> None:
    """A node restores the engine lazily, reads it meanwhile, and goes on with it."""
    node, last_seq = node_in(world, "b"), model.applied_seq
    node.model = copy.deepcopy(model)

    def restore(on_progress: OnProgress) -> Engine:
        if not is_complete:
            node.restore(on_progress=on_progress)
        return node.open().engine

    def open_reader() -> EngineReader:
        metadata = BucketMetadataStore(world.store, read_only=True)
        return EngineReader(world.store, metadata, KEYS, node.settings, runs_in_background=False)

    try:
        with RestoringEngine(open_reader, restore) as restoring:
            for seq in (last_seq, 30):
                assert_state(cast(Engine, restoring), model, seq)
            assert restoring.wait(LIMIT_SECONDS).applied_seq >= last_seq
            node.apply_these(RandomEntries("goes on").entries(10, last_seq + 1))  # again, if it has had them
            node.ship_all()
            node.engine.create_checkpoint()
            node.assert_same([last_seq])
    finally:
        if world.crashed:
            with contextlib.suppress(Crash, TidelogError, OSError):
                node.crash()


def test_lazy_drill_claims_nothing(lost: Lost) -> None:
    """Beside the living owner: a copy for reading, readable at once."""
    with tidelog.open_engine(lost.path / "lost", store=lost.url, read_only=False, **SETTINGS) as owner:
        with lost.restore("drill", claim=False) as restoring:
            assert restoring.digest() == lost.digest
            assert restoring.wait(LIMIT_SECONDS).digest() == lost.digest
        owner.apply(owner.applied_seq + 1, tidelog.CreateBucket("further"))
        owner.update_low_water_mark(owner.applied_seq)
        assert owner.ship() == owner.applied_seq


def test_lazy_restore_in_tasks(lost: Lost) -> None:
    """The async twins are those of whichever answers."""

    async def restore() -> None:
        async with await tidelog.restore_engine_async(lost.path / "new", store=lost.url, lazy=True) as restoring:
            assert await restoring.digest_async() == lost.digest
            engine = await restoring.wait_async(LIMIT_SECONDS)
            assert await restoring.digest_async() == await engine.digest_async() == lost.digest

    asyncio.run(asyncio.wait_for(restore(), LIMIT_SECONDS))
