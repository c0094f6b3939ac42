"""Cases that broke a log once: each opens with the loss it prevents."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tidelog
from tidelog.files import LocalFiles
from tidelog.log import Log, LogSettings
from tidelog.log.append_queue import AppendQueue
from tidelog.log.binding import BINDING_BYTES
from tidelog.log.repair import plan_repair
from tidelog.log.view import LogView

NAME = "a/b"


def topic_files(root: Path) -> list[Path]:
    return sorted((root / NAME).glob("wal.*.log"))


def values(root: Path) -> dict[int, bytes]:
    with tidelog.open(root) as log:
        return {message.offset: message.value or b"" for message in log.topic(NAME).read(on_gap="skip")}


def flip(path: Path, byte: int) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)


def log_that_holds_frames(root: Path) -> tuple[int, int]:
    """A topic whose message 10 is a copy of a log with the offsets that come next: where that message is."""
    with tidelog.open(root / "source") as log:
        source = log.topic(NAME)
        source.append_many([b"embedded %d" % number for number in range(40)])
        source.flush()
    copied = topic_files(root / "source")[0].read_bytes()[BINDING_BYTES:]
    inner = copied[copied.index((11).to_bytes(8, "little")) :]
    with tidelog.open(root / "log") as log:
        topic = log.topic(NAME)
        topic.append_many([b"real %d" % number for number in range(10)], sync=True)
        start = topic_files(root / "log")[0].stat().st_size
        topic.append(inner, sync=True)
        end = topic_files(root / "log")[0].stat().st_size
        topic.append_many([b"real %d" % number for number in range(11, 30)])
    return start, end


def test_a_torn_message_that_holds_frames_is_a_torn_tail(tmp_path: Path) -> None:
    """Lost: a log that could not be opened after an ordinary crash, because its last message was a copy of a log."""
    start, end = log_that_holds_frames(tmp_path)
    path = topic_files(tmp_path / "log")[0]
    for size in (start + 17, start + (end - start) // 2, end - 1):
        copy = tmp_path / f"cut-{size}"
        shutil.copytree(tmp_path / "log", copy)
        os.truncate(topic_files(copy)[0], size)
        assert values(copy) == {number: b"real %d" % number for number in range(10)}
    assert path.stat().st_size > end


def test_a_repair_never_takes_frames_inside_a_message_for_the_log(tmp_path: Path) -> None:
    """Lost: the real messages behind a damaged one, replaced by those that it held a copy of."""
    start, _ = log_that_holds_frames(tmp_path)
    flip(topic_files(tmp_path / "log")[0], start + 30)
    plan = plan_repair(tmp_path / "log" / NAME)
    plan.apply()
    assert plan.lost == ((10, 10),)
    assert values(tmp_path / "log") == {number: b"real %d" % number for number in range(30) if number != 10}


@pytest.mark.parametrize("with_checkpoint", [True, False])
@pytest.mark.parametrize("way", ["swapped", "doubled"])
def test_good_frames_are_never_cut_as_a_torn_tail(tmp_path: Path, way: str, with_checkpoint: bool) -> None:
    """Lost: a whole file of synced messages, cut to nothing because its offsets were not the next ones."""
    with tidelog.open(tmp_path, rotate_max_bytes=1000) as log:
        for number in range(25):
            log.topic(NAME).append(b"message %d" % number)
    first, last = topic_files(tmp_path)[0], topic_files(tmp_path)[-1]
    if way == "swapped":
        kept = first.read_bytes()
        first.write_bytes(last.read_bytes())
        last.write_bytes(kept)
    else:
        shutil.copy(first, last.with_name("wal.0000000009.log"))
    if not with_checkpoint:
        (tmp_path / NAME / "wal.ckpt").unlink()
    before = {path.name: path.read_bytes() for path in topic_files(tmp_path)}
    with tidelog.open(tmp_path) as log, pytest.raises(tidelog.DataError):
        log.topic(NAME)
    assert {path.name: path.read_bytes() for path in topic_files(tmp_path)} == before


def test_one_header_does_not_push_out_the_files_behind_it(tmp_path: Path) -> None:
    """Lost: four good files, removed by a repair that believed one damaged header."""
    with tidelog.open(tmp_path, rotate_max_bytes=32) as log:
        for number in range(8):
            log.topic(NAME).append(b"message %d" % number)
    (tmp_path / NAME / "wal.ckpt").unlink()
    path = topic_files(tmp_path)[2]
    data = path.read_bytes()
    path.write_bytes(data[:BINDING_BYTES] + (6).to_bytes(8, "little") + data[BINDING_BYTES + 8 :])
    plan_repair(tmp_path / NAME).apply()
    assert values(tmp_path) == {number: b"message %d" % number for number in range(8) if number != 2}


def test_deleting_a_topic_does_not_follow_links(tmp_path: Path) -> None:
    """Lost: an archive outside of the log directory, emptied through a link in a topic."""
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "keep").write_text("kept")
    with tidelog.open(tmp_path / "log") as log:
        log.topic(NAME).append(b"value")
        (tmp_path / "log" / NAME / "removed").symlink_to(archive)
        log.delete_topic(NAME)
    assert (archive / "keep").read_text() == "kept"


def test_a_topic_moved_elsewhere_by_a_link_can_be_deleted(tmp_path: Path) -> None:
    """Lost: the whole log directory, which could not be opened after such a topic was deleted."""
    with tidelog.open(tmp_path / "log") as log:
        log.topic(NAME).append(b"value")
    shutil.move(tmp_path / "log" / NAME, tmp_path / "elsewhere")
    (tmp_path / "log" / NAME).symlink_to(tmp_path / "elsewhere")
    with tidelog.open(tmp_path / "log") as log:
        log.delete_topic(NAME)
        assert log.topics() == []
    with tidelog.open(tmp_path / "log") as log:
        assert log.topics() == []


def test_a_lock_needs_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost: a log that stayed locked for the life of the process because its lock file could not be written."""

    def no_room(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", no_room)
        LocalFiles().lock(tmp_path / "lock").release()
    LocalFiles().lock(tmp_path / "lock").release()


def test_a_released_lock_is_free_although_a_child_has_a_copy(tmp_path: Path) -> None:
    """Lost: a log that could not be opened again while some other program was just being started."""
    lock = LocalFiles().lock(tmp_path / "lock")
    copy = os.dup(lock._descriptor)  # type: ignore[attr-defined]
    lock.release()
    LocalFiles().lock(tmp_path / "lock").release()
    os.close(copy)


def interrupting(name: str) -> Callable[..., None]:
    """A step of the hand-over that Ctrl-C hits when the main thread takes it; the writer's thread is never hit."""
    original = getattr(AppendQueue, name)

    def step(self: AppendQueue) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        original(self)

    return step


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("append", [lambda log: log.append(b"lost?"), lambda log: log.append_many([b"lost?"] * 5)])
@pytest.mark.parametrize("where", ["_wake", "_seal"])
def test_an_interrupted_append_leaves_a_log_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, append: Callable[[Log], object]
) -> None:
    """Lost: everything after a Ctrl-C inside an append, with the writer asleep for ever."""
    log = Log.open(tmp_path, LogSettings(fsync_max_batch_bytes=2, fsync_interval_ms=20))
    log.append(b"first", sync=True)
    wait_until(lambda: log._append_queue._somebody_sleeps)
    with monkeypatch.context() as patched:
        patched.setattr(AppendQueue, where, interrupting(where))
        with pytest.raises(KeyboardInterrupt):
            append(log)
    # What was accepted reaches the file without another append to wake the writer.
    wait_until(lambda: log.statistics().written_offset == log.next_offset)
    log.append(b"last", sync=True)
    found = [payload for batch in log.read() for payload in batch.payloads()]
    assert (found[0], found[-1], len(found)) == (b"first", b"last", log.next_offset)
    log.close()


def append_without_closing(root: str) -> None:
    topic = tidelog.open(root).topic(NAME)
    for number in range(1000):
        topic.append(b"%d" % number)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_of_multiprocessing_flushes_at_its_end(tmp_path: Path, method: str) -> None:
    """Lost: everything that a worker process had accepted, since it ends without exit handlers."""
    context: Any = multiprocessing.get_context(method)
    process = context.Process(target=append_without_closing, args=(str(tmp_path),))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert len(values(tmp_path)) == 1000


def test_cancelled_followers_leave_nothing_behind(tmp_path: Path) -> None:
    """Lost: memory, a little with every task that stopped following a quiet topic."""

    async def follow_and_cancel(topic: tidelog.Topic) -> None:
        async def follow() -> None:
            async for _ in topic.read_async("latest", follow=True):
                pass

        tasks = [asyncio.create_task(follow()) for _ in range(20)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with tidelog.open(tmp_path) as log:
        topic = log.topic(NAME)
        asyncio.run(follow_and_cancel(topic))
        assert topic._owned is not None
        assert topic._owned._append_queue._listeners == []


def test_an_onlooker_forgets_what_a_cut_made_untrue(tmp_path: Path) -> None:
    """Lost: good messages, called damaged by an onlooker that remembered where others had been before a cut."""
    settings = LogSettings(cache_max_bytes=0)
    log = Log.open(tmp_path, settings)
    log.append_many([b"x" * 1000] * 300, sync=True)
    log.close()
    view = LogView(tmp_path, settings)
    assert sum(batch.stop - batch.start for batch in view.read()) == 300
    path = tmp_path / "wal.0000000000.log"
    os.truncate(path, BINDING_BYTES + 10 * 1016)
    (tmp_path / "wal.ckpt").unlink()
    log = Log.open(tmp_path, settings)
    log.append_many([b"y" * 700] * 600, sync=True)
    log.close()
    assert view.next_offset == 610
    for start in (0, 5, 250, 400, 609):
        assert sum(batch.stop - batch.start for batch in view.read(start)) == 610 - start


def test_sigterm_in_the_middle_of_threading_still_flushes(tmp_path: Path) -> None:
    """Lost: a process that neither flushed nor ended, because the signal came while a thread was being joined."""
    program = (
        "import os, signal, sys, threading, tidelog\n"
        "topic = tidelog.open(sys.argv[1]).topic('a/b')\n"
        "topic.append(b'accepted')\n"
        "with threading._shutdown_locks_lock if hasattr(threading, '_shutdown_locks_lock') else threading.Lock():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    threading.Event().wait(300)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=120, check=False)
    assert done.returncode == -signal.SIGTERM
    assert values(tmp_path) == {0: b"accepted"}
