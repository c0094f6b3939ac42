"""Three replicas of an engine, kept equal by Raft: one is killed, one loses its disk, and nobody notices.

pip install pysyncobj
python examples/engine_raft.py [DIRECTORY]

Raft (PySyncObj) orders the entries and replicates them; every replica applies them to an engine of its own. What each
of them has applied is replicated as well, so all know the low-water mark: what every replica has. Up to there an engine
ships to its store, and what all stores have is forgotten by the log. The traffic of PySyncObj is pickled and not
authenticated: keep it inside of a network that you trust.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from pysyncobj import SyncObj, SyncObjConf, SyncObjException, replicated

import tidelog
from tidelog.engine.orchestrator.base import decode_entry, drive, encode_entry
from tidelog.engine.txn.transaction import Transaction

MEMBERS = ("one", "two", "three")
ANSWER_SECONDS = 30.0


class RaftLog(SyncObj):
    """The log of all replicas: the fields below are the same on each of them, since Raft runs the same commands there.

    It is an orchestrator: `low_water_mark`, `entries` and `truncate` are what an engine asks for.
    """

    def __init__(self, member: str, addresses: dict[str, str], directory: Path) -> None:
        # What is set before the base class is this process's own; what is set after it is replicated.
        self.member = member
        self.truncation_mark = 0
        self.reported: tuple[int, int] | None = None
        self.reported_at = 0.0
        settings = SyncObjConf(
            autoTick=False,
            journalFile=str(directory / "raft.journal"),
            fullDumpFile=str(directory / "raft.dump"),
            useFork=False,
            appendEntriesUseBatch=False,
            connectionRetryTime=0.2,
        )
        others = [address for name, address in addresses.items() if name != member]
        super().__init__(addresses[member], others, settings)
        self.kept: dict[int, bytes] = {}
        self.last_seq = 0
        self.applied = dict.fromkeys(addresses, 0)
        self.shipped = dict.fromkeys(addresses, 0)

    @replicated
    def add(self, data: bytes) -> int:
        """An entry, as the next one of the log."""
        self.last_seq += 1
        self.kept[self.last_seq] = data
        return self.last_seq

    @replicated
    def report(self, member: str, applied_seq: int, shipped_seq: int) -> None:
        """How far a replica is. What the stores of all replicas have, the log need not keep."""
        self.applied[member] = applied_seq
        self.shipped[member] = max(shipped_seq, self.shipped[member])
        for seq in [seq for seq in self.kept if seq <= min(self.shipped.values())]:
            del self.kept[seq]

    def low_water_mark(self) -> int:
        return min(self.applied.values())

    def entries(self, after_seq: int, up_to: int | None = None) -> Iterator[tuple[int, object]]:
        last_seq = self.last_seq if up_to is None else min(self.last_seq, up_to)
        for seq in range(after_seq + 1, last_seq + 1):
            data = self.kept.get(seq)
            if data is None:
                raise tidelog.GapError("the log was truncated here; restore the engine", first=seq, last=seq)
            yield seq, decode_entry(data)

    def truncate(self, seq: int) -> None:
        self.truncation_mark = seq

    def note_applied(self, seq: int) -> None:
        """Reports go through the log too, so there are no more of them than needed."""
        news = (seq, self.truncation_mark)
        if news != self.reported and time.monotonic() > self.reported_at + 0.1:
            self.reported, self.reported_at = news, time.monotonic()
            self.report(self.member, *news)


def open_or_restore(directory: Path, store: str) -> tidelog.Engine:
    """The engine of this disk. On an empty one: what its store has; and a new one when that is empty too.

    The store is this member's alone. If somebody still holds it, that was this member before it lost its disk.
    """
    if not directory.exists():
        with contextlib.suppress(tidelog.NotFoundError):
            return tidelog.restore_engine(directory, store=store, take_over=True)
    return tidelog.open_engine(directory, store=store)


class Replica:
    """One process: Raft, an engine, and a thread that brings entries from one to the other."""

    def __init__(self, member: str, addresses: dict[str, str], directory: Path, store: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.engine = open_or_restore(directory / "engine", store)
        self.raft = RaftLog(member, addresses, directory)
        self.stopping = threading.Event()
        self.results: dict[int, str] = {}
        self.threads = [threading.Thread(target=self.tick), threading.Thread(target=self.apply)]
        for thread in self.threads:
            thread.start()

    def tick(self) -> None:
        while not self.stopping.is_set():
            self.raft.doTick(0.02)

    def apply(self) -> None:
        def note(result: tidelog.Result) -> None:
            self.results[result.seq] = result.status

        try:
            drive(self.engine, self.raft, follow=True, stop=self.stopping, on_result=note)
        finally:
            self.stopping.set()  # one that cannot apply any more takes no part

    def propose(self, entry: object) -> bool:
        """Whether an entry got its place in the log and was applied there, as far as this replica can tell."""
        with contextlib.suppress(SyncObjException):  # no leader now, or a new one: the outcome is not known
            seq = self.raft.add(encode_entry(entry), sync=True, timeout=5.0)
            while seq not in self.results and not self.stopping.is_set():
                time.sleep(0.002)
            return self.results.get(seq) == "applied"
        return False

    def create(self, bucket: str) -> None:
        while bucket not in self.engine.list_buckets() and not self.stopping.is_set():
            self.propose(tidelog.CreateBucket(bucket))

    def count(self, request: str) -> None:
        """Adds one to a counter, exactly once, while other replicas do the same.

        The batch is refused by every replica if the counter was changed before it. The request is written down with
        it, so that one whose outcome was not known is not done twice.
        """
        while not self.try_to_count(request) and not self.stopping.is_set():
            time.sleep(0.01)

    def try_to_count(self, request: str) -> bool:
        try:
            with self.engine.transaction() as tx:
                if read_or_none(tx, f"request/{request}") is not None:
                    return True
                count = int(read_or_none(tx, "counter") or b"0")
                tx.put("shared", "counter", b"%d" % (count + 1))
                tx.put("shared", f"request/{request}", b"done")
                return self.propose(tx.guarded())
        except (tidelog.ConflictError, tidelog.RetryError):
            return False  # the log was faster

    def status(self) -> dict[str, object]:
        last_seq, applied_seq = self.raft.last_seq, self.engine.applied_seq
        has_all = applied_seq >= last_seq or last_seq in self.results  # the last one may have been refused
        return {"last": last_seq, "has_all": has_all, "applied": applied_seq, "low": self.engine.low_water_mark}

    def ship(self) -> dict[str, object]:
        """Ships now, and waits until the log has forgotten what all replicas have shipped."""
        mark = self.engine.ship()
        while self.raft.shipped[self.raft.member] < mark and not self.stopping.is_set():
            time.sleep(0.01)
        return {"shipped": mark, "kept": len(self.raft.kept)}

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join()
        self.raft.destroy()
        self.engine.close()


def read_or_none(tx: Transaction, key: str) -> bytes | None:
    """The data of an object, if there is one; that there is none is remembered as something that was read."""
    try:
        return tx.read("shared", key).data
    except tidelog.NotFoundError:
        return None


def serve(member: str, addresses: dict[str, str], directory: Path, store: str) -> None:
    """A replica that executes commands: a line of JSON in, a line of JSON out."""
    # That others cannot be reached is a part of the show; so are entries that come twice, which it calls critical.
    logging.getLogger("pysyncobj").setLevel(logging.CRITICAL + 1)
    replica = Replica(member, addresses, directory, store)
    try:
        for line in sys.stdin:
            print(json.dumps(obey(replica, *json.loads(line))), flush=True)
    finally:
        replica.stop()


def obey(replica: Replica, command: str, *arguments: str) -> object:
    """One command, and what to say to it."""
    if command == "digest":
        return replica.engine.digest()
    if command == "read":
        return replica.engine.read("shared", *arguments).data.decode()
    if command == "ship":
        return replica.ship()
    if command == "count":
        replica.create("shared")
        for request in arguments:
            replica.count(request)
    return replica.status()


# The show


class Member:
    """A replica in a process of its own."""

    def __init__(self, name: str, addresses: dict[str, str], root: Path) -> None:
        self.name = name
        self.directory = root / name
        store = (root / "stores" / name).absolute().as_uri()  # in your program: s3://bucket/prefix
        command = [sys.executable, __file__, "replica", name, json.dumps(addresses), str(self.directory), store]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"replica {self.name} ended")
        return json.loads(line)

    def ask(self, *command: object) -> object:
        self.tell(*command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.close()

    def close(self) -> None:
        """Ends its input, and with it the replica, if it runs."""
        self.process.communicate(timeout=ANSWER_SECONDS)


def free_addresses() -> dict[str, str]:
    """An address for each member that nobody uses now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in MEMBERS]
        return {name: f"127.0.0.1:{one.getsockname()[1]}" for name, one in zip(MEMBERS, sockets, strict=True)}


def wait_until_equal(members: list[Member]) -> None:
    """Until all have applied the whole log, and know that all have; then their states are the same."""
    deadline = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < deadline:
        states = [member.ask("status") for member in members]
        first = states[0]
        if first["has_all"] and first["low"] == first["applied"] and all(state == first for state in states):
            digests = {str(member.ask("digest")) for member in members}
            assert len(digests) == 1, digests
            print(f"  all at {first['applied']}, low-water mark too, digest {min(digests)[:16]}")
            return
        time.sleep(0.05)
    raise SystemExit(f"the replicas do not agree: {states}")


def count_on(members: list[Member], name: str, times: int) -> None:
    """All of them count at the same time."""
    for member in members:
        member.tell("count", *(f"{name}-{member.name}-{number}" for number in range(times)))
    for member in members:
        member.answer()


def main(root: Path, times: int = 5) -> None:
    """Starts three replicas, and is not kind to them."""
    addresses = free_addresses()
    one, two, three = members = [Member(name, addresses, root) for name in MEMBERS]
    print("three replicas count at the same time")
    count_on(members, "together", times)
    wait_until_equal(members)

    print("three is killed; the others go on, and it catches up")
    three.kill()
    count_on([one, two], "without-three", times)
    three = Member("three", addresses, root)
    wait_until_equal([one, two, three])

    print("all ship what all have, so that the log can forget it")
    *_, last = [member.ask("ship") for member in (one, two, three)]
    print(f"  in the stores: everything up to {last['shipped']}; kept by the log: {last['kept']} entries")

    print("two is killed and loses its disk; it comes back from its store and the rest of the log")
    two.kill()
    shutil.rmtree(two.directory)
    count_on([one, three], "without-two", times)
    two = Member("two", addresses, root)
    members = [one, two, three]
    count_on(members, "again", times)
    wait_until_equal(members)

    counters = {member.ask("read", "counter") for member in members}
    assert counters == {str(10 * times)}, counters
    print(f"the counter is {10 * times} on all of them: nothing was lost, and nothing done twice")
    for member in members:
        member.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["replica"]:
        serve(sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    elif len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
