"""Two owners of one topic, in real processes: the old one is stopped, the topic moves, and the old one wakes up.

It can change nothing any more, wherever it was stopped, and what it had accepted and not shipped is kept aside. However
many want a topic at the same moment, one of them has it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, Self

import pytest
from tests.campaign import SEED, examples
from tests.log.workbench import LIMIT_SECONDS, python, python_environment, wait_until
from tests.servers import ACCESS_KEY_ID, SECRET_ACCESS_KEY, EtcdServer, S3Server

import tidelog
from tidelog.clock import SystemClock
from tidelog.cold.rebuild import rebuild_catalog
from tidelog.cold.takeover import divergent_tails
from tidelog.files import LocalFiles
from tidelog.topics.directory import LogDirectory
from tidelog.topics.message import TIMESTAMP_FIELD

NAME = "shop/orders"
RACERS = 8
KILLS = examples(2)
METADATA = ("bucket", "etcd", "sqlite")
FENCED = {"error": "FencedError"}
KEYS = {"store_access_key_id": ACCESS_KEY_ID, "store_secret_access_key": SECRET_ACCESS_KEY}
# Nothing happens by itself: what finds out that the topic has moved is what is being tested.
QUIET: dict[str, Any] = {
    "ship_interval_seconds": 3600,
    "retention_interval_seconds": 3600,
    "ownership_check_seconds": 3600,
}
STOPPED_SECONDS = 0.6  # more than a process may be late without taking itself for one that slept

# Does what it is told, a line at a time, and says how it went.
OWNER = '''
import asyncio, json, os, signal, sys, tidelog
from tidelog.store.metadata.base import MeasuredMetadata
from tidelog.cold.ownership import OwnedCatalog
from tidelog.cold.upload import Upload

directory, place = sys.argv[1], json.loads(sys.argv[2])
log, plans = None, {}

def stops_before(owner, name, condition=lambda arguments: True):
    """The next such call finds itself stopped, and goes on when it is woken up."""
    original = getattr(owner, name)
    def stopping(*arguments, **keywords):
        if condition(arguments):
            setattr(owner, name, original)
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments, **keywords)
    setattr(owner, name, stopping)

STOPS = {
    "inside the upload": lambda: stops_before(Upload, "_send_frames"),
    "between upload and publish": lambda: stops_before(OwnedCatalog, "publish"),
    "between verify and commit": lambda: stops_before(
        MeasuredMetadata, "_commit", lambda arguments: any("/segments/" in write.key for write in arguments[2])),
}

def open_log():
    global log
    log = tidelog.open(directory, **place)

def close_log():
    log.close()

def append(name, *values):
    return [log.topic(name, take_over=True).append(value.encode()) for value in values]

def append_many(name, *values):
    return log.topic(name).append_many([value.encode() for value in values])

def append_async(name, value):
    async def run():
        return await log.topic(name).append_async(value.encode())
    return asyncio.run(run())

def topic(name, settings={}):
    return log.topic(name, take_over=True, **settings).next_offset

def topic_if_free(name):
    return log.topic(name).next_offset

def append_and_ship(name, *values):
    offsets = append(name, *values)
    log.topic(name).ship()
    return offsets

def topics_known():
    return log is not None

def race(name, word):
    """Opens the topic, whoever has it, and ships; returns what was reported to be in the store, by offset."""
    global log
    if log is not None:
        log.close()
    for _ in range(20):
        try:
            log = tidelog.open(directory, **place)
            log.topic(name, take_over=True)
            break
        except (tidelog.ConflictError, tidelog.FencedError):
            log.close()
    shipped = {}
    try:
        for number in range(5):
            offset, = append_and_ship(name, f"{word}-{number}")
            shipped[offset] = f"{word}-{number}"
    except tidelog.FencedError:
        pass
    return shipped

def plan(name):
    plans[name] = log.topic(name).plan_orphans()

def sweep(name):
    return repr(log.topic(name).remove_orphans(plans[name]))

def move_cursor(name, offset):
    log.topic(name)._tiered.owned.move_cursor("billing", offset)

ACTIONS = {
    "ship": lambda name: log.topic(name).ship(), "seal": lambda name: log.topic(name).seal(),
    "prune": lambda name: log.topic(name).prune(), "plan_orphans": lambda name: repr(log.topic(name).plan_orphans()),
    "delete": lambda name: log.delete_topic(name), "stop": lambda where: STOPS[where](),
}
for line in sys.stdin:
    action, *arguments = json.loads(line)
    try:
        answer = {"result": (ACTIONS.get(action) or globals()[action])(*arguments)}
    except tidelog.TidelogError as error:
        answer = {"error": type(error).__name__}
    print(json.dumps(answer), flush=True)
'''


class Owner:
    """A process that has a log directory open, on demand."""

    def __init__(self, directory: Path, place: dict[str, Any]) -> None:
        self.directory = directory
        self.process = subprocess.Popen(
            python(OWNER, directory, json.dumps(place)),
            env=python_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(words).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def ask(self, *words: object) -> dict[str, Any]:
        self.tell(*words)
        return self.answer()

    def does(self, *words: object) -> Any:
        """What the answer is; it must not be an error."""
        answer = self.ask(*words)
        assert "error" not in answer, (words, answer)
        return answer["result"]

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        self.wait_until_stopped()

    def wait_until_stopped(self) -> None:
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: stat.read_text("ascii").rpartition(")")[2].split()[0] == "T", "the process to stop")

    def wake(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT_SECONDS)


@pytest.fixture
def place(request: pytest.FixtureRequest, s3_server: S3Server, tmp_path: Path) -> dict[str, Any]:
    """Store and metadata, as `tidelog.open` takes them."""
    kind = request.param
    url = f"sqlite:///{tmp_path}/metadata.db" if kind == "sqlite" else kind
    if kind == "etcd":
        etcd: EtcdServer = request.getfixturevalue("etcd_server")
        url = etcd.url
    place = {"store": s3_server.url(f"two-owners/{tmp_path.name}"), "metadata": url, "metadata_root": tmp_path.name}
    return place | {"store_endpoint": s3_server.endpoint} | KEYS | QUIET


every_metadata = pytest.mark.parametrize("place", METADATA, indirect=True)
# For what each of them must do alike, and `tests/contracts` shows of each: the others in campaigns.
one_metadata = pytest.mark.parametrize(
    "place", ["bucket", *(pytest.param(kind, marks=pytest.mark.long) for kind in METADATA[1:])], indirect=True
)


def history(tmp_path: Path, place: dict[str, Any], name: str) -> list[tuple[int, bytes]]:
    """All that the store has of a topic, as somebody sees it who has nothing else."""
    with tidelog.open(tmp_path / "onlooker", read_only=True, **place) as log:
        return [(message.offset, message.value or b"") for message in log.topic(name).read()]


def numbered(*values: str) -> list[tuple[int, bytes]]:
    return list(enumerate(value.encode() for value in values))


def words(who: str, count: int) -> list[str]:
    return [f"{who}-{number}" for number in range(count)]


# What a replaced owner tries, and with what.
ATTEMPTS: dict[str, tuple[object, ...]] = {
    "append": ("late",),
    "append_many": ("late", "later"),
    "append_async": ("late",),
    "ship": (),
    "seal": (),
    "prune": (),
    "move_cursor": (1,),
    "plan_orphans": (),
    "sweep": (),
    "delete": (),
}


@every_metadata
def test_owner_that_was_stopped_can_change_nothing(place: dict[str, Any], tmp_path: Path) -> None:
    """Whatever a woken owner does first, it raises FencedError and changes nothing; its tails are kept aside."""
    names = {attempt: f"shop/{attempt}" for attempt in ATTEMPTS}
    with Owner(tmp_path / "old", place) as old:
        old.does("open_log")
        for name in names.values():
            old.does("topic", name, {"retention_bytes": 1})
            old.does("append_and_ship", name, *words("old", 4))
            old.does("append_many", name, *words("unshipped", 2))
            old.does("plan", name)
        old.pause()
        begin = time.monotonic()
        with tidelog.open(tmp_path / "new", **place) as log:
            for name in names.values():
                take_over(log.topic(name, take_over=True))
            time.sleep(max(0.0, begin + STOPPED_SECONDS - time.monotonic()))
            old.wake()
            for attempt, name in names.items():
                assert old.ask(attempt, name, *ATTEMPTS[attempt]) == FENCED, attempt
                assert old.ask("append", name, "much later") == FENCED, attempt
                check_untouched(tmp_path, place, log, name)
            old.does("close_log")
        check_reopened(old, list(names.values()))


def take_over(topic: tidelog.Topic) -> None:
    assert topic.append_many([b"new-0", b"new-1", b"new-2"]) == [4, 5, 6]
    topic.ship()
    assert topic._tiered is not None
    topic._tiered.owned.move_cursor("billing", 5)


def check_untouched(tmp_path: Path, place: dict[str, Any], log: LogDirectory, name: str) -> None:
    topic = log.topic(name)
    assert topic._tiered is not None
    catalog = topic._tiered.owned.catalog
    cursor = catalog.cursor("billing")
    assert cursor is not None
    assert cursor[0].offset == 5
    assert catalog.start_offset() == 0
    assert history(tmp_path, place, name) == numbered(*words("old", 4), *words("new", 3))
    topic._tiered.verify()


def check_reopened(old: Owner, names: list[str]) -> None:
    """The old owner may own the topic again: it goes on behind the other's messages, its own are aside."""
    old.does("open_log")
    for name in names:
        assert old.does("topic", name) == 7
        tails = divergent_tails(LocalFiles(), old.directory / name)
        assert [(tail.first_offset, tail.next_offset) for tail in tails] == [(4, 6)], name


@one_metadata
@pytest.mark.parametrize("where", ["inside the upload", "between upload and publish"])
def test_owner_that_was_stopped_while_it_uploaded(place: dict[str, Any], tmp_path: Path, where: str) -> None:
    """Wherever an owner was stopped on the way to publishing an object, it is not published after a takeover."""
    check_stopped_owner(place, tmp_path, where)


@every_metadata
def test_owner_that_was_stopped_while_it_published(place: dict[str, Any], tmp_path: Path) -> None:
    """The last moment: it has looked whether the topic is its own, and its commit is refused all the same."""
    check_stopped_owner(place, tmp_path, "between verify and commit")


def check_stopped_owner(place: dict[str, Any], tmp_path: Path, where: str) -> None:
    with Owner(tmp_path / "old", place) as old:
        old.does("open_log")
        old.does("append_and_ship", NAME, *words("old", 4))
        old.does("append_many", NAME, *words("unshipped", 2))
        old.does("stop", where)
        old.tell("ship", NAME)
        old.wait_until_stopped()
        with tidelog.open(tmp_path / "new", **place) as log:
            topic = log.topic(NAME, take_over=True)
            take_over(topic)
            old.wake()
            assert old.answer() == FENCED
            assert old.ask("append", NAME, "late") == FENCED
            check_untouched(tmp_path, place, log, NAME)
            topic.remove_orphans(topic.plan_orphans())
            assert object_names(log) == published_names(log)
            old.does("close_log")
        check_reopened(old, [NAME])


def object_names(log: LogDirectory) -> set[str]:
    """What is in the bucket."""
    assert log._tier is not None
    prefix = log._tier.catalog(*NAME.split("/")).keys.objects_prefix
    return {info.key.rpartition("/")[2] for info in log._tier.objects.list(prefix)}


def published_names(log: LogDirectory) -> set[str]:
    """What is in the catalog."""
    assert log._tier is not None
    return {one.object_id for one in log._tier.catalog(*NAME.split("/")).walk(0)}


@every_metadata
def test_topic_of_a_living_process_is_not_opened_elsewhere(place: dict[str, Any], tmp_path: Path) -> None:
    """Not while it lives, nor soon after it was killed, but then at once in its own directory; and after it closed."""
    with Owner(tmp_path / "old", place | {"lease_seconds": 3600}) as old:
        old.does("open_log")
        old.does("append_and_ship", NAME, *words("old", 4))
        with tidelog.open(tmp_path / "new", **place) as log:
            for attempt in (lambda: log.topic(NAME), lambda: log.delete_topic(NAME)):
                with pytest.raises(tidelog.LockedError, match=f"pid {old.process.pid}"):
                    attempt()
            old.does("append_and_ship", NAME, "still its own")
            old.process.kill()
            old.process.wait(LIMIT_SECONDS)
            with pytest.raises(tidelog.LockedError):
                log.topic(NAME)
            with Owner(tmp_path / "old", place) as again:
                again.does("open_log")
                assert again.does("topic_if_free", NAME) == 5
                with pytest.raises(tidelog.LockedError, match=f"pid {again.process.pid}"):
                    log.topic(NAME)
                again.does("close_log")
                assert log.topic(NAME).append(b"new") == 5


@pytest.mark.parametrize("place", ["etcd"], indirect=True)
def test_lease_of_a_killed_process_runs_out(place: dict[str, Any], tmp_path: Path) -> None:
    """By etcd's own time: whoever waits long enough needs no leave."""
    with Owner(tmp_path / "old", place | {"lease_seconds": 1}) as old:
        old.does("open_log")
        old.does("append_and_ship", NAME, *words("old", 4))
        old.process.kill()
        old.process.wait(LIMIT_SECONDS)

    def is_free() -> bool:
        try:
            log.topic(NAME)
        except tidelog.LockedError:
            return False
        return True

    with tidelog.open(tmp_path / "new", **place) as log:
        wait_until(is_free, "the end of the lease")


def test_one_of_eight_processes_opens_a_directory(tmp_path: Path) -> None:
    """Of eight that open one directory at the same moment one has it, and the others are told so."""
    with ExitStack() as stack:
        racers = [stack.enter_context(Owner(tmp_path, {})) for _ in range(RACERS)]
        for racer in racers:
            racer.does("topics_known")
        for racer in racers:
            racer.tell("open_log")
        answers = [racer.answer() for racer in racers]
        assert sorted(answers, key=str) == [{"error": "LockedError"}] * (RACERS - 1) + [{"result": None}]


@one_metadata
def test_eight_processes_race_for_a_topic(place: dict[str, Any], tmp_path: Path) -> None:
    """Of eight that take a topic from each other all that was reported as shipped is there once; the last can ship."""
    with ExitStack() as stack:
        racers = [stack.enter_context(Owner(tmp_path / str(number), place)) for number in range(RACERS)]
        reported: dict[int, bytes] = {}
        for turn in range(2):
            for number, racer in enumerate(racers):
                racer.tell("race", NAME, f"{number}-{turn}")
            for racer in racers:
                shipped = racer.answer()["result"]
                assert not reported.keys() & {int(offset) for offset in shipped}
                reported |= {int(offset): value.encode() for offset, value in shipped.items()}
        answers = [racer.ask("append_and_ship", NAME, "last") for racer in racers]
        assert sum("error" not in answer for answer in answers) == 1
        assert all(answer == FENCED for answer in answers if "error" in answer)
        found = history(tmp_path, place, NAME)
        assert [offset for offset, _ in found] == list(range(len(found)))
        assert len({value for _, value in found}) == len(found)
        assert reported.items() <= dict(found).items()
        assert reported


# Appends from several threads and ships in the background; tells what is synced, and how far it is shipped.
LOADED = """
import json, os, sys, threading, time, tidelog
place, life = json.loads(sys.argv[2]), int(sys.argv[3])
place |= {"ship_interval_seconds": 0.01, "ship_min_bytes": 1, "ship_max_delay_seconds": 0, "rotate_max_bytes": 20_000,
    "max_object_bytes": 15_000, "fsync_interval_ms": 20}
topic = tidelog.open(sys.argv[1], **place).topic("shop/orders")

def produce(thread):
    for number in range(1_000_000):
        value = b"%d/%d/%d/" % (life, thread, number) + bytes(200)
        offset = topic.append(value, sync=True)
        os.write(1, b"%d %d/%d/%d\\n" % (offset, life, thread, number))

for thread in range(2):
    threading.Thread(target=produce, args=(thread,), daemon=True).start()
first = topic.shipped_offset
while topic.shipped_offset < first + 20:
    time.sleep(0.001)
os.write(1, b"shipping\\n")
while True:
    time.sleep(0.01)
    os.write(1, b"shipped %d\\n" % topic.shipped_offset)
"""


def killed_under_load(directory: Path, place: dict[str, Any], life: int, milliseconds: int) -> list[bytes]:
    """What a process said before it was killed, so long after it began to ship; whole lines only."""
    program = python(LOADED, directory, json.dumps(place), str(life))
    process = subprocess.Popen(program, env=python_environment(), stdout=subprocess.PIPE)
    assert process.stdout is not None
    lines = list[bytes]()
    while not lines or lines[-1] != b"shipping\n":
        lines.append(process.stdout.readline())
        assert lines[-1], "it ended by itself"
    timer = Timer(milliseconds / 1000, process.kill)
    timer.start()
    rest, _ = process.communicate(timeout=LIMIT_SECONDS)
    timer.join()
    assert process.returncode == -signal.SIGKILL
    return lines + rest[: rest.rfind(b"\n") + 1].splitlines(keepends=True)


@pytest.mark.deeper
@pytest.mark.parametrize("place", ["bucket"], indirect=True)
def test_owner_is_killed_under_load_while_it_ships(place: dict[str, Any], tmp_path: Path) -> None:
    """Kills and then the loss of the disk: no gap, nothing twice, and what was shipped is what was on the disk."""
    choose, synced, shipped = random.Random(7 + SEED), dict[int, bytes](), 0
    for life in range(KILLS):
        for line in killed_under_load(tmp_path / "node", place, life, choose.randint(1, 150)):
            what, *value = line.split()
            if what == b"shipped":
                shipped = max(shipped, int(value[0]))
            elif value:
                assert synced.setdefault(int(what), value[0]) == value[0], "an offset was used twice"
    with tidelog.open(tmp_path / "node", read_only=True, **place) as log:
        local = [message.value or b"" for message in log.topic(NAME).read()]
    assert all(local[offset].startswith(value + b"/") for offset, value in synced.items()), "a synced message is lost"
    with tidelog.open(tmp_path / "other", **place) as log:
        topic = log.topic(NAME, take_over=True)
        found = [message.value for message in topic.read()]
        assert shipped <= topic.next_offset == len(found)
        assert found == local[: len(found)]
        assert len(set(found)) == len(found)
        topic.append(b"goes on")
        topic.ship()
        topic.remove_orphans(topic.plan_orphans(), drop_uncovered=True)
        assert object_names(log) == published_names(log)
    with tidelog.open(tmp_path / "node", **place) as log:
        log.topic(NAME)
    kept = divergent_tails(LocalFiles(), tmp_path / "node" / NAME)
    unshipped = [(len(found), len(local))] if len(found) < len(local) else []
    assert [(tail.first_offset, tail.next_offset) for tail in kept] == unshipped


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_bucket_alone_gives_the_topic_back(place: dict[str, Any], tmp_path: Path) -> None:
    """Without the disk and without the metadata the topic is made anew from its objects, and goes on."""
    with tidelog.open(tmp_path / "node", max_object_bytes=1000, **place) as log:
        topic = log.topic(NAME)
        topic.append_many([tidelog.Message(b"%d" % number, key=b"k") for number in range(100)])
        topic.ship()
        expected = list(topic.read())
    shutil.rmtree(tmp_path / "node")
    for left in tmp_path.glob("metadata.db*"):
        left.unlink()
    with tidelog.open(tmp_path / "new", **place) as log:
        with pytest.raises(tidelog.DataError, match="rebuild-catalog"):
            log.topic(NAME)
        assert log._tier is not None
        keys = log._tier.catalog(*NAME.split("/")).keys
        clock = SystemClock()
        report = rebuild_catalog(log._tier.metadata, keys, log._tier.objects, clock=clock, time_field=TIMESTAMP_FIELD)
        assert (report.start_offset, report.next_offset, report.messages) == (0, 100, 100)
        topic = log.topic(NAME)
        assert list(topic.read()) == expected
        assert topic.append(b"goes on") == 100
        topic.ship()
    assert history(tmp_path, place, NAME)[99:] == [(99, b"99"), (100, b"goes on")]
