"""The disk that dies: what a crash keeps, what it loses, and how a living disk fails."""

from __future__ import annotations

import contextlib
import errno
import threading
from pathlib import Path

import pytest

from tidelog.errors import LockedError
from tidelog.files import File
from tidelog.testing import Call, Crash, FaultyFiles, Policy

POWER_LOSS: tuple[Policy, ...] = ("lose", "tear", "reorder", "holes")
SEEDS = range(60)
ROOT = Path("/")
A = ROOT / "a"


def durable_file(files: FaultyFiles, path: Path = A, content: bytes = b"old") -> File:
    """A file of which name and content are durable, left open."""
    file = files.create(path)
    file.write_at(0, content)
    file.sync()
    files.sync_directory(path.parent)
    return file


def remains(files: FaultyFiles, policy: Policy, path: Path = A) -> set[bytes | None]:
    """What a file may be after a crash, over many seeds; None where it is gone."""
    return {files.after_crash(policy, seed=seed).tree().get(str(path)) for seed in SEEDS}


class TestContents:
    """What a crash leaves in a file."""

    def test_what_was_synced_survives_everything(self) -> None:
        """A synced file with a synced name is there under every policy."""
        files = FaultyFiles()
        durable_file(files)
        assert [remains(files, policy) for policy in (*POWER_LOSS, "keep")] == [{b"old"}] * 5

    def test_what_was_not_synced_is_lost_with_the_power(self) -> None:
        """A write without a sync is not durable."""
        files = FaultyFiles()
        durable_file(files).write_at(3, b"new")
        assert files.tree() == {"/a": b"oldnew"}
        assert remains(files, "lose") == {b"old"}

    def test_a_killed_process_loses_nothing_that_it_wrote(self) -> None:
        """The system still has it, but it is no more durable than it was."""
        files = FaultyFiles()
        durable_file(files).write_at(3, b"new")
        found = files.after_crash("keep")
        assert found.tree() == {"/a": b"oldnew"}
        assert remains(found, "lose") == {b"old"}
        file = found.open(A)
        file.sync()
        assert remains(found, "lose") == {b"oldnew"}

    def test_unsynced_appends_are_torn_at_any_byte(self) -> None:
        """Some prefix of what was appended is there, over several writes."""
        files = FaultyFiles()
        file = durable_file(files)
        file.write_at(3, b"12")
        file.write_at(5, b"34")
        assert remains(files, "tear") == {b"old", b"old1", b"old12", b"old123", b"old1234"}

    def test_an_unsynced_cut_happened_or_did_not(self) -> None:
        """A truncation is not undone by what follows it."""
        files = FaultyFiles()
        file = durable_file(files)
        file.truncate(1)
        file.write_at(1, b"X")
        assert remains(files, "tear") == {b"old", b"o", b"oX"}

    def test_holes_are_seen_only_when_asked_for(self) -> None:
        """A later sector without an earlier one is possible under `holes` and under nothing else."""
        files = FaultyFiles()
        durable_file(files).write_at(3, b"x" * 2000)
        assert not any(
            b"\0" in (content or b"") for policy in ("tear", "reorder") for content in remains(files, policy)
        )
        assert any(b"\0x" in (content or b"") for content in remains(files, "holes"))

    def test_the_same_seed_leaves_the_same(self) -> None:
        """One seed replays one crash."""
        files = FaultyFiles()
        durable_file(files).write_at(3, b"x" * 1000)
        for policy in POWER_LOSS:
            assert files.after_crash(policy, seed=7).tree() == files.after_crash(policy, seed=7).tree()


class TestNames:
    """What a crash leaves in a directory."""

    def test_a_new_name_needs_a_sync_of_its_directory(self) -> None:
        """Syncing the file alone does not keep it."""
        files = FaultyFiles()
        file = files.create(A)
        file.write_at(0, b"new")
        file.sync()
        assert remains(files, "lose") == {None}
        assert remains(files, "reorder") == {None, b"new"}
        files.sync_directory(ROOT)
        assert remains(files, "lose") == {b"new"}

    def test_a_rename_may_be_undone_until_the_directory_is_synced(self) -> None:
        """Either both names are old or both are new."""
        files = FaultyFiles()
        durable_file(files, A, b"old")
        durable_file(files, ROOT / "a.tmp", b"new")
        files.rename(ROOT / "a.tmp", A)
        found = {tuple(files.after_crash("reorder", seed=seed).tree().items()) for seed in SEEDS}
        assert found == {(("/a", b"new"),), (("/a", b"old"), ("/a.tmp", b"new"))}
        assert remains(files, "lose") == {b"old"}
        files.sync_directory(ROOT)
        assert remains(files, "lose") == {b"new"}

    def test_a_rename_of_an_unsynced_file_can_leave_an_empty_one(self) -> None:
        """The classic way to lose both the old and the new content."""
        files = FaultyFiles()
        durable_file(files)
        files.create(ROOT / "a.tmp").write_at(0, b"new")
        files.rename(ROOT / "a.tmp", A)
        files.sync_directory(ROOT)
        assert remains(files, "lose") == {b""}

    def test_a_removed_file_may_come_back(self) -> None:
        """Removal, too, is durable only with its directory."""
        files = FaultyFiles()
        durable_file(files)
        files.remove(A)
        assert remains(files, "reorder") == {None, b"old"}
        files.sync_directory(ROOT)
        assert remains(files, "reorder") == {None}

    def test_changes_of_names_are_lost_one_by_one(self) -> None:
        """A later name may survive without an earlier one under `reorder`, not under `tear`."""
        files = FaultyFiles()
        for name in ("a", "b"):
            files.create(ROOT / name)
        listings: dict[str, set[tuple[str, ...]]] = {
            policy: {tuple(files.after_crash(policy, seed=seed).list(ROOT)) for seed in SEEDS}
            for policy in ("tear", "reorder")
        }
        assert listings["tear"] == {(), ("a",), ("a", "b")}
        assert listings["reorder"] == {(), ("a",), ("b",), ("a", "b")}

    def test_a_file_is_gone_with_its_directory(self) -> None:
        """Syncing a directory does not keep the directory itself."""
        files = FaultyFiles()
        files.make_directory(ROOT / "d")
        durable_file(files, ROOT / "d" / "a")
        assert files.after_crash("lose").tree() == {}
        files.sync_directory(ROOT)
        assert files.after_crash("lose").tree() == {"/d": None, "/d/a": b"old"}

    def test_a_file_moved_between_directories_is_never_in_neither(self) -> None:
        """As long as neither directory is synced, the move happened or did not."""
        files = FaultyFiles()
        files.make_directories(ROOT / "d")
        durable_file(files)
        files.rename(A, ROOT / "d" / "a")
        found = {tuple(files.after_crash("reorder", seed=seed).tree()) for seed in SEEDS}
        assert found == {("/a", "/d"), ("/d", "/d/a")}

    def test_atomic_writing_leaves_old_or_new_at_every_crash(self) -> None:
        """`write_atomically` keeps its promise at each of its calls under every policy."""
        allowed = [{b"old", b"new"}] * 5 + [{b"new", b"newer"}] * 5 + [{b"newer"}]
        for crash_at, contents in enumerate(allowed, 1):
            before = FaultyFiles()
            durable_file(before)
            files = before.after_crash("keep", crash_at=crash_at)
            with contextlib.suppress(Crash):
                files.write_atomically(A, b"new")
                files.write_atomically(A, b"newer")
            assert files.crashed == (crash_at <= 10)
            for policy in POWER_LOSS:
                assert remains(files, policy) <= contents, (crash_at, policy)


class TestCrash:
    """Dying."""

    def test_the_call_that_crashes_has_no_effect_and_none_follows(self) -> None:
        """Reading is over too: the process is dead."""
        files = FaultyFiles(crash_at=5)
        file = durable_file(files)
        with pytest.raises(Crash, match="call 5 write_at /a"):
            file.write_at(3, b"new")
        for use in (file.sync, file.size, lambda: file.read_at(0, 1), lambda: files.list(ROOT), lambda: files.open(A)):
            with pytest.raises(Crash, match="dead"):
                use()
        file.close()
        assert files.crashed
        assert files.after_crash("keep").tree() == {"/a": b"old"}

    def test_product_code_cannot_swallow_a_crash(self) -> None:
        """It is not an Exception."""
        assert not issubclass(Crash, Exception)

    def test_calls_are_numbered_in_order(self) -> None:
        """The trace names each changing call; looking is not in it."""
        files = FaultyFiles(crash_at=6)
        file = durable_file(files)
        file.read_at(0, 1)
        files.rename(A, ROOT / "b")
        with pytest.raises(Crash):
            files.remove(ROOT / "b")
        assert files.calls == [
            Call(1, "create", "/a"),
            Call(2, "write_at", "/a"),
            Call(3, "sync", "/a"),
            Call(4, "sync_directory", "/"),
            Call(5, "rename", "/b"),
            Call(6, "remove", "/b"),
        ]

    def test_an_interrupted_write_may_have_begun(self) -> None:
        """A prefix of the write that the crash hit takes effect where asked for."""
        files = FaultyFiles(crash_at=5, torn_bytes=2)
        file = durable_file(files)
        with pytest.raises(Crash):
            file.write_at(3, b"new")
        assert files.in_flight_bytes == 3
        assert files.after_crash("keep").tree() == {"/a": b"oldne"}
        assert files.after_crash("keep", torn_bytes=0).tree() == {"/a": b"old"}
        assert files.after_crash("lose").tree() == {"/a": b"old"}
        assert remains(files, "tear") == {b"old", b"oldn", b"oldne"}

    def test_the_next_life_can_be_cut_short_too(self) -> None:
        """Recovery can be crashed like anything else; its calls are numbered from 1."""
        files = FaultyFiles()
        durable_file(files)
        again = files.after_crash("lose", crash_at=1)
        with pytest.raises(Crash):
            again.remove(A)

    def test_locks_do_not_survive(self) -> None:
        """The next owner is not kept out by a dead one."""
        files = FaultyFiles()
        files.lock(ROOT / "lock")
        with pytest.raises(LockedError):
            files.lock(ROOT / "lock")
        files.crash()
        files.after_crash("keep").lock(ROOT / "lock")

    def test_threads_die_together(self) -> None:
        """A crash met by one thread is met by all of them at their next call, and nothing changes any more."""
        files = FaultyFiles(crash_at=500)
        file = files.create(A)
        deaths: list[Crash] = []

        def write() -> None:
            try:
                while True:
                    file.write_at(file.size(), b"x")
            except Crash as crash:
                deaths.append(crash)

        threads = [threading.Thread(target=write) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert len(deaths) == 4
        assert sum(death.call is not None for death in deaths) == 1
        assert len(files.calls) == 500

    def test_a_hook_sees_each_call_before_it_takes_effect(self) -> None:
        """A test can act at a call, for example look at the disk as it is right then."""
        seen: list[tuple[Call, dict[str, bytes | None]]] = []
        files = FaultyFiles(on_call=lambda call: seen.append((call, files.tree())))
        files.create(A).write_at(0, b"new")
        assert seen == [((1, "create", "/a"), {}), ((2, "write_at", "/a"), {"/a": b""})]


class TestFailures:
    """A disk that lives and fails."""

    def test_the_nth_call_fails_with_the_given_error(self) -> None:
        """Only that one, only of that operation, and it changes nothing."""
        files = FaultyFiles()
        file = durable_file(files)
        files.fail("write_at", nth=2, error=errno.EIO)
        file.write_at(3, b"1")
        with pytest.raises(OSError, match="Input/output error") as failed:
            file.write_at(4, b"2")
        assert (failed.value.errno, failed.value.filename) == (errno.EIO, "/a")
        file.write_at(4, b"3")
        assert files.read(A) == b"old13"

    def test_a_failed_write_may_leave_a_part(self) -> None:
        """The prefix that was written can be read."""
        files = FaultyFiles()
        file = durable_file(files)
        files.fail("write_at", error=errno.ENOSPC, partial_bytes=2)
        with pytest.raises(OSError, match="No space"):
            file.write_at(3, b"new")
        assert files.read(A) == b"oldne"

    def test_it_fails_as_often_as_asked_for_or_until_healed(self) -> None:
        """A full disk gets room again."""
        files = FaultyFiles()
        files.fail("create", times=2, error=errno.ENOSPC)
        for _ in range(2):
            with pytest.raises(OSError, match="No space"):
                files.create(A)
        files.create(A)
        files.fail("remove", times=None)
        for _ in range(5):
            with pytest.raises(OSError, match="Input/output"):
                files.remove(A)
        files.heal()
        files.remove(A)

    def test_only_the_named_files_fail(self) -> None:
        """A failure can be narrowed to the names that match."""
        files = FaultyFiles()
        files.fail("create", matching="*.ckpt")
        files.create(ROOT / "wal.log")
        with pytest.raises(OSError, match="Input/output"):
            files.create(ROOT / "wal.ckpt")

    def test_looking_can_fail_too(self) -> None:
        """An error while reading must not be taken for nothing there."""
        files = FaultyFiles()
        file = durable_file(files)
        files.fail("read_at")
        with pytest.raises(OSError, match="Input/output"):
            file.read_at(0, 1)
        files.fail("list", error=errno.EACCES)
        with pytest.raises(PermissionError):
            files.list(ROOT)
        assert file.read_at(0, 3) == b"old"

    def test_an_operation_that_does_not_exist_is_refused(self) -> None:
        """A typing error in a test does not make it pass."""
        files = FaultyFiles()
        with pytest.raises(ValueError, match="no operation 'fsync'"):
            files.fail("fsync")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="no policy"):
            files.after_crash("loose")  # type: ignore[arg-type]

    def test_a_failed_sync_is_never_healed_by_a_second_one(self) -> None:
        """The system has forgotten what it could not write; whoever syncs again is told a lie."""
        files = FaultyFiles()
        file = durable_file(files)
        file.write_at(3, b"new")
        files.fail("sync")
        with pytest.raises(OSError, match="Input/output"):
            file.sync()
        file.sync()
        assert files.read(A) == b"oldnew"
        for policy in POWER_LOSS:
            assert remains(files, policy) == {b"old"}

    def test_what_is_written_again_after_a_failed_sync_is_durable(self) -> None:
        """Only what came before the failure is lost; it leaves a hole before what came after."""
        files = FaultyFiles()
        file = durable_file(files)
        file.write_at(3, b"new")
        files.fail("sync")
        with pytest.raises(OSError, match="Input/output"):
            file.sync()
        file.write_at(6, b"est")
        file.sync()
        assert remains(files, "lose") == {b"old\0\0\0est"}
        file.write_at(3, b"new")
        file.sync()
        assert remains(files, "lose") == {b"oldnewest"}

    def test_a_failed_sync_of_a_directory_is_not_healed_either(self) -> None:
        """The names that it should have kept are lost with the power."""
        files = FaultyFiles()
        files.create(A)
        files.fail("sync_directory")
        with pytest.raises(OSError, match="Input/output"):
            files.sync_directory(ROOT)
        files.sync_directory(ROOT)
        assert remains(files, "reorder") == {None}

    def test_a_gap_before_a_write_takes_room_too(self) -> None:
        """Else a file grew on a full disk by a write far behind its end, and later ones had room in the gap."""
        files = FaultyFiles(capacity_bytes=5)
        file = durable_file(files)
        with pytest.raises(OSError, match="No space"):
            file.write_at(8, b"new")
        assert (files.read(A), files.free_bytes(ROOT)) == (b"old", 2)

    def test_a_full_disk_takes_what_fits(self) -> None:
        """A write is cut at the capacity; overwriting needs no room; removing gives it back."""
        files = FaultyFiles(capacity_bytes=5)
        file = durable_file(files)
        assert files.free_bytes(ROOT) == 2
        with pytest.raises(OSError, match="No space") as full:
            file.write_at(3, b"new")
        assert (full.value.errno, files.read(A), files.free_bytes(ROOT)) == (errno.ENOSPC, b"oldne", 0)
        file.write_at(0, b"OLD")
        with pytest.raises(OSError, match="No space"):
            files.create(ROOT / "b").write_at(0, b"x")
        files.remove(A)
        assert files.free_bytes(ROOT) == 5
        files.heal()
        files.open(ROOT / "b", write=True).write_at(0, b"x" * 100)
